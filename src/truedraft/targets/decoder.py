"""Any `transformers` decoder language model as a target: trees and rows of different lengths on the stock model.

The model is called as it is, with a cache whose rows have their own lengths (`caches/rows.py`), explicit positions
and an explicit mask. Layers with full attention are hosted, and sliding windows too: their keys are kept and the
mask does the sliding. Whatever keeps a running state is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from truedraft.caches.rows import RowCache
from truedraft.errors import NoRoom, Refused
from truedraft.runtime.compiled import CompiledPass
from truedraft.runtime.fingerprint import fingerprint
from truedraft.runtime.graphs import VIEW, CudaGraphs, GraphPass
from truedraft.runtime.weights import NotCompilable
from truedraft.targets.quirks import HOSTED_LAYERS, REFUSALS, learned_positions
from truedraft.targets.stock import ForwardPass, LinearsPass, PromptPass, long_prompt
from truedraft.tree import DraftTree, Prompt, Row, Scores, Taps, joined

BLANK = {"token_type_ids", "mm_token_type_ids"}  # inputs that tokenizers fill with zeros for texts


class DecoderTarget:
    """A decoder language model that scores trees.

    Args:
        model: a causal language model of `transformers`, in eval mode.
        runtime: "auto" for compiled passes or captured graphs where they can stand in for the model's own forward,
            else "stock".
        strict: passes do not depend on how many tokens they read, prompts' neither.

    Attributes:
        runner: what makes the passes.
        blank: inputs of the model whose zeros change nothing, as they mark text among images.
        long: tokens from which on a prompt is read by the model's own forward; None where `runner` reads them all.
        why_stock: why it is the model's own forward, where something faster was asked for.
        noise: by how much its logits and those of the model's own forward differ, at most; 0 until it was measured.

    Raises:
        Refused: the model cannot be hosted exactly; the message says why.
    """

    family = "decoder"
    noise = 0.0

    def __init__(self, model: PreTrainedModel, runtime: str = "auto", strict: bool = False):
        if runtime not in ("auto", "stock"):
            raise Refused(f"runtime={runtime!r}: give 'auto' (compiled passes where they can be had) or 'stock'")
        self._made_of = fingerprint(model)
        check_hosted(model)
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.taps = Taps()
        self.blank: frozenset[str] = frozenset()
        self._cache: RowCache | None = None
        self.layer_types = get_layer_types_and_kwargs(self.config)[0]
        self.window = getattr(self.config, "sliding_window", None) if "sliding_attention" in self.layer_types else None
        self.vocabulary: int = self.config.vocab_size
        self.runner, self.why_stock = self._runner(runtime)
        self.long = None if strict else self._long()
        self._reader = PromptPass(self.model, self.layer_types, self.window)

    def _long(self) -> int | None:
        quantised = any(type(p).__module__.startswith("torchao.") for p in self.model.parameters())
        if quantised or not isinstance(self.runner, CompiledPass | LinearsPass):
            return None
        return long_prompt(self.dtype, self.config.hidden_size)

    def _runner(self, runtime: str) -> tuple[CompiledPass | GraphPass | ForwardPass, str | None]:
        if runtime == "stock":
            return self._stock(), None
        try:
            if self.device.type == "cuda":
                return GraphPass(self._stock(), CudaGraphs(self.device)), None
            return CompiledPass(self.model), None
        except NotCompilable as why:
            return self._own_forward(), str(why)

    def _stock(self) -> ForwardPass:
        return ForwardPass(self.model, self.layer_types, self.window)

    def _own_forward(self) -> ForwardPass:
        """The model's own forward, its linear layers by compiled code where there is any."""
        try:
            return LinearsPass(self.model, self.layer_types, self.window)
        except NotCompilable:
            return self._stock()

    def _fall_back(self, why: NotCompilable) -> None:
        """From here on the model's own forward makes the passes."""
        self.runner, self.why_stock = self._own_forward(), str(why)
        self.runner.attach(self._cache)

    @property
    def changed(self) -> bool:
        """Whether the model is another one than when this was made, in more than the values of its weights: what is
        known of it, the comparison with its own forward included, does not hold any more."""
        return fingerprint(self.model) != self._made_of

    @property
    def runtime(self) -> str:
        """How passes are made, and why not faster where that was asked for."""
        return f"{self.runner.name} ({self.why_stock})" if self.why_stock else self.runner.name

    @property
    def one_vocabulary(self) -> bool:
        """Whether sources and outputs are made of the same tokens."""
        return True

    @property
    def cold(self) -> bool:
        """Whether the last pass took longer than others of its size will, because it was captured first."""
        return self.runner.cold

    @property
    def cache(self) -> RowCache | None:
        """The cache that passes read and write; None while nothing is generated."""
        return self._cache

    @cache.setter
    def cache(self, cache: RowCache | None) -> None:
        self._cache = cache
        self._reader.attach(cache)
        try:
            self.runner.attach(cache)
        except NotCompilable as why:  # it cannot be had for such a cache
            self._fall_back(why)

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def context(self) -> int | None:
        """Positions that the model was made for."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def hard_limit(self) -> int | None:
        """Positions past which the model itself fails; None where it does not."""
        return learned_positions(self.config)

    @property
    def longest_source(self) -> int | None:
        """Tokens of a source that its encoder was made for; None where there is no such bound, or no encoder."""
        return None

    def prompts(self, rows: Sequence[Row], width: int) -> list[Prompt]:
        """What rows begin with that another model's `generate` began.

        width: of an encoder-decoder, which reads their sources: what it pads these to.
        """
        return [Prompt(torch.tensor(row.tokens, device=self.device)) for row in rows]

    def prompt(self, ids: Tensor) -> Prompt:
        """A prompt like those of a call, to measure passes with; of an encoder-decoder, behind a source of its own."""
        return Prompt(ids)

    def encoded(self, inputs: Tensor | None, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `generate` with more that is known (see `Seq2SeqTarget`), or without what changes nothing."""
        return {name: value for name, value in given.items() if name not in self.blank or bool(value.any())}

    def reserve(self, rows: int, capacity: int) -> None:
        """Make room for `rows` rows of `capacity` positions each.

        Raises:
            Refused: the cache would not fit in the memory that is free, or autocast is on, which only the model's own
                forward follows; nothing was computed yet.
        """
        if torch.is_autocast_enabled(self.device.type) and self.runner.name != ForwardPass.name:
            raise Refused(
                f"torch.autocast is on, which the {self.runner.name} does not follow: load the model in the dtype "
                "that is wanted, or accelerate(runtime='stock')"
            )
        kept = None
        if isinstance(self.runner, GraphPass):
            capacity += -capacity % VIEW  # so that calls of about this length find the same cache, and its graphs
            kept = self.runner.kept(rows, capacity)
        self.cache = self._allocated(rows, capacity) if kept is None else kept

    def _allocated(self, rows: int, capacity: int) -> RowCache:
        layers = len(self.layer_types)
        check_room(self.config, layers, rows, capacity, self.dtype, self.device)
        return RowCache(layers, rows, capacity)

    def check_room(self, prompts: Sequence[Prompt]) -> None:
        """Raises NoRoom where what new rows need beside the cache that was reserved does not fit in the free memory."""

    def ready(self, prompts: Sequence[Prompt]) -> bool:
        """New rows made ready for drafts behind the last tokens of their prompts, where all before these needs no pass;
        elsewhere nothing is done, and the prompts are to be read first."""
        return False

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Prompt]) -> Scores:
        """Read the prompts of new rows, each taking the next free slot; the scores are those of their last tokens.

        By whichever is faster here, which depends on a prompt's own length alone: not on drafts, nor on other rows.
        """
        parts: list[Scores] = []
        for long, group in groupby(prompts, self._is_long):
            batch = list(group)
            parts.append(self.read(batch) if long else self.runner.prefill(batch, self.taps))
        self.wait()
        return joined(parts)

    @torch.no_grad()
    def read(self, prompts: Sequence[Prompt]) -> Scores:
        """Read the prompts of new rows by the model's own forward; see `prefill`."""
        return self._reader.prefill(prompts, self.taps)

    def _is_long(self, prompt: Prompt) -> bool:
        return self.long is not None and len(prompt) >= self.long

    @torch.no_grad()
    def score(self, trees: Sequence[DraftTree]) -> Scores:
        """One pass: the logits at every node of one tree per slot in use. A GPU may be at it still; see `wait`."""
        try:
            return self.runner.score(trees, self.taps)
        except NotCompilable as why:  # it could not be captured
            self._fall_back(why)
            return self.runner.score(trees, self.taps)

    def wait(self) -> None:
        """Until the device has done what it was asked."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def commit(self, paths: Sequence[Sequence[int]], first: int = 0) -> None:
        """Make the KV of the accepted path of each slot, from `first` on, permanent; the rest is forgotten."""
        assert self.cache is not None
        for slot, path in enumerate(paths, first):
            self.cache.commit(slot, path)

    def crop(self, slot: int, length: int) -> None:
        """Forget what a slot's cache holds beyond a length."""
        assert self.cache is not None
        self.cache.lengths[slot] = length

    def release(self, slot: int) -> None:
        """Free a slot; the last slot in use moves into it."""
        assert self.cache is not None
        self.cache.release(slot)


