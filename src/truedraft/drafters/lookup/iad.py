"""Input-guided aggressive decoding: draft the whole source, and after a change continue from a match in it.

Sun et al., "Instantaneous Grammatical Error Correction with Shallow Aggressive Decoding", 2021 (arXiv 2106.04970), and
Ge et al., "Lossless Acceleration for Seq2seq Generation with Aggressive Decoding", 2022 (arXiv 2205.10350). After a
change, drafting continues where the last one, two or three tokens have a unique match in the source; until there is
one, nothing is drafted. `iad-tree` drafts from several matches at once where none is unique, and from the positions
that replacing, inserting or deleting one token would lead to. The source is the input of an encoder-decoder, or the
references, or the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from truedraft.card import Card, knob
from truedraft.drafters._base import PerRow
from truedraft.drafters._trees import copied_onward, root_of
from truedraft.stores._cursor import SEPARATOR
from truedraft.stores.union import union
from truedraft.tree import DraftTree, Row

LONGEST = 3  # most tokens of a match; published 3
EDITED = 0.3  # probability that one token was replaced, inserted or deleted here: a prior


@dataclass
class SourceState:
    """A row's source, and the row's position in it.

    ends: n-gram of up to three tokens -> indices of its last tokens. at: index of the next token, None where unknown.
    run: consecutive tokens equal to the source. followed: tokens of the row followed so far. left: index at which the
    output last departed from the source.
    """

    tokens: list[int]
    followed: int
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    at: int | None = 0
    run: int = LONGEST
    left: int = 0

    def __post_init__(self) -> None:
        for end in range(len(self.tokens)):
            for n in range(1, min(LONGEST, end + 1) + 1):
                self.ends.setdefault(tuple(self.tokens[end + 1 - n : end + 1]), []).append(end)

    def follow(self, token: int) -> None:
        """Advance by an emitted token."""
        if self.at is not None and self.at < len(self.tokens) and self.tokens[self.at] == token:
            self.at, self.run = self.at + 1, self.run + 1
        elif self.at is not None:
            self.left, self.at, self.run = self.at, None, 0

    def found(self, last: Sequence[int]) -> list[int]:
        """Indices after the matches of the last 1 to 3 tokens: of the shortest unique n-gram, or else the longest."""
        places: list[int] = []
        for n in range(1, min(LONGEST, len(last)) + 1):
            if not (ends := self.ends.get(tuple(last[-n:]))):
                break
            places = [end + 1 for end in ends]
            if len(places) == 1:
                break
        return places


@dataclass
class Iad(PerRow[SourceState]):
    card = Card(
        paper="arXiv 2205.10350 (2022)",
        idea="Draft the whole source; after a change, continue from the unique match of the last tokens.",
        family="retrieval",
        presets={"iad-tree": {"places": 4, "edits": True}},
        published="7x to 9x on grammatical error correction, 9x to 12x with a shallow decoder (encoder-decoders, GPU).",
        also={
            "aggressive-decoding": "draft='iad' copies the input, and draft='gad:FOLDER' is the trained drafter",
        },
    )
    takes_references = True
    length: int = knob(64, 1, 1024)  # tokens drafted; published: the whole rest
    places: int = knob(1, 1, 16)  # most matches drafted from where none is unique; published 1: no draft then
    edits: bool = knob(False)  # whether drafts also assume one token replaced, inserted or deleted; published: no

    @property
    def width(self) -> int:
        return self.length * self.places if self.places > 1 else self.length

    def begin(self, row: Row) -> SourceState:
        given = [token for document in row.references for token in (*document, SEPARATOR)]
        return SourceState(given or list(row.tokens[: row.prompt]), row.prompt)

    def draft(self, row: Row, state: SourceState, after: Sequence[int], budget: int) -> DraftTree:
        if not after:
            self._follow(row, state)
        root = root_of(row, after)
        most = min(self.length, budget)
        chains = [
            copied_onward(root, state.tokens, at + len(after), most, run, None if run else EDITED)
            for at, run in self._starts(row, state)
        ]
        if not chains:
            return DraftTree.chain(root, (), ())
        return chains[0] if len(chains) == 1 else union(chains, budget).tree

    def _follow(self, row: Row, state: SourceState) -> None:
        for token in row.tokens[state.followed :]:
            state.follow(token)
        state.followed = len(row.tokens)
        if state.at is None and len(found := state.found(row.tokens[row.prompt :])) == 1:
            state.at, state.run = found[0], 1

    def _starts(self, row: Row, state: SourceState) -> list[tuple[int, int]]:
        """Indices to draft from, each with the length of its match; 0 for an assumed edit."""
        if state.at is not None:
            return [(state.at, state.run)]
        found = state.found(row.tokens[row.prompt :])
        starts = (
            [(at, 1) for at in sorted(found, key=lambda at: abs(at - state.left))[: self.places]]
            if self.places > 1
            else []
        )
        if self.edits:
            matched = {at for at, _ in starts}
            starts += [(at, 0) for at in (state.left + 1, state.left, state.left + 2) if at not in matched]
        return starts
