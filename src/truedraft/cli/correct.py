"""`truedraft correct`: corrects English text sentence by sentence, in a few passes each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from truedraft.cli import _lines
from truedraft.cli._options import Control, Dtype, Quantize, Threads

if TYPE_CHECKING:
    from truedraft.accelerated import Accelerated


def correct(
    file: _lines.File,
    model: Annotated[str, Option(help="An encoder-decoder for correction: embedded, a folder, a name.")] = "nano-gec",
    out: _lines.Out = None,
    in_place: _lines.InPlace = False,
    diff: Annotated[
        bool | None, Option("--diff/--plain", help="Show differences by words; by default on a terminal.")
    ] = None,
    split: Annotated[bool, Option("--split/--whole", help="Correct sentence by sentence, or lines as a whole.")] = True,
    prefix: _lines.Prefix = "",
    draft: Annotated[
        str, Option(help="A drafter, `name:knob=value`, auto, or none (see `truedraft methods`).")
    ] = "iad",
    control: Control = "cost",
    batch: _lines.Batch = 16,
    max_new_tokens: _lines.MaxNewTokens = None,
    num_beams: _lines.NumBeams = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    threads: Threads = None,
    check: _lines.Check = False,
    report: _lines.Figures = False,
) -> int:
    """Correct a text: as many lines as it has, in their order, white space kept; what cannot be read stays as it is.

    \f
    Returns the exit code: 1 where --check finds a difference, 130 after Ctrl-C. Raises Refused for a bad argument.
    """
    _lines.check_counts(batch, max_new_tokens, num_beams)
    paths = _lines.TextPaths(file, out, in_place, diff)
    options = _lines.ModelOptions(model, "--model", "correct", dtype, quantize, draft, control, threads, check)
    return _lines.rewrite(
        paths, options, _fitted, report,
        batch=batch, split=split, careful=True, prefix=prefix, max_new_tokens=max_new_tokens, check=check,
    )  # fmt: skip


def _fitted(fast: Accelerated) -> Mapping[str, Any]:
    from truedraft.text.languages import check_monolingual

    check_monolingual(fast.tokenizer, "truedraft correct")
    return {}
