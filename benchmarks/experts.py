"""Mixtures of experts and supernets: what passes read and cost, and what drafting with less of them gives at best.

    python benchmarks/experts.py [--threads N] [--json FILE]

passes: a random Qwen 3 MoE of 0.1 B parameters, 8 of 32 experts per token, behind 256 positions: by width, the experts
of a layer that a pass reads, in the mean, and its seconds over those of width 1.
views: passes of width 1 under views, over one of the whole model, and the share of bytes of weights that they read.
oracle: the same model, wired so that every draft is right: speed over no drafts.
relu: a model of 0.1 B by its own forward, whose routers end in a ReLU: passes of width 1 with fewer of 56 experts.
supernet: a model of 0.15 B with a window of 4,096 as another mixer of each layer, behind 16,384 positions: a pass of
the lighter placement over one of full attention, and the bytes of weights of both.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from transformers import LlamaConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

import truedraft
from peers import VOCABULARY, successors, wired
from truedraft import registry
from truedraft.bench.workloads import embedded
from truedraft.files import write_whole
from truedraft.loading import load
from truedraft.runtime.placements import placed
from truedraft.targets.hosting import hosted
from truedraft.tree import DraftTree, Prompt

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import remote_code

WIDTHS, BEHIND, LONG, WINDOW = (1, 2, 4, 8, 16, 32), 256, 16384, 4096
VIEWS = ("fewer-experts", "fewer-experts:experts=2", "fewer-experts:experts=4", "int8-self", "fewer-experts+int8-self")
DRAFTS = (None, "fewer-experts", "fewer-experts:experts=4", "int8-self", "fewer-experts+int8-self")
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8,
    tie_word_embeddings=False, initializer_range=0.01, max_position_embeddings=32768, eos_token_id=2, pad_token_id=0,
)  # fmt: skip


def mixture() -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, head_dim=64, num_experts=32, num_experts_per_tok=8, moe_intermediate_size=256)
    return wired(Qwen3MoeForCausalLM(config).eval())


def begun(model: Any, behind: int, runtime: str = "auto") -> Any:
    """A target with a row of so many positions of random keys."""
    target: Any = hosted(model, runtime)
    target.reserve(1, behind + 64)
    target.prefill([Prompt(torch.tensor([5]))])
    for layer in target.cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    target.cache.lengths[0] = behind
    return target


def in_turns(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[float, float]]:
    """By name, the median seconds of a call, and of the ratio to the first one's within a round."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, call in ways.items():
            best = []
            for _ in range(5):
                start = time.perf_counter()
                call()
                best.append(time.perf_counter() - start)
            taken[name] += [median(best)][: turn > 0]
    first = taken[next(iter(ways))]
    return {name: (median(own), median(a / b for a, b in zip(own, first, strict=True))) for name, own in taken.items()}


def unions(model: Any, ids: list[int], width: int) -> float:
    """Distinct experts of a layer, in the mean over layers and over pieces of so many tokens of a text."""
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, args, out: chosen.append(out[2]))
        for layer in model.model.layers
    ]
    model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return mean(
        len(of_layer[at : at + width].unique()) for of_layer in chosen for at in range(0, len(ids) - width + 1, width)
    )


