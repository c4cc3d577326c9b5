"""truedraft against other CPU engines on one model: the same weights, precision, threads and text, taking turns.

    python benchmarks/peers.py --python openvino=/venvs/openvino/bin/python --python llama.cpp=... [--json FILE]

The model is a Llama with random weights of real shapes, wired so that its greedy text is known: the output head is the
embedding matrix permuted, so each token determines the next. Half of the vocabulary runs in cycles of 64, whose text
copies itself; half in cycles of about 4000, whose text repeats nothing. What an engine writes is compared with that
text every time; one that writes something else gets no ratio.

Every engine (peers_engines.py) is a process of its own, by this interpreter or by the one given with `--python`. All
stay alive and take turns, round by round, one working at a time. Speeds are those of decoding: tokens after the first
over the seconds after the first. They are medians over rounds (lowest-highest); ratios are taken round by round.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from peers_engines import BITS, ENGINES, THREADS
from runtime import SIZES

DTYPES = ["float32", "bfloat16", *BITS]
VOCABULARY, PERIODS = 32000, {"copy-heavy": 64, "no repeats": 4000}


def successors() -> dict[str, list[list[int]]]:
    """The cycles of each kind of text; the tokens of a cycle follow each other, the last is followed by the first."""
    order = torch.randperm(VOCABULARY - 64, generator=torch.Generator().manual_seed(0)) + 64  # no special ones
    half = len(order) // 2
    short, long = order[:half].split(PERIODS["copy-heavy"]), order[half:].split(PERIODS["no repeats"])
    return {name: [c.tolist() for c in cycles] for name, cycles in zip(PERIODS, (short, long), strict=True)}


def wired(model: PreTrainedModel) -> PreTrainedModel:
    """A model of untied embeddings, its weights changed so that each token determines the next."""
    follows = torch.arange(VOCABULARY)
    for cycles in successors().values():
        for cycle in cycles:
            follows[cycle] = torch.tensor(cycle[1:] + cycle[:1])
    embeddings = model.get_input_embeddings().weight
    with torch.no_grad():
        # large compared with the layers' outputs, so that the last hidden state still determines the token
        embeddings.normal_(std=1.0)
        model.get_output_embeddings().weight[follows] = 0.05 * embeddings
    return model


def make_model(folder: Path, shape: dict[str, int]) -> None:
    """The wired model in fp32 and bf16, with a tokenizer of one piece per id."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=2048, tie_word_embeddings=False, initializer_range=0.01,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, **shape,
    )  # fmt: skip
    model = wired(LlamaForCausalLM(config).eval())
    pieces = ["<unk>", "<s>", "</s>"] + [f"w{i}" for i in range(3, VOCABULARY)]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>")),
        unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>",
    )  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        model.to(getattr(torch, dtype)).save_pretrained(folder / dtype)
        tokenizer.save_pretrained(folder / dtype)
        (folder / dtype / "pieces.json").write_text(json.dumps(pieces))


