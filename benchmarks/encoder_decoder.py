"""An encoder-decoder on the lines of a file: rows per second by batch size, against `model.generate`, line for line.

    python benchmarks/encoder_decoder.py nano-gec dev.src --references dev.ref0 dev.ref1 --metric gleu --draft iad
    python benchmarks/encoder_decoder.py MODEL test.en.gz --references test.de.gz --metric bleu --draft gad:model=GAD

Ways take turns batch by batch, in the same batches of similar lengths, greedy, with the cache; times are medians over
rounds. Quality is that of the lines as `truedraft correct` or `translate` writes them: GLEU for corrections (`pip
install gleu`), else BLEU (`sacrebleu`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import truedraft
from truedraft.files import read_lines
from truedraft.loading import load
from truedraft.text.lines import Rewriter


@dataclass
class Way:
    """One way of decoding: its seconds by round, and the emitted rows.

    passes: that emitted tokens, counted per row.
    """

    generate: Any
    fast: Any = None
    seconds: list[float] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    passes: int = 0
    tokens: int = 0


def measured(way: Way, batches: Sequence[dict[str, torch.Tensor]], settings: dict[str, Any], pad: int) -> None:
    """One round: seconds of all batches together."""
    way.rows, way.passes, way.tokens, seconds = [], 0, 0, 0.0
    if way.fast is not None:
        way.fast.forget()  # clears drafters' memories: every round emits the same text
    for batch in batches:
        begun = time.perf_counter()
        out = way.generate(**batch, **settings)
        seconds += time.perf_counter() - begun
        rows = [[t for t in row if t != pad] for row in out.tolist()]
        way.rows += rows
        way.tokens += sum(map(len, rows))
        if way.fast is not None:
            report = way.fast.report()
            seconds -= report.seconds.get("measure", 0.0)
            way.passes += sum(len(done.emitted) for done in report.passes)
    way.seconds.append(seconds)


def quality(metric: str, sources: Path, outputs: Sequence[str], references: Sequence[Path]) -> str:
    """The score of the outputs, and for GLEU that of the unchanged sources."""
    if metric == "bleu":
        import sacrebleu

        texts = [read_lines(path)[: len(outputs)] for path in references]
        return f"BLEU {sacrebleu.corpus_bleu(list(outputs), texts).score:.1f}"
    scores = []
    with tempfile.TemporaryDirectory() as folder:
        for text in (outputs, read_lines(sources)):
            paths = [Path(folder) / str(i) for i in range(len(references) + 2)]
            for path, lines in zip(paths, (text, read_lines(sources), *map(read_lines, references)), strict=True):
                path.write_text("\n".join(lines[: len(outputs)]) + "\n")
            out, source, *refs = map(str, paths)
            done = subprocess.run(
                ["gleu", "-f", "-s", source, "-o", out, "-r", *refs], capture_output=True, text=True, check=True
            )
            scores.append(float(done.stdout.split()[-1]))
    return f"GLEU {scores[0]:.2f} (of the unchanged sources {scores[1]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an embedded model, a folder, or a name on the hub")
    parser.add_argument("sources", type=Path, help="a line each; plain or .gz")
    parser.add_argument("--references", type=Path, nargs="*", default=[])
    parser.add_argument("--metric", choices=["gleu", "bleu"], default="bleu")
    parser.add_argument("--draft", action="append", help="drafters; repeatable", default=None)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--limit", type=int, help="lines that are timed; the quality is that of all lines")
    parser.add_argument("--control", default="cost", help="fixed: every draft in full")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    lines = [line if line.strip() else "." for line in read_lines(args.sources)]
    settings = dict(max_new_tokens=args.max_new_tokens, do_sample=False)
    drafts = args.draft or ["none", "iad", "auto"]
    pad = model.generation_config.pad_token_id
    figures: list[dict[str, Any]] = []
    table = Table("batch", "draft", "rows/s", "times transformers", "passes a row", "tokens a pass", "identical")
    for size in args.batch:
        timed = sorted(lines[: args.limit], key=len)
        batches = [
            {k: given[k] for k in ("input_ids", "attention_mask")}
            for first in range(0, len(timed), size)
            if (given := tokenizer(timed[first : first + size], return_tensors="pt", padding=True))
        ]
        ways = {"transformers": Way(model.generate)}
        for name in drafts:
            fast = truedraft.accelerate(
                model, tokenizer, draft=None if name == "none" else name, control=args.control
            )  # fmt: skip
            ways[name] = Way(fast.generate, fast)
        for _ in range(args.rounds):
            for way in ways.values():
                measured(way, batches, settings, pad)
        plain = statistics.median(ways["transformers"].seconds)
        for name, way in ways.items():
            seconds = statistics.median(way.seconds)
            same = sum(a == b for a, b in zip(way.rows, ways["transformers"].rows, strict=True))
            figures.append(
                dict(
                    batch=size, draft=name, rows_per_second=len(timed) / seconds, speedup=plain / seconds,
                    passes_per_row=way.passes / len(timed), tokens_per_pass=way.tokens / max(way.passes, 1),
                    identical=same, rows=len(timed),
                )
            )  # fmt: skip
            f = figures[-1]
            table.add_row(
                str(size), name, f"{f['rows_per_second']:.1f}", f"{f['speedup']:.2f}",
                *([f"{f['passes_per_row']:.2f}", f"{f['tokens_per_pass']:.2f}"] if way.fast else ["", ""]),
                f"{same} of {len(timed)}",
            )  # fmt: skip
    console = Console()
    console.print(table)
    if args.references:
        done = Rewriter(truedraft.accelerate(model, tokenizer), careful=args.metric == "gleu").run(lines)
        console.print(quality(args.metric, args.sources, [line.text for line in done], args.references))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
