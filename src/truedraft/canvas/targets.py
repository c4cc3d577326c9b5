"""Models that score canvases: several of several rows in one pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.caches.rows import RowCache
from truedraft.canvas._base import CanvasRow, Draft
from truedraft.canvas.layout import Layout
from truedraft.canvas.passes import CompiledNodes, ForwardNodes
from truedraft.canvas.reference import attended
from truedraft.runtime.fingerprint import fingerprint
from truedraft.runtime.forward import attention_mask
from truedraft.runtime.nodes import Nodes
from truedraft.runtime.panels import Panels, panels_of
from truedraft.runtime.weights import NotCompilable
from truedraft.targets.memory import check_room, free_memory

READ = 512  # most positions of a prompt in one pass


@dataclass(frozen=True)
class Variant:
    """A canvas to score, from a position on.

    start: what stands before is that of the row's own canvas, the first variant, which starts at the end of what is
        committed.
    tokens: ids from there on.
    block: the block to fill; the tokens end with it, or with a later one.
    masked: the masked positions from there on that are scored, in order; their logits are returned.
    causal: each position reads those before it and itself alone.
    probes: masks behind the tokens, one for each scored position, at which that is scored instead.
    """

    start: int
    tokens: Sequence[int]
    block: range
    masked: Sequence[int]
    causal: bool = False
    probes: int = 0

    @property
    def width(self) -> int:
        """Nodes of a pass."""
        return len(self.tokens) + self.probes


class CanvasTarget(ABC):
    """A diffusion language model; made by `canvas.hosting.hosted_canvas`.

    Attributes:
        model: of `transformers`.
        layout: its canvas, with the block length of the current call.
        causal_cache: of the current call, see `Policy`.
        runtime: how passes are computed, as reports show it.
        batch_invariant: whether the logits of a canvas have the same bits whatever else is in the pass.
        together: whether a pass may score several canvases of a row.
    """

    together: ClassVar[bool] = True
    reads_sources = False
    hard_limit = None
    causal_cache = False

    def __init__(self, model: PreTrainedModel, layout: Layout, runtime: str = "auto"):
        self._made_of = fingerprint(model)
        self.model, self.layout = model, layout
        self.config = model.config.get_text_config(decoder=True)
        self.device: torch.device = model.get_input_embeddings().weight.device  # type: ignore[assignment]
        self.cache: RowCache | None = None
        self._copied: Panels | None = None
        self.runner, self.fallback_reason = self._runner(runtime)

    def _runner(self, runtime: str) -> tuple[CompiledNodes | ForwardNodes, str | None]:
        if runtime == "stock":
            return ForwardNodes(self.model), None
        if runtime == "auto" and self.device.type == "cpu":
            self._copied = panels_of(self.model, free_memory(self.device))
        try:
            return CompiledNodes(self.model, self._copied), None
        except NotCompilable as why:
            return ForwardNodes(self.model), str(why)

    @property
    def runtime(self) -> str:
        return f"{self.runner.name} ({self.fallback_reason})" if self.fallback_reason else self.runner.name

    @property
    def changed(self) -> bool:
        """Whether the model has changed since this was constructed, in more than the values of its weights."""
        return fingerprint(self.model) != self._made_of

    @property
    def batch_invariant(self) -> bool:
        return self.runner.batch_invariant

    @property
    def vocabulary(self) -> int:
        return int(self.config.vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def weight_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    @property
    def cost_key(self) -> tuple[str, ...]:
        """What the duration of a pass depends on besides the machine."""
        return (
            type(self.model).__name__, self.config.to_json_string(use_diff=False), str(self.dtype), self.runner.name,
            "panels" if self._copied else "in place", "canvas", self.layout.attention,
        )  # fmt: skip

    @property
    def context(self) -> int | None:
        """Positions that the model was trained for; None where its configuration names none."""
        return getattr(self.config, "max_position_embeddings", None)

    def check_capacity(self, rows: int, capacity: int) -> None:
        """Raises NoRoom where a cache of these sizes does not fit in free memory."""
        check_room(self.config, self.config.num_hidden_layers, rows, capacity, self.dtype, self.device)

    def _reserve(self, rows: int, capacity: int) -> None:
        self.check_capacity(rows, capacity)
        self.cache = RowCache(self.config.num_hidden_layers, rows, capacity)
        self.runner.attach(self.cache)

    def free(self) -> None:
        """Release the memory of the cache."""
        self.cache = None
        self.runner.attach(None)

    @abstractmethod
    def reserve(self, rows: int, capacity: int, variants: int) -> None:
        """Allocate what rows of up to `capacity` positions need, with so many variants each.

        Raises:
            NoRoom: it does not fit in free memory.
        """

    @abstractmethod
    def admit(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Admit rows to the next slots; returns how many tokens of each prompt are committed."""

    @abstractmethod
    def variant(self, row: CanvasRow, draft: Draft) -> Variant:
        """The canvas that a row may reach as a variant."""

    @abstractmethod
    def score(self, rows: Sequence[Sequence[Variant]]) -> list[Tensor]:
        """One pass: by slot, the logits (n, V) at the masked positions of its variants, one after another; a slot
        without variants takes no part."""

    @abstractmethod
    def probe(self, width: int) -> None:
        """A pass over so many positions of the first row, to be timed."""

    def commit(self, slot: int, variant: int) -> int:
        """Make permanent what is complete in a variant of the last pass, which is right; returns the committed
        positions of the slot."""
        return 0

    def release(self, slot: int) -> None:
        """Free a slot; the last one moves into it."""


