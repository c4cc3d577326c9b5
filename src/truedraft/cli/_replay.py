"""`truedraft bench --replay`: drafters on recorded outputs, as one table or as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from truedraft import registry
from truedraft.cli._models import load_tokenizer, machine
from truedraft.cli._options import use_threads
from truedraft.cli._page import origin, write_page
from truedraft.cli._tables import print_folded, print_table
from truedraft.cli._text import console, waiting

if TYPE_CHECKING:
    from truedraft.bench.replay import Replayed

NOTE = (
    "Replay: no model was run. A recording has neither logits nor the model's predictions after a rejected node, so "
    "drafters that learn from those look worse than they are."
)


def replay_files(
    files: Sequence[Path],
    drafts: Sequence[str],
    tokenizer: tuple[str, str],
    questions: Path | None,
    limit: int | None,
    budget: int | None,
    threads: int | None,
    as_json: bool,
    html: Path | None,
    command: Sequence[str],
) -> int:
    """Run every drafter over every file and print the figures.

    Args:
        tokenizer: its name, and the option that gave it, for messages.
        html: path of a page with the figures.
        command: the arguments of the command line, for that page.

    Returns:
        The exit code.

    Raises:
        Refused: a file, a drafter or the tokenizer cannot be used.
    """
    for draft in drafts:
        registry.check("drafters", draft)
    with waiting("reading the recordings") as show:
        use_threads(threads)
        from truedraft.bench.columns import replayed
        from truedraft.bench.recordings import conversations, tokenized
        from truedraft.bench.replay import check_replayable, replay
        from truedraft.parts import drafter_of

        for draft in drafts:  # all names first: a wrong one fails before any work
            check_replayable(draft, drafter_of(draft))
        found: list[Replayed] = []
        recorded = [(file, conversations(file, questions)[:limit]) for file in files]
        encode = load_tokenizer(*tokenizer)
        for file, dialogues in recorded:
            recordings = tokenized(file.name.split(".jsonl")[0], dialogues, encode)
            for draft in drafts:
                found += replay(recordings, draft, budget or 0, progress=show)
    if html is not None:
        from truedraft.bench import page

        facts = {"recordings": ", ".join(map(str, files)), "tokenizer": tokenizer[0], **origin(command)}
        write_page(html, page.replayed("truedraft bench --replay", facts, found, tokenizer[0], NOTE))
    if as_json:
        facts = {"tokenizer": tokenizer[0], "machine": machine(), "note": NOTE}
        print(json.dumps({**facts, "replay": [asdict(f) for f in found]}, indent=2))
    else:
        out = console()
        print_table(out, replayed(found, tokenizer[0]))
        print_folded(out, NOTE)
    return 0
