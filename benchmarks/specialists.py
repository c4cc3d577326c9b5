"""Drafters of one language each, and how a row gets its own: tokens per pass of every way to use them.

    python benchmarks/specialists.py --data FOLDER --runs FOLDER [--texts 24] --json FILE

The languages are the English and German captions of Multi30k (FOLDER has train.LANGUAGE.gz and test_2016_flickr.
LANGUAGE.gz). One small target is trained on both; then draft models of one size, with as many steps each, on either
language and on both, by the target's distributions. What was trained is kept in --runs and is not trained again. The
figures are counts, which do not depend on other load; drafts are in full.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import truedraft
from truedraft import Drafter, registry
from truedraft.drafters._compose import Merge, Route
from truedraft.drafters.models._reader import Reader
from truedraft.files import read_lines, write_whole
from truedraft.train.loop import Plan, Run, fit

LANGUAGES = ("en", "de")
VOCABULARY, LENGTH, CAPTIONS = 2048, 128, 6  # of the tokenizer; tokens of a training text, and captions of a document
TARGET = dict(hidden_size=160, intermediate_size=432, num_hidden_layers=4, num_attention_heads=5)
SMALL = dict(hidden_size=64, intermediate_size=176, num_hidden_layers=1, num_attention_heads=4)
STEPS = {"target": 280, "draft model": 160}  # of training, each of 2,048 tokens
EXAMPLES = 20  # captions from which the routing by text learns a language
NEW, ROWS = 40, 8  # new tokens of a text, and rows of a batch
KINDS = {"chain of 7": "draft-model", "tree of 24 nodes": "opt-tree:gain=0.0"}
RULES = {"greedy": {}, "sampled, seeded": {"do_sample": True}}
SAMPLING = {"temperature": 0.8, "top_k": 0}


def captions(data: Path, name: str, language: str) -> list[str]:
    return [line.strip() for line in read_lines(data / f"{name}.{language}.gz") if line.strip()]


def documents(data: Path, name: str, language: str) -> list[str]:
    """Captions of a language, some in each document."""
    lines = captions(data, name, language)
    return ["\n".join(lines[i : i + CAPTIONS]) for i in range(0, len(lines), CAPTIONS)]


def tokenizer_of(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of both languages; a text begins with <s>."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tok.train_from_iterator(texts, trainer)
    tok.decoder = decoders.ByteLevel()
    tok.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", clean_up_tokenization_spaces=False)


def built(shape: Mapping[str, int], seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=0, eos_token_id=None,
        pad_token_id=0, **shape,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def windows(ids: list[list[int]], count: int = 16) -> Iterator[torch.Tensor]:
    """Endless batches, (count, LENGTH) ids of whole documents in random order."""
    rng = random.Random(0)
    while True:
        rng.shuffle(ids)
        line = torch.tensor([token for text in ids for token in text])
        lines = line[: len(line) // LENGTH * LENGTH].view(-1, LENGTH)
        yield from lines.split(count)[: len(lines) // count]


def trained(model: Any, loss: Callable[[Any], torch.Tensor], batches: Iterator[Any], steps: int, out: Path) -> None:
    def save(_: Run) -> None:
        model.save_pretrained(out)

    plan = Plan(minutes=1e9, steps=steps, every=1e9, warmup=20)
    fit(model, loss, batches, plan, validate=dict, save=save, log=out / "log.jsonl")


def train(data: Path, runs: Path) -> None:
    """Train what the folder of runs lacks."""
    texts = {language: documents(data, "train", language) for language in LANGUAGES}
    texts["generic"] = [text for pair in zip(*texts.values(), strict=False) for text in pair]
    if not (runs / "target").exists():
        tokenizer, target = tokenizer_of(texts["generic"]), built(TARGET, 0)

        def likelihood(ids: torch.Tensor) -> torch.Tensor:
            return target(input_ids=ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]

        ids = tokenizer(texts["generic"]).input_ids
        trained(target, likelihood, windows(ids), STEPS["target"], runs / "target")
        tokenizer.save_pretrained(runs / "target")
    target, tokenizer = loaded(runs)
    for name, some in texts.items():
        if (runs / f"draft model {name}").exists():
            continue
        small = built(SMALL, 1)

        def divergence(ids: torch.Tensor, small: Any = small) -> torch.Tensor:
            with torch.no_grad():
                laws = target(input_ids=ids, use_cache=False).logits.log_softmax(-1).flatten(0, 1)
            own = small(input_ids=ids, use_cache=False).logits.log_softmax(-1).flatten(0, 1)
            return torch.nn.functional.kl_div(own, laws, log_target=True, reduction="batchmean")

        ids = tokenizer(some).input_ids
        trained(small, divergence, windows(ids), STEPS["draft model"], runs / f"draft model {name}")


def loaded(runs: Path) -> tuple[Any, Any]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(runs / "target")
    return AutoModelForCausalLM.from_pretrained(runs / "target").eval(), tokenizer


def averaged(one: Any, other: Any) -> Any:
    """A model whose weights are the means of those of two."""
    mean = built(SMALL, 1).eval()
    theirs = other.state_dict()
    mean.load_state_dict({name: (weight + theirs[name]) / 2 for name, weight in one.state_dict().items()})
    return mean


def ways(spec: str, small: Mapping[str, Any], examples: Mapping[str, Sequence[str]]) -> dict[str, Drafter]:
    """Every way of drafting, by name; `spec` is the drafter of each draft model."""

    def one(name: str, **knobs: Any) -> Drafter:
        return registry.load("drafters", spec, model=small[name], **knobs)  # type: ignore[no-any-return]

    def both(**knobs: Any) -> list[Drafter]:
        return [one(language, **knobs) for language in LANGUAGES]

    named = dict(zip(LANGUAGES, both(), strict=True)) | {"otherwise": one("generic")}
    return {
        "generic": one("generic"), **{f"specialist {language}": one(language) for language in LANGUAGES},
        "averaged weights": one("averaged"),
        "text-routing": registry.load("drafters", "text-routing", specialists=named, examples=examples),
        "a|b": Route(both()), "confidence-routing": registry.load("drafters", "confidence-routing", specialists=both()),
        "a+b": Merge(both()), **({"a+b, 48 nodes": Merge(both(nodes=48))} if "tree" in spec else {}),
    }  # fmt: skip


class Counting:
    """Passes of draft models over rows, while it is entered."""

    def __enter__(self) -> Counting:
        self.rows, self._expand = 0, Reader.expand
        self._greedily = Reader.decode_greedily

        def expand(reader: Reader, growing: Any) -> Any:
            self.rows += len(growing)
            return self._expand(reader, growing)

        Reader.expand, Reader.decode_greedily = expand, lambda *_: False  # type: ignore[assignment,method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Reader.expand, Reader.decode_greedily = self._expand, self._greedily  # type: ignore[method-assign]


def batches(tokenizer: Any, texts: Sequence[str]) -> list[dict[str, torch.Tensor]]:
    """Prompts, left-padded."""
    tokenizer.padding_side, tokenizer.pad_token = "left", "<s>"
    parts = [texts[i : i + ROWS] for i in range(0, len(texts), ROWS)]
    return [tokenizer(list(part), return_tensors="pt", padding=True, return_token_type_ids=False) for part in parts]


def measured(runs: Path, data: Path, count: int) -> dict[str, Any]:
    """Tokens per pass by language, and exactness, of all ways; rows of both languages in each batch."""
    target, tokenizer = loaded(runs)
    small = {
        name: AutoModelForCausalLM.from_pretrained(runs / f"draft model {name}").eval()
        for name in (*LANGUAGES, "generic")
    }
    small["averaged"] = averaged(*(small[language] for language in LANGUAGES))
    examples = {language: captions(data, "train", language)[:EXAMPLES] for language in LANGUAGES}
    held = [documents(data, "test_2016_flickr", language)[: count // 2] for language in LANGUAGES]
    prompts = ["\n".join(text.split("\n")[:2]) + "\n" for pair in zip(*held, strict=True) for text in pair]
    of_row = [LANGUAGES[i % len(LANGUAGES)] for i in range(len(prompts))]
    inputs, results = batches(tokenizer, prompts), []
    for rule, given in RULES.items():
        settings = {"max_new_tokens": NEW, "do_sample": False, **given, **(SAMPLING if given else {})}
        plain = []
        for i, some in enumerate(inputs):
            torch.manual_seed(i)
            plain.append(target.generate(**some, **settings))
        for kind, spec in KINDS.items():
            for way, draft in ways(spec, small, examples).items():
                found = _of_way(target, tokenizer, draft, (inputs, plain, of_row), settings)
                results.append({"rule": rule, "draft": kind, "way": way, **found})
                print(json.dumps(results[-1]), flush=True)
    return {
        "target": target.num_parameters(), "draft_model": small["generic"].num_parameters(), "steps": STEPS,
        "texts": len(prompts), "tokens": NEW, "examples": EXAMPLES, "temperature": SAMPLING["temperature"],
        "classified": classified(tokenizer, data, examples, small), "results": results,
    }  # fmt: skip


def _of_way(
    target: Any,
    tokenizer: Any,
    draft: Drafter,
    texts: tuple[Sequence[Any], Sequence[torch.Tensor], Sequence[str]],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Tokens per pass by language, passes of draft models per pass of a row, and whether all texts are the model's."""
    inputs, plain, of_row = texts
    fast = truedraft.accelerate(target, tokenizer, draft=draft, control="fixed")
    tokens, passes, drafted_by = dict.fromkeys(LANGUAGES, 0), dict.fromkeys(LANGUAGES, 0), list[str]()
    exact = True
    with Counting() as counting:
        for i, (some, expected) in enumerate(zip(inputs, plain, strict=True)):
            torch.manual_seed(i)
            exact &= torch.equal(fast.generate(**some, **settings), expected)
            for done in fast.report().passes[1:]:
                for one in done.emitted:
                    tokens[of_row[i * ROWS + one.row]] += len(one.tokens)
                    passes[of_row[i * ROWS + one.row]] += 1
            drafted_by += [max(row, key=row.__getitem__) for row in fast.report().drafted_by if row]
    own = [name == language for name, language in zip(drafted_by, of_row, strict=False)]
    return {
        "exact": exact,
        "tokens_per_pass": {name: round(tokens[name] / passes[name], 3) for name in LANGUAGES},
        "both": round(sum(tokens.values()) / sum(passes.values()), 3),
        "draft_passes": round(counting.rows / sum(passes.values()), 2),
        "own_specialist": round(sum(own) / len(own), 3) if "en" in drafted_by else None,
    }


