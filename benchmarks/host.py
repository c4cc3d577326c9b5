"""What decoding costs besides the passes of the target: milliseconds of a pass by part, with a target that takes none.

    python benchmarks/host.py [--rows 1 8 32] [--passes 48] [--rounds 3] [--weights MB] [--label LABEL] --json FILE
    python benchmarks/host.py --calls 40 [--weights MB] [--label LABEL] --json FILE

The target is a stand-in: it says the next token of a written text at every node that agrees with it, and anything
elsewhere, over a vocabulary of 49,152. By the clock that the control reads, a pass takes what one of a small model
takes, so that drafts pay as they do there; in truth it takes no time that is counted. `--weights 100`: it reads as many
megabytes, as a pass over weights does, which leave none of the host's memory in the processor's caches. Figures are
processor time, the medians of passes. Two kinds of text: `edit`, the prompt with a change now and then, and `prose`,
which goes on. Two ways to draft by the default drafter: under the cost control, and `full`, 16 nodes for each row in
every pass, verified whatever they cost. Rows of other labels are kept.

`--calls N`: instead, the first calls of 96 tokens of N fresh controls and drafters, in a model of passes in packed
weights of few bits, which grow fast with their width: the time without drafts over that with them, by the clock, what
the host takes included. A third kind of text has `nothing` that could be drafted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from truedraft import registry
from truedraft.accept._ties import NearTies
from truedraft.chance import StreamNoise
from truedraft.cli._models import machine
from truedraft.drafters import _compose
from truedraft.drafters._compose import name_of
from truedraft.engine import Engine
from truedraft.files import write_whole
from truedraft.parts import drafter_of
from truedraft.request import Request
from truedraft.runtime.curve import Curve
from truedraft.sampling import History, Laws
from truedraft.stats import PARTS
from truedraft.stopping import Stops
from truedraft.stopwatch import Stopwatch
from truedraft.tree import DraftTree, Prompt, Row, Scores, Taps

DOCS = Path(__file__).resolve().parents[1] / "docs"
VOCABULARY, END = 49_152, 1  # that of SmolLM2
PROMPT, ROOM = 400, 3000  # tokens
CHANGED = 25  # tokens of an edit from one change to the next, in the mean
PLAIN, NODE, READ = 6e-3, 1.5e-4, 3e-4  # seconds of a pass, of a further node in it, and of a prompt's token
PACKED = Curve((1, 2, 4, 8, 16, 32, 64), (1.0, 1.33, 1.85, 2.66, 3.9, 6.0, 8.2))  # times PLAIN, by nodes in a pass
NOISE = 0.03  # of the seconds of a pass, in such calls
CALL = 96  # tokens of such a call
RIGHT = 24.0  # the logit of the right token; those of others are drawn from a normal distribution
WARM = 24  # passes that are not counted


class Clock:
    """The processor time of this thread, so that other work on the machine counts little, and what passes would have
    taken. ahead: seconds of the latter."""

    def __init__(self) -> None:
        self.real, self.ahead = time.thread_time, 0.0

    def __call__(self) -> float:
        return self.real() + self.ahead

    @contextmanager
    def running(self) -> Iterator[None]:
        before, time.perf_counter = time.perf_counter, self
        try:
            yield
        finally:
            time.perf_counter = before


class Written:
    """A `Target` whose rows have written texts. `Scores` are valid until the next pass.

    Args:
        texts: by slot. cost: the seconds of a pass over so many nodes, by the clock.

    weights: numbers that every pass reads, as a model reads its weights.
    """

    weights: ClassVar[Tensor] = torch.zeros(0)

    branching = croppable = True
    padded = cold = False
    carried, hard_limit, vocabulary, embedding_width = 0, None, VOCABULARY, 8
    weight_bytes, device, cost_key = 100_000_000, torch.device("cpu"), ("written",)

    def __init__(self, clock: Clock, texts: Sequence[Sequence[int]], cost: Callable[[int], float]):
        self.taps, self._clock, self._cost = Taps(), clock, cost
        self._texts = [(text, 0) for text in texts]  # by slot, with the place of its next token
        self._line = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self._pool = self._line.clone()
        self._peaks: list[tuple[int, int]] = []  # entries of the pool that are set, by line and token
        self.seconds = 0.0  # spent here
        self._measuring = False

    @contextmanager
    def _passing(self, nodes: int) -> Iterator[None]:
        began = self._clock.real()
        yield
        self.weights.sum()
        spent = self._clock.real() - began
        self.seconds += spent
        self._clock.ahead += self._cost(nodes) - spent

    @contextmanager
    def temporary_cache(self, rows: int, capacity: int) -> Iterator[None]:
        self._measuring = True
        try:
            yield
        finally:
            self._measuring = False

    def prompt(self, ids: Tensor) -> Prompt:
        return Prompt(ids)

    def prefill(self, prompts: Sequence[Prompt]) -> Scores:
        return self.score([DraftTree.chain(0)] * len(prompts))

    def admit(self, prompts: Sequence[Prompt]) -> Scores:
        scores = self.score([DraftTree.chain(0)] * len(prompts))
        self._clock.ahead += READ * sum(map(len, prompts))
        return Scores(scores.logits, {}, [len(prompt) - 1 for prompt in prompts])

    def score(self, trees: Sequence[DraftTree]) -> Scores:
        width = max(map(len, trees))
        with self._passing(sum(map(len, trees))):
            logits = self._lines(len(trees) * width).view(len(trees), width, VOCABULARY)
            if not self._measuring:
                self._write(trees, width)
        return Scores(logits, {}, [0] * len(trees))

    def _lines(self, count: int) -> Tensor:
        if count > len(self._pool):
            self._pool = self._line.repeat(count, 1)
            self._peaks = []
        return self._pool[:count]

    def _write(self, trees: Sequence[DraftTree], width: int) -> None:
        """Make the right token of each node that agrees with its row's text the likeliest."""
        entries = self._pool.numpy()
        for line, token in self._peaks:
            entries[line, token] = self._line[0, token]
        self._peaks = []
        for row, (tree, (text, at)) in enumerate(zip(trees, self._texts, strict=True)):
            reached: dict[int, int] = {0: at}
            for node, (token, parent) in enumerate(zip(tree.tokens, tree.parent, strict=True)):
                if node and parent in reached and text[reached[parent]] == token:
                    reached[node] = reached[parent] + 1
            self._peaks += [(row * width + node, text[place]) for node, place in reached.items()]
        for line, token in self._peaks:
            entries[line, token] = RIGHT

    def wait(self) -> None:
        """Passes are synchronous."""

    def commit(self, paths: Sequence[Sequence[int]], first: int = 0) -> None:
        self._texts = [(text, at + len(path)) for (text, at), path in zip(self._texts, paths, strict=True)]

    def release(self, slot: int) -> None:
        self._texts[slot] = self._texts[-1]
        self._texts.pop()


