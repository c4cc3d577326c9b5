"""NEST: copy from given texts, at the position whose hidden state is nearest to the current one.

Li et al., "Nearest Neighbor Speculative Decoding for LLM Generation and Attribution", 2024 (arXiv 2405.19325): its
dynamic span. Among the nearest neighbours of the state after the text, the nearest whose next token is the pending one
is copied from, where retrieval is confident. It finds text of similar meaning, where lookup finds text of equal
wording. Under an exact rule the output is the model's, and this is one more drafter that copies; the method as
published, which emits the texts' tokens even where the model would not, is this under `lossy/nest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from truedraft.card import Card, knob
from truedraft.drafters._base import PerRow
from truedraft.drafters._trees import root_of
from truedraft.errors import Refused
from truedraft.stores.neighbours import Near, Search
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row, Scores, Taps


@dataclass
class QueryState:
    """The query of a row.

    state: (H,), the hidden state that predicted the pending token. near: its neighbours, once they were searched.
    """

    state: Tensor | None = None
    near: Near | None = None


@dataclass
class Nest(PerRow[QueryState]):
    card = Card(
        paper="arXiv 2405.19325 (2024)",
        idea="Copy from given texts, where the model's hidden state is most similar to the current one.",
        family="retrieval",
        needs=("references",),
        cannot={"encoder-decoder": "states of given texts are read by a model whose prompt is such a text"},
        published="As a whole, with lossy/nest: 1.8x over Llama-2-Chat 70B alone.",
    )
    takes_references = True
    store: Any = None  # Neighbours or their file (stores/neighbours.py); else the references of each call
    layer: int = knob(-2, -1024, 1024)  # whose output is compared, -1 the last; that of the authors' code
    k: int = knob(1024, 1, 1_000_000)  # neighbours searched; authors' code, published a few hundred to 1024
    alpha: float = knob(0.3, -1e6, 1e6)  # similarity ratio at which the model weighs half; authors' demo, unverified
    tau: float = knob(0.1, 0, 1e6, open=True)  # how fast that weight changes; authors' demo, unverified
    delta: float = knob(0.5, 0, 1)  # weight of the model above which nothing is drafted; authors' code, unverified
    length: int = knob(64, 1, 1024)  # tokens copied; published up to 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self._search = Search(self.store, self.layer, self.k, self.alpha, self.tau)
        self.needs = Taps((self._search.layer,))

    def bind(self, target: Target) -> None:
        if why := self.card.cannot.get(target.family):
            raise Refused(f"nest cannot draft for {type(target.model).__name__}: {why}")
        self._search.fit(target.model)

    @property
    def width(self) -> int:
        return self.length

    def begin(self, row: Row) -> QueryState:
        return QueryState()

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        super().observe(rows, trees, scores, accepted)
        for b, (row, a) in enumerate(zip(rows, accepted, strict=True)):
            self._states[id(row)] = QueryState(scores.features(b, a.path[-1:], (self._search.layer,))[-1])

    def draft(self, row: Row, state: QueryState, after: Sequence[int], budget: int) -> DraftTree:
        root, near = root_of(row, after), self._near(row, state)
        if near is None or near.doubt > self.delta:
            return DraftTree.chain(root)
        drafted = (row.tokens[-1], *after)
        if (place := near.saying(drafted)) is None:
            return DraftTree.chain(root)
        span = near.store.behind(place, len(drafted) + min(self.length, budget))[len(drafted) :]
        return DraftTree.chain(root, span, [1 - near.doubt] * len(span))

    def _near(self, row: Row, query: QueryState) -> Near | None:
        if query.near is None and query.state is not None:
            near = self._search.at(row, query.state[None])
            query.near = None if near is None else near(0)
        return query.near
