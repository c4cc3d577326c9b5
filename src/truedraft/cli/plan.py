"""`truedraft plan`: the memory that a model with a drafter needs, before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from truedraft.cli._options import AsJson, Dtype, Quantize, Stretched, check_names
from truedraft.cli._tables import print_folded, print_table
from truedraft.cli._text import console, waiting
from truedraft.errors import Refused
from truedraft.layout import Column, Table
from truedraft.packaged import MODEL_HELP

if TYPE_CHECKING:
    from truedraft.planning.parts import Part
    from truedraft.planning.plan import Plan

HELD = {
    "always": "",
    "start": "before the first token",
    "prompt": "while prompts are read",
    "draft": "while drafts are made",
    "pass": "from a pass to the next",
    "later": "after many calls",
}


def plan(
    model: Annotated[str, Argument(metavar="MODEL", help=MODEL_HELP)],
    draft: Annotated[
        str, Option(help="Drafter, with its draft model or head: draft-model:NAME, eagle3:FOLDER.")
    ] = "auto",
    rows: Annotated[int, Option(help="Rows of a batch.")] = 1,
    tokens: Annotated[int, Option(help="Tokens of a row, prompt and output together.")] = 2048,
    memory: Annotated[str | None, Option(help="Memory that there is, as 8GiB; by default what is free here.")] = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    stretched: Stretched = None,
    sample: Annotated[bool, Option("--sample", help="Tokens are drawn, not chosen greedily.")] = False,
    as_json: AsJson = False,
) -> int:
    """Print what memory a model needs with a drafter, and the largest drafts, batch and length that fit.

    Nothing is loaded: sizes are those of configurations and file headers. Python with torch takes 0.5 GiB besides.

    \f
    Returns the exit code. Raises Refused for a bad setting, and, after the table, where it does not fit.
    """
    for name, value in (("--rows", rows), ("--tokens", tokens)):
        if value < 1:
            raise Refused(f"{name} {value}: give at least 1")
    check_names(model, dtype, quantize, drafts=[draft])
    with waiting("reading configurations"):
        import torch

        from truedraft.planning.parts import bytes_of
        from truedraft.planning.plan import planned
        from truedraft.targets.memory import free_memory

        limit = None if memory is None else bytes_of(memory, "--memory")
        found = planned(
            model, draft, rows, tokens, limit, free=lambda device: free_memory(torch.device(device)),
            dtype=dtype, quantize=quantize, stretched=stretched, sampled=sample,
        )  # fmt: skip
    if as_json:
        print(json.dumps({**asdict(found), "fits": found.fits}, indent=2))
    else:
        _print(found)
    found.check()
    return 0


def _print(found: Plan) -> None:
    from truedraft.planning.parts import size

    def on_device(part: Part) -> str:
        return part.device

    columns: list[Column[Part]] = [
        Column("part", "", lambda part: part.name),
        Column("size", "", lambda part: size(part.bytes) if part.bytes else "?" if part.known == "unknown" else "0"),
        Column(
            "known", "whether these are the bytes of the tensors, their most, or an estimate", lambda part: part.known
        ),
        Column("held", "when; empty for the whole time", lambda part: HELD[part.held]),
        *([Column("on", "its device", on_device)] if found.beside else []),
        Column("of", "", lambda part: part.of),
    ]
    out = console()
    load = found.load
    rows = "1 row" if load.rows == 1 else f"{load.rows} rows"
    title = f"Memory of {rows} x {load.tokens:,} tokens, drafts of {load.nodes - 1} nodes"
    print_table(out, Table(title, columns, {"": found.parts}))
    if found.context and load.tokens > found.context:
        print_folded(out, f"These are more tokens than the {found.context:,} that the model was trained for.", "bold")
    most = [
        f"drafts of {found.nodes} nodes" if found.nodes else "", f"{found.rows:,} rows" if found.rows else "",
        f"{found.tokens:,} tokens of a row" if found.tokens else "",
    ]  # fmt: skip
    print_folded(out, f"Needed at once: {size(found.needed)} of {size(found.memory)}.", "bold")
    for device, (needed, there) in found.beside.items():
        print_folded(out, f"Needed at once on {device}: {size(needed)} of {size(there)}.", "bold")
    print_folded(out, f"Without drafts: {size(found.plain)}; with drafts of one node: {size(found.least)}.")
    contexts = [f"{rows:,} of {tokens:,} tokens" for tokens, rows in found.contexts.items()]
    print_folded(out, f"Rows that fit at once: {', '.join(contexts)}.")
    print_folded(out, f"Most that fit, each with the rest as above: {', '.join(filter(None, most)) or 'nothing'}.")