@cache
def tokens() -> list[int]:
    """The documentation as tokens of up to six characters, their ids spread over the vocabulary."""
    text = "\n".join(path.read_text("utf-8") for path in sorted(DOCS.glob("*.md")))
    ids: dict[str, int] = {}
    return [
        ids.setdefault(piece, 2 + len(ids) * 7919 % (VOCABULARY - 2)) for piece in re.findall(r" ?\w{1,5}|\W", text)
    ]


def texts(kind: str, rows: int) -> tuple[list[list[int]], list[list[int]]]:
    """The prompt and the text of each row."""
    source, rng = tokens(), random.Random(rows)
    prompts, outputs = [], []
    for row in range(rows):
        at = row * (len(source) - PROMPT - ROOM) // max(rows, 2)
        length = ROOM if kind == "edit" else PROMPT
        prompts.append(source[at : at + length])
        if kind == "prose":
            outputs.append(source[at + length : at + length + ROOM])
        else:
            outputs.append([rng.choice(source) if rng.random() < 1 / CHANGED else token for token in prompts[-1]])
    return prompts, outputs


def requested(prompts: Sequence[list[int]], mode: str, draft: str, room: int = ROOM) -> Request:
    """The request of a call of these rows, each of `room` new tokens."""
    rows = [Row(i, list(ids), len(ids), room, ends=frozenset({END})) for i, ids in enumerate(prompts)]
    ids = torch.tensor(prompts)
    history = History(ids, room, 0, rows)
    warpers = [TemperatureLogitsWarper(0.8)] if mode == "sampled" else []
    laws = Laws(LogitsProcessorList(warpers), history)
    criteria = StoppingCriteriaList([MaxLengthCriteria(ids.shape[1] + room), EosTokenCriteria(END)])
    rule = NearTies(registry.load("accept", "greedy" if mode == "greedy" else "seeded"), laws, 1e-5)
    stops, chance = Stops(criteria, history, laws), StreamNoise(len(rows))
    prompted = [Prompt(one) for one in ids]
    return Request(rows, prompted, drafter_of(draft), rule, laws, stops, chance, history)  # type: ignore[arg-type]


