"""Drafters that are given something besides the model: a constraint, a corpus, other token mixers, a calibration.

    python benchmarks/provided.py MODEL --stories FILE [--parts PART ...] [--json FILE] [--note NAME]

Tokens per pass of drafts in full, greedy, which do not depend on the load of the machine; every text is compared with
that of `model.generate`. `--note` writes the figures for the pages of the methods, with the name of the model.

constraint: answers to requests for records, each constrained by the same JSON schema, by `grammar` and lookup.
corpus: stories by `rest` beside lookup, with a corpus of other stories of the file, of several sizes.
mixers: stories behind long beginnings by `super-apriel`. The model becomes a supernet in which every layer may also
attend to a window, by the same weights, which were not trained for it.
calibrated: texts of the model by the halves of layers that `draft-and-verify` finds on other texts of the same kinds,
and by those that `knn-ssd` finds for each kind; where neither finds any, what the best drafts by a set were worth.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList

import truedraft
from heads import workloads
from noted import figure, note
from shared_drafters import texts_of
from truedraft import registry
from truedraft.calibrating import TextEvaluator
from truedraft.drafters.self_._drafter import SelfDrafter
from truedraft.errors import Refused
from truedraft.files import write_whole
from truedraft.loading import load
from truedraft.runtime.identity import fingerprint
from truedraft.serve.constraints import Constraints
from truedraft.stores.corpus import Corpus
from truedraft.text.templates import request_text

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "occupation": {"type": "string", "maxLength": 40},
        "year_of_birth": {"type": "integer"},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 40}, "city": {"type": "string", "maxLength": 40}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
        "languages": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
    },
    "required": ["name", "occupation", "year_of_birth", "address", "languages"],
    "additionalProperties": False,
}
PERSONS = ("a teacher from Lyon", "a carpenter in Kyoto", "a nurse from Lagos", "a baker in Oslo", "a pilot from Lima")
BEGINNING, LONG = 32, 512  # tokens of a story that are the prompt
STORIES = (200, 2000)  # of a corpus
WINDOWS = (64, 256)
TRIALS, DEPTH = 80, 8
CALIBRATED = ("draft-and-verify", "knn-ssd")
UNITS = {
    "mean_acceptance_length": "tokens per pass", "tokens_per_reading": "tokens per reading of all weights",
}  # fmt: skip  # by figure


def chatted(tokenizer: Any, text: str) -> Tensor:
    """(1, n) token ids of a request, in the model's chat template where it has one."""
    if tokenizer.chat_template:
        text = request_text(tokenizer, text)
    ids: Tensor = tokenizer(text, return_tensors="pt", return_token_type_ids=False)["input_ids"]
    return ids


