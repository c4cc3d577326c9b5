"""`truedraft demo`: plain and accelerated generation side by side, on two prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Option

from truedraft import packaged
from truedraft.cli._cases import Case, cases
from truedraft.cli._models import accelerated
from truedraft.cli._options import Dtype, Quantize, Stretched, Threads
from truedraft.cli._tables import print_folded, print_table
from truedraft.cli._text import console, waiting
from truedraft.errors import Refused
from truedraft.layout import Column, Table
from truedraft.runtime import checkpoints
from truedraft.text.pieces import Pieces

if TYPE_CHECKING:
    from rich.console import Console

    from truedraft.accelerated import Accelerated
    from truedraft.stats import Pass, Report

ROUNDS = 3
WARM_UP = 16  # tokens
DRAFTED = "bold green"


@dataclass
class Outcome:
    """Both ways of decoding one case: new ids and report of the last round, seconds of every round.

    differs: the first index at which the ids of a round differed; None where all were identical.
    """

    case: Case
    plain: list[int] = field(default_factory=list)
    fast: list[int] = field(default_factory=list)
    plain_seconds: list[float] = field(default_factory=list)
    fast_seconds: list[float] = field(default_factory=list)
    report: Report | None = None
    differs: int | None = None


def demo(
    prompt: Annotated[Path | None, Option(help="A file with a prompt, instead of the embedded ones.")] = None,
    instruction: Annotated[str | None, Option(help="An instruction to edit the file of --prompt.")] = None,
    model: Annotated[
        str | None,
        Option(help=f"{packaged.MODEL_HELP} By default smollm2 where it is installed, else nano."),
    ] = None,
    canvas: Annotated[bool, Option("--canvas", help="A diffusion model (nano-diffusion), whose canvas fills.")] = False,
    draft: Annotated[str, Option(help="A drafter or `name:knob=value` (see `truedraft methods`).")] = "auto",
    max_new_tokens: Annotated[int | None, Option(help="Most tokens per prompt; 200 for prose, 400 for edits.")] = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    stretched: Stretched = None,
    threads: Threads = None,
) -> int:
    """Decode greedily with transformers alone and accelerated; show the text, the speed, whether the tokens agree.

    \f
    Returns the exit code: 1 where a token differs. Raises Refused for a bad argument, KeyboardInterrupt for Ctrl-C.
    """
    if max_new_tokens is not None and max_new_tokens < 1:
        raise Refused(f"--max-new-tokens {max_new_tokens} must be at least 1")
    todo = cases(prompt, instruction, max_new_tokens)
    if canvas:
        from truedraft.cli._canvas import demo_canvas

        return demo_canvas(todo, model or "nano-diffusion", draft, dtype, quantize, stretched, threads)
    out = console()
    instead = None
    if model is None:
        model, instead = ("nano", None) if stretched else _default()
    fast = accelerated(
        model, dtype, draft, quantize=quantize, argument="--model", threads=threads, stretched=stretched,
        release_weights=False,  # its own generate is timed
    )  # fmt: skip
    todo = cases(prompt, instruction, max_new_tokens, fast.tokenizer)
    _check(fast, model, todo)
    if instead is not None:
        print_folded(out, instead)
    with waiting("warming up, and measuring the cost of a pass"):
        for case in todo:
            outcome = Outcome(Case(case.name, case.text, WARM_UP))
            _run_plain(fast, outcome)
            _run_fast(fast, outcome, None)
    print_folded(out, f"{model}, greedy." if stretched is None else f"{model} stretched to {stretched}, greedy.")
    if out.color_system is not None:
        out.print("Green: drafted and accepted.", style=DRAFTED, end=" ")
        out.print("Plain: the model's own token.")
    outcomes = [run(fast, case, out) for case in todo]
    print_table(out, _table(outcomes))
    for outcome in outcomes:
        if outcome.differs is not None:
            print_folded(out, f"{outcome.case.name}: differs from new token {outcome.differs} on")
    return int(any(outcome.differs is not None for outcome in outcomes))


def _default() -> tuple[str, str | None]:
    """SmolLM2 where its package is installed, and what reads its file; else `nano`, and why, to be said."""
    try:
        checkpoints.place(packaged.path("smollm2"))
    except Refused as why:
        return "nano", f"{why}. Without it, the demonstration runs nano, a model of stories and edits of code."
    return "smollm2", None


def _check(fast: Accelerated, model: str, todo: Sequence[Case]) -> None:
    """Raises Refused, before any output, for an encoder-decoder or a prompt that is too long."""
    from truedraft.call.arguments import check_lengths

    if fast.target.reads_sources:
        raise Refused(f"--model {model!r} is an encoder-decoder: use `truedraft correct`, `translate` or `generate`")
    for case in todo:
        length = len(fast.tokenizer(case.text)["input_ids"])  # type: ignore[misc]
        check_lengths(fast.target, length, case.tokens)


def run(fast: Accelerated, case: Case, out: Console) -> Outcome:
    """Plain and accelerated rounds in turn; the first accelerated one is streamed to `out`.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    outcome, pieces = Outcome(case), Pieces(fast.tokenizer)  # type: ignore[arg-type]

    def show(done: Pass) -> None:
        for emission in done.emitted:
            out.out(pieces.feed(emission.tokens[: emission.drafted]), style=DRAFTED, end="", highlight=False)
            out.out(pieces.feed(emission.tokens[emission.drafted :]), end="", highlight=False)

    out.print()
    print_folded(out, case.name, "bold underline")
    for turn in range(1, ROUNDS + 1):
        with waiting(f"transformers alone, round {turn} of {ROUNDS}"):
            _run_plain(fast, outcome)
        if turn == 1:
            out.out(case.shown or case.text, style="dim", end="", highlight=False)
            _run_fast(fast, outcome, show)
            out.out(pieces.end() + "\n")
        else:
            with waiting(f"accelerated, round {turn} of {ROUNDS}"):
                _run_fast(fast, outcome, None)
    return outcome