def check_room(
    config: Any, layers: int, rows: int, capacity: int, dtype: torch.dtype, device: torch.device,
    remedy: str = "lower max_new_tokens or the batch size",
) -> None:  # fmt: skip
    """Raises NoRoom where keys and values of so many rows and positions do not fit in the memory that is free."""
    of_layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config] * layers
    numbers = 2 * rows * capacity * sum(map(_numbers_in_keys, of_layers))
    need, free = numbers * dtype.itemsize, free_memory(device)
    if need > free:
        raise NoRoom(
            f"the KV cache of {rows} rows x {capacity} positions needs {need:,} bytes, {free:,} are free: {remedy}"
        )


def _numbers_in_keys(config: Any) -> int:
    """Of one position in a layer."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def free_memory(device: torch.device) -> int:
    """Bytes that tensors on a device can still take, those that torch holds in reserve included."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


# What a forward must take, of decoders and of encoder-decoders.
NEEDED = {
    False: ("position_ids", "past_key_values", "attention_mask"),
    True: ("encoder_outputs", "past_key_values", "decoder_attention_mask"),
}


def _drops(module: Any) -> bool:
    """Whether a module, or its functional calls, leave numbers out at random."""
    rates = [value for name, value in vars(module).items() if name == "p" or "drop" in name]
    return module.training and any(isinstance(rate, float) and rate > 0 for rate in rates)


