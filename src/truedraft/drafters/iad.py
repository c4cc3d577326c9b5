"""Input-guided aggressive decoding: draft the whole source, and after a change go on where the last tokens stand in it.

Sun et al., "Instantaneous Grammatical Error Correction with Shallow Aggressive Decoding", 2021 (arXiv 2106.04970), and
Ge et al., "Lossless Acceleration for Seq2seq Generation with Aggressive Decoding", 2022 (arXiv 2205.10350). The place
behind a change is where the last one, two or three tokens stand in the source, as soon as they stand there once; until
then nothing is drafted. `iad-tree` drafts from several places at once where there is no such one, and from the places
that one token replaced, inserted or left out would lead to. The source is what an encoder-decoder was given, or the
references, or the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from truedraft.card import Card, knob
from truedraft.drafters._base import PerRow
from truedraft.drafters._texts import root_of
from truedraft.drafters._trees import onward
from truedraft.stores._cursor import SEPARATOR
from truedraft.stores.union import union
from truedraft.tree import DraftTree, Row

LONGEST = 3  # tokens that a place is looked for by; published 3
EDITED = 0.3  # chance that a token was replaced, inserted or left out just here, a first guess


@dataclass
class Source:
    """A row's source, and where it stands in it.

    ends: of every string of up to three tokens, where it ends. at: the next token's place, None where that is unknown.
    run: tokens in a row that were as in the source. heard: tokens of the row that were followed. left: the place where
    it last departed from the source.
    """

    tokens: list[int]
    heard: int
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    at: int | None = 0
    run: int = LONGEST
    left: int = 0

    def __post_init__(self) -> None:
        for end in range(len(self.tokens)):
            for n in range(1, min(LONGEST, end + 1) + 1):
                self.ends.setdefault(tuple(self.tokens[end + 1 - n : end + 1]), []).append(end)

    def follow(self, token: int) -> None:
        """The row said a token."""
        if self.at is not None and self.at < len(self.tokens) and self.tokens[self.at] == token:
            self.at, self.run = self.at + 1, self.run + 1
        elif self.at is not None:
            self.left, self.at, self.run = self.at, None, 0

    def found(self, last: Sequence[int]) -> list[int]:
        """Where the last one, two or three tokens stand: the shortest string that stands there once, or the longest."""
        places: list[int] = []
        for n in range(1, min(LONGEST, len(last)) + 1):
            if not (ends := self.ends.get(tuple(last[-n:]))):
                break
            places = [end + 1 for end in ends]
            if len(places) == 1:
                break
        return places


@dataclass
class Iad(PerRow[Source]):
    card = Card(
        paper="arXiv 2205.10350 (2022)",
        idea="Draft the whole source; after a change, from where the last tokens stand in it once.",
        family="retrieval",
        presets={"iad-tree": {"places": 4, "edits": True}},
        published="7x to 9x on grammatical error correction, 9x to 12x with a shallow decoder (encoder-decoders, GPU).",
    )
    takes_references = True
    length: int = knob(64, 1, 1024)  # tokens drafted; published: all that is left
    places: int = knob(1, 1, 16)  # drafted from where the last tokens stand in several; published 1: none then
    edits: bool = knob(False)  # whether drafts also go on behind a token replaced, inserted or left out; published: no

    @property
    def width(self) -> int:
        return self.length * self.places if self.places > 1 else self.length

    def begin(self, row: Row) -> Source:
        given = [token for document in row.references for token in (*document, SEPARATOR)]
        return Source(given or list(row.tokens[: row.prompt]), row.prompt)

    def draft(self, row: Row, state: Source, ahead: Sequence[int], budget: int) -> DraftTree:
        if not ahead:
            self._follow(row, state)
        root = root_of(row, ahead)
        most = min(self.length, budget)
        chains = [
            onward(root, state.tokens, at + len(ahead), most, run, None if run else EDITED)
            for at, run in self._starts(row, state)
        ]
        if not chains:
            return DraftTree.chain(root, (), ())
        return chains[0] if len(chains) == 1 else union(chains, budget).tree

    def _follow(self, row: Row, state: Source) -> None:
        for token in row.tokens[state.heard :]:
            state.follow(token)
        state.heard = len(row.tokens)
        if state.at is None and len(found := state.found(row.tokens[row.prompt :])) == 1:
            state.at, state.run = found[0], 1

    def _starts(self, row: Row, state: Source) -> list[tuple[int, int]]:
        """Places to draft from, and how many tokens say so; 0 for a guess."""
        if state.at is not None:
            return [(state.at, state.run)]
        found = state.found(row.tokens[row.prompt :])
        starts = (
            [(at, 1) for at in sorted(found, key=lambda at: abs(at - state.left))[: self.places]]
            if self.places > 1
            else []
        )
        if self.edits:
            known = {at for at, _ in starts}
            starts += [(at, 0) for at in (state.left + 1, state.left, state.left + 2) if at not in known]
        return starts
