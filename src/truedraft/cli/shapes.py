"""`truedraft shapes`: the shapes of draft models, by the rate at which a model would decode with each."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from truedraft import loading
from truedraft.cli._options import COLDEST, AsJson, Threads, check_seeds, use_threads
from truedraft.cli.train import lines_of
from truedraft.errors import Refused
from truedraft.files import check_folder

if TYPE_CHECKING:
    from truedraft.layout import Table
    from truedraft.train.shapes import Shape

LAYERS = (1, 2, 4, 8)


def shapes(
    target: Annotated[str, Option(help="The model to draft for: a local folder, or a name on the hub.")],
    data: Annotated[Path, Option(help="Prompts, as of `truedraft train`.")],
    out: Annotated[
        Path, Option(help="Folder of the model's responses, as `truedraft train` leaves them, and of what is trained.")
    ],
    model: Annotated[list[str] | None, Option(metavar="MODEL", help="A draft model to measure; repeatable.")] = None,
    parameters: Annotated[int, Option(help="Weights of shapes to search over; 0: only --model.")] = 0,
    layers: Annotated[
        list[int] | None, Option(help="Layers of such a shape; repeatable. By default 1, 2, 4 and 8.")
    ] = None,
    minutes: Annotated[float, Option(help="Minutes to train each of them; 0: their costs alone.")] = 0.0,
    loss: Annotated[str, Option(help="The loss of that training.")] = "kl",
    length: Annotated[int, Option(help="Tokens drafted at once, at most.")] = 12,
    temperature: Annotated[float, Option(help="Of the model's responses; 0 for its likeliest tokens.")] = 0.0,
    max_new_tokens: Annotated[int, Option(help="Tokens of a response, at most.")] = 512,
    chat: Annotated[bool, Option("--chat", help="Put prompts into the model's chat template.")] = False,
    threads: Threads = None,
    seed: Annotated[int, Option(help="Seed of responses and weights.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Find the draft model with which a model decodes fastest: its acceptance on the model's stored responses, and
    times on this machine, give the tokens per second.

    \f
    Raises Refused, before any work: a file, folder or model cannot be used, or there is nothing to measure.
    """
    if not model and not parameters:
        raise Refused("there is nothing to measure: give --model MODEL, or --parameters N for shapes with N weights")
    given = {"--parameters": (parameters, 0), "--minutes": (minutes, 0), "--length": (length, 1)}
    given |= {"--max-new-tokens": (max_new_tokens, 1), "--layers": (min(layers or LAYERS), 1)}
    for option, (value, least) in given.items():
        if not least <= value < inf:
            raise Refused(f"{option} {value}: give at least {least}")
    if temperature != 0 and not COLDEST <= temperature < inf:
        raise Refused(f"--temperature {temperature}: give 0, or a number from {COLDEST:g} on")
    check_seeds([seed])
    check_folder(out, f"--out {out}")
    loading.check(target, argument="--target")
    _, prompts, _ = lines_of(data)
    use_threads(threads)
    from truedraft.cli._models import load
    from truedraft.train.responses import Responding
    from truedraft.train.shapes import Shapes

    report: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    drafted_for, tokenizer = load(target, argument="--target")
    how = Responding(max_new_tokens, 0, temperature, chat, seed)
    measured = Shapes(drafted_for, tokenizer, prompts, out, how, length, report)
    found = [measured.given(name) for name in model or ()]
    if parameters:
        counts = layers or LAYERS
        found += [measured.searched(count, parameters, minutes, loss_name=loss) for count in counts]
    found.sort(key=lambda shape: (-(shape.rate or 0.0), shape.level_seconds))
    if as_json:
        plain = {"context": measured.context, "pass_seconds": measured.passes}
        print(json.dumps({**plain, "shapes": [asdict(shape) for shape in found]}, indent=2))
        return
    from truedraft.cli._tables import print_table
    from truedraft.cli._text import console

    print_table(console(), _table(found, measured.passes))


def _table(found: Sequence[Shape], passes: Sequence[float]) -> Table[Shape]:
    from truedraft.layout import Column, Table

    plain = 1 / passes[0]
    columns: list[Column[Shape]] = [
        Column("draft model", "", lambda s: s.name),
        Column("weights", "", lambda s: f"{s.parameters:,}"),
        Column("level ms", "time of a level of a draft", lambda s: f"{s.level_seconds * 1e3:.3f}"),
        Column("share", "of the time of the target's pass without a draft", lambda s: f"{s.level_seconds * plain:.0%}"),
        Column(
            "needed",
            "tokens per pass from which on drafts of some length pay at that cost",
            lambda s: f"{s.needed:.2f}",
        ),
        Column("k", "tokens to draft at once; 0: no draft pays", lambda s: "" if s.drafted is None else str(s.drafted)),
        Column(
            "tokens per pass",
            "with so many, on the target's responses",
            lambda s: "" if s.drafted is None else f"{s.tokens_per_pass[s.drafted]:.2f}",
        ),
        Column("tokens/s", "predicted", lambda s: "" if s.rate is None else f"{s.rate:.1f}"),
        Column("speed-up", "predicted", lambda s: "" if s.rate is None else f"{s.rate / plain:.2f}"),
    ]  # fmt: skip
    return Table(f"Without drafts {plain:.1f} tokens/s", columns, {"": found})
