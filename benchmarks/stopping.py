"""When to end the drafts of a draft model: a trained head (SpecDec++) against fixed lengths and the cost control.

    python benchmarks/stopping.py [--minutes 4.5] [--prompts 8] [--tokens 64] --json FILE [--svg FILE]

A pass of the target is taken to cost 2, 5, 10, 20 or 50 passes of the draft model, whatever its width. Costs are
counted, not timed, so that they depend on no load: a clock that only these passes move is what the control and the
drafter read. Prompts are beginnings of paragraphs of TinyStories. Heads are trained first, on responses to others of
them, one for greedy decoding, whose text has to be that of `model.generate`, and one for sampling at temperature 1
(`rule="rejection"`). The best fixed length and the best threshold are those of the fewest costs on the same prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import truedraft
from truedraft import registry
from truedraft.bench.plots import Panel, picture
from truedraft.drafters._learned import WEIGHTS as TRAINED
from truedraft.files import write_whole
from truedraft.loading import load
from truedraft.train.drafter import train_drafter
from truedraft.train.loop import Plan
from truedraft.train.responses import Responding

SHARED = Path(__file__).resolve().parents[2] / "shared"
STORIES = SHARED / "data" / "tinystories_sample" / "tinystories_4MB.txt"
PAIRS = (("bitllama_3M", "stories260K"), ("nano", "nano-draft"))
RATIOS = (2, 5, 10, 20, 50)
LENGTHS = range(1, 13)
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
CONFIDENCES = (0.2, 0.4, 0.6, 0.8)
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 1.0, "top_k": 0},
}  # fmt: skip
UNIT = 1e-3  # seconds of a pass of the draft model, by the clock
WORDS = 12  # of a prompt


class Clock:
    """A clock that passes move. steps: passes of the draft model."""

    def __init__(self) -> None:
        self.now, self.steps = 0.0, 0

    @contextmanager
    def running(self) -> Iterator[None]:
        real = time.perf_counter
        time.perf_counter = lambda: self.now
        try:
            yield
        finally:
            time.perf_counter = real

    def move(self, seconds: float) -> None:
        self.now += seconds

    def step(self, count: int) -> None:
        self.steps, self.now = self.steps + count, self.now + count * UNIT


def moved(function: Callable[..., Any], move: Callable[[Any], None]) -> Callable[..., Any]:
    """A function after whose calls `move` is called with the result."""

    def called(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        move(found)
        return found

    return called


def counted(
    model: Any, tokenizer: Any, prompts: list[torch.Tensor], plain: list[torch.Tensor], most: int, mode: str,
    draft: Any, control: str, ratio: float,
) -> dict[str, int]:  # fmt: skip
    """Passes of the target and of the draft model, without those over prompts, and tokens that they gave."""
    clock, found = Clock(), {"passes": 0, "steps": 0, "tokens": 0}
    rule = None if mode == "greedy" else "rejection"
    fast = truedraft.accelerate(model, tokenizer, draft=draft, control=control, rule=rule)
    for read in ("score", "prefill"):
        setattr(fast.target, read, moved(getattr(fast.target, read), lambda _: clock.move(ratio * UNIT)))
    small = draft.reader.target
    small.extend_tapped = moved(small.extend_tapped, lambda _: clock.step(1))
    small.extend_greedily = moved(small.extend_greedily, lambda made: clock.step(max(map(len, made)) if made else 0))
    with clock.running():
        for seed, (ids, expected) in enumerate(zip(prompts, plain, strict=True)):
            torch.manual_seed(seed)
            text = fast.generate(ids, max_new_tokens=most, **MODES[mode])
            if mode == "greedy":
                assert torch.equal(text, expected), "the text is not that of model.generate"
            report = fast.report()
            found["passes"] += len(report.passes) - 1
            found["tokens"] += report.tokens - 1
    return found | {"steps": clock.steps}


def measured(
    names: tuple[str, str], model: Any, tokenizer: Any, small: Any, head: Path, mode: str, prompts: list[str], most: int
) -> list[dict[str, Any]]:
    """A row by way to end drafts, and for ways that follow costs by ratio of these."""
    ids = [tokenizer(text, return_tensors="pt", return_token_type_ids=False).input_ids for text in prompts]
    plain = [model.generate(one, max_new_tokens=most, do_sample=False) for one in ids] if mode == "greedy" else ids

    def row(way: str, name: str, control: str = "fixed", ratio: int | None = None, **knobs: Any) -> dict[str, Any]:
        draft = registry.load("drafters", name, model=small, **knobs)
        costs = counted(model, tokenizer, ids, plain, most, mode, draft, control, ratio or 0)
        found = {"target": names[0], "draft": names[1], "mode": mode, "way": way, "ratio": ratio, **knobs, **costs}
        found.pop("head", None)
        print(found, flush=True)
        return found

    rows = [row("fixed", "draft-model", length=length) for length in LENGTHS]
    rows += [row("confidence", "draft-model", length=20, confidence=least) for least in CONFIDENCES]
    rows += [row("threshold", "specdec-pp", head=str(head), threshold=most_risk) for most_risk in THRESHOLDS]
    for ratio in RATIOS:
        rows.append(row("by costs", "specdec-pp", "cost", ratio, head=str(head)))
        rows.append(row("cost control", "draft-model", "cost", ratio, length=12))
    return rows


def trained(model: Any, tokenizer: Any, small: str, mode: str, prompts: list[str], out: Path, minutes: float) -> Path:
    """The folder of a head, trained unless it is there."""
    if not (out / TRAINED).exists():
        temperature = 0.0 if mode == "greedy" else 1.0
        learner = registry.method("drafters", "specdec-pp").learner(model=small, temperature=temperature)
        how = Responding(max_new_tokens=64, temperature=temperature)
        train_drafter(
            learner, model, tokenizer, prompts, out, Plan(minutes=minutes, lr=3e-3, every=minutes / 8), how=how
        )
    return out


def cost(row: dict[str, Any], ratio: float) -> float:
    """Of an emitted token, in passes of the draft model."""
    return float((row["passes"] * ratio + row["steps"]) / row["tokens"])


def plotted(rows: list[dict[str, Any]]) -> str:
    """Costs of a token over those of the best fixed length, by ratio, a panel for each pair and mode."""
    panels = []
    for key in dict.fromkeys((row["target"], row["mode"]) for row in rows):
        own = [row for row in rows if (row["target"], row["mode"]) == key]
        lines = []
        for way in dict.fromkeys(row["way"] for row in own):
            least = [min(cost(r, x) for r in own if r["way"] == way and r["ratio"] in (None, x)) for x in RATIOS]
            fixed = [min(cost(r, x) for r in own if r["way"] == "fixed") for x in RATIOS]
            lines.append((way, [a / b for a, b in zip(least, fixed, strict=True)]))
        panels.append(Panel(f"{key[0]}, {key[1]}: cost of a token", lines, ticks=[str(x) for x in RATIOS]))
    return picture(panels, "cost of a pass of the target, in passes of the draft model")


def paragraphs() -> list[str]:
    """Beginnings of paragraphs."""
    texts = (paragraph.split() for paragraph in STORIES.read_text("utf-8").split("\n\n"))
    return list(dict.fromkeys(" ".join(words[:WORDS]) for words in texts if len(words) > 2 * WORDS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.5, help="of training, for each head")
    parser.add_argument("--lines", type=int, default=1200, help="prompts to train each head on")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--heads", type=Path, help="folder where heads are kept")
    parser.add_argument("--targets", nargs="+", default=[names[0] for names in PAIRS], help="rows of others are kept")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="rows of others are kept")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    if not STORIES.exists():
        raise SystemExit(f"{STORIES} is not on this machine: nothing was measured")
    texts = paragraphs()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # curves by the clock are no curves of this machine
        for names in (names for names in PAIRS if names[0] in args.targets):
            places = [str(SHARED / "weights" / n) if (SHARED / "weights" / n).is_dir() else n for n in names]
            if not names[0].startswith("nano") and places[0] == names[0]:
                print(f"{names[0]} is not on this machine: left out")
                continue
            model, tokenizer = load(places[0])
            for mode in args.modes:
                out = (args.heads or Path(folder)) / f"{names[0]}-{mode}"
                head = trained(model, tokenizer, places[1], mode, texts[: args.lines], out, args.minutes)
                small = load(places[1])[0]
                held = texts[-args.prompts :]
                rows = measured(names, model, tokenizer, small, head, mode, held, args.tokens)
                if args.json:
                    kept = json.loads(args.json.read_text("utf-8")) if args.json.exists() else {}
                    others = [row for row in kept.get("rows", ()) if (row["target"], row["mode"]) != (names[0], mode)]
                    given = {name: getattr(args, name) for name in ("lines", "minutes", "prompts", "tokens")}
                    settings = kept.get("settings", {}) | {f"{names[0]}, {mode}": given}
                    write_whole(args.json, json.dumps({"settings": settings, "rows": others + rows}, indent=1))
    if args.json and args.svg:
        write_whole(args.svg, plotted(json.loads(args.json.read_text("utf-8"))["rows"]))


if __name__ == "__main__":
    main()