class BlockTarget(CanvasTarget):
    """A model that attends in blocks: keys and values of complete blocks are kept, and never change.

    A pass reads of each row the complete blocks that are not committed yet and the block that is being filled, and of
    each further variant the block again, or where that is complete the block behind it as well. Of a causal variant
    each token reads those before it; where logits are not for the next position, masks behind them are scored, each of
    which reads the tokens before its position and itself.
    """

    _variants: Sequence[Sequence[Variant]] = ()

    def reserve(self, rows: int, capacity: int, variants: int) -> None:
        self._reserve(rows, capacity + (2 * variants + 2) * self.layout.block)
        self._edges: list[Tensor | None] = []  # logits at the last committed position of each slot

    def admit(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        assert self.cache is not None
        committed = []
        for prompt in prompts:
            size, slot = self.layout.block, len(self.cache.lengths)
            whole = len(prompt) // size * size
            self.cache.lengths.append(0)
            edge = None
            for start in range(0, whole, span := max(READ // size, 1) * size):
                nodes = Nodes()
                end = min(start + span, whole)
                self._add(nodes, slot, prompt[start:end], start, start, (), self._kept)
                nodes.group(end - start)
                edge = self.runner(nodes, [end - start - 1])[0]
                self.cache.lengths[slot] = end
            self._edges.append(edge)
            committed.append(whole)
        return committed

    @property
    def _kept(self) -> int:
        """Positions of the blocks whose keys and values are kept, as they are read."""
        return 1 if self.causal_cache else self.layout.block

    def _add(
        self, nodes: Nodes, slot: int, tokens: Sequence[int], start: int, place: int, before: Sequence[int], size: int
    ) -> None:
        """Nodes of complete blocks, from a position on: each attends to what is committed, to the places `before` of
        this pass, and to those of these nodes up to the end of its block; places that directly follow what is committed
        count as that.

        size: positions of each block, but for the last; 1 where nodes read those before them alone.
        """
        assert self.cache is not None
        base = self.cache.lengths[slot]
        n = len(tokens)
        nodes.token += tokens
        nodes.slot += [slot] * n
        nodes.position += range(start, start + n)
        nodes.place += range(place, place + n)
        places = [*before, *range(place, place + n)]
        direct = next((k for k, one in enumerate(places) if one != base + k), len(places))
        for i in range(0, n, size):
            end = min(i + size, n)
            behind = min(direct, len(before) + end)
            reads = places[behind : len(before) + end]
            first = start + end - len(reads)
            for _ in range(i, end):
                nodes.base.append(base + behind)
                nodes.extra += reads
                nodes.extra_position += range(first, first + len(reads))
                nodes.extra_from.append(len(nodes.extra))

    def variant(self, row: CanvasRow, draft: Draft) -> Variant:
        canvas, block, masked = row.reached(draft.fixed)
        start = row.block.start if draft.steps else row.committed
        probes = 0 if self.layout.shifted or not row.causal else len(masked)
        return Variant(start, canvas.tokens[start : row.span(block).stop], block, masked, row.causal, probes)

    def _read(self, nodes: Nodes, slot: int, variant: Variant, place: int, before: Sequence[int]) -> None:
        """Nodes of a variant: complete blocks, the block to fill and later ones, and masks behind them."""
        assert self.cache is not None
        start, tokens, filled = variant.start, variant.tokens, variant.block.start - variant.start
        self._add(nodes, slot, tokens[:filled], start, place, before, self._kept)
        inside = [*before, *range(place, place + filled)]
        size = 1 if variant.causal else len(variant.block)
        self._add(nodes, slot, tokens[filled:], start + filled, place + filled, inside, size)
        base, behind = self.cache.lengths[slot], place + len(tokens)
        for i, position in enumerate(variant.masked[: variant.probes]):
            nodes.token.append(self.layout.mask)
            nodes.add_node(slot, position, behind + i, base, [*before, *range(place, place + position - start)])

    def score(self, rows: Sequence[Sequence[Variant]]) -> list[Tensor]:
        assert self.cache is not None
        nodes, gather, counts = Nodes(), list[int](), list[int]()
        for slot, variants in enumerate(rows):
            if not variants:
                counts.append(0)
                continue
            first, place = len(nodes), self.cache.lengths[slot]
            own = variants[0]
            for variant in variants:
                at, shared = len(nodes), range(place, place)
                if variant is not own:
                    shared = range(self.cache.lengths[slot], self.cache.lengths[slot] + variant.start - own.start)
                self._read(nodes, slot, variant, place, shared)
                place += variant.width
                gather += range(at + len(variant.tokens), at + variant.width)
                for position in variant.masked[variant.probes :]:
                    node = position - self.layout.shifted
                    begun, origin = (at, variant.start) if node >= variant.start else (first, own.start)
                    gather.append(begun + max(node - origin, 0))
            nodes.group(len(nodes) - first)
            counts.append(sum(len(variant.masked) for variant in variants))
        logits = self.runner(nodes, gather)
        found = list(logits.split(counts))
        self._variants = rows
        if self.layout.shifted:
            self._keep_edges(rows, found)
        return found

    def probe(self, width: int) -> None:
        nodes = Nodes()
        self._add(nodes, 0, [0] * width, 0, 0, (), self.layout.block)
        nodes.group(width)
        self.runner(nodes, range(width))

    def _keep_edges(self, rows: Sequence[Sequence[Variant]], logits: Sequence[Tensor]) -> None:
        """Where logits are for the next position, those of the first position of a block belong to the end of the block
        before it: they are kept until they are replaced at a commit."""
        self._ends: list[dict[int, Tensor]] = []
        for slot, (variants, scored) in enumerate(zip(rows, logits, strict=True)):
            ends, first = dict[int, Tensor](), 0
            for i, variant in enumerate(variants):
                if variant.masked and variant.masked[0] == variant.block.start:
                    if variant.block.start == variants[0].start:
                        scored[first] = self._edges[slot]  # type: ignore[assignment]
                    elif variant.start < variant.block.start:
                        ends[i] = scored[first].clone()
                first += len(variant.masked)
            self._ends.append(ends)

    def commit(self, slot: int, variant: int) -> int:
        assert self.cache is not None
        own, right = self._variants[slot][0], self._variants[slot][variant]
        before = sum(one.width for one in self._variants[slot][:variant])
        path = [*range(own.block.start - own.start)]
        if variant:
            path += range(before, before + right.block.start - right.start)
        self.cache.commit(slot, path)
        if self.layout.shifted:
            for i in (0, variant):
                self._edges[slot] = self._ends[slot].get(i, self._edges[slot])
        return self.cache.lengths[slot]

    def release(self, slot: int) -> None:
        assert self.cache is not None
        self.cache.release(slot)
        self._edges[slot] = self._edges[-1]
        self._edges.pop()


class WholeTarget(CanvasTarget):
    """A model that attends to the whole canvas: every variant is a text of its own, and nothing can be kept."""

    def __init__(self, model: PreTrainedModel, layout: Layout, runtime: str = "auto", unmasked: bool = False):
        self.unmasked = unmasked
        super().__init__(model, layout, runtime)

    def check_capacity(self, rows: int, capacity: int) -> None:
        if self.batch_invariant:  # else there is no cache
            super().check_capacity(rows, capacity)

    def reserve(self, rows: int, capacity: int, variants: int) -> None:
        if self.batch_invariant:
            self._reserve(rows * (variants + 1), capacity)

    def admit(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        return [0] * len(prompts)

    def variant(self, row: CanvasRow, draft: Draft) -> Variant:
        canvas, block, masked = row.reached(draft.fixed)
        return Variant(0, canvas.tokens, block, masked)

    def score(self, rows: Sequence[Sequence[Variant]]) -> list[Tensor]:
        texts = [variant for variants in rows for variant in variants]
        logits = self._compiled(texts) if self.batch_invariant else self._forwarded(texts)
        counts = [sum(len(variant.masked) for variant in variants) for variants in rows]
        return list(logits.split(counts))

    def probe(self, width: int) -> None:
        self.score([[Variant(0, [0] * width, range(width), range(self.layout.shifted, width))]])

    def _compiled(self, texts: Sequence[Variant]) -> Tensor:
        nodes, gather = Nodes(), list[int]()
        for slot, text in enumerate(texts):
            gather += [len(nodes) + position - self.layout.shifted for position in text.masked]
            nodes.add_whole(slot, list(text.tokens), list(range(len(text.tokens))))
        return self.runner(nodes, gather)

    @torch.no_grad()
    def _forwarded(self, texts: Sequence[Variant]) -> Tensor:
        by_length: dict[int, list[int]] = {}
        for i, text in enumerate(texts):
            by_length.setdefault(len(text.tokens), []).append(i)
        found: list[Tensor] = [torch.empty(0)] * len(texts)
        for group in by_length.values():
            logits = plain_logits(self.model, [texts[i].tokens for i in group], self.layout, self.unmasked)
            for i, scored in zip(group, logits, strict=True):
                found[i] = scored[[position - self.layout.shifted for position in texts[i].masked]].float()
        return torch.cat(found)


@torch.no_grad()
def plain_logits(model: Any, texts: Sequence[Sequence[int]], layout: Layout, unmasked: bool = False) -> Tensor:
    """(rows, length, V) of one forward over whole texts of one length, without a cache.

    unmasked: the model attends to everything by itself, and is given no mask.
    """
    ids = torch.tensor(texts, device=model.get_input_embeddings().weight.device)
    if unmasked and layout.attention == "whole":
        return model(ids).logits
    seen = attended(ids.shape[1], layout)[None, None].to(ids.device)
    return model(ids, attention_mask=attention_mask(model, seen), use_cache=False).logits
