"""Drafters on a large model's recorded outputs, in real passes of a small model: real text and measured times.

    python benchmarks/recorded.py ANSWERS.jsonl --tokenizer NAME
    python benchmarks/recorded.py ANSWERS.jsonl --tokenizer NAME --hidden 768 --layers 12 --json OUT

A Llama with random weights computes every pass; a logits processor forces the recorded output. `bench --replay`
counts passes without a model; here passes and drafting take time, and the cost control chooses the drafts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

import truedraft
from truedraft.bench.recordings import Recording, conversations, tokenized
from truedraft.loading import load_tokenizer

WAYS = ("none", "auto", "prompt-lookup", "llma", "input-guided", "suffix-wide", "lookahead-pia", "token-recycling")


class Forced(LogitsProcessor):
    """Forces a text: every other token has score -inf."""

    def __init__(self, text: Sequence[int]):
        self.text = text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.text[min(input_ids.shape[1], len(self.text) - 1)]] = 0.0
        return forced


def replayed(fast: Any, recording: Recording, tokens: int) -> tuple[float, int, int]:
    """Seconds, tokens and passes of one output, without the time of calibration (once per model)."""
    output = recording.output[:tokens]
    given: dict[str, Any] = {}
    if fast.drafter.takes_references and recording.references:
        given["references"] = [list(map(list, recording.references))]
    prompt = torch.tensor([recording.prompt])
    begun = time.perf_counter()
    out = fast.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=len(output), do_sample=False, pad_token_id=0,
        logits_processor=LogitsProcessorList([Forced((*recording.prompt, *output))]), **given,
    )  # fmt: skip
    seconds = time.perf_counter() - begun - fast.report().seconds.get("measure", 0.0)
    assert out[0, prompt.shape[1] :].tolist() == list(output)
    return seconds, len(output), len(fast.report().passes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--limit", type=int, default=8, help="conversations")
    parser.add_argument("--tokens", type=int, default=160, help="of an output at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft", action="append", help="a drafter; several by repeating")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    read = tokenized(args.answers.name, conversations(args.answers)[: args.limit], load_tokenizer(args.tokenizer))
    outputs = [recording for recording in read.outputs if len(recording.prompt) > 1]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(read.ids), hidden_size=args.hidden, intermediate_size=4 * args.hidden,
            num_hidden_layers=args.layers, num_attention_heads=args.hidden // 64, max_position_embeddings=16384,
            eos_token_id=None, bos_token_id=None,
        )
    ).eval()  # fmt: skip
    ways = args.draft or list(WAYS)
    sides = [(way, truedraft.accelerate(model, draft=None if way == "none" else way)) for way in ways]
    seconds: dict[tuple[str, str], list[float]] = {}
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    for turn in range(args.rounds):
        for k in range(len(sides)):
            way, fast = sides[(k + turn) % len(sides)]
            fast.forget()
            spent: dict[str, list[tuple[float, int, int]]] = {}
            for recording in outputs:
                spent.setdefault(recording.kind, []).append(replayed(fast, recording, args.tokens))
            for kind, each in spent.items():
                seconds.setdefault((kind, way), []).append(sum(one[0] for one in each))
                counts[kind, way] = sum(one[1] for one in each), sum(one[2] for one in each)
    found = []
    for kind in dict.fromkeys(kind for kind, _ in counts):
        plain = statistics.median(seconds[kind, ways[0]])
        for way in ways:
            tokens, passes = counts[kind, way]
            took = statistics.median(seconds[kind, way])
            ratios = [first / own for first, own in zip(seconds[kind, ways[0]], seconds[kind, way], strict=True)]
            found.append({
                "kind": kind, "draft": way, "tokens a pass": tokens / passes, "tokens a second": tokens / took,
                f"over {ways[0]}": plain / took, "least": min(ratios), "most": max(ratios),
            })  # fmt: skip
    size = sum(p.numel() for p in model.parameters())
    table = Table(title=f"{args.answers.name}: Llama of {size / 1e6:.0f} M random parameters, {args.rounds} rounds")
    for name in found[0]:
        table.add_column(name)
    for line in found:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in line.values()))
    Console(width=130).print(table)
    if args.json:
        args.json.write_text(json.dumps({"parameters": size, "figures": found}, indent=1))


if __name__ == "__main__":
    main()
