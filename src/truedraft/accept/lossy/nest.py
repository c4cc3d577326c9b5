"""NEST: the model's law mixed with what followed its nearest hidden states in given texts, and drafts judged leniently.

Li et al., "Nearest Neighbor Speculative Decoding for LLM Generation and Attribution", 2024 (arXiv 2405.19325). The law
of the next token is l p_model + (1 - l) p_neighbours, with l from how far the nearest neighbour stands out. A drafted
token x is kept with min(1, p(x) / (gamma max p)), otherwise one is drawn from the mixture. With `nest` as the drafter
this is the method as published; with another, the mixture without its spans. Lossy by intent: the output says what the
texts say, and the report says which of its spans stand where in them (`report().attributions`).

What logits processors rule out is never said: of the neighbours' law the part is taken that the model's allows. With
top-k or top-p that is little, so leave them off (`top_k=0`) for texts that the model does not know.

Other than in the authors' code, states are compared at a common scale (`stores/neighbours.py`), the temperature is the
caller's, a span begins behind a token that was drawn, not with it, and a place may be copied from more than once
(`no_repeat_ngram_size` forbids it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from truedraft.accept._base import AttributingRule
from truedraft.accept._rounds import as_law, tokens_by
from truedraft.accept._verification import Candidates
from truedraft.accept.lossy._base import LossyNodeRule
from truedraft.card import Card, knob
from truedraft.chance import Chance
from truedraft.errors import Refused
from truedraft.sampling import Laws
from truedraft.stats import Attribution
from truedraft.stores.neighbours import Near, Search
from truedraft.tree import PreferredDrafts, Row, Taps


@dataclass
class Copy:
    """A span of a row's output that is followed in a source.

    start: of its first token in the output. place: of that token in the texts. drafted: whether any of it was.
    """

    near: Near
    start: int
    place: int
    length: int = 1
    drafted: bool = False


@dataclass
class Nest(LossyNodeRule, AttributingRule):
    card = Card(
        paper="arXiv 2405.19325 (2024)",
        idea="Mix into the model's law what given texts say after like hidden states, and keep long spans of them.",
        family="lossy",
        needs=("references",),
        published="1.8x over Llama-2-Chat 70B alone, with better quality and attribution than kNN-LM.",
    )
    samples: ClassVar[bool] = True
    preferred_drafts: ClassVar[PreferredDrafts] = "likeliest"
    store: Any = None  # Neighbours or their file (stores/neighbours.py); else the references of each call
    layer: int = knob(-2, -1024, 1024)  # whose output is compared, -1 the last; that of the authors' code
    k: int = knob(1024, 1, 1_000_000)  # neighbours looked for; authors' code, published a few hundred to 1024
    alpha: float = knob(0.3, -1e6, 1e6)  # nearest over farthest at which they count half; authors' demo, unverified
    tau: float = knob(0.1, 0, 1e6, open=True)  # how fast that changes; authors' demo, unverified
    gamma: float = knob(5e-4, 0, 1e9)  # share of the likeliest token's chance that suffices; authors' demo, unverified

    def __post_init__(self) -> None:
        self._search = Search(self.store, self.layer, self.k, self.alpha, self.tau)
        self.needs = Taps((self._search.layer,))

    def bind(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._search.fit(model)

    def begin_call(self, laws: Laws) -> None:
        if not any(map(self._search.has, laws.history.rows)):
            raise Refused(
                "rule='lossy/nest' has no text to look in: give generate() references of two tokens or more, "
                "or the rule a store"
            )
        self._copies: dict[int, Copy] = {}
        self._found: list[Attribution] = []

    def choose(
        self, scores: Tensor, candidates: Sequence[Candidates], rows: Sequence[Row], chance: Chance
    ) -> list[int]:
        near = {row.index: self._near(row, children) for row, children in zip(rows, candidates, strict=True)}

        def relaxed(p: Tensor, children: Candidates, row: Row, chance: Chance) -> tuple[int | None, Tensor]:
            law = _mixed(p, near[row.index])
            enough = self.gamma * float(law.max())
            for token in children.tokens:
                odds = float(law[token])
                if odds > 0 and (odds >= enough or chance.flip(odds / enough, row)):
                    return token, law
            return None, law

        tokens = tokens_by(scores, candidates, rows, chance, relaxed)
        for row, children, token in zip(rows, candidates, tokens, strict=True):
            if not row.ended:
                self._follow(row, near[row.index], token, token in children.tokens)
        return tokens

    def _near(self, row: Row, children: Candidates) -> Near | None:
        """The neighbours of the state where the row stands."""
        assert children.hidden is not None
        at = self._search.at(row, children.hidden(self._search.layer)[None])
        return None if at is None else at(0)

    def _follow(self, row: Row, near: Near | None, token: int, drafted: bool) -> None:
        """Go on with the copy that the row is in, or begin another."""
        copy = self._copies.get(row.index)
        if copy is not None and copy.near.store.behind(copy.place, copy.length + 1)[copy.length :] == [token]:
            copy.length += 1
            copy.drafted |= drafted
            return
        self._close(row.index)
        if near is not None and (place := near.saying([token])) is not None:
            self._copies[row.index] = Copy(near, row.step, place, drafted=drafted)

    def _close(self, index: int) -> None:
        copy = self._copies.pop(index, None)
        if copy is not None and copy.drafted and copy.length > 1:
            source, offset = copy.near.store.source(copy.place)
            self._found.append(Attribution(index, copy.start, copy.start + copy.length, source, offset))

    def attributions(self) -> tuple[Attribution, ...]:
        for index in list(self._copies):
            self._close(index)
        return tuple(sorted(self._found, key=lambda a: (a.row, a.start)))


def _mixed(p: Tensor, near: Near | None) -> Tensor:
    """The target's law and the neighbours', each by its weight. p: (V,)."""
    if near is None:
        return p
    theirs = near.law(len(p)).masked_fill_(p == 0, 0.0)
    return as_law(near.doubt * p + (1 - near.doubt) * theirs, p)
