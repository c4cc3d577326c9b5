"""A diffusion language model run beside the target: it predicts the tokens at masks behind the text of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from truedraft.canvas.hosting import hosted_canvas
from truedraft.canvas.layout import FIELD, Layout, layout_of
from truedraft.canvas.targets import CanvasTarget, Variant
from truedraft.drafters.models._vocabularies import sized
from truedraft.errors import NoRoom, Refused
from truedraft.runtime.released import release_weights
from truedraft.runtime.releasing import released_by_default
from truedraft.targets._base import Target
from truedraft.tree import Row


class MaskReader:
    """A diffusion language model with a cache of its own, a slot per row; a row may be admitted to it later than to the
    target.

    With attention in blocks the keys and values of complete blocks are kept. What a pass reads of a row is one block:
    the tokens from the last complete one before the pending token on, and the masks, as many as are to be predicted.
    With attention to the whole text every pass reads all of it.

    Args:
        model: of `transformers`; its configuration declares its layout.
        runtime: how it makes its passes, see `accelerate`.
    """

    def __init__(self, model: Any, runtime: str = "auto"):
        self.model, self.runtime = model, runtime
        self._layout = layout_of(getattr(model, "config", None))
        self._hosted: CanvasTarget | None = None
        self._forget()
        self._running: set[Row] = set()
        self._needed = (0, 0)  # slots and positions to reserve; (0, 0) for as many as there are
        self._fitting = (0, 0)  # those for which there was memory

    def _forget(self) -> None:
        """Nothing is reserved, and nothing read."""
        self._reserved = (0, 0)  # slots, and positions of each
        self._rows: list[Row] = []  # of each slot
        self._committed: list[int] = []  # tokens of each slot whose keys and values are kept

    @property
    def layout(self) -> Layout:
        """How the model reads a text with masks.

        Raises:
            Refused: it is no diffusion model.
        """
        if self._layout is None:
            raise Refused(
                f"the draft model {type(self.model).__name__} is no diffusion model: its configuration declares no "
                f"{FIELD}; give one that does, or draft with draft-model"
            )
        return self._layout

    @property
    def target(self) -> CanvasTarget:
        """The model as a target of canvases."""
        assert self._hosted is not None
        return self._hosted

    def fit(self, target: Target) -> None:
        """Host the model, for a target.

        Raises:
            Refused: it is no diffusion model, or does not attend as its layout names it.
        """
        self._host()
        self._device, self._vocabulary = target.device, target.vocabulary

    def _host(self) -> None:
        if self._hosted is None or self._hosted.changed:
            if released_by_default(self.model, self.runtime):
                release_weights(self.model)
            self._hosted = hosted_canvas(self.model, self.layout, self.runtime)
            self._forget()

    def start(self, rows: Sequence[Row], more: int) -> None:
        """Admit new rows, with `more` masks beyond the end of a row; cache is reserved once a draft is requested.

        Raises:
            NoRoom: a cache larger than those before would not fit in memory; rows that run already are not affected.
        """
        self._running |= set(rows)
        count, capacity = len(self._running), more + max(row.prompt + row.room for row in self._running)
        self._needed = count, capacity
        if self._fitting[0] < count or self._fitting[1] < capacity:
            self.target.check_capacity(count, capacity)
            self._fitting = count, capacity

    def reserve(self) -> bool:
        """Reserve cache for all rows that were started, unless there is; false where memory is too short by now."""
        if self._needed == (0, 0):
            return self._reserved != (0, 0)
        self._host()
        (slots, room), (count, capacity) = self._reserved, self._needed
        if slots < count or room < capacity:
            size = (max(count, 2 * slots), max(capacity, room))
            try:
                self.target.reserve(*size, 0)
            except NoRoom:
                return False
            self._forget()  # what was read is read again
            self._reserved = size
        self._needed = (0, 0)
        return True

    def end(self, row: Row) -> None:
        """The row is finished; its slot is freed by the next pass, or when the last row ends."""
        self._running.discard(row)
        if not self._running and self._hosted is not None:
            self.target.free()
            self._forget()

    def reach(self, row: Row) -> int:
        """Masks behind the row for which the model has positions."""
        context = self.target.context
        return row.room if context is None else context - len(row.tokens)

    def filled(self, rows: Sequence[Row], counts: Sequence[int]) -> Tensor:
        """One pass: (rows, most of `counts`, V) raw logits at so many masks behind each row, V and the device as of the
        target."""
        self._admit(rows)
        asked = dict(zip(rows, counts, strict=True))
        variants = [
            [self._variant(row, committed, asked[row])] if row in asked else []
            for row, committed in zip(self._rows, self._committed, strict=True)
        ]
        found = dict(zip(self._rows, self.target.score(variants), strict=True))
        for slot, row in enumerate(self._rows):
            if row in asked:
                self._committed[slot] = self.target.commit(slot, 0)
        logits = pad_sequence([found[row] for row in rows], batch_first=True)
        logits[..., self.layout.mask] = -torch.inf
        return sized(logits, self._vocabulary).to(self._device)

    def _admit(self, rows: Sequence[Row]) -> None:
        for slot in reversed([slot for slot, row in enumerate(self._rows) if row not in self._running]):
            self.target.release(slot)
            self._rows[slot], self._committed[slot] = self._rows[-1], self._committed[-1]
            self._rows.pop()
            self._committed.pop()
        if new := [row for row in rows if row not in self._rows]:
            self._committed += self.target.admit([row.tokens[:-1] for row in new])
            self._rows += new

    def _variant(self, row: Row, committed: int, count: int) -> Variant:
        last = len(row.tokens)
        first = (last - 1) // self.layout.block * self.layout.block
        tokens = [*row.tokens[committed:], *[self.layout.mask] * count]
        return Variant(committed, tokens, range(first, last + count), range(last, last + count))
