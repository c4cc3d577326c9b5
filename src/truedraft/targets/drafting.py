"""Passes of a target under views: over its cache, or over a part of the entries, in a cache of their own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.caches.rows import RowCache
from truedraft.caches.seq2seq import Seq2SeqCache
from truedraft.caches.subset import SubsetCache
from truedraft.errors import Refused
from truedraft.identity import FEWER, Identity
from truedraft.runtime._base import Runner
from truedraft.runtime.identity import identity_of
from truedraft.runtime.shares import weight_share
from truedraft.targets.memory import check_room
from truedraft.tree import DraftTree, Scores, Taps
from truedraft.views._base import Rounded, Selection, View

DEPTHS = (0, *(2**n for n in range(20)))  # at which a view that varies is checked before it generates
COARSER = "it may be a worse approximation than of the model that it was made for"
SCRATCH = 64  # places for it behind chosen entries, at first


class ViewPasses:
    """What `Target` does under views. Scratch is in the target's cache, or in that of one selection of its entries."""

    model: PreTrainedModel
    config: Any
    device: torch.device
    layer_types: list[str]
    runner: Runner
    taps: Taps
    _cache: RowCache | Seq2SeqCache | None
    view: View | None = None

    @property
    def layers(self) -> int:
        return len(self.layer_types)

    @property
    def _cached_layers(self) -> int:
        """Layers of the cache: not the last, where these read the keys of others."""
        return len(self.layer_types) - self.layer_types.count("dummy")

    def check_view(self, view: View) -> None:
        self.fitting(view)
        self.runner.reduced(view)

    def fitting(self, view: View) -> list[str]:
        return [sentence for part in view.fitted if (sentence := self._fitting(part))]

    def _fitting(self, view: View) -> str:
        found, own = view.fitted_to, self._identity
        assert found is not None
        done, again = ("calibrated", "calibrate") if view.learner is None else ("trained", "train")
        fitted, remedy = f"{view.name} was {done}", f"{again} it again"
        return found.compared(own, fitted, remedy, FEWER if self.view is None else COARSER)

    @cached_property
    def _identity(self) -> Identity:
        return identity_of(self.model)

    def generate_under(self, view: View) -> None:
        if view.alternatives:
            raise Refused(
                f"{view.lossy} has several sets of layers, for rows of several subjects: choose one of them by "
                "lossy/skip-layers:layers=..."
            )
        for one in dict.fromkeys(view.at(depth) for depth in DEPTHS):
            self.check_view(one)
            if self.runner.reduced(one).output_head:
                raise Refused(f"{view.lossy} has no output head, and generates no tokens: draft by it")
        self.view = view

    def check_drafts(self) -> None:
        if self.view is None:
            return
        reduction = self.runner.reduced(self.view)
        if self.view.varies or reduction.entries is not None:
            raise Refused(
                f"under {self.view.lossy} what a token reads depends on its position, so that its text would depend on "
                "the drafts: use draft='none'"
            )
        if reduction.sparing and not self.runner.batch_invariant:
            raise Refused(
                f"under {self.view.lossy} the last bits of a token decide what it skips, and by the {self.runner.name} "
                "they depend on the drafts: use draft='none', or the compiled pass"
            )

    def share(self, view: View) -> float:
        return weight_share(self.model, self.layers, self.runner.reduced(view))

    def advance(self, view: View, paths: Sequence[Sequence[int]], slots: Sequence[int] | None = None) -> None:
        reduction, rows = self.runner.reduced(view), self._whole
        cache = rows.subsets.get(reduction.entries, rows)
        for slot, path in zip(range(len(paths)) if slots is None else slots, paths, strict=True):
            cache.advance(slot, path, reduction.attention)

    def replayed(self, view: View, slot: int, tokens: Sequence[int]) -> Tensor:
        if self.runner.reduced(view).entries is not None:
            raise Refused(f"{view.name} cannot read committed tokens again: what it reads of the cache follows commits")
        with self._whole.set_back(slot, len(tokens)):
            return self._score_under(view, [DraftTree.chain(tokens[0], tokens[1:])], [slot]).logits[0]

    def rewind(self) -> None:
        if self._cache is not None:
            self._cache.rewind()

    @property
    def _whole(self) -> RowCache:
        """The cache of the decoder's rows."""
        assert self._cache is not None
        return self._cache.rows if isinstance(self._cache, Seq2SeqCache) else self._cache

    def _score_under(self, view: View, trees: Sequence[DraftTree], slots: Sequence[int] | None) -> Scores:
        rows, reduction, width = self._whole, self.runner.reduced(view), max(map(len, trees))
        slots = range(len(rows.lengths)) if slots is None else slots
        padded = [DraftTree.chain(0)] * len(rows.lengths)  # slots without a tree score a dummy token
        for slot, tree in zip(slots, trees, strict=True):
            padded[slot] = tree
        entries, caches = reduction.entries, [rows, *rows.subsets.values()]
        written = rows.subsets.get(entries) if isinstance(entries, Selection) else rows
        if any(any(other.cursor.scratch) for other in caches if other is not written):
            raise Refused(f"{view.name} reads other entries than what has written the scratch: rewind before it")
        cache = self._subset(entries, padded, slots) if isinstance(entries, Selection) else rows
        if isinstance(entries, Rounded):
            self.runner.round_entries(entries, slots)
        if missing := sorted(cache.cursor.partial - reduction.attention):
            raise Refused(f"{view.name} runs layers {missing}, which have not written the scratch: rewind before it")
        with cache.cursor.behind_scratch():
            if (need := max(cache.cursor.positions) + width) > rows.cursor.capacity:
                raise Refused(
                    f"the scratch of {view.name} needs {need} positions of a row, the cache has "
                    f"{rows.cursor.capacity}: a drafter's width counts every position that it advances by"
                )
            with nullcontext() if cache is rows else self.runner.over(cache):
                return self.runner.score(padded, view.taps, view).of(slots)

    def _score_lossy(self, view: View, trees: Sequence[DraftTree]) -> Scores:
        """The pass of a target that generates under a view; what it writes can be committed."""
        rows = self._whole
        view = view.at(max(rows.cursor.generated())).tapping(self.taps)
        scores = self._score_under(view, trees, None)
        if (subset := rows.subsets.get(self.runner.reduced(view).entries)) is not None:
            subset.return_nodes(rows, list(map(len, trees)))
        return scores

    def _subset(self, entries: Selection, trees: Sequence[DraftTree], slots: Sequence[int]) -> SubsetCache:
        """The cache of chosen entries, up to date in these slots, and with room for the trees of all slots in use.

        Raises:
            NoRoom: it does not fit in free memory.
        """
        rows, places, width = self._whole, entries.kept + entries.recent, max(map(len, trees))
        subset = rows.subsets.get(entries)
        taken = places if subset is None else max(subset.cursor.taken, default=places)
        if subset is None or taken + width > subset.cursor.capacity:
            capacity = min(places + max(SCRATCH, 2 * (taken - places + width)), rows.cursor.capacity)
            check_room(
                self.config, self._cached_layers, rows.cursor.slots, capacity, self.model.dtype, self.device,
                f"draft by fewer than the {entries} of each row",
            )  # fmt: skip
            subset = rows.subsets[entries] = SubsetCache(rows, entries.kept, entries.recent, capacity, subset)
        subset.cursor.use(len(rows.lengths))
        for slot in slots:
            subset.follow(rows, slot)
        due = [slot for slot in slots if entries.chunk and subset.due(rows, slot, entries.refresh)]
        if due:
            queries = self.runner.queries(trees)
            for slot in due:
                subset.choose(rows, slot, [of_layer[slot] for of_layer in queries], entries.chunk)
        return subset
