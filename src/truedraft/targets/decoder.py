"""Any `transformers` decoder language model as a target: trees and rows of different lengths on the unmodified model.

The model is called as it is, with a cache whose rows have their own lengths (`caches/rows.py`), explicit positions
and an explicit mask. Layers with full, sliding-window and chunked attention are supported; the cache keeps all keys,
and the mask implements the window. Models with recurrent state are hosted by `recurrent.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from truedraft.caches import pages
from truedraft.caches.prefixes import Prefixes
from truedraft.caches.rows import IndexedCache, RowCache
from truedraft.caches.seq2seq import Seq2SeqCache
from truedraft.errors import NoRoom, Refused
from truedraft.runtime._base import Runner
from truedraft.runtime.compiled import CompiledPass
from truedraft.runtime.fingerprint import fingerprint
from truedraft.runtime.forward import ForwardPass, LinearsPass, PromptPass
from truedraft.runtime.generate_pass import GeneratePass
from truedraft.runtime.graphs import CudaGraphs, GraphPass
from truedraft.runtime.panels import Panels, forget, panels_of
from truedraft.runtime.processors import long_prompt
from truedraft.runtime.released import PanelTensor, in_panels
from truedraft.runtime.tokenwise import TokenwisePass
from truedraft.runtime.weights import NotCompilable
from truedraft.targets.drafting import ViewPasses
from truedraft.targets.extending import ExtendingPasses
from truedraft.targets.hostable import check_hosted, check_runtime, layer_types
from truedraft.targets.inputs import check_text, text_prompts
from truedraft.targets.kinds import Family
from truedraft.targets.memory import cache_bytes, check_room, free_memory, spare_memory
from truedraft.targets.progress import reporting
from truedraft.targets.quirks import check_sides, learned_positions, switches, window_of
from truedraft.targets.reference import Reference
from truedraft.tree import DraftTree, Piece, Prompt, Row, Scores, Taps, joined
from truedraft.views._base import View

Made = TypeVar("Made")
WHOLE_PAGES = 2048  # positions of a head, whose entries have two bytes or more, fill whole pages of memory


class DecoderTarget(ViewPasses, ExtendingPasses):
    """A decoder language model that scores trees; see `Target`.

    Args:
        model: a causal language model of `transformers`, in eval mode.
        runtime: "auto" for compiled passes or captured graphs where they can replace the model's own forward;
            "in-place" for the same without a second copy of the weights; "stock" for the model's own forward.
        strict: results do not depend on the number of tokens in a pass, prompts included.

    Attributes:
        runner: computes the passes.
        pads: whether padding does not change the model's text; if it does, padded prompts are refused.
        ignorable: model inputs that have no effect where they are all zeros, such as token type ids.
        long: prompts of this many tokens or more are read by the model's own forward; None where `runner` reads all.
        fallback_reason: why the model's own forward is used though something faster was requested.

    Raises:
        Refused: the model cannot be hosted exactly; the message gives the reason.
    """

    family: ClassVar[Family] = "decoder"
    reads_sources: ClassVar[bool] = False
    output_class: ClassVar[type[Any]] = GenerateDecoderOnlyOutput
    branching = croppable = pads = True
    noise = 0.0
    on_read: Callable[[int, int], None] | None = None
    _copied: Panels | None = None
    _cache_class: ClassVar[type[RowCache | Seq2SeqCache]] = RowCache
    _forward_class: ClassVar[type[ForwardPass]] = ForwardPass
    _linears_class: ClassVar[type[LinearsPass]] = LinearsPass
    _prompt_class: ClassVar[type[PromptPass]] = PromptPass

    def __init__(self, model: PreTrainedModel, runtime: str = "auto", strict: bool = False):
        check_runtime(runtime)
        self._made_of = fingerprint(model)
        check_hosted(model)
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.device: torch.device = model.get_input_embeddings().weight.device  # type: ignore[assignment]
        self.taps = Taps()
        self.ignorable: frozenset[str] = frozenset()
        self._cache: RowCache | Seq2SeqCache | None = None
        self._switches = switches(self.config)
        self.layer_types = self._layer_types()
        self.window = window_of(self.config, self.layer_types)
        self.vocabulary: int = self.config.vocab_size
        self.runner, self.fallback_reason = self._runner(runtime)
        self.long = None if strict else self._long()
        self._reader = self._prompt_class(self.model, self.layer_types, self.window)

    def _layer_types(self) -> list[str]:
        return layer_types(self.model)

    def _long(self) -> int | None:
        quantised = any(hasattr(p, "qdata") and not isinstance(p, PanelTensor) for p in self.model.parameters())
        compiled = not quantised and isinstance(self.runner, CompiledPass | LinearsPass)
        return long_prompt(self.dtype, self.config.hidden_size) if compiled else None

    def _runner(self, runtime: str) -> tuple[Runner, str | None]:
        self._copied = None
        if runtime == "stock":
            return self._stock(), None
        if runtime == "auto" and self.device.type == "cpu":
            self._copied = panels_of(self.model, free_memory(self.device))
        try:
            return self._fast(), None
        except NotCompilable as why:
            return self._own_forward(), str(why)

    def _fast(self) -> Runner:
        if self.device.type == "cuda":
            return GraphPass(self._stock(), CudaGraphs(self.device))
        if self._switches:
            raise NotCompilable("its rotary frequencies change with the length of a text")
        return CompiledPass(self.model, self._copied)

    def _stock(self) -> ForwardPass:
        return self._forward_class(self.model, self.layer_types, self.window)

    def _own_forward(self) -> ForwardPass:
        """The model's own forward, with compiled linear layers where they are available."""
        try:
            return self._linears_class(self.model, self.layer_types, self.window, self._copied)
        except NotCompilable:
            return self._stock()

    def _run(self, make: Callable[[], Made]) -> Made:
        """A pass by the runner, or where it could not be captured, by the model's own forward."""
        try:
            return make()
        except NotCompilable as why:
            self._fall_back(why)
            return make()

    def _fall_back(self, why: NotCompilable) -> None:
        """Use the model's own forward from now on."""
        self.runner, self.fallback_reason = self._own_forward(), str(why)
        self.runner.attach(self._cache)

    @property
    def changed(self) -> bool:
        return fingerprint(self.model) != self._made_of or self.runner.changed

    @cached_property
    def _in_panels(self) -> list[PanelTensor]:
        """The weights of the model that are in panels alone, as it was hosted."""
        return in_panels(self.model)

    @property
    def runtime(self) -> str:
        once = sum([weight.qdata.nbytes for weight in self._in_panels])
        kept = f"{once / 1e6:,.0f} MB of weights kept once, in panels" if once else ""
        if made := sum([weight.made.nbytes for weight in self._in_panels if weight.made is not None]):
            kept += f", {made / 1e6:,.0f} MB of them made once more for calls of the model itself"
        notes = [self.fallback_reason or "", kept, str(self._copied) if self._copied else ""]
        name = self.runner.name if self.view is None else f"{self.runner.under_views} under {self.view.lossy}"
        return f"{name} ({'; '.join(filter(None, notes))})" if any(notes) else name

    @property
    def shared_vocabulary(self) -> bool:
        return True

    @property
    def batch_invariant(self) -> bool:
        return self.runner.batch_invariant

    @property
    def decides_as_generate(self) -> bool:
        return isinstance(self.runner, GeneratePass | TokenwisePass)

    @property
    def padded(self) -> bool:
        return self.runner.padded

    @property
    def carried(self) -> int:
        return 0

    @property
    def cold(self) -> bool:
        return self.runner.cold

    @property
    def weight_bytes(self) -> int:
        whole = sum(weight.numel() * weight.element_size() for weight in self.model.parameters())
        return whole if self.view is None else round(whole * self.share(self.view))

    @property
    def cost_key(self) -> tuple[str, ...]:
        return (
            type(self.model).__name__, self.config.to_json_string(use_diff=False), str(self.dtype),
            self.model.config._attn_implementation, self.runner.name,
            "panels" if self._copied or self._in_panels else "in place",
            *(() if self.view is None else (repr(self.view),)),
        )  # fmt: skip

    @property
    def cache(self) -> RowCache | Seq2SeqCache | None:
        """The cache that passes read and write; None outside of calls."""
        return self._cache

    @cache.setter
    def cache(self, cache: RowCache | Seq2SeqCache | None) -> None:
        self._cache = cache
        self._reader.attach(cache)
        try:
            self.runner.attach(cache)
        except NotCompilable as why:  # not available for this cache
            self._fall_back(why)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def embedding_width(self) -> int | None:
        table: Any = self.model.get_input_embeddings()
        return int(table.weight.shape[-1])

    @property
    def context(self) -> int | None:
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def hard_limit(self) -> int | None:
        return learned_positions(self.config)

    def check_lengths(self, prompts: Sequence[Prompt], steps: int) -> None:
        check_sides(self.config, list(map(len, prompts)), steps)

    @property
    def longest_source(self) -> int | None:
        return None

    def check_inputs(self, inputs: Any, given: Mapping[str, Any]) -> None:
        check_text(self.model, inputs, given)

    def encoded(self, inputs: Tensor | None, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `generate` without those of `ignorable` that are all zeros."""
        return {name: value for name, value in given.items() if name not in self.ignorable or bool(value.any())}

    def prompts_of(self, input_ids: Tensor, given: Mapping[str, Any], sources: Tensor | None) -> list[Prompt]:
        return text_prompts(input_ids, given, self.window, self.pads)

    def prompts(self, rows: Sequence[Row], texts: Sequence[Sequence[int]], width: int) -> list[Prompt]:
        return [Prompt(torch.tensor(text, device=self.device)) for text in texts]

    def prompt(self, ids: Tensor) -> Prompt:
        return Prompt(ids)

    def reserve(self, rows: int, capacity: int, shared: bool = False) -> None:
        if torch.is_autocast_enabled(self.device.type) and self.runner.name != ForwardPass.name:
            raise Refused(
                f"torch.autocast is on, which the {self.runner.name} does not follow: load the model in the dtype "
                "that you need, or accelerate(runtime='stock')"
            )
        if shared and self.paged:
            self.cache = self._allocated(rows, capacity + -capacity % WHOLE_PAGES)
            return
        kept = self.runner.kept(rows, capacity)
        self.cache = self._with_room(rows, capacity + -capacity % self.runner.extent) if kept is None else kept

    def _with_room(self, rows: int, capacity: int) -> RowCache | Seq2SeqCache:
        """A cache, in the memory of the weights' copies if there is no other."""
        if self._copied is not None:
            with suppress(NoRoom):
                self._check_room(rows, capacity)
                return self._allocated(rows, capacity)
            self._give_up_copies()
        self._check_room(rows, capacity)
        return self._allocated(rows, capacity)

    def _give_up_copies(self) -> None:
        """Read weights in place from now on, so that there is more memory for keys and values."""
        forget(self.model)
        self.runner, self.fallback_reason = self._runner("in-place")
        self.runner.attach(self._cache)

    def _check_room(self, rows: int, capacity: int) -> None:
        check_room(self.config, self._cached_layers, rows, capacity, self.dtype, self.device)

    def _allocated(self, rows: int, capacity: int) -> RowCache | Seq2SeqCache:
        made = IndexedCache if "indexed_attention" in self.layer_types else self._cache_class
        return made(self._cached_layers, rows, capacity)

    def check_capacity(self, rows: int, capacity: int) -> None:
        if self.runner.kept(rows, capacity) is None:
            check_room(self.config, self._cached_layers, rows, capacity, self.dtype, self.device, copies=self._copied)

    @property
    def paged(self) -> bool:
        return self.device.type == "cpu" and pages.available()

    @property
    def position_bytes(self) -> int:
        of_cache = 0 if self.cache is None else self.cache.bytes_per_position  # 0 before the first pass of some
        return of_cache or cache_bytes(self.config, self._cached_layers, 1, 1, self.dtype)

    def spare_memory(self, utilization: float, least: int) -> int:
        there = spare_memory(self.device, utilization)
        if there < least and self._copied is not None and there + self._copied.bytes >= least:
            self._give_up_copies()
            there = spare_memory(self.device, utilization)
        return there

    def committed_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        kept = self._whole.layers[layer]
        return kept.keys, kept.values

    @property
    def reserved(self) -> tuple[int, int]:
        return (0, 0) if self.cache is None else (self.cache.cursor.slots, self.cache.cursor.capacity)

    def free(self) -> None:
        self.cache = None

    @contextmanager
    def temporary_cache(self, rows: int, capacity: int) -> Iterator[None]:
        held = self.cache
        try:
            self.reserve(rows, capacity)
            yield
        finally:
            self.cache = held

    def check_room(self, prompts: Sequence[Prompt]) -> None:
        """Does nothing: new rows need only the reserved cache."""

    def admit(self, prompts: Sequence[Prompt]) -> Scores | None:
        return self.prefill(prompts)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Prompt]) -> Scores:
        """By the pass that is faster for a prompt of its length; the choice depends on nothing else."""
        self.rewind()
        parts: list[Scores] = []
        with reporting([self.runner, self._reader], self.on_read, sum(map(len, prompts))):
            for (long, _), group in groupby(prompts, lambda p: (self._is_long(p), p.ids is None)):
                batch = list(group)
                parts.append(self.read(batch) if long else self.runner.prefill(batch, self.taps))
        self.wait()
        return joined(parts)

    @torch.no_grad()
    def read(self, prompts: Sequence[Prompt]) -> Scores:
        """Read the prompts of new rows by the model's own forward; see `prefill`."""
        return self._reader.prefill(prompts, self.taps)

    @property
    def granularity(self) -> int | None:
        return self.runner.granularity

    def open(self) -> int:
        return self._rows.open()

    @torch.no_grad()
    def read_pieces(self, pieces: Sequence[Piece], taps: Taps) -> list[Scores]:
        self.rewind()
        scores: list[Scores] = []
        for _, group in groupby(pieces, lambda piece: piece.prompt.ids is None):
            scores += self.runner.read_pieces(list(group), taps)
        for piece in pieces:
            # the root is committed with its path
            self._rows.cursor.reading[piece.slot] = piece.end - 1 if piece.last else piece.end
        self.wait()
        return scores

    def activate(self, slot: int) -> int:
        return self._rows.activate(slot)

    def discard(self, slot: int) -> None:
        self._rows.discard(slot)

    def prefixes(self, limit: int, shared: bool) -> Prefixes | None:
        if self._switches or self.view is not None:  # keys depend on the length of the prompt, or on where it ends
            return None
        return Prefixes(self._rows, limit, shared, self.runner.granularity)

    @property
    def _rows(self) -> RowCache:
        assert isinstance(self.cache, RowCache)
        return self.cache

    def _is_long(self, prompt: Prompt) -> bool:
        return self.long is not None and len(prompt) >= self.long

    def score(
        self, trees: Sequence[DraftTree], view: View | None = None, slots: Sequence[int] | None = None
    ) -> Scores:  # fmt: skip
        if view is not None:
            return self._score_under(view, trees, slots)
        self.rewind()
        if self.view is not None:
            return self._score_lossy(self.view, trees)
        return self._run(lambda: self.runner.score(trees, self.taps))

    def check_taps(self, taps: Taps) -> None:
        self.runner.check_taps(taps)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def commit(self, paths: Sequence[Sequence[int]], first: int = 0) -> None:
        assert self.cache is not None
        for slot, path in enumerate(paths, first):
            self.cache.commit(slot, path)

    def crop(self, slot: int, length: int) -> None:
        assert self.cache is not None
        self.cache.shorten(slot, length)

    def release(self, slot: int) -> None:
        assert self.cache is not None
        self.cache.release(slot)

    def reference(self, rows: int, capacity: int) -> Reference:
        return Reference(self.model, self.config, self._cached_layers, rows, capacity)