class Details:
    """Seconds of the parts of the drafter. seconds: by part and what it does."""

    def __init__(self, clock: Clock, drafter: Any):
        self.seconds: Counter[str] = Counter()
        self._clock, self._union = clock, _compose.union
        for part in getattr(drafter, "parts", ()):
            part.propose = self._timed(f"draft {name_of(part)}", part.propose)
            part.observe = self._timed(f"observe {name_of(part)}", part.observe)
        _compose.union = self._timed("merge", self._union)

    def _timed(self, name: str, f: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began = self._clock.real()
            try:
                return f(*args, **kwargs)
            finally:
                self.seconds[name] += self._clock.real() - began

        return wrapped

    def end(self) -> None:
        _compose.union = self._union


def measured(kind: str, mode: str, way: str, rows: int, passes: int) -> dict[str, Any]:
    """Milliseconds of a pass by part: medians over passes."""
    clock = Clock()
    prompts, outputs = texts(kind, rows)
    target = Written(clock, outputs, lambda nodes: PLAIN + NODE * (nodes - 1))
    request = requested(prompts, mode, "none" if way == "none" else "auto")
    control: dict[str, Any] = {"nodes": 16} if way == "full" else {}
    engine = Engine(target, registry.load("control", "fixed" if way == "full" else "cost", **control))  # type: ignore
    watch, details = Stopwatch(), Details(clock, request.drafter)
    watch.attach(engine)
    step = watch.timed_steps(engine.step)
    request.drafter.bind(target)  # type: ignore[arg-type]
    engine.admit(request)
    found: dict[str, list[float]] = {}
    with clock.running(), torch.no_grad():
        for _ in range(WARM + passes):
            before = watch.seconds | details.seconds | {"host": clock.real() - target.seconds}
            step()
            request.check()
            after = watch.seconds | details.seconds | {"host": clock.real() - target.seconds}
            spent = {part: seconds - before.get(part, 0.0) for part, seconds in after.items()}
            spent["loop"] = spent["all"] - sum([spent[part] for part in PARTS])
            for part, seconds in spent.items():
                found.setdefault(part, []).append(seconds)
        engine.close()
    details.end()
    emitted = [e for done in request.passes[-passes:] for e in done.emitted]
    ms = {part: 1e3 * statistics.median(seconds[-passes:]) for part, seconds in found.items()}
    return {
        "rows": rows, "kind": kind, "mode": mode, "way": way, "passes": passes,
        "tokens_per_pass": sum(len(e.tokens) for e in emitted) / len(emitted),
        "nodes": sum(e.offered for e in emitted) / len(emitted),
        "host": ms["host"],
        "parts": {part: ms[part] for part in (*PARTS, "loop") if part not in ("target", "prefill")},
        "drafter": {part: ms[part] for part in details.seconds},
    }  # fmt: skip


def written(kind: str, seed: int) -> tuple[list[int], list[int]]:
    """The prompt and the text of a first call."""
    source, rng = tokens(), random.Random(seed)
    if kind == "nothing":
        prompt, text = ([rng.randrange(2, VOCABULARY) for _ in range(2 * CALL)] for _ in range(2))
        return prompt, text
    at = rng.randrange(len(source) - 4 * CALL)
    if kind == "prose":
        return source[at : at + CALL], source[at + CALL : at + 3 * CALL]
    prompt = source[at : at + 2 * CALL]
    return prompt, [rng.choice(source) if rng.random() < 1 / CHANGED else token for token in prompt]


def first_call(prompt: list[int], text: list[int], draft: str, seed: int) -> tuple[float, float]:
    """Seconds of a call by the clock, and its tokens per pass."""
    clock, rng = Clock(), random.Random(seed)
    target = Written(clock, [text], lambda nodes: PLAIN * PACKED(nodes) * max(1 + rng.gauss(0, NOISE), 0.8))
    request = requested([prompt], "greedy", draft, CALL)
    request.drafter.bind(target)  # type: ignore[arg-type]
    engine, watch = Engine(target, registry.load("control", "cost")), Stopwatch()  # type: ignore[arg-type]
    watch.attach(engine)
    step = watch.timed_steps(engine.step)
    engine.admit(request)
    with clock.running(), torch.no_grad():
        began = clock()
        while engine.running:
            step()
            request.check()
        return clock() - began, CALL / (len(request.passes) - 1)


def first_calls(kind: str, calls: int) -> dict[str, Any]:
    """The ratios of some first calls."""
    ratios, per_pass = [], []
    for seed in range(calls):
        prompt, text = written(kind, seed)
        with tempfile.TemporaryDirectory() as os.environ["XDG_CACHE_HOME"]:
            none, _ = first_call(prompt, text, "none", seed)
            drafted, tokens_per_pass = first_call(prompt, text, "auto", seed)
        ratios.append(none / drafted)
        per_pass.append(tokens_per_pass)
    return {
        "kind": kind, "calls": calls, "median": statistics.median(ratios), "mean": statistics.mean(ratios),
        "least": min(ratios), "tokens_per_pass": statistics.mean(per_pass),
    }  # fmt: skip


def median_of(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run of the median time."""
    return sorted(found, key=lambda one: one["host"])[len(found) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--kinds", nargs="+", default=["edit", "prose"])
    parser.add_argument("--modes", nargs="+", default=["greedy", "sampled"])
    parser.add_argument("--ways", nargs="+", default=["none", "cost", "full"])
    parser.add_argument("--passes", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--label", default="now", help="rows of the same label are replaced")
    parser.add_argument("--calls", type=int, default=0)
    parser.add_argument("--weights", type=int, default=0, help="megabytes that a pass reads")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    Written.weights = torch.zeros(args.weights << 18)
    found: list[dict[str, Any]] = []
    for kind in ("nothing", "prose", "edit") if args.calls else ():
        found.append({"label": args.label, "calls": args.calls} | first_calls(kind, args.calls))
        print(found[-1], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # times by the clock are no times of this machine
        cells = itertools.product(args.kinds, args.modes, args.ways, args.rows)
        for cell in cells if not args.calls else ():
            row = median_of([measured(*cell, args.passes) for _ in range(args.rounds)])
            found.append({"label": args.label} | row)
            figures = {part: round(ms, 3) for part, ms in (row["parts"] | row["drafter"]).items() if ms >= 5e-4}
            print(*cell, f"{row['host']:.3f} ms", f"{row['tokens_per_pass']:.2f} tokens", f"{row['nodes']:.1f} nodes")
            print("   ", figures, flush=True)
    if args.json:
        kept = json.loads(args.json.read_text("utf-8")) if args.json.exists() else {"rows": []}
        same = [row for row in kept["rows"] if row["label"] == args.label and ("calls" in row) == bool(args.calls)]
        rows = [row for row in kept["rows"] if row not in same] + found
        write_whole(args.json, json.dumps(kept | {"machine": machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