def decoded(model: Any, draft: Any, prompts: Sequence[Tensor], tokens: int, processors: Any = None) -> dict[str, Any]:
    """What a drafter makes of prompts, (1, n) each.

    processors: of a prompt, a list of new ones.

    Raises ValueError where another text is made than by `model.generate`.
    """
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    emitted = passes = 0
    for ids in prompts:
        settings: dict[str, Any] = dict(attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        given = [LogitsProcessorList(processors(ids)) if processors else None for _ in range(2)]
        expected = model.generate(ids, logits_processor=given[0], **settings)
        if not fast.generate(ids, logits_processor=given[1], **settings).equal(expected):
            raise ValueError("the text differs from that of model.generate")
        emitted, passes = emitted + fast.report().tokens, passes + fast.report().row_passes
    return {"mean_acceptance_length": emitted / passes, "tokens": emitted, "passes": passes}


def constraint(model: Any, tokenizer: Any, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    ends = model.generation_config.eos_token_id
    compiled = Constraints(tokenizer, model.config.vocab_size, ends if isinstance(ends, list) else [ends])
    prompts = [chatted(tokenizer, f"Describe {person} as a record in JSON.") for person in PERSONS[: args.limit]]
    made = lambda ids: [compiled.processor("json_schema", SCHEMA, ids.shape[1])]  # noqa: E731
    for draft in ("grammar", "prompt-lookup", "grammar>prompt-lookup"):
        yield {"draft": draft, "kind": "records by a JSON schema", **decoded(model, draft, prompts, args.tokens, made)}


def stories(tokenizer: Any, path: Path) -> tuple[list[list[int]], list[list[int]]]:
    """The token ids of the stories of a file: those of a corpus, and those that are held out."""
    known, held = (tokenizer(texts, add_special_tokens=False)["input_ids"] for texts in texts_of(path))
    return known, held


def corpus(model: Any, tokenizer: Any, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    known, held = stories(tokenizer, args.stories)
    prompts = [torch.tensor([ids[:BEGINNING]]) for ids in held[: args.limit]]
    ways: list[tuple[str, Any]] = [("prompt-lookup", "prompt-lookup")]
    for count in STORIES:
        built = Corpus.built(known[:count])
        ways.append((f"rest, {count:,} stories", registry.load("drafters", "rest", corpus=built)))
    for name, draft in ways:
        yield {"draft": name, "kind": "stories", **decoded(model, draft, prompts, args.tokens)}


class Mixers(nn.Module):
    """The attention of a layer, and the same to a window, of which `active` is used."""

    def __init__(self, attention: nn.Module, window: int):
        super().__init__()
        self.active = "attention"
        narrow: Any = copy.deepcopy(attention, {id(kept): kept for kept in attention.parameters()})
        narrow.window_size = window
        self.mixers = nn.ModuleDict({"attention": attention, "window": narrow})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.mixers[self.active](*args, **kwargs)


def mixers(model: Any, tokenizer: Any, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    joined = [token for ids in stories(tokenizer, args.stories)[1] for token in ids]
    prompts = [torch.tensor([joined[at : at + LONG]]) for at in range(0, args.limit * LONG, LONG)]
    attentions, own = [layer.self_attn for layer in model.model.layers], type(model)
    model.__class__ = type(f"Supernet{own.__name__}", (own,), {})  # its layers are no longer those of its class
    for window in WINDOWS:
        for layer, attention in zip(model.model.layers, attentions, strict=True):
            layer.self_attn = Mixers(attention, window)
        found = decoded(model, "super-apriel", prompts, args.tokens)
        yield {"draft": f"windows of {window}", "kind": f"stories behind {LONG} tokens", **found}
    for layer, attention in zip(model.model.layers, attentions, strict=True):
        layer.self_attn = attention
    model.__class__ = own


@dataclass
class Noted(TextEvaluator):
    """Keeps what drafts by each view were worth."""

    goodputs: list[float] = field(default_factory=list)

    def goodput(self, view: Any, least: float = 0.0) -> float:
        self.goodputs.append(super().goodput(view, least))
        return self.goodputs[-1]


def calibrated(model: Any, tokenizer: Any, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    kinds = {one.name: [chatted(tokenizer, item.text) for item in one.items] for one in workloads(0, 2 * args.limit)}
    searched, held = {}, {}
    for kind, prompts in kinds.items():
        half = len(prompts) // 2
        made = [model.generate(ids, max_new_tokens=64, do_sample=False)[0].tolist() for ids in prompts[half:]]
        searched[kind] = Noted(model, made, [ids[0].tolist() for ids in prompts[half:]])
        held[kind] = prompts[:half]
    for name in CALIBRATED:
        evaluator = Noted(model, [text for one in searched.values() for text in one.texts], subjects=searched)
        view = registry.load("views", f"{name}:trials={args.trials}")
        try:
            record = view.calibrate(evaluator)
        except Refused as why:  # no set of layers drafts faster than the whole model
            print(why)
            what = f"the best of {len(evaluator.goodputs)} sets of layers, none found worth drafting with"
            yield {"draft": name, "kind": what, "tokens_per_reading": max(evaluator.goodputs)}
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "found.json"
            file.write_text(json.dumps({**record, "fingerprint": fingerprint(model)}))
            draft = SelfDrafter(replace(view, file=str(file)), nodes=DEPTH, depth=DEPTH, top_k=1)
            for kind, prompts in held.items():
                yield {"draft": name, "kind": kind, **decoded(model, draft, prompts, args.tokens)}


PARTS = {"constraint": constraint, "corpus": corpus, "mixers": mixers, "calibrated": calibrated}
METHODS = {"constraint": "grammar", "corpus": "rest", "mixers": "super-apriel"}  # drafters; the others are views


def noted(found: dict[str, list[dict[str, Any]]], name: str, args: argparse.Namespace) -> None:
    """Write the figures of each method for its page."""
    made: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for part, rows in found.items():
        command = f"python benchmarks/provided.py {Path(args.model).name} --stories FILE --parts {part}"
        setting = f"{name}, greedy, drafts in full, {args.limit} prompts of a kind, up to {args.tokens} tokens"
        for row in rows:
            method = ("drafters", METHODS[part]) if part in METHODS else ("views", row["draft"])
            what = f"{row['kind']}, {row['draft']}" if part in METHODS else row["kind"]
            for key, unit in UNITS.items():
                if key in row:
                    made[method].append(figure(what, round(row[key], 2), unit, setting, "counts", command))
    for method, figures in made.items():
        note(*method, figures)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--stories", type=Path, required=True, help="a file of stories")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--limit", type=int, default=4, help="prompts of a kind")
    parser.add_argument("--trials", type=int, default=TRIALS, help="sets of layers that a search tries")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--note", metavar="NAME", help="of the model, in the pages of the methods")
    args = parser.parse_args()
    model, tokenizer = load(args.model, "float32")
    found: dict[str, list[dict[str, Any]]] = {}
    for part in args.parts:
        found[part] = []
        for row in PARTS[part](model, tokenizer, args):
            found[part].append(row)
            print(part, row, flush=True)
    if args.json:
        write_whole(args.json, json.dumps({"model": args.note or args.model, **found}, indent=1) + "\n")
    if args.note:
        noted(found, args.note, args)


if __name__ == "__main__":
    main()
