"""`truedraft bench --replay`: drafters against recorded outputs, in one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from truedraft import registry
from truedraft.cli._models import load_tokenizer, machine
from truedraft.cli._text import console, waiting

if TYPE_CHECKING:
    from rich.table import Table

    from truedraft.bench.replay import Replayed

NOTE = (
    "Replay: no model was run. A recording does not tell logits, nor what the model would have said behind a rejected "
    "node, so drafters that learn from those look worse than they are."
)


def replay_files(
    files: Sequence[Path],
    drafts: Sequence[str],
    tokenizer: tuple[str, str],
    questions: Path | None,
    limit: int | None,
    budget: int | None,
    as_json: bool,
) -> int:
    """Run every drafter over every file and write what came of it.

    Args:
        tokenizer: its name, and what that is called in messages.

    Returns:
        The exit code.

    Raises:
        Refused: a file, a drafter or the tokenizer will not do.
    """
    for draft in drafts:
        registry.check("drafters", draft)
    with waiting("reading the recordings") as say:
        from truedraft.bench.recordings import conversations, tokenized
        from truedraft.bench.replay import check_replayable, replay
        from truedraft.parts import drafter_of

        for draft in drafts:  # a wrong name does not wait for the others
            check_replayable(draft, drafter_of(draft))
        found: list[Replayed] = []
        read = [(file, conversations(file, questions)[:limit]) for file in files]
        encode = load_tokenizer(*tokenizer)
        for file, talks in read:
            recordings = tokenized(file.name.split(".jsonl")[0], talks, encode)
            for draft in drafts:
                found += replay(recordings, draft, budget or 0, progress=say)
    if as_json:
        about = {"tokenizer": tokenizer[0], "machine": machine(), "note": NOTE}
        print(json.dumps({**about, "replay": [asdict(f) for f in found]}, indent=2))
    else:
        for name in dict.fromkeys(f.file for f in found):
            console().print(_table(name, [f for f in found if f.file == name], tokenizer[0]))
        console().print(NOTE)
    return 0


def _table(file: str, found: Sequence[Replayed], tokenizer: str) -> Table:
    from rich.table import Table

    table = Table(
        title=f"Replay of {file}, in tokens of {Path(tokenizer).name}",
        caption="accepted: tokens per pass, bonus included; drafted: nodes per pass; right: share of these; "
        "µs: drafting per pass",
    )
    heads = ("kind", "way", "outputs", "tokens", "passes", "accepted", "drafted", "right", "µs")
    for head in heads:
        table.add_column(head, no_wrap=head in ("kind", "way"), overflow="fold")
    for f in found:
        table.add_row(
            f.kind, f.way, str(f.outputs), str(f.tokens), str(f.passes), f"{f.mean_acceptance_length:.2f}",
            f"{f.drafted_per_pass:.1f}", "" if f.accepted_share is None else f"{f.accepted_share:.0%}",
            f"{f.drafting_microseconds:.0f}",
        )  # fmt: skip
    return table
