"""A decoder with recurrent or convolutional state as a target.

The compiled pass scores trees; the model's own forward chains, from snapshots of the states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from transformers.cache_utils import get_layer_types_and_kwargs

from truedraft.caches.drafted import DraftedStateCache
from truedraft.caches.states import LightningCache, StateCache, layer_kinds
from truedraft.errors import Refused
from truedraft.runtime._base import Runner
from truedraft.runtime.chains import CARRY, ChainPass, ChainPromptPass, LinearsChainPass
from truedraft.runtime.forward import ForwardPass, LinearsPass, PromptPass
from truedraft.runtime.states import CompiledStatePass
from truedraft.runtime.weights import NotCompilable
from truedraft.targets.decoder import DecoderTarget
from truedraft.targets.memory import cached_layers
from truedraft.targets.quirks import MIXING_ROWS, STATES_OUTSIDE
from truedraft.targets.reference import Reference
from truedraft.tree import Prompt

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

    @property
    def _cached_layers(self) -> int:
        """States do not grow with the text; the memory that they need is not checked."""
        return cached_layers(self.config)

    def _allocated(self, rows: int, capacity: int) -> StateCache | DraftedStateCache:
        if self.branching:
            return DraftedStateCache(self._cached_layers, rows, capacity)
        counts = [given.get("number_of_states", 1) for given in get_layer_types_and_kwargs(self.config)[1]]
        cache = LightningCache if self.config.model_type == "minimax" else StateCache
        return cache(layer_kinds(self.config), counts, rows, capacity + CARRY)

    def prompts_of(self, input_ids: Tensor, given: Mapping[str, Any], sources: Tensor | None) -> list[Prompt]:
        """Raises Refused, too, where the text of `generate` would not be that of each prompt alone."""
        prompts, embeds = super().prompts_of(input_ids, given, sources), given.get("inputs_embeds")
        name, lengths = type(self.model).__name__, set(map(len, prompts))
        if self._states_outside and lengths != {(input_ids if embeds is None else embeds).shape[1]}:
            raise Refused(f"a prompt is padded, and {name}.generate reads padding as text: give prompts of one length")
        if self.config.model_type in MIXING_ROWS and len(prompts) > 1:
            raise Refused(
                f"{len(prompts)} rows, which {name}.generate lets read each other's states: give one prompt at a time"
            )
        if self.config.model_type == "recurrent_gemma" and 1 in lengths:
            raise Refused(
                f"a prompt of one token, which {name}.generate continues from the text of its last call: give two "
                "tokens or more"
            )
        return prompts

    @property
    def carried(self) -> int:
        if not isinstance(self.cache, StateCache):
            return 0
        carries = [len(self.cache.carry(slot)) for slot in range(len(self.cache.lengths))]
        return len(carries) * max(carries, default=0)

    def prefixes(self, limit: int, shared: bool) -> None:
        """None: a prefix could only be used with the states at its end, which are not kept."""

    @property
    def _states_outside(self) -> bool:
        return self.config.model_type in STATES_OUTSIDE

    @property
    def hard_limit(self) -> None:
        """None: beside layers with states, positions are rotary ones or none."""

    def reference(self, rows: int, capacity: int) -> Reference:
        if self._states_outside:
            raise Refused(
                f"ties='recheck' needs a model whose cache holds its states, which that of {type(self.model).__name__} "
                "does not: leave it out"
            )
        return Reference(self.model, self.config, self._cached_layers, rows, capacity)

    def crop(self, slot: int, length: int) -> None:
        raise Refused(f"{type(self.model).__name__} has states that cannot be taken back to an earlier token")
