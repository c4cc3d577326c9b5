"""Input-guided decoding: copy the input from the output's position in it, and find that position again after a change.

Sun et al., "Instantaneous Grammatical Error Correction with Shallow Aggressive Decoding", 2021 (arXiv 2106.04970), and
Ge et al., "Lossless Acceleration for Seq2seq Generation with Aggressive Decoding", 2022 (arXiv 2205.10350), here for
inputs of any kind: the references, or else the prompt. While the output follows the input, the next `length` tokens of
the input are drafted. Where it departs, drafting continues from the nearest match of the last tokens; until there is
one, one token is assumed to have been replaced. Strong where a document is edited; other copying drafters lose their
position with every change, and may find a wrong one where the same words occur several times. The source of an
encoder-decoder is drafted from its beginning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.drafters._base import PerRow
from truedraft.drafters._trees import copied_onward, root_of
from truedraft.drafters.lookup._texts import RowText, row_text
from truedraft.tree import DraftTree, Row

AFAR = 5  # tokens of the shortest match anywhere in the input, while the old position is not given up
CONTEXT = 8  # last tokens that are compared with the input
REPLACED = 0.5  # score of one token replaced; a match scores 2 per token less log2(1 + distance)
OPENING = 0.5  # probability that the output of an encoder-decoder begins as its source does: a prior
ASTRAY = 0.3  # to the power of the wrong tokens since: probability of the first token after a change, a prior


@dataclass
class InputState:
    """A row's position in its input.

    source: the input's tokens, of references those indexed so far.
    at: index of the next token, None where there is none.
    run: consecutive tokens equal to the input. wrong: tokens since then that were not.
    followed: tokens of the row followed so far.
    """

    source: list[int]
    text: RowText
    followed: int
    at: int | None = None
    run: int = 0
    wrong: int = 0


@dataclass
class InputGuided(PerRow[InputState]):
    card = Card(
        paper="arXiv 2205.10350 (2022)",
        idea="Copy the input from the output's position in it, and find the position again after each change.",
        family="retrieval",
        published="7x to 9x on grammatical error correction, 9x to 12x with a shallow decoder (encoder-decoders, GPU).",
    )
    takes_references = True
    length: int = knob(40, 1, 1024)  # tokens drafted; published: the whole rest
    shortest: int = knob(2, 1, 1024)  # tokens of the shortest match where there is no position yet; published 1 to n
    reach: int = knob(64, 0, 1_000_000)  # tokens around the old position searched for a match; published: everywhere
    patience: int = knob(16, 0, 1_000_000)  # consecutive wrong tokens after which the position is lost; unpublished

    @property
    def width(self) -> int:
        return self.length

    def begin(self, row: Row) -> InputState:
        text = row_text(row, self.pass_cost)
        source = text.given.tokens if text.given is not None else list(row.tokens[: row.prompt])
        begins = bool(row.source) and text.given is not None  # else its tokens are not those of the output
        return InputState(source, text, len(row.tokens), at=0 if begins else None)

    def draft(self, row: Row, state: InputState, after: Sequence[int], budget: int) -> DraftTree:
        if not after:
            self._follow(row, state)
        root, at = root_of(row, after), state.at
        if at is None:
            return DraftTree.chain(root, (), ())
        first = ASTRAY**state.wrong if state.wrong else None if state.run else OPENING
        return copied_onward(root, state.source, at + len(after), min(self.length, budget), state.run, first)

    def _follow(self, row: Row, state: InputState) -> None:
        state.text.follow(row)
        for end in range(state.followed + 1, len(row.tokens) + 1):
            token = row.tokens[end - 1]
            if state.at is not None and state.at < len(state.source) and state.source[state.at] == token:
                state.at, state.run = state.at + 1, 1 if state.wrong else state.run + 1
                state.wrong = 0
            elif state.at is not None:
                self._depart(state, row.tokens[max(end - CONTEXT, 0) : end])
        state.followed = len(row.tokens)
        if state.at is None or state.wrong:
            self._relocate(state)

    def _depart(self, state: InputState, last: Sequence[int]) -> None:
        """After a departure from the input: take the best match nearby, or assume that one token was replaced."""
        assert state.at is not None
        source, at = state.source, state.at
        best, found, matched = REPLACED, None, 0
        for place in range(max(at - self.reach, 1), min(at + self.reach, len(source)) + 1):
            if source[place - 1] == last[-1]:
                length = 1
                while length < min(len(last), place) and source[place - 1 - length] == last[-1 - length]:
                    length += 1
                score = 2 * length - math.log2(1 + abs(place - at))
                if score > best:
                    best, found, matched = score, place, length
        if found is not None:
            state.at, state.run, state.wrong = found, matched, 0
        elif state.run or state.wrong:
            state.at, state.run, state.wrong = at + 1, 0, state.wrong + 1
            if state.wrong > self.patience:
                state.at = None
        else:
            state.at = None

    def _relocate(self, state: InputState) -> None:
        """Take the first match of the last tokens in the input, at any distance from the old position."""
        automaton, cursor = state.text.places(longest=CONTEXT)[0]
        for length, _ in automaton.suffixes(cursor):
            if length < (self.shortest if state.at is None else AFAR):
                return
            automaton.shorten(cursor, length)
            end = automaton.first(cursor)
            if end + 1 < len(state.source):
                state.at, state.run, state.wrong = end + 1, length, 0
                return
