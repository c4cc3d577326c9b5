"""`truedraft demo --canvas`: a diffusion model's canvas as it fills, and its text beside step-by-step decoding."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.text import Text

from truedraft.cli._cases import Case
from truedraft.cli._models import load
from truedraft.cli._options import CANVASES, check_names, use_threads
from truedraft.cli._tables import print_folded, print_table
from truedraft.cli._text import console, waiting
from truedraft.errors import Refused
from truedraft.layout import Column, Table
from truedraft.text.spelling import Spelling
from truedraft.text.token_text import token_text

if TYPE_CHECKING:
    from rich.console import Console

    from truedraft.canvas._base import CanvasRow
    from truedraft.canvas.accelerated import AcceleratedCanvas

ROUNDS = 3
COLOURS = ("green", "cyan", "yellow", "magenta", "blue", "red")  # of the passes, in turn
UNKNOWN = "·"


@dataclass
class Filling:
    """A prompt decoded step by step, with one canvas per pass, and accelerated: ids, passes, seconds of all rounds."""

    case: Case
    plain: list[int] = field(default_factory=list)
    fast: list[int] = field(default_factory=list)
    plain_passes: int = 0
    fast_passes: int = 0
    plain_seconds: list[float] = field(default_factory=list)
    fast_seconds: list[float] = field(default_factory=list)


def demo_canvas(
    cases: Sequence[Case], model: str, draft: str, dtype: str, quantize: str | None, stretched: str | None,
    threads: int | None,
) -> int:  # fmt: skip
    """Returns the exit code: 1 where a token differs.

    Raises:
        Refused: it is no diffusion model, or an argument is wrong.
    """
    check_names(model, dtype, quantize, "--model", drafts=[draft], runs=CANVASES)
    with waiting("loading the model"):
        use_threads(threads)
        from truedraft import accelerate
        from truedraft.canvas.layout import layout_of

        loaded = load(model, dtype, quantize, "--model", stretched=stretched, runs=CANVASES)
        if layout_of(loaded[0].config, loaded[1]) is None:
            raise Refused(f"--canvas shows diffusion models, and --model {model!r} is none: drop --canvas")
        plain: Any = accelerate(*loaded, draft=None)
        fast: Any = accelerate(*loaded, draft=draft)
    out = console()
    print_folded(out, f"{model}{f' stretched to {stretched}' if stretched else ''}, greedy; drafts by {fast!r}.")
    print_folded(out, "Neighbouring passes have different colours: what has one colour was fixed by one pass.")
    fillings = [run(plain, fast, case, out) for case in cases]
    print_table(out, _table(fillings))
    return int(any(one.plain != one.fast for one in fillings))


def run(plain: AcceleratedCanvas, fast: AcceleratedCanvas, case: Case, out: Console) -> Filling:
    """Rounds of both in turn; the canvas of the first accelerated one is shown as it fills."""
    found = Filling(case)
    out.print()
    print_folded(out, case.name, "bold underline")
    for turn in range(1, ROUNDS + 1):
        with waiting(f"step by step, round {turn} of {ROUNDS}"):
            found.plain, seconds = _timed(plain, case)
            found.plain_seconds.append(seconds)
        if turn == 1:
            out.out(case.text, style="dim", highlight=False)
            canvas = Colours(fast.tokenizer)
            with Live(console=out, auto_refresh=False, transient=False) as live:
                _timed(fast, case, lambda rows: live.update(canvas.text(rows[0]), refresh=out.is_terminal))
            out.print()
        with waiting(f"accelerated, round {turn} of {ROUNDS}"):
            found.fast, seconds = _timed(fast, case)
            found.fast_seconds.append(seconds)
    found.plain_passes, found.fast_passes = len(plain.report().passes), len(fast.report().passes)
    return found


class Colours:
    """A canvas as text, each token in the colour of the pass that fixed it.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Any):
        self._texts = token_text(tokenizer)
        self._passes = 0
        self._fixed: dict[int, int] = {}  # position -> number of the pass that fixed it

    def text(self, row: CanvasRow) -> Text:
        """The canvas behind the prompt, up to the end of its text, after another pass."""
        self._passes += 1
        shown = Text()
        spelling = Spelling(self._texts, context=row.canvas.tokens[: row.prompt])
        for place in range(row.prompt, row.prompt + row.new):
            if row.canvas.known[place]:
                if row.canvas.tokens[place] in row.ends:
                    break
                number = self._fixed.setdefault(place, self._passes)
                spelling.add([row.canvas.tokens[place]])
                shown.append(spelling.tokens[-1].text, COLOURS[number % len(COLOURS)])
            else:
                shown.append(UNKNOWN, "dim")
        return shown


def _timed(
    model: AcceleratedCanvas, case: Case, on_canvas: Callable[[list[CanvasRow]], None] | None = None
) -> tuple[list[int], float]:
    """New ids and seconds of one greedy call."""
    inputs: Any = model.tokenizer(case.text, return_tensors="pt")  # type: ignore[misc]
    start = time.perf_counter()
    ids = inputs["input_ids"].to(model.model.device)
    out = model.generate(ids, max_new_tokens=case.tokens, on_canvas=on_canvas)
    return out[0, ids.shape[1] :].tolist(), time.perf_counter() - start


def _table(fillings: Sequence[Filling]) -> Table[Filling]:
    def ratio(one: Filling) -> str:
        return f"{statistics.median(one.plain_seconds) / statistics.median(one.fast_seconds):.2f}x"

    columns: list[Column[Filling]] = [
        Column("prompt", "", lambda one: one.case.name),
        Column("identical", "whether all tokens are those of step-by-step decoding", lambda one: _identical(one)),
        Column("speed-up", "over one canvas per pass", ratio),
        Column("tokens", "generated", lambda one: str(len(one.fast))),
        Column("steps", "passes with one canvas each", lambda one: str(one.plain_passes)),
        Column("passes", "of several canvases", lambda one: str(one.fast_passes)),
    ]
    return Table(f"Medians of {ROUNDS} rounds", columns, {"": list(fillings)})


def _identical(one: Filling) -> str:
    return "yes" if one.plain == one.fast else "NO"
