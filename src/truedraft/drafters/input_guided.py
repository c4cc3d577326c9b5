"""Input-guided decoding: copy the input from the place where the output stands, and find the place again after a
change.

Sun et al., "Instantaneous Grammatical Error Correction with Shallow Aggressive Decoding", 2021 (arXiv 2106.04970), and
Ge et al., "Lossless Acceleration for Seq2seq Generation with Aggressive Decoding", 2022 (arXiv 2205.10350), here for
inputs of any kind: the references, or else the prompt. While the output follows the input, what comes next there is
drafted, as far as `length`. Where it departs, the nearest place that agrees with the last tokens is taken up; until
there is one, the output is taken to have replaced one token for another. Strong where a document is edited; other
copying drafters lose their place with every change, and find it by chance where the same words stand in several. The
source of an encoder-decoder is drafted from its beginning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.drafters._base import PerRow
from truedraft.drafters._texts import RowText, root_of, told
from truedraft.drafters._trees import onward
from truedraft.tree import DraftTree, Row

AFAR = 5  # tokens that must agree far from a place that was only just lost
CONTEXT = 8  # last tokens that two places are compared by
REPLACED = 0.5  # what the guess that one token was replaced is worth, where a place is worth 2 a token less its way
OPENING = 0.5  # chance that the output of an encoder-decoder begins as its source does, a first guess
ASTRAY = 0.3  # to the power of the tokens wrong since: chance of the first token behind a change, a first guess


@dataclass
class Place:
    """Where a row stands in its input.

    source: the input's tokens, of references those read so far.
    at: the next token's place, None where it never stood anywhere.
    run: tokens in a row that were as in the input. wrong: tokens since then that were not.
    heard: tokens of the row that were followed.
    """

    source: list[int]
    text: RowText
    heard: int
    at: int | None = None
    run: int = 0
    wrong: int = 0


@dataclass
class InputGuided(PerRow[Place]):
    card = Card(
        paper="arXiv 2205.10350 (2022)",
        idea="Copy the input from where the output stands in it, and find the place again after each change.",
        family="retrieval",
        published="7x to 9x on grammatical error correction, 9x to 12x with a shallow decoder (encoder-decoders, GPU).",
    )
    takes_references = True
    length: int = knob(40, 1, 1024)  # tokens drafted; published: all that is left
    shortest: int = knob(2, 1, 1024)  # that must agree where a place is found first, or from afar; published 1 to n
    reach: int = knob(64, 0, 1_000_000)  # tokens about the old place in which it is found again; published: everywhere
    patience: int = knob(16, 0, 1_000_000)  # wrong tokens in a row after which the place is given up; unpublished

    @property
    def width(self) -> int:
        return self.length

    def begin(self, row: Row) -> Place:
        text = told(row, self.pass_cost)
        source = text.given.tokens if text.given is not None else list(row.tokens[: row.prompt])
        begins = bool(row.source) and text.given is not None  # else its tokens are not those of the output
        return Place(source, text, len(row.tokens), at=0 if begins else None)

    def draft(self, row: Row, state: Place, ahead: Sequence[int], budget: int) -> DraftTree:
        if not ahead:
            self._follow(row, state)
        root, at = root_of(row, ahead), state.at
        if at is None:
            return DraftTree.chain(root, (), ())
        first = ASTRAY**state.wrong if state.wrong else None if state.run else OPENING
        return onward(root, state.source, at + len(ahead), min(self.length, budget), state.run, first)

    def _follow(self, row: Row, state: Place) -> None:
        state.text.follow(row)
        for end in range(state.heard + 1, len(row.tokens) + 1):
            token = row.tokens[end - 1]
            if state.at is not None and state.at < len(state.source) and state.source[state.at] == token:
                state.at, state.run = state.at + 1, 1 if state.wrong else state.run + 1
                state.wrong = 0
            elif state.at is not None:
                self._astray(state, row.tokens[max(end - CONTEXT, 0) : end])
        state.heard = len(row.tokens)
        if state.at is None or state.wrong:
            self._found_anew(state)

    def _astray(self, state: Place, last: Sequence[int]) -> None:
        """The output departed from the input: the place that agrees best and is near, or one token was replaced."""
        assert state.at is not None
        source, at = state.source, state.at
        best, found, agreed = REPLACED, None, 0
        for place in range(max(at - self.reach, 1), min(at + self.reach, len(source)) + 1):
            if source[place - 1] == last[-1]:
                agrees = 1
                while agrees < min(len(last), place) and source[place - 1 - agrees] == last[-1 - agrees]:
                    agrees += 1
                rank = 2 * agrees - math.log2(1 + abs(place - at))
                if rank > best:
                    best, found, agreed = rank, place, agrees
        if found is not None:
            state.at, state.run, state.wrong = found, agreed, 0
        elif state.run or state.wrong:
            state.at, state.run, state.wrong = at + 1, 0, state.wrong + 1
            if state.wrong > self.patience:
                state.at = None
        else:
            state.at = None

    def _found_anew(self, state: Place) -> None:
        """Where the last tokens first stood in the input, however far from the old place."""
        automaton, cursor = state.text.places(longest=CONTEXT)[0]
        for length, _ in automaton.suffixes(cursor):
            if length < (self.shortest if state.at is None else AFAR):
                return
            automaton.shorten(cursor, length)
            end = automaton.first(cursor)
            if end + 1 < len(state.source):
                state.at, state.run, state.wrong = end + 1, length, 0
                return
