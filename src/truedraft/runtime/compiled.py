"""The compiled pass on the CPU: nodes of all rows in one call of C code, without padding, masks or copies.

Every node's numbers are computed in an order that depends on its own path alone (native/pass.c), so its logits are the
same bit for bit whether it is scored alone, in a chain, in a tree, in a batch, or as part of a prompt.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.caches.rows import RowCache
from truedraft.errors import Refused
from truedraft.runtime import native
from truedraft.runtime.buffers import buffer_rows, buffers_of, pad_in_place
from truedraft.runtime.chaining import ExtendingPass, FurtherPasses, floats
from truedraft.runtime.embedding import embedded
from truedraft.runtime.experts import check_ops
from truedraft.runtime.native import Failure, Op, OpKind, PassArguments
from truedraft.runtime.nodes import Nodes, prompts_in_parts
from truedraft.runtime.panels import rounded_copies
from truedraft.runtime.position_tables import PositionTables, RotaryTables
from truedraft.runtime.program import Program
from truedraft.runtime.programs import compile_program
from truedraft.runtime.rounded import RoundedOps
from truedraft.runtime.rounded_entries import CHUNK, RoundedEntries, readable
from truedraft.runtime.selecting import fitted, point
from truedraft.runtime.skipping import check_own_keys
from truedraft.runtime.tapping import layer_number, several_streams
from truedraft.runtime.variants import Variants
from truedraft.runtime.weights import Copies, NotCompilable, padded_to_16
from truedraft.tree import DraftTree, Piece, Prompt, Scores, Taps, continued, joined
from truedraft.views._base import WHOLE, Reduction, Rounded, View

VARIANTS = 64  # most cached reductions and lists of operations; the oldest is dropped first
CPU = torch.device("cpu")


class CompiledPass(ExtendingPass):
    """The compiled pass of one model.

    Args:
        copied: makes the copies that are read instead of the weights; None where these are read in place.

    Raises:
        NotCompilable: the compiled pass is not available, or cannot replace this model's forward; with the reason.
    """

    name = "compiled pass"
    batch_invariant = True
    padded = False
    granularity = 1

    def __init__(self, model: PreTrainedModel, copied: Copies | None = None):
        library = native.library()
        if library is None:
            raise NotCompilable(native.missing())
        self._library, self._run = library, library.truedraft_pass
        self.model, self.copied = model, copied
        self._compile()

    def _compile(self) -> None:
        self.program: Program = self._compiled(self.copied)
        self._vocabulary, self._hidden = self.program.widths["logits"], self.program.widths["x"]
        attending = [op for op in self.program.ops if op.kind in (OpKind.ATTEND, OpKind.CROSS)]
        self._share = max((op.heads // op.kv_heads for op in attending), default=1)
        self._arena = 0
        self._lists = Variants(self.program, self._compiled, type(self.model).__name__)
        self._reductions: dict[View, Reduction] = {}
        self._rounded: dict[int, RoundedOps] = {}  # by bits
        self._readable = {at for op, at in zip(self.program.ops, self.program.layers, strict=True) if readable(op)}
        self._tables = RotaryTables()
        self._along = PositionTables()

    def _compiled(self, copied: Copies | None) -> Program:
        return compile_program(self.model, copied)

    def attach(self, cache: RowCache | None) -> None:
        """Point the program at the cache of the passes that follow.

        The model must not have changed since the program was compiled, except for the values of its weights; the
        caller checks that (`DecoderTarget.changed`).

        Args:
            cache: None detaches the previous one.
        """
        self.cache: RowCache = cache  # type: ignore[assignment]
        self._whole: RowCache = cache  # type: ignore[assignment]
        self._variants: dict[tuple[tuple[int, ...], Reduction, RowCache | RoundedEntries | None], ctypes.Array[Op]] = {}
        if cache is None:
            return
        p, dtype = self.program, self.model.dtype
        p.refresh()
        self._lists.refresh()
        for rounded in self._rounded.values():
            rounded.refresh()
        for op, at in zip(p.ops, p.layers, strict=True):
            if op.kind == OpKind.ATTEND and not (layer := cache.layers[at]).is_initialized:
                heads, size = (1, op.inner) if op.inner else (op.kv_heads, op.head)  # latents: those of all heads
                layer.allocate(heads, op.head, dtype, torch.device("cpu"), size)
        for op, at in zip(p.ops, p.layers, strict=True):
            if at >= 0:
                point(op, cache.layers[at])
                rotary = p.rotaries.get(at, p.rotary)
                if op.kind in (OpKind.PREPARE, OpKind.LATENT) and rotary is not None and at not in p.unrotated:
                    cos, sin = self._tables(rotary, p.layer_types[at], cache.cursor.capacity, dtype)
                    op.cosine, op.sine, op.rotary = cos.data_ptr(), sin.data_ptr(), cos.shape[1]
                if op.kind == OpKind.PREPARE and at in p.factored and p.factor:
                    op.factor = self._along(p.factor, cache.cursor.capacity).data_ptr()
                if op.kind == OpKind.ATTEND and p.lean:
                    biases = self._along(p.lean, cache.cursor.capacity)
                    op.bias, op.out = biases.data_ptr(), biases.shape[-1]

    def prefill(self, prompts: Sequence[Prompt], taps: Taps) -> Scores:
        """Read the prompts of new rows together, at most PROMPT nodes per call."""
        lengths = self.cache.cursor.lengths
        parts: list[list[Scores]] = [[] for _ in prompts]
        for part in prompts_in_parts([len(p) for p in prompts]):
            pieces = [Piece(prompts[i], len(lengths) + i, start, end) for i, start, end in part]
            for (i, _, _), scores in zip(part, self.read_pieces(pieces, taps), strict=True):
                parts[i].append(scores)
            if self.on_read is not None:
                self.on_read(sum(map(len, pieces)))
        lengths += [len(p) - 1 for p in prompts]  # the root is committed with its path
        return joined([continued(of_prompt) for of_prompt in parts])

    def read_pieces(self, pieces: Sequence[Piece], taps: Taps) -> list[Scores]:
        """Read pieces of prompts in one call; see `Runner.read_pieces`."""
        nodes, gather, embeds = Nodes(), list[int](), []
        for piece in pieces:
            prompt, n, span = piece.prompt, len(piece), slice(piece.start, piece.end)
            nodes.add_chain(piece.slot, piece.start, None if prompt.ids is None else prompt.ids[span].tolist(), n)
            if (counted := self._counted(prompt)) is not None:
                nodes.position[-n:] = counted[span]
            gather += range(len(nodes) - piece.scores, len(nodes))
            if prompt.embeds is not None:
                embeds.append(prompt.embeds[span])
        logits, states = self(nodes, gather, torch.cat(embeds) if embeds else None, taps.hidden)
        scored, sizes = logits.split([piece.scores for piece in pieces]), [len(piece) for piece in pieces]
        hidden = {layer: state.split(sizes) for layer, state in states.items()}
        return [
            Scores(of_piece[None], {k: [v[i]] for k, v in hidden.items()}, [n - 1])
            for i, (of_piece, n) in enumerate(zip(scored, sizes, strict=True))
        ]

    def _counted(self, prompt: Prompt) -> list[int] | None:
        """The positions of a prompt's tokens, where they differ from their indices; else None."""
        return None

    def check_taps(self, taps: Taps) -> None:
        for layer in taps.hidden:
            layer_number(layer, len(self.program.outputs) - 1)
        if taps.hidden and not self.program.tapped:
            raise Refused(several_streams(type(self.model).__name__))

    def reduced(self, view: View) -> Reduction:
        """What passes under a view leave out.

        Raises:
            Refused: the view does not fit such a decoder, some of its layers read the keys and values of others, their
                halves cannot be skipped, or their weights cannot be rounded.
            NoRoom: copies of these do not fit in memory.
        """
        if view in self._reductions:
            return self._reductions[view]
        reduction = view.reduction(len(self.program.layer_types))
        if reduction.skips:
            check_own_keys(self.model)
        self._lists.check(reduction)
        if reduction.experts is not None:
            check_ops(type(self.model).__name__, self.program.ops, reduction.experts)
        try:
            self._of_bits(reduction.bits)
        except NotCompilable as why:
            raise Refused(f"{type(self.model).__name__} cannot run under {view.name}: {why}") from why
        attending = [op for op in self.program.ops if op.kind == OpKind.ATTEND]
        by_place = self.program.lean or self.program.biased or any(op.mode & 1 for op in attending)
        window = min((op.window for op in attending if op.window), default=None)
        if len(self._reductions) == VARIANTS:
            del self._reductions[next(iter(self._reductions))]
        self._reductions[view] = fitted(self.model, reduction, bool(by_place), window, bool(self._readable))
        return self._reductions[view]

    def round_entries(self, entries: Rounded, slots: Sequence[int]) -> None:
        whole, copies = self._whole, self._whole.rounded.get(entries)
        if copies is None and any(whole.lengths[slot] >= entries.recent + CHUNK for slot in slots):
            copies = whole.rounded[entries] = RoundedEntries(whole, self._readable, entries.bits, entries.recent)
        if copies is not None:
            for slot in slots:
                copies.follow(whole, slot)

    def queries(self, trees: Sequence[DraftTree]) -> list[Tensor]:
        p, nodes, names = self.program, Nodes(), list(self.program.widths)
        for slot, (length, tree) in enumerate(zip(self.cache.cursor.lengths, trees, strict=True)):
            nodes.add_tree(slot, length, tree.cut(1))
        attending = [(op, at) for op, at in zip(p.ops, p.layers, strict=True) if op.kind == OpKind.ATTEND]
        copies = (p.copying(names[op.src], len(names) + i) for i, (op, _) in enumerate(attending))
        ops: list[Op] = []
        for op in p.ops[: p.head_from]:
            ops += (next(copies), op) if op.kind == OpKind.ATTEND else (op,)
        seen = [floats(len(nodes), self._stride(names[op.src])) for op, _ in attending]
        logits = floats(0, self._stride("logits"))
        self._execute((Op * len(ops))(*ops), nodes, [], None, [logits, *seen], {})
        found: list[list[Tensor]] = [[] for _ in self.cache.layers]
        for (op, at), rows in zip(attending, seen, strict=True):
            queries = rows[:, : op.heads * op.step].unflatten(1, (op.heads, op.step))[..., : op.head] * op.scale
            found[at].append(queries.unflatten(1, (self.cache.layers[at].keys.shape[1], -1)))
        return [torch.cat(of_layer, 2) for of_layer in found]

    def score(self, trees: Sequence[DraftTree], taps: Taps, view: View | None = None) -> Scores:
        """The logits at every node of one tree per slot in use, of the whole model or under a view.

        Raises:
            Refused: see `reduced`.
        """
        reduction = WHOLE if view is None else self.reduced(view)
        nodes = Nodes()
        cursor = self.cache.cursor
        offsets = cursor.offsets or [0] * len(trees)
        for slot, (length, offset, tree) in enumerate(zip(cursor.lengths, offsets, trees, strict=True)):
            nodes.add_tree(slot, length, tree, offset)
        sizes = [len(tree) for tree in trees]
        width = max(sizes)
        inputs = embedded(self.model, trees, width, CPU)
        if inputs is not None:
            inputs = torch.cat([line[:size] for line, size in zip(inputs, sizes, strict=True)])
        shape, gather = (len(trees), width), range(len(nodes))
        if reduction.output_head:
            shape, gather = (len(trees), 0), range(0)
        if reduction.sparing is not None:
            nodes.whole = [*chain.from_iterable(cursor.warm(trees, reduction.sparing.warm))]
        logits, states = self(nodes, gather, inputs, taps.hidden, reduction, shape)
        if len(gather) < logits.shape[0] * logits.shape[1]:
            pad_in_place(logits, sizes)
        hidden = {layer: list(state.split(sizes)) for layer, state in states.items()}
        return Scores(logits, hidden, [0] * len(trees))

    def __call__(
        self, nodes: Nodes, gather: Sequence[int], embeds: Tensor | None = None, hidden: Sequence[int] = (),
        reduction: Reduction = WHOLE, shape: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:  # fmt: skip
        """Run the nodes.

        Args:
            gather: the nodes whose logits are returned.
            embeds: (nodes, H) instead of token ids.
            hidden: layers whose hidden states are returned, numbered as in `Taps`.
            reduction: what does not run.
            shape: sizes that the logits are returned in instead of len(gather); the rest is not written.

        Returns:
            fp32 logits (*shape, V), and the hidden states (nodes, H) by layer.

        Raises:
            Refused: there is no such layer.
        """
        kept = {layer: floats(len(nodes), self._stride("x")) for layer in hidden}
        further: dict[str, Sequence[int]] = {}
        before = []
        if reduction.spared:
            further["sparing"] = [*(-int(whole) for whole in nodes.whole or [False] * len(nodes)), 0]
            before = [floats(len(nodes), self._stride("x"))]
        logits = floats(*(shape or (len(gather),)), self._stride("logits"))
        if (copies := self._whole.rounded.get(reduction.entries)) is not None:
            further["rounded"] = copies.lengths
        beside = [torch.zeros(len(nodes), padded_to_16(width)) for width in self._lists.widths(reduction)]
        out = [logits, *kept.values(), *before, *beside]
        self._execute(self._ops(tuple(hidden), reduction), nodes, gather, embeds, out, further)
        if logits.shape[-1] > self._vocabulary:
            logits = logits[..., : self._vocabulary]
        return logits, {layer: kept[layer][:, : self._hidden] for layer in hidden}

    def _execute(
        self, ops: ctypes.Array[Op], nodes: Nodes, gather: Sequence[int], embeds: Tensor | None, out: Sequence[Tensor],
        further: Mapping[str, Sequence[int]], behind: FurtherPasses | None = None,
    ) -> None:  # fmt: skip
        """Run operations over the nodes.

        Args:
            out: fp32 buffers behind those of the program, the logits first.
            further: lists that some operations need. rounded: by slot, the first places that attention reads in fewer
                bits; sparing: see `Pass` in pass.c.
            behind: what further passes compute behind the nodes of `gather`.
        """
        n, m = len(nodes), len(gather)
        self._reserve(n)
        buffers = [*self._buffers, *[one.data_ptr() for one in out]]
        strides = [*self._strides[:-1], *[one.shape[-1] for one in out]]
        room = [*self._room, *[one.numel() for one in out]]
        embedded = None if embeds is None else embeds.float().contiguous()
        if embedded is not None and embedded.shape != (n, self._hidden):
            raise ValueError(f"embeddings {tuple(embedded.shape)} for {n} nodes of width {self._hidden}")
        numbers = {
            "nodes": n, "tail": m, "vocabulary": self.program.vocab_size, "capacity": self.cache.cursor.capacity,
            "embeds": 0 if embedded is None else embedded.data_ptr(), "groups": len(nodes.group_from) - 1,
            "longest": nodes.longest, "slots": self.cache.cursor.slots, "extras": len(nodes.extra),
            "buffers": len(buffers), "positions": self._whole.cursor.capacity,
        }  # fmt: skip
        lists = {
            "token": nodes.token, "slot": nodes.slot, "position": nodes.position, "place": nodes.place,
            "base": nodes.base, "extra_from": nodes.extra_from, "extra": nodes.extra,
            "extra_position": nodes.extra_position, "gather": gather, "group_from": nodes.group_from,
            "room": room, "buffer": buffers, "stride": strides, **further,
        }  # fmt: skip
        self._complete(nodes, numbers, lists)
        given = PassArguments.of(numbers, lists)
        passed = ops, len(ops), given, self._share, torch.get_num_threads()
        if behind is None:
            failure = self._run(*passed)
        else:
            failure = getattr(self._library, behind.function)(*passed, behind.arguments(len(self._buffers)))
        if failure == Failure.NO_MEMORY:
            raise MemoryError(f"no memory for the attention scores of {nodes.longest} positions")
        if failure:
            raise IndexError(Failure(failure).why)

    def _complete(self, nodes: Nodes, numbers: dict[str, int], lists: dict[str, Sequence[int]]) -> None:
        """Set further arguments, in subclasses; see `PassArguments.of`."""

    def _stride(self, name: str) -> int:
        return padded_to_16(self.program.widths[name])

    def _reserve(self, nodes: int) -> None:
        """Allocate buffers for that many nodes; zeros, because padding of a row must stay zero."""
        if nodes <= self._arena:
            return
        arena, self._arena, self._storage = buffer_rows(nodes, self._arena), 0, []  # freed first
        names, sizes = list(self.program.widths), buffers_of(self.program, arena)
        self._strides = [self._stride(name) for name in names]
        self._storage = [torch.zeros(sizes.get(name, (0, 0)), dtype=torch.float32) for name in names[:-1]]
        for name, (of, column) in self.program.parts.items():
            at, of_at = names.index(name), names.index(of)
            self._strides[at], self._storage[at] = self._strides[of_at], self._storage[of_at][:, column:]
        self._buffers = [s.data_ptr() for s in self._storage]  # without the logits, allocated per pass
        self._room = [len(s) * stride for s, stride in zip(self._storage, self._strides, strict=False)]
        self._arena = arena

    def _of_bits(self, bits: int) -> list[Op]:
        """All operations, those of linear layers with weights of so many bits, or where it is 0 as they are.

        Raises:
            NotCompilable, NoRoom: see `RoundedOps` and `rounded_copies`.
        """
        if not bits:
            return self.program.ops
        if bits not in self._rounded:
            copies = rounded_copies(self.model, bits)
            try:
                self._rounded[bits] = RoundedOps(self.program, self._compiled(copies), copies)
            except NotCompilable:
                copies.clear()
                raise
        return self._rounded[bits].ops

    def _ops(self, hidden: tuple[int, ...], reduction: Reduction) -> ctypes.Array[Op]:
        """The operations under a reduction, with a copy of "x" after each layer in `hidden`."""
        part = self._whole.rounded.get(reduction.entries) if self.cache is self._whole else self.cache
        key = hidden, reduction, part
        if key not in self._variants:
            ops = self._lists.ops(self._of_bits(reduction.bits), hidden, reduction, part)
            if len(self._variants) == VARIANTS:
                del self._variants[next(iter(self._variants))]
            self._variants[key] = (Op * len(ops))(*ops)
        return self._variants[key]
