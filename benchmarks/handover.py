"""Who foresees how a pass ends: the draft model's own law, or the target's layers half-way through the pass.

    python benchmarks/handover.py [--pairs TARGET DRAFT ...] [--tokens 120] [--length 7] [--json FILE]

`mirror-sd` continues the likeliest pairs of an accepted prefix and the token after it while the pass runs. It takes
them from the draft model's law; the paper takes them from an early layer of the target, by the target's own output head
(early exit). For every pass of a greedy text, a chain of the draft model's likeliest tokens, the pairs are ranked by
each law and by the mean of both, and counted where the pass ended with one of the first 1, 5 and 9: the branch that
would have been ready. By plain forwards; counts depend on no time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stories import beginnings
from truedraft.cli._models import machine
from truedraft.files import write_whole
from truedraft.loading import load

WEIGHTS = Path(__file__).resolve().parents[2] / "shared" / "weights"
PAIRS = [("nano", "nano-draft"), (str(WEIGHTS / "bitllama_3M"), str(WEIGHTS / "stories260K"))]
BRANCHES = (1, 5, 9)  # those of pearl, of mirror-sd, and of mirror-sd:branches=8
DEPTHS = (0.25, 0.5, 0.75)  # of the target's layers


def ranked(laws: Tensor, chain: Sequence[int], count: int) -> list[tuple[int, int]]:
    """The likeliest pairs of an accepted length and the token after it. laws: (length + 1, V), at the chain's nodes."""
    found, right = list[tuple[float, int, int]](), 1.0
    for place, law in enumerate(laws):
        drafted = chain[place] if place < len(chain) else -1
        values, tokens = law.topk(count + 1)
        pairs = zip(values.tolist(), tokens.tolist(), strict=True)
        found += [(right * share, -place, token) for share, token in pairs if token != drafted]
        right *= float(law[drafted])
    return [(-place, token) for _, place, token in sorted(found, reverse=True)[:count]]


def counted(target: Any, draft: Any, ids: Tensor, tokens: int, length: int) -> tuple[dict[str, list[int]], int, int]:
    """By law, the passes that ended with one of the first pairs; all passes, and the tokens that they emitted."""
    text = target.generate(ids, max_new_tokens=tokens + length + 1, do_sample=False)
    layers = target.config.num_hidden_layers
    exits = {f"layer {round(depth * layers)} of {layers}": round(depth * layers) for depth in DEPTHS}
    hits = {name: [0] * len(BRANCHES) for name in ("draft model", *exits, *(f"mean with {name}" for name in exits))}
    at, passes = ids.shape[1], 0
    while at < ids.shape[1] + tokens and at + length < text.shape[1]:
        drafted = draft.generate(text[:, :at], max_new_tokens=length, do_sample=False)[0, at:].tolist()
        read = torch.cat([text[:, :at], torch.tensor([drafted], dtype=torch.long)], 1)
        out = target(read, output_hidden_states=True)
        right = out.logits[0, at - 1 :].argmax(-1).tolist()
        accepted = next((i for i, token in enumerate(drafted) if token != right[i]), len(drafted))
        laws = {"draft model": draft(read).logits[0, at - 1 :].float().softmax(-1)}
        for name, layer in exits.items():
            states = target.base_model.norm(out.hidden_states[layer])
            laws[name] = target.get_output_embeddings()(states)[0, at - 1 :].float().softmax(-1)
            laws[f"mean with {name}"] = (laws[name] + laws["draft model"]) / 2
        for name, law in laws.items():
            pairs = ranked(law, drafted, max(BRANCHES))
            for i, count in enumerate(BRANCHES):
                hits[name][i] += (accepted, right[accepted]) in pairs[:count]
        at, passes = at + accepted + 1, passes + 1
    return hits, passes, at - ids.shape[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=[name for pair in PAIRS for name in pair])
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--length", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    rows: list[dict[str, Any]] = []
    for names in zip(args.pairs[::2], args.pairs[1::2], strict=True):
        (target, tokenizer), (draft, _) = load(names[0]), load(names[1])
        prompts = beginnings(tokenizer, 6)
        found = [counted(target, draft, ids, args.tokens, args.length) for ids in prompts]
        passes, emitted = (sum(one[place] for one in found) for place in (1, 2))
        for law in found[0][0]:
            shares = [sum(one[0][law][i] for one in found) / passes for i in range(len(BRANCHES))]
            rows.append({
                "target": Path(names[0]).name, "draft": Path(names[1]).name, "law": law, "passes": passes,
                "tokens_per_pass": emitted / passes, "ready": dict(zip(map(str, BRANCHES), shares, strict=True)),
            })  # fmt: skip
            print(
                f"{rows[-1]['target']:12} {law:28} {passes} passes", *(f"{share:6.1%}" for share in shares), flush=True
            )
    if args.json:
        about = {"machine": machine(), "tokens": args.tokens, "length": args.length, "torch": torch.__version__}
        write_whole(args.json, json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
