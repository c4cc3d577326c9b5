"""Models of attention and recurrent layers: truedraft against `model.generate`, on text that is known.

    python benchmarks/hybrid.py [--layers 12] [--hidden 768] [--dtype float32 bfloat16] [--json FILE]

The models are random Qwen 3.5, wired as in peers.py so that each token determines the next. What is generated is
compared with that text every time. All ways of generating take turns, round by round; ratios are taken within rounds,
and figures are medians over them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import truedraft
from peers import PERIODS, VOCABULARY, successors, wired
from truedraft.bench.roofline import measure_passes
from truedraft.files import write_whole
from truedraft.targets.hosting import hosted

PROMPT, WIDTHS = 128, (1, 8, 16)


def hybrid(layers: int, hidden: int, dtype: torch.dtype) -> PreTrainedModel:
    """Qwen 3.5 with recurrent layers and every fourth one of attention."""
    torch.manual_seed(0)
    heads = hidden // 64
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 3, head_dim=64,
        linear_num_key_heads=heads // 2, linear_num_value_heads=heads, linear_key_head_dim=64, linear_value_head_dim=64,
        tie_word_embeddings=False, initializer_range=0.01, max_position_embeddings=4096, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return wired(Qwen3_5ForCausalLM(config).eval()).to(dtype)


def text_of(kind: str, tokens: int, which: int) -> list[int]:
    cycles = successors()[kind]
    cycle, start = cycles[which % len(cycles)], which * tokens
    return [cycle[(start + i) % len(cycle)] for i in range(tokens)]


def seconds(generate: Callable[..., Any], text: list[int], new: int) -> float:
    """Raises ValueError where another text is generated."""
    began = time.perf_counter()
    out = generate(torch.tensor([text[:PROMPT]]), max_new_tokens=new, do_sample=False, eos_token_id=None)
    spent = time.perf_counter() - began
    if out[0].tolist() != text[: PROMPT + new]:
        raise ValueError("the text differs from the expected one")
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768, help="a multiple of 192")
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160, help="new tokens")
    parser.add_argument("--machine", default="", help="a description of this machine, for --json")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for dtype in args.dtype:
        model = hybrid(args.layers, args.hidden, getattr(torch, dtype))
        size = sum(weight.numel() for weight in model.parameters())
        compiled, own = measure_passes([hosted(model), hosted(model, "stock")], 256, WIDTHS, args.rounds)
        for width in WIDTHS:
            results.append(
                {"dtype": dtype, "parameters": size, "width": width, "seconds": compiled[width],
                 "of_width_1": compiled[width] / compiled[1], "forward": own[width]}
            )  # fmt: skip
        ways = {
            "transformers": model.generate,
            "none": truedraft.accelerate(model, draft="none").generate,
            "auto": truedraft.accelerate(model).generate,
        }
        for kind in PERIODS:
            times: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(args.rounds + 1):  # the first is not counted
                for way, generate in ways.items():
                    spent = seconds(generate, text_of(kind, PROMPT + args.tokens, turn), args.tokens)
                    if turn:
                        times[way].append(spent)
            for way, spent in times.items():
                gains = [plain / one for plain, one in zip(times["transformers"], spent, strict=True)]
                results.append(
                    {"dtype": dtype, "parameters": size, "text": kind, "draft": way,
                     "tokens_per_second": args.tokens / median(spent), "speed_up": median(gains)}
                )  # fmt: skip
    passes = Table("dtype", "parameters", "width", "ms", "of width 1", "own forward, ms")
    texts = Table("dtype", "parameters", "text", "draft", "tokens/s", "over transformers")
    for r in results:
        size = f"{r['parameters'] / 1e6:.0f} M"
        if "width" in r:
            passes.add_row(
                r["dtype"], size, str(r["width"]), f"{r['seconds'] * 1e3:.1f}", f"{r['of_width_1']:.2f}",
                f"{r['forward'] * 1e3:.1f}",
            )  # fmt: skip
        else:
            texts.add_row(
                r["dtype"], size, r["text"], r["draft"], f"{r['tokens_per_second']:.1f}", f"{r['speed_up']:.2f}x"
            )
    console = Console(width=120)
    console.print(passes, texts)
    if args.json:
        write_whole(args.json, json.dumps({"machine": args.machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
