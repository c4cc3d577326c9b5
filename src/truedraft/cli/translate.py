"""`truedraft translate`: translates a file line by line, in batches."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from truedraft.cli import _lines
from truedraft.cli._options import Control, Dtype, Quantize, Threads


def translate(
    file: _lines.File,
    model: Annotated[str, Option(help="A translation model (encoder-decoder): a folder, or a name on the hub.")],
    out: _lines.Out = None,
    in_place: _lines.InPlace = False,
    source_lang: Annotated[str | None, Option(help="For multilingual models, the model's code: eng_Latn.")] = None,
    target_lang: Annotated[str | None, Option(help="For multilingual models, the model's code: deu_Latn.")] = None,
    split: Annotated[bool, Option("--split/--whole", help="Translate sentence by sentence, or whole lines.")] = False,
    prefix: _lines.Prefix = "",
    draft: Annotated[
        str, Option(help="A drafter, `name:knob=value`, auto, or none (see `truedraft methods`).")
    ] = "auto",
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
    """Translate a text line by line: as many lines as it has, in their order; what cannot be read stays as it is.

    \f
    Returns the exit code: 1 where --check finds a difference, 130 after Ctrl-C. Raises Refused for a bad argument.
    """
    from truedraft.text.languages import languages

    _lines.check_counts(batch, max_new_tokens, num_beams)
    paths = _lines.TextPaths(file, out, in_place)
    options = _lines.ModelOptions(model, "--model", "translate", dtype, quantize, draft, control, threads, check)
    return _lines.rewrite(
        paths, options, lambda fast: languages(fast.model, fast.tokenizer, source_lang, target_lang), report,
        batch=batch, split=split, prefix=prefix, max_new_tokens=max_new_tokens, check=check,
    )  # fmt: skip