class Worker:
    """An engine in another process; `absent` is the reason why there is none."""

    def __init__(self, name: str, python: str, folder: Path, dtype: str):
        self.name, self.absent = name, ""
        script = Path(__file__).with_name("peers_engines.py")
        try:
            self.process = subprocess.Popen(
                [python, str(script), name, str(folder), dtype],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            hello = self.read()
        except OSError as e:
            hello = {"absent": f"not installed ({e})"}
        self.absent = hello.get("absent", hello.get("error", ""))
        self.versions: dict[str, str] = hello.get("versions", {})
        self.lookups: list[int] = hello.get("lookups", [])
        self.precision: str = hello.get("precision", "")

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": f"died with {self.process.wait()}"}

    def request(self, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(arguments) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        return self.read()

    def close(self) -> None:
        if not self.absent:
            self.process.stdin.close()  # type: ignore[union-attr]
            self.process.wait()


@dataclass
class Figures:
    """One way of generating on one text; `lookup` is 0 where nothing is drafted."""

    model: str
    dtype: str
    engine: str
    versions: dict[str, str]
    precision: str
    lookup: int
    text: str
    speeds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    wrong: str = ""  # the text generated instead of the expected one, or the error

    @property
    def shown(self) -> tuple[str, str]:
        """Tokens per second, and how many times as fast truedraft is in the same mode."""
        if self.wrong or not self.speeds:
            return "-", "-"
        s = self.speeds
        ratio = f"{median(self.ratios):.2f}x" if self.ratios else "-"
        return f"{median(s):.1f} ({min(s):.1f}-{max(s):.1f})", ratio


def measure(
    name: str, dtype: str, workers: list[Worker], prompt: int, new: int, rounds: int, console: Console
) -> list[Figures]:
    """All ways of all engines, `rounds` times in turn after a warm-up.

    In text without repeats nothing is drafted, so one length of prompt lookup represents all.
    """
    walks = {text: (cycles[0] * (1 + (prompt + new) // len(cycles[0]))) for text, cycles in successors().items()}
    ways = [
        (w, Figures(name, dtype, w.name, w.versions, w.precision, lookup, text))
        for w in workers
        for text, lookup in [*(("copy-heavy", n) for n in (0, *w.lookups)), *(("no repeats", n) for n in w.lookups[:1])]
    ]
    for turn in range(rounds + 1):
        at = (turn * len(ways)) // (rounds + 1)  # every round begins with another way
        for worker, way in ways[at:] + ways[:at]:
            if way.wrong:
                continue
            length = new if turn else min(new, 32)
            got = worker.request(prompt=walks[way.text][:prompt], new=length, lookup=way.lookup)
            expected = walks[way.text][prompt : prompt + length]
            if got.get("tokens") != expected:
                way.wrong = got.get("error") or difference(got["tokens"], expected)
            elif turn:
                way.speeds.append(got["speed"])
            what = way.wrong or f"{got['speed']:.1f} tok/s"
            console.print(f"[dim]{name} {dtype}, round {turn}: {way.engine}, {way.text}, lookup {way.lookup}: {what}")
    figures = [way for _, way in ways]
    own: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for way in figures:
        if way.engine == "truedraft":
            own[way.text, bool(way.lookup)] = way.speeds
    for way in figures:
        way.ratios = [a / b for a, b in zip(own[way.text, bool(way.lookup)], way.speeds, strict=False)]
    return figures


def difference(got: list[int], expected: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), None)
    return f"{len(got)} tokens instead of {len(expected)}" if at is None else f"another token at {at}"


def show(figures: list[Figures], absent: list[Worker], title: str, console: Console) -> None:
    table = Table(title=title)
    for head in ("engine", "mode", "copy-heavy, tok/s", "truedraft", "no repeats, tok/s", "truedraft", "text as known"):
        table.add_column(head, justify="left" if head in ("engine", "mode", "text as known") else "right")
    grouped: dict[tuple[str, int], list[Figures]] = defaultdict(list)
    for f in figures:
        grouped[f.engine, f.lookup].append(f)
    for (engine, lookup), both in grouped.items():
        cells = {f.text: f.shown for f in both}
        wrong = "; ".join(f"{f.text}: {f.wrong}" for f in both if f.wrong)
        mode = f"prompt lookup, {lookup}" if lookup else "plain"
        blank = ("", "")
        table.add_row(
            engine, mode, *cells["copy-heavy"], *cells.get("no repeats", blank), f"NO: {wrong}" if wrong else "yes"
        )
    for worker in absent:
        table.add_row(worker.name, worker.absent)
    console.print(table)
    for f in {f.engine: f for f in figures}.values():
        console.print(f"{f.engine}: {', '.join(f'{k} {v}' for k, v in f.versions.items())}; {f.precision}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH", help="interpreter of an engine")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "truedraft-peers")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if unknown := [p for p in args.python if p.split("=")[0] not in ENGINES or "=" not in p]:
        parser.error(f"--python {unknown[0]}: give ENGINE=PATH, ENGINE one of {', '.join(ENGINES)}")
    pythons = dict(p.split("=", 1) for p in args.python)
    console, results = Console(width=150), []
    for size in args.sizes:
        folder = args.folder / size.replace(" ", "")
        if not folder.exists():
            make_model(folder, SIZES[size])
        for dtype in args.dtypes:
            workers = [Worker(name, pythons.get(name, sys.executable), folder, dtype) for name in args.engines]
            present = [w for w in workers if not w.absent]
            figures = measure(size, dtype, present, args.prompt, args.new, args.rounds, console)
            for worker in workers:
                worker.close()
            title = (
                f"{size} {dtype}: {args.prompt} prompt tokens, {args.new} new, {THREADS} threads, {args.rounds} rounds"
            )
            show(figures, [w for w in workers if w.absent], title, console)
            results += [asdict(f) for f in figures]
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