def check_hosted(model: Any) -> None:
    """Raises Refused, in one sentence, where a model cannot be hosted exactly."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise Refused(
            f"model={name} is not a model of transformers: load one with AutoModelForCausalLM.from_pretrained"
        )
    if not getattr(model, "can_generate", lambda: False)():
        raise Refused(f"{name} is not generative: it has no language-model head; load it with AutoModelForCausalLM")
    if model.training or any(_drops(module) for module in model.modules()):
        raise Refused(f"{name} is in training mode, where dropout makes the text random: call model.eval() first")
    config = model.config.get_text_config(decoder=True)
    for refusal in REFUSALS:
        if why := refusal(config):
            raise Refused(f"{name} cannot be hosted exactly: it {why}")
    if model.config.is_encoder_decoder and getattr(type(model), "generate", None) is not GenerationMixin.generate:
        raise Refused(f"{name} cannot be hosted exactly: it has a generate of its own, which does more than decode")
    parameters = inspect.signature(model.forward).parameters
    for needed in NEEDED[bool(model.config.is_encoder_decoder)]:
        if needed not in parameters:
            raise Refused(f"{name} cannot be hosted exactly: its forward takes no {needed}, which trees need")
    foreign = set(get_layer_types_and_kwargs(config)[0]) - HOSTED_LAYERS
    if foreign or getattr(model, "_is_stateful", False):
        kinds = ", ".join(sorted(foreign)) or "recurrent state"
        raise Refused(
            f"{name} cannot be hosted exactly: it has {kinds} layers, whose state cannot be rolled back to a path"
        )
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise Refused(
            f"attn_implementation={attention!r} takes no tree mask: load the model with attn_implementation='sdpa'"
        )
