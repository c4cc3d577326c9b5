"""A decoder with recurrent or convolutional state as a target.

The compiled pass scores trees; the model's own forward chains, from snapshots of the states.
"""

from __future__ import annotations

from typing import ClassVar

from transformers.cache_utils import get_layer_types_and_kwargs

from truedraft.caches.drafted import DraftedStateCache
from truedraft.caches.states import LightningCache, StateCache
from truedraft.errors import Refused
from truedraft.runtime._base import Runner
from truedraft.runtime.chains import CARRY, ChainPass, ChainPromptPass, LinearsChainPass
from truedraft.runtime.forward import ForwardPass, LinearsPass, PromptPass
from truedraft.runtime.states import CompiledStatePass
from truedraft.runtime.weights import NotCompilable
from truedraft.targets.decoder import DecoderTarget
from truedraft.targets.memory import cached_layers, check_room
from truedraft.targets.reference import Reference

ATTENDING = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}  # what layers with state attend to


class RecurrentTarget(DecoderTarget):
    """See `DecoderTarget`. Passes are compiled, or the model's own forward over chains (`runtime/chains.py`)."""

    runner: ChainPass | CompiledStatePass
    croppable = False
    _forward_class: ClassVar[type[ForwardPass]] = ChainPass
    _linears_class: ClassVar[type[LinearsPass]] = LinearsChainPass
    _prompt_class: ClassVar[type[PromptPass]] = ChainPromptPass

    def _layer_types(self) -> list[str]:
        return [ATTENDING.get(kind, kind) for kind in super()._layer_types()]

    @property
    def branching(self) -> bool:  # type: ignore[override]
        return isinstance(self.runner, CompiledStatePass)

    def _fast(self) -> Runner:
        if self.device.type != "cpu":
            raise NotCompilable("its layers have states")
        return CompiledStatePass(self.model, self._copied)

    def _long(self) -> int | None:
        """The model's own forward cannot read for compiled passes: its states are laid out differently."""
        return None if self.branching else super()._long()

    def _allocated(self, rows: int, capacity: int) -> StateCache | DraftedStateCache:
        """States do not grow with the text; the memory that they need is not checked."""
        if self.branching:
            check_room(self.config, cached_layers(self.config), rows, capacity, self.dtype, self.device)
            return DraftedStateCache(cached_layers(self.config), rows, capacity)
        kinds, options = get_layer_types_and_kwargs(self.config)
        check_room(self.config, cached_layers(self.config), rows, capacity + CARRY, self.dtype, self.device)
        cache = LightningCache if self.config.model_type == "minimax" else StateCache
        return cache(kinds, [given.get("number_of_states", 1) for given in options], rows, capacity + CARRY)

    @property
    def carried(self) -> int:
        if not isinstance(self.cache, StateCache):
            return 0
        carries = [len(self.cache.carry(slot)) for slot in range(len(self.cache.lengths))]
        return len(carries) * max(carries, default=0)

    def prefixes(self, limit: int, shared: bool) -> None:
        """None: a prefix could only be used with the states at its end, which are not kept."""

    def reference(self, rows: int, capacity: int) -> Reference:
        return Reference(self.model, self.config, cached_layers(self.config), rows, capacity)

    def crop(self, slot: int, length: int) -> None:
        raise Refused(f"{type(self.model).__name__} has states that cannot be taken back to an earlier token")
