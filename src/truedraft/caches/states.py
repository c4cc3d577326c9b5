"""A KV cache for rows of models with recurrent or convolutional state, which no pass can take back.

A slot keeps a snapshot: its states after some of its row's committed tokens. A pass begins there with the committed
tokens that follow (the *carry*), and works on copies. Where the row is then committed up to the very end of what the
pass read, the copies become the snapshot; otherwise they are dropped, and what was committed joins the carry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DummyLayer, LinearAttentionLayer, get_layer_types_and_kwargs
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from truedraft.caches.rows import CacheCursor, RowCache, RowLayer
from truedraft.tree import Prompt

STATE_LAYERS = {"conv", "linear_attention"}  # kinds of layers with states and no keys and values,
MIXED_LAYERS = {"hybrid", "hybrid_sliding"}  # and with both


def layer_kinds(config: PreTrainedConfig) -> list[str]:
    """The kind of each layer of a decoder, as in `layer_types` of a configuration; that of RWKV does not have them."""
    if config.model_type == "rwkv":
        return ["linear_attention"] * config.num_hidden_layers
    kinds: list[str] = get_layer_types_and_kwargs(config)[0]
    return kinds


States = list[Tensor | None]  # of one row in one layer: the inputs of its convolutions, then its recurrent states


class StateLayer(LinearAttentionLayer):
    """One layer's states of the rows of a pass: at first copies of the snapshots, then those at its end.

    conv_states: (rows, channels, n) by index of the state: the latest inputs of a convolution, n >= those that it
        reads for a token; all inputs of the pass, where it had several tokens.
    recurrent_states: (rows, ...) by index of the state.
    """

    is_compileable = False
    conv_kernel_size: dict[int, Any]

    def load(self, rows: Sequence[States | None]) -> None:
        """Copy the states of the rows of a pass; None for a row that begins with it."""
        begun = next((states for states in rows if states is not None), None)
        count = self.number_of_states
        for index in range(count):
            self.has_previous_state[index] = begun is not None
            self.conv_states[index] = _stacked(rows, begun, index)
            self.recurrent_states[index] = _stacked(rows, begun, count + index)

    def states(self, row: int) -> States:
        """The states of a row at the end of the pass, with all inputs of its convolutions."""
        kept = [*self.conv_states.values(), *self.recurrent_states.values()]
        return [None if states is None else states[row] for states in kept]

    def before(self, states: States, back: int) -> States | None:
        """States as they were `back` tokens before; None where they are lost, as recurrent states always are."""
        convs: States = []
        for index, inputs in enumerate(states[: self.number_of_states]):
            if inputs is not None:
                end, size = inputs.shape[1] - back, self.conv_kernel_size[index]
                if end < size:
                    return None
                inputs = inputs[:, end - size : end].clone()
            convs.append(inputs)
        recurrent = states[self.number_of_states :]
        return None if back and any(state is not None for state in recurrent) else convs + recurrent

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Append the inputs of the pass, (rows, channels, width); returns all that are kept."""
        before = self.conv_states[state_idx]
        if before is None:
            size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            self.conv_kernel_size[state_idx] = size
            before = conv_states.new_zeros(*conv_states.shape[:2], size)
        inputs = self.conv_states[state_idx] = torch.cat([before, conv_states], -1)
        self.has_previous_state[state_idx] = True
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        before = self.recurrent_states[state_idx]
        after = recurrent_states if before is None else recurrent_states.to(before.dtype)
        self.recurrent_states[state_idx] = after
        return after


def _stacked(rows: Sequence[States | None], begun: States | None, place: int) -> Tensor | None:
    """One state of all rows, zero for those without; None where no row has it."""
    if begun is None or (like := begun[place]) is None:
        return None
    return torch.stack([torch.zeros_like(like) if states is None else states[place] for states in rows])  # type: ignore[misc]


class MixedLayer(RowLayer, StateLayer):  # type: ignore[misc]
    """A layer with keys and values, and states."""

    def __init__(self, cursor: CacheCursor, number_of_states: int = 1):
        RowLayer.__init__(self, cursor)
        StateLayer.__init__(self, number_of_states=number_of_states)


@dataclass(eq=False)
class RowStates:
    """The states of a row in a slot.

    snapshot: by layer with states; None before the first token.
    carry: the latest committed tokens, which the snapshot has not read.
    read: positions that the latest pass had read at its end.
    latest: states there, by layer; None where they were dropped.
    tree: tokens of the chain that the pass ended with, of which a part may be committed.
    """

    snapshot: list[States] | None = None
    carry: list[int] = field(default_factory=list)
    read: int = 0
    latest: list[States] | None = None
    tree: Sequence[int] = ()


