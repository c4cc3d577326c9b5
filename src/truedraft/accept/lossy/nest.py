"""NEST: mixes the model's law with the next tokens of similar hidden states in given texts; accepts drafts leniently.

Li et al., "Nearest Neighbor Speculative Decoding for LLM Generation and Attribution", 2024 (arXiv 2405.19325). The law
of the next token is l p_model + (1 - l) p_neighbours, with l from the relative distance of the nearest neighbour. A
drafted token x is accepted with min(1, p(x) / (gamma max p)), else a token is drawn from the mixture p. With the
drafter `nest` this is the method as published; with another, the mixture without its spans. Lossy by intent: the output
follows the texts, and `report().attributions` lists the spans that were copied, with their places.

Tokens that logits processors exclude are never emitted: the neighbours' law is restricted to the model's support. With
top-k or top-p that is small, so leave them off (`top_k=0`) for texts that the model was not trained on.

Unlike in the authors' code, states are compared at a common scale (`stores/neighbours.py`), the temperature is the
caller's, a span begins after a drawn token, not with it, and a place may be copied from more than once
(`no_repeat_ngram_size` prevents it).
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
    """A span of a row's output that equals a span of a text.

    start: step of its first token. place: index of that token in the texts. drafted: whether any token was drafted.
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
        idea="Mix the model's law with next tokens of similar hidden states in given texts; accept long spans of them.",
        family="lossy",
        needs=("references",),
        published="1.8x over Llama-2-Chat 70B alone, with better quality and attribution than kNN-LM.",
    )
    samples: ClassVar[bool] = True
    preferred_drafts: ClassVar[PreferredDrafts] = "likeliest"
    store: Any = None  # Neighbours or their file (stores/neighbours.py); else the references of each call
    layer: int = knob(-2, -1024, 1024)  # whose states are compared, as in `Taps`; that of the authors' code
    k: int = knob(1024, 1, 1_000_000)  # neighbours of a search; authors' code, published a few hundred to 1024
    alpha: float = knob(0.3, -1e6, 1e6)  # nearest over farthest at which their weight is 1/2; authors' demo, unverified
    tau: float = knob(0.1, 0, 1e6, open=True)  # scale of that sigmoid; authors' demo, unverified
    gamma: float = knob(5e-4, 0, 1e9)  # fraction of the largest probability that suffices; authors' demo, unverified

    def __post_init__(self) -> None:
        self._search = Search(self.store, self.layer, self.k, self.alpha, self.tau)
        self.needs = Taps((self._search.layer,))

    def bind(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._search.fit(model)

    def begin_call(self, laws: Laws) -> None:
        if not any(map(self._search.has, laws.history.rows)):
            raise Refused(
                "rule='lossy/nest' has no text to search: give generate() references of two tokens or more, "
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
                p_token = float(law[token])
                if p_token > 0 and (p_token >= enough or chance.flip(p_token / enough, row)):
                    return token, law
            return None, law

        tokens = tokens_by(scores, candidates, rows, chance, relaxed)
        for row, children, token in zip(rows, candidates, tokens, strict=True):
            if not row.ended:
                self._follow(row, near[row.index], token, token in children.tokens)
        return tokens

    def _near(self, row: Row, children: Candidates) -> Near | None:
        """The neighbours of the hidden state at the row's current node."""
        assert children.hidden is not None
        at = self._search.at(row, children.hidden(self._search.layer)[None])
        return None if at is None else at(0)

    def _follow(self, row: Row, near: Near | None, token: int, drafted: bool) -> None:
        """Extend the row's current copy by a token, or end it and begin another."""
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
    """(V,) the mixture of the target's law and the neighbours'. p: (V,)."""
    if near is None:
        return p
    q = near.law(len(p)).masked_fill_(p == 0, 0.0)
    return as_law(near.doubt * p + (1 - near.doubt) * q, p)