def of_mixture(rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Passes by width, and passes of width 1 under views."""
    model = mixture()
    _, tokenizer = load("nano", "float32")
    story = next(load_ for load_ in embedded() if load_.name == "story")
    text = [i % VOCABULARY for item in story.items for i in tokenizer(item.text)["input_ids"]][:512]
    measured = list(range(32)) * 4  # the tokens of measured latency curves
    counts = {w: {"text": unions(model, text, w), "measured": unions(model, measured[:128], w)} for w in WIDTHS}
    target = begun(model, BEHIND)
    chains = {width: DraftTree.chain(0, list(range(1, width))) for width in WIDTHS}
    times = in_turns({str(w): lambda w=w: target.score([chains[w]]) for w in WIDTHS}, rounds)
    rows: list[dict[str, Any]] = [
        {"width": w, "union": counts[w]["measured"], "union_of_text": counts[w]["text"], "seconds": s, "ratio": ratio}
        for w, (s, ratio) in zip(WIDTHS, times.values(), strict=True)
    ]
    views = {spec: registry.load("drafters", spec).view for spec in VIEWS}
    calls: dict[str, Callable[[], Any]] = {"": lambda: target.score([chains[1]])}
    calls |= {spec: lambda view=view: target.score([chains[1]], view) for spec, view in views.items()}
    under: list[dict[str, Any]] = []
    for spec, (seconds, ratio) in list(in_turns(calls, rounds).items())[1:]:
        under.append({"view": spec, "share": target.share(views[spec]), "seconds": seconds, "ratio": ratio})
    return rows, under


def oracle(tokens: int) -> list[dict[str, Any]]:
    """Raises ValueError where another text is generated."""
    model, cycle = mixture(), successors()["no repeats"][0]
    ids = torch.tensor([[cycle[i % len(cycle)] for i in range(BEHIND + tokens)]])
    rows: list[dict[str, Any]] = []
    for spec in DRAFTS:
        fast, best = truedraft.accelerate(model, draft=spec), float("inf")
        for _ in range(4):
            given = ids[:, :BEHIND]
            out = fast.generate(given, max_new_tokens=tokens, do_sample=False, eos_token_id=None)
            if not out.equal(ids):
                raise ValueError("the text differs from the expected one")
            spent = fast.report().seconds
            best = min(best, spent["all"] - spent["prefill"] - spent["measure"])
        found = fast.report().mean_acceptance_length
        rows.append({"draft": spec or "", "seconds": best / tokens, "mean_acceptance_length": found})
    return [{**row, "over_no_drafts": rows[0]["seconds"] / row["seconds"]} for row in rows]


def relu(rounds: int) -> list[dict[str, Any]]:
    config = LlamaConfig(**SIZES, intermediate_size=16)
    torch.manual_seed(0)
    model: Any = remote_code.ReluRoutedForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.mlp = remote_code.ReluMixture(config.hidden_size, 56, 192, False)
    target, views = begun(model, BEHIND), {n: registry.load("views", f"fewer-experts:experts={n}") for n in (28, 8, 4)}
    calls: dict[str, Callable[[], Any]] = {"56": lambda: target.score([DraftTree.chain(7)])}
    calls |= {str(n): lambda view=view: target.score([DraftTree.chain(7)], view) for n, view in views.items()}
    found = in_turns(calls, rounds)
    shares = {"56": 1.0} | {str(n): target.share(view) for n, view in views.items()}
    return [
        {"experts": int(n), "share": shares[n], "seconds": seconds, "ratio": ratio}
        for n, (seconds, ratio) in found.items()
    ]


def bytes_of(*models: Any) -> int:
    """Those of the weights of models, shared ones once."""
    kept = [weights.untyped_storage() for model in models for weights in model.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())


def supernet(rounds: int) -> list[dict[str, Any]]:
    remote_code.WINDOW = WINDOW
    config = copy.deepcopy(LlamaConfig(**SIZES | {"hidden_size": 768, "num_hidden_layers": 10}, intermediate_size=2048))
    torch.manual_seed(0)
    model = remote_code.SupernetForCausalLM(config).eval()
    lighter = placed(model, ["window"])
    targets = {"attention": begun(model, LONG), "window": begun(lighter, LONG, "in-place")}
    calls = {name: lambda target=target: target.score([DraftTree.chain(7)]) for name, target in targets.items()}
    alone, both = bytes_of(model), bytes_of(model, lighter)
    return [
        {"placement": name, "seconds": seconds, "ratio": ratio, "bytes": alone, "bytes_of_both": both}
        for name, (seconds, ratio) in in_turns(calls, rounds).items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--machine", default=platform.processor(), help="a description of this machine, for --json")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(args.threads)
    passes, views = of_mixture(args.rounds)
    found = {
        "passes": passes, "views": views, "oracle": oracle(args.tokens), "relu": relu(args.rounds),
        "supernet": supernet(args.rounds),
    }  # fmt: skip
    for name, rows in found.items():
        print(name, *rows, sep="\n  ")
    if args.json:
        about = {"machine": args.machine, "threads": torch.get_num_threads(), "torch": torch.__version__}
        write_whole(args.json, json.dumps({"machine": about, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