class StateCache(RowCache):
    """See the module; keys and values as in `RowCache`.

    Args:
        kinds: the kind of each layer, as in `layer_types` of a configuration.
        counts: the number of states of each layer.
        slots, capacity: see `RowCache`.
    """

    def __init__(self, kinds: Sequence[str], counts: Sequence[int], slots: int, capacity: int):
        super().__init__(0, slots, capacity)
        layers: list[Any] = [_layer(kind, count, self.cursor) for kind, count in zip(kinds, counts, strict=True)]
        self.layers = layers
        self._state_layers: list[StateLayer] = [layer for layer in layers if isinstance(layer, StateLayer)]
        self._rows: dict[int, RowStates] = {}

    @property
    def attention(self) -> list[RowLayer]:
        return [layer for layer in self.layers if isinstance(layer, RowLayer)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        cursor = self.cursor
        return max(cursor.lengths[cursor.first : cursor.last], default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.cursor.extent, 0

    @property
    def filled(self) -> bool:
        """Whether the latest pass wrote to every layer with states."""
        return all(any(layer.has_previous_state.values()) for layer in self._state_layers)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Within the block the model reads the slots of the cursor: from their snapshots, or on from where their latest
        pass ended."""
        cursor = self.cursor
        rows = [self._rows.setdefault(slot, RowStates()) for slot in range(cursor.first, cursor.last)]
        starts = cursor.lengths[cursor.first : cursor.last]
        for row, start in zip(rows, starts, strict=True):
            if row.read == start:
                self._settle(row, start)
        for i, layer in enumerate(self._state_layers):
            layer.load([None if row.snapshot is None else row.snapshot[i] for row in rows])
        yield
        for place, (row, start) in enumerate(zip(rows, starts, strict=True)):
            row.latest, row.read = [layer.states(place) for layer in self._state_layers], start + cursor.width

    def began(self, slot: int, prompt: Prompt) -> None:
        """The prompt of a slot was read; all of its tokens but the last are committed. One of embeddings cannot be read
        again: its last token must be committed before the next pass."""
        row, ids = self._rows[slot], [0] * len(prompt) if prompt.ids is None else prompt.ids.tolist()
        row.carry, row.tree = ids[:-1], ids[-1:]

    def carry(self, slot: int) -> list[int]:
        """The committed tokens of a slot that its next pass has to read again."""
        row = self._rows[slot]
        self._settle(row, self.cursor.committed(slot))
        return row.carry

    @contextmanager
    def at_snapshots(self, trees: Sequence[Sequence[int]]) -> Iterator[None]:
        """Within the block passes begin at the snapshots of the slots in use, as if nothing behind were committed.

        trees: by slot, the tokens behind the carry.
        """
        committed = list(self.lengths)
        self.lengths[:] = [length - len(self.carry(slot)) for slot, length in enumerate(committed)]
        for slot, tree in enumerate(trees):
            self._rows[slot].tree = tree
        try:
            yield
        finally:
            self.lengths[:] = committed

    def _settle(self, row: RowStates, length: int) -> None:
        """Make the latest states the snapshot, if they are known after `length` positions, all that are committed; in
        any case they are dropped."""
        if row.latest is not None and row.read >= length:
            back = row.read - length
            found = [layer.before(own, back) for layer, own in zip(self._state_layers, row.latest, strict=True)]
            states = [own for own in found if own is not None]
            if len(states) == len(found):
                row.snapshot, row.carry = states, []
        row.latest = None

    def clear(self) -> None:
        super().clear()
        self._rows.clear()

    def commit(self, slot: int, path: Sequence[int]) -> None:
        super().commit(slot, path)
        row = self._rows[slot]
        row.carry += [row.tree[node] for node in path]

    def release(self, slot: int) -> None:
        last = len(self.lengths) - 1
        super().release(slot)
        self._rows[slot] = self._rows[last]
        del self._rows[last]

    def activate(self, slot: int) -> int:
        new = super().activate(slot)
        if slot != new:
            other, self._rows[new] = self._rows.pop(new, None), self._rows.pop(slot)
            if other is not None:
                self._rows[slot] = other
        return new

    def discard(self, slot: int) -> None:
        super().discard(slot)
        self._rows.pop(slot, None)


class LightningCache(StateCache, MiniMaxCache):
    """The same by the methods in which the layers of MiniMax read and write their states."""

    linear_cache: Any = ()

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        layer: Any = self.layers[layer_idx]
        return layer.recurrent_states[0]

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        layer: Any = self.layers[layer_idx]
        layer.update_recurrent_state(linear_cache)
        layer.has_previous_state[0] = True


def _layer(kind: str, count: int, cursor: CacheCursor) -> Any:
    if kind in STATE_LAYERS:
        return StateLayer(count)
    if kind in MIXED_LAYERS:
        return MixedLayer(cursor, count)
    return DummyLayer() if kind == "dummy" else RowLayer(cursor)
