"""Finds the layers to skip while it decodes: sets are scored on the text just decoded, and the best one drafts.

Xia et al., "SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration", ICLR 2025 (arXiv 2410.06916).
One pass without the layers of a candidate set reads the last tokens of a row again; the score of the set is the share
of them at which its likeliest token is that of the whole model. Each namespace has a search, which goes on from call to
call. It pays for large models, whose layers are redundant, and long streams of like texts; views that are calibrated
are the same with the search before the first text.

What differs from the publication: the time of the search is bounded by a share of the time of decoding; the sets that
are not random come from a linear model of the scores, whose fit takes no time (`SkipSearch`); of the candidates at a
level of the comb, 3 to 10 by the confidence of the likeliest, those are verified that are worth their share of the
pass, by their calibrated probability; where a model's halves of layers cannot be skipped, whole layers are.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from truedraft.card import Card, knob
from truedraft.drafters.self_._drafter import ViewDrafter
from truedraft.drafters.self_._search import SkipSearch
from truedraft.errors import Refused
from truedraft.stores.memory import Tenants
from truedraft.stores.ranks import ranks_of
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row, Scores
from truedraft.views._base import NONE, Reduction, View
from truedraft.views._layers import Without

NAMESPACES = 64  # whose searches are kept


@dataclass
class _Stream:
    """The search over the texts of one namespace.

    view: that without the best set.
    passes: since a set was scored.
    decoding, searching, trial: seconds of passes, of scoring sets, and of scoring the last one.
    """

    search: SkipSearch
    view: View
    passes: int = 0
    decoding: float = 0.0
    searching: float = 0.0
    trial: float = 0.0


@dataclass
class Swift(ViewDrafter):
    """Drafts under views that it searches for. See `Drafter`."""

    card = Card(
        paper="arXiv 2410.06916 (2024)",
        idea="The model drafts for itself without layers that it finds dispensable while it decodes.",
        family="self-drafting",
        published="1.3x to 1.6x with Llama 2 13B and 70B and others, greedy and sampled.",
    )
    share: float = knob(0.45, 0, 1)  # of the halves of layers that are skipped, one at least; published 0.45, 70B 0.5
    ends: int = knob(1, 0, 64)  # layers at either end that are kept; published 1
    window: int = knob(50, 1, 1024)  # last tokens of a row that a set is scored on; published 50
    interval: int = knob(1, 1, 1024)  # passes from one set to the next, at least; published 1
    modelled: int = knob(25, 1, 1024)  # every so many-th set is drawn from a model of the scores; published 25
    enough: float = knob(0.95, 0, 1)  # score with which the search ends; published 0.93 to 0.95
    patience: int = knob(300, 1, 100_000)  # sets without improvement after which it ends; published 300
    trials: int = knob(1000, 1, 100_000)  # sets at most; published 1,000
    effort: float = knob(0.01, 0, 1000)  # seconds that the search may take, per second of decoding; 0 for no search
    nodes: int = knob(24, 1, 1024)  # of the draft
    depth: int = knob(25, 1, 64)  # levels at most; published 25
    top_k: int = knob(10, 1, 64)  # children of a node, of which the likeliest is expanded; published 3 to 10
    drawn: bool = knob(False)  # a drawn chain for rejection rules

    view = View()  # of no row

    def forget(self) -> None:
        super().forget()
        self._streams: Tenants[_Stream] = Tenants(NAMESPACES, self._stream, _nbytes)
        self._decoded: dict[int, deque[int]] = {}  # by row, the whole model's likeliest tokens at its last positions
        self._began = 0.0  # when the pass began

    def _stream(self) -> _Stream:
        search = SkipSearch(len(self._parts), self._size, self.modelled)
        return _Stream(search, self.without(search.best))

    def view_of(self, row: Row) -> View:
        return self.found(row.namespace)

    def found(self, namespace: str = "") -> View:
        """The view that was found for rows of a namespace."""
        return self._streams.of(namespace).view

    @property
    def expanded(self) -> int:
        return 1

    @property
    def width(self) -> int:
        return max(super().width, self.window)  # a pass that scores a set may be as wide for every row

    def bind(self, target: Target) -> None:
        self._parts, self._size = self._spared(target)
        super().bind(target)
        self._streams = Tenants(NAMESPACES, self._stream, _nbytes)

    def _spared(self, target: Target) -> tuple[list[Reduction], int]:
        """What sets are made of: halves of layers in order, or whole layers; and the size of a set.

        Raises:
            Refused: all layers are kept, or they cannot be skipped.
        """
        within = range(self.ends, target.layers - self.ends)
        if not within:
            raise Refused(
                f"swift:ends={self.ends} keeps all of the {target.layers} layers: skip some of them, or draft by "
                "another drafter"
            )
        every = frozenset(within)
        try:
            for half in (Reduction(attention=every), Reduction(feed_forward=every)):
                target.check_view(Without(half))
            parts = [part for i in within for part in (Reduction(frozenset({i})), Reduction(NONE, frozenset({i})))]
        except Refused:
            target.check_view(Without(Reduction(every, every)))
            parts = [Reduction(frozenset({i}), frozenset({i})) for i in within]
        of_all = round(self.share * target.layers * len(parts) / len(within))
        return parts, min(max(of_all, 1), len(parts))

    def without(self, chosen: tuple[int, ...]) -> View:
        """The view without a set of parts."""
        return Without(reduce(Reduction.joined, (self._parts[i] for i in chosen)))

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        self._began = time.perf_counter()
        return super().propose(rows, budget)

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        super().observe(rows, trees, scores, accepted)
        of_row = (time.perf_counter() - self._began) / len(rows) if self._began else 0.0
        ready: dict[str, list[Row]] = {}
        likeliest: Any = ranks_of(scores) or scores.logits.argmax(-1).tolist()
        for row, best, one in zip(rows, likeliest, accepted, strict=True):
            stream, mine = self._streams.of(row.namespace), ready.setdefault(row.namespace, [])
            stream.decoding += of_row
            if not one.ended and self.effort and self._goes_on(stream.search):
                decoded = self._decoded.setdefault(id(row), deque(maxlen=self.window))
                decoded.extend(best[node] for node in one.path)
                if len(decoded) == self.window < len(row.tokens):
                    mine.append(row)
        for namespace, some in ready.items():
            stream = self._streams.of(namespace)
            stream.passes += 1
            paid = stream.searching + (stream.trial or self._of_trial) < self.effort * stream.decoding
            if some and paid and stream.passes >= self.interval:
                self._try(stream, some[len(stream.search.tried) % len(some)])

    @property
    def _of_trial(self) -> float:
        """Seconds that the first scoring of a set is expected to take: the pass reads a window under a view."""
        cost = self.pass_cost
        return 0.0 if cost is None else self._share * (cost.plain + self.window * cost.node)

    def _goes_on(self, search: SkipSearch) -> bool:
        return search.score <= self.enough and search.stale < self.patience and len(search.tried) < self.trials

    def _try(self, stream: _Stream, row: Row) -> None:
        """Score the next set on a row, and draft by it if it is the best."""
        began = time.perf_counter()
        chosen = stream.search.propose()
        view, tokens = self.without(chosen), row.tokens[-self.window - 1 : -1]
        likeliest = self.reader.target.replayed(view, row.slot, tokens).argmax(-1).cpu()
        agreed = likeliest == torch.tensor(self._decoded[id(row)])
        if stream.search.record(chosen, float(agreed.float().mean())):
            stream.view = view
        stream.trial, stream.passes = time.perf_counter() - began, 0
        stream.searching += stream.trial

    def end(self, row: Row) -> None:
        super().end(row)
        self._decoded.pop(id(row), None)


def _nbytes(stream: _Stream) -> int:
    return 8 * sum(map(len, (chosen for chosen, _ in stream.search.tried)))
