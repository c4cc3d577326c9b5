"""A nested draft model: its passes over some of its layers, which go on from what earlier passes have left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from truedraft.drafters._base import usual_seconds
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters.models._reader import Reader
from truedraft.runtime._base import TreeGrowth
from truedraft.runtime.compiled import CompiledPass
from truedraft.runtime.segment_passes import CompiledSegments, ForwardSegments, SegmentPasses, begins_anywhere
from truedraft.targets.hostable import layer_types
from truedraft.targets.quirks import window_of
from truedraft.tree import Row

ENOUGH = 64  # tokens that reach an exit before it may be dropped
FEW = 8  # tokens of a row in a pass that is timed, at most
TRIES = 3  # passes of which the fastest is the time of one without layers


@dataclass
class Exit:
    """After how many layers drafts may be read off, and what that has cost and saved.

    threshold: least probability of the likeliest token with which a token is drafted here.
    seconds: of a pass over the layers between the exit before and this one; a moving average.
    reached, left: tokens that came as far as here, and those that were drafted here.
    """

    layers: int
    threshold: float
    seconds: float = 0.0
    reached: int = 0
    left: int = 0


@dataclass
class Progress:
    """How far the layers have read a slot's tokens.

    read: by exit, how many of the first tokens. states: by exit, (count, H) hidden states there of the tokens that the
    layers behind it have not read.
    """

    read: list[int]
    states: dict[int, Tensor] = field(default_factory=dict)

    def went_on(self, exit: int, states: Tensor) -> None:
        """The layers up to an exit have read further tokens, with these hidden states."""
        self.read[exit] += len(states)
        if exit + 1 < len(self.read):
            kept = self.states.get(exit)
            self.states[exit] = states if kept is None else torch.cat([kept, states])
        self.states.pop(exit - 1, None)

    def crop(self, length: int) -> None:
        """Forget all tokens but the first `length`."""
        for exit, kept in self.states.items():
            self.states[exit] = kept[: max(length - self.read[exit + 1], 0)]
        self.read = [min(count, length) for count in self.read]


class NestedReader(Reader):
    """A draft model with exits as a `LevelReader` of chains.

    A token is read as far as the first exit at which the likeliest next one is probable enough; where it is not, the
    layers behind run over it and, in the same pass, over the tokens before it that left at that exit, which have no
    keys and values in these layers yet.

    Args:
        exits: in order; the last one is behind all layers that are used.
    """

    def __init__(self, model: Any, exits: Sequence[Exit]):
        super().__init__(model)
        self.exits = list(exits)
        self.overhead = 0.0  # seconds of a pass that runs no layer
        self._progress: list[Progress] = []
        self._attached: Any = None  # the cache of `_passes`
        self._passes: SegmentPasses

    def _host(self) -> None:
        before = self._hosted
        super()._host()
        if self._hosted is not before:
            kinds = layer_types(self.model)
            window = window_of(self.model.config.get_text_config(decoder=True), kinds)
            self._forward = ForwardSegments(self.model, kinds, window)

    def _clear(self) -> None:
        super()._clear()
        self._progress = []

    def drop_exits(self) -> None:
        """Drop the exits that do not pay: where what is saved, the layers behind it for the tokens that leave there, is
        less than the final norm, the output head and the call of one more pass. No row may be running."""
        for place in reversed(range(len(self.exits) - 1)):
            one, behind = self.exits[place], self.exits[place + 1 :]
            if one.reached >= ENOUGH and one.left * sum(e.seconds for e in behind) < one.reached * self.overhead:
                behind[0].seconds += max(one.seconds - self.overhead, 0.0)
                del self.exits[place]

    def _prefill(self, rows: Sequence[Row]) -> None:
        cache: Any = self._cache
        for row in rows:
            cache.lengths.append(0)
            self.slot_rows.append(row)
            self.written.append([])
            self._confirmed.append(0)
            self._progress.append(Progress([0] * len(self.exits)))

    @property
    def _cache(self) -> Any:
        """That of the draft model, in which all layers are allocated."""
        cache: Any = self.target.cache  # type: ignore[attr-defined]
        if self._attached is not cache:
            runner = self.target.runner  # type: ignore[attr-defined]
            compiled = isinstance(runner, CompiledPass) and begins_anywhere(runner.program)
            self._passes = CompiledSegments(runner) if compiled else self._forward
            self._passes.attach(cache)
            self._attached = cache
            self._pass(0, self.target.layers, [[0]], [0], [None])
            self.overhead = min(self._pass(0, 0, [[0]], [0], [None])[2] for _ in range(TRIES))
        return cache

    def _release(self, slot: int) -> None:
        super()._release(slot)
        self._progress[slot] = self._progress[-1]
        self._progress.pop()

    def _crop(self, slot: int, text: Sequence[int]) -> None:
        super()._crop(slot, text)
        self._progress[slot].crop(len(self.written[slot]))

    def decode_greedily(self, growing: Sequence[GrowingTree], least: float) -> bool:
        return False

    def grow_greedily(
        self, growing: Sequence[GrowingTree], growth: TreeGrowth, shapes: Sequence[Sequence[int] | None]
    ) -> list[float]:
        return []

    def read(self, chains: Sequence[Sequence[int]]) -> None:
        self._go_on(0, chains)

    def keep(self, tokens: Sequence[Sequence[int]], paths: Sequence[Sequence[int]] = ()) -> None:
        """Does nothing: what was read is kept already."""

    def expand(self, growing: Sequence[GrowingTree]) -> Tensor:
        slots = [self.slot_rows.index(tree.row) for tree in growing]
        chains: list[Sequence[int]] = [()] * len(self.slot_rows)
        for slot, tree in zip(slots, growing, strict=True):
            (node,) = tree.frontier
            chains[slot] = tree.ids[: node + 1] if node == tree.root else tree.ids[node : node + 1]
        logits = self._go_on(0, chains)
        unsure = self._unsure(0, slots, logits)
        for exit in range(1, len(self.exits)):
            if unsure:
                further = self._go_on(exit, [self._waiting(slot, exit, slot in unsure) for slot in range(len(chains))])
                logits[unsure] = further[unsure]
                unsure = self._unsure(exit, unsure, logits)
        return self._drafted_from(logits[slots])

    def _unsure(self, exit: int, slots: Sequence[int], logits: Tensor) -> list[int]:
        """Those of these slots that go on behind an exit."""
        one = self.exits[exit]
        sure = (logits[list(slots)].float().softmax(-1).amax(-1) >= one.threshold).tolist()
        one.reached, one.left = one.reached + len(sure), one.left + sum(sure)
        return [slot for slot, enough in zip(slots, sure, strict=True) if not enough]

    def _waiting(self, slot: int, exit: int, goes_on: bool) -> list[int]:
        """The tokens of a slot that go on to an exit, all that wait for it or none."""
        progress = self._progress[slot]
        return self.written[slot][progress.read[exit] : progress.read[exit - 1]] if goes_on else []

    def _go_on(self, exit: int, chains: Sequence[Sequence[int]]) -> Tensor:
        """Run the layers between two exits over the tokens of chains behind what they have read, by slot; (slots, V)
        logits of the last ones."""
        read = [progress.read[exit] for progress in self._progress]
        given = [
            progress.states[exit - 1] if exit and chain else None
            for chain, progress in zip(chains, self._progress, strict=True)
        ]
        first, last = self.exits[exit - 1].layers if exit else 0, self.exits[exit].layers
        logits, states, seconds = self._pass(first, last, chains, read, given)
        if max(map(len, chains)) <= FEW:
            self.exits[exit].seconds = usual_seconds(self.exits[exit].seconds, seconds)
        for slot, (chain, progress) in enumerate(zip(chains, self._progress, strict=True)):
            if chain:
                progress.went_on(exit, states[slot])
                if not exit:
                    self.written[slot] += chain
                    self._cache.lengths[slot] = len(self.written[slot])
        return logits

    def _pass(
        self, first: int, last: int, chains: Sequence[Sequence[int]], read: Sequence[int],
        given: Sequence[Tensor | None],
    ) -> tuple[Tensor, list[Tensor], float]:  # fmt: skip
        """What `SegmentPasses.run` finds, and seconds."""
        began = time.perf_counter()
        logits, states = self._passes.run(first, last, chains, read, given)
        self.target.wait()
        return logits, states, time.perf_counter() - began