def _run_plain(fast: Accelerated, outcome: Outcome) -> None:
    generate = cast("Callable[..., Any]", fast.model.generate)
    outcome.plain, seconds = _timed(generate, fast, outcome.case)
    outcome.plain_seconds.append(seconds)


def _run_fast(fast: Accelerated, outcome: Outcome, show: Callable[[Pass], None] | None) -> None:
    """The accelerated half of a round, compared with the plain one; the drafter starts empty."""
    fast.forget()
    outcome.fast, seconds = _timed(fast.generate, fast, outcome.case, on_pass=show)
    outcome.fast_seconds.append(seconds)
    outcome.report = fast.report()
    if outcome.differs is None:
        outcome.differs = first_difference(outcome.plain, outcome.fast)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which two sequences differ, the end of the shorter one included; None where they are equal."""
    index = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return None if index == len(a) == len(b) else index


def _timed(generate: Callable[..., Any], fast: Accelerated, case: Case, **settings: Any) -> tuple[list[int], float]:
    """New ids and seconds of one greedy call."""
    encoded: Any = fast.tokenizer(case.text, return_tensors="pt")  # type: ignore[misc]
    inputs = {name: encoded[name].to(fast.model.device) for name in ("input_ids", "attention_mask")}
    start = time.perf_counter()
    out = generate(**inputs, max_new_tokens=case.tokens, do_sample=False, **settings)
    ids = out[0, inputs["input_ids"].shape[1] :].tolist()
    return ids, time.perf_counter() - start


def _table(outcomes: Sequence[Outcome]) -> Table[Outcome]:
    columns: list[Column[Outcome]] = [
        Column("prompt", "", lambda o: o.case.name),
        Column("identical", "whether all tokens equal those of model.generate", _identical),
        Column("speed-up", "time of transformers' generate over that of truedraft", _speed_up),
        Column("plain tokens/s", "transformers' generate", lambda o: _rate(o.plain, o.plain_seconds)),
        Column("drafted tokens/s", "truedraft", lambda o: _rate(o.fast, o.fast_seconds)),
        Column("tokens", "generated", lambda o: str(len(o.fast))),
        Column("passes", "forward passes of the model for them", lambda o: str(len(_report(o).passes))),
        Column("tokens/pass", "mean acceptance length", lambda o: f"{_report(o).mean_acceptance_length:.2f}"),
    ]
    return Table(f"Medians of {ROUNDS} rounds, drafter {_report(outcomes[0]).drafter}", columns, {"": outcomes})


def _report(outcome: Outcome) -> Report:
    assert outcome.report is not None, "the case was run"
    return outcome.report


def _identical(outcome: Outcome) -> str:
    return "yes" if outcome.differs is None else "NO"


def _speed_up(outcome: Outcome) -> str:
    return f"{statistics.median(outcome.plain_seconds) / statistics.median(outcome.fast_seconds):.2f}x"


def _rate(tokens: Sequence[int], seconds: Sequence[float]) -> str:
    return f"{len(tokens) / statistics.median(seconds):.0f}"