def classified(tokenizer: Any, data: Path, examples: Any, small: Any) -> list[dict[str, Any]]:
    """The share of held-out captions, cut to some tokens, whose language is clear and right, or clear and wrong; and
    the seconds of classifying a prompt of 256 tokens, which depend on the machine."""
    named = {language: registry.load("drafters", "draft-model", model=small[language]) for language in LANGUAGES}
    routing = registry.load("drafters", "text-routing", specialists=named, examples=examples)
    routing._vocabulary = VOCABULARY
    routing.read(tokenizer)
    found = []
    for length in (4, 8, 16):
        right = wrong = 0
        for language in LANGUAGES:
            for text in captions(data, "test_2016_flickr", language):
                name = routing.like(tokenizer(text, add_special_tokens=False).input_ids[:length])
                right, wrong = right + (name == language), wrong + (name not in (language, None))
        total = sum(len(captions(data, "test_2016_flickr", language)) for language in LANGUAGES)
        found.append({"tokens": length, "right": round(right / total, 4), "wrong": round(wrong / total, 4)})
    ids = tokenizer(" ".join(captions(data, "test_2016_flickr", "en")[:60])).input_ids[:256]
    began = time.process_time()
    for _ in range(100):
        routing.like(ids)
    return [*found, {"tokens": len(ids), "seconds": round((time.process_time() - began) / 100, 6)}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    train(given.data, given.runs)
    found = measured(given.runs, given.data, given.texts)
    if given.json is not None:
        write_whole(given.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
