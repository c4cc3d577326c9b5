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

from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.drafters._base import PerRow
from truedraft.drafters._trees import copied_onward, root_of
from truedraft.drafters.lookup._texts import RowText, row_text
from truedraft.stores._cursor import Place, Search
from truedraft.tree import DraftTree, Row

AFAR = 5  # tokens of the shortest match anywhere in the input, while the old position is not given up
CONTEXT = 8  # last tokens that are compared with the input
REPLACED = 0.5  # score of one token replaced; a match scores 2 per token less log2(1 + distance)
OPENING = 0.5  # probability that the output of an encoder-decoder begins as its source does: a prior
ASTRAY = 0.3  # to the power of the wrong tokens since: probability of the first token after a change, a prior


@dataclass
class InputState:
    """A row and its input.

    source: the input's tokens, of references those indexed so far.
    place: the row's position in it, after its first `followed` tokens.
    """

    source: list[int]
    text: RowText
    followed: int
    place: Place


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
        return InputState(source, text, len(row.tokens), Place(0 if begins else -1))

    def finds(self, row: Row, state: InputState) -> bool:
        return state.text.grows(row)

    def draft(self, row: Row, state: InputState, after: Sequence[int], budget: int) -> DraftTree:
        if not after:
            self._follow(row, state)
        root, place = root_of(row, after), state.place
        if place.at < 0:
            return DraftTree.chain(root, (), ())
        first = ASTRAY**place.wrong if place.wrong else None if place.run else OPENING
        return copied_onward(root, state.source, place.at + len(after), min(self.length, budget), place.run, first)

    def _follow(self, row: Row, state: InputState) -> None:
        state.text.follow(row)
        search = Search(self.shortest, AFAR, CONTEXT, self.reach, self.patience, REPLACED)
        state.text.locate(state.place, len(state.source), row.tokens, len(row.tokens) - state.followed, search)
        state.followed = len(row.tokens)
