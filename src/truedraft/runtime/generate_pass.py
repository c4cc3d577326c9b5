"""The compiled pass with the bits of `model.generate`, which reads its own text a token at a time.

It is the program of the compiled pass in which each operation that adds up does so in torch's order for a single token:
products, norms and attention. An activation in bf16 has 65,536 arguments: its results are a table, made by the model's
own function. Everything else in a program rounds where the model does, and has one order only. Orders are measured
(`orders.py`), and whether a whole model has the same bits is measured before the pass is used
(`targets/generates.py`). Prompts are read as `model.generate` reads them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from truedraft.caches.rows import RowCache
from truedraft.runtime import native
from truedraft.runtime.compiled import CompiledPass
from truedraft.runtime.native import Op, OpKind
from truedraft.runtime.orders import ALONE, BY_PAIRS, attention_mode, columns_alone, norms_as_torch
from truedraft.runtime.program import TABLED, Program
from truedraft.runtime.tokenwise import PromptsAlone
from truedraft.runtime.weights import Copies, NotCompilable, Weight, linear_weight
from truedraft.tree import Piece, Prompt, Scores, Taps
from truedraft.views._base import WHOLE, Reduction

IN_ONE_ORDER = {
    OpKind.EMBED, OpKind.PREPARE, OpKind.ADD, OpKind.GATHER, OpKind.SCALE, OpKind.CLAMP, OpKind.MULTIPLY,
}  # fmt: skip
BF16_NUMBERS = 1 << 16


class GeneratePass(CompiledPass):
    """The compiled pass of a model in bf16, with the bits of one token at a time.

    copied: makes the copies in panels that products read.

    Raises:
        NotCompilable: there is no compiled pass, or torch adds up in an order that it does not repeat.
    """

    name = "compiled pass with the bits of single tokens"

    def __init__(self, model: PreTrainedModel, layer_types: Sequence[str], copied: Copies):
        if not native.attends_alone():
            raise NotCompilable("there is no compiled attention for single tokens on this processor")
        self._prompts = PromptsAlone(model, layer_types, None)
        self.granularity = self._prompts.granularity
        self._threads = torch.get_num_threads()
        super().__init__(model, copied)

    def _compiled(self, copied: Copies | None) -> Program:
        program = super()._compiled(copied)
        if copied is self.copied:  # others are those of drafters, whose bits do not matter
            _order(program, self._layers())
        return program

    def _layers(self) -> dict[int, tuple[nn.Linear, Weight]]:
        """The linear layers and their panels, by the addresses of these."""
        assert self.copied is not None
        layers = [m for m in self.model.modules() if type(m) is nn.Linear]
        weights = [self.copied(linear_weight(layer, self.model.dtype)) for layer in layers]
        return {w.values.data_ptr(): (layer, w) for layer, w in zip(layers, weights, strict=True)}

    @property
    def changed(self) -> bool:
        """Whether orders were measured with another number of threads."""
        return self._threads != torch.get_num_threads()

    def _ops(self, hidden: tuple[int, ...], reduction: Reduction) -> ctypes.Array[Op]:
        ops = super()._ops(hidden, reduction)
        for op in ops if reduction != WHOLE else ():  # drafts, which may read other entries
            if op.kind == OpKind.ATTEND:
                op.mode &= ~(ALONE | BY_PAIRS)
        return ops

    def attach(self, cache: RowCache | None) -> None:
        super().attach(cache)
        self._prompts.attach(cache)

    def prefill(self, prompts: Sequence[Prompt], taps: Taps) -> Scores:
        self._prompts.on_read = self.on_read
        return _in_fp32(self._prompts.prefill(prompts, taps))

    def read_pieces(self, pieces: Sequence[Piece], taps: Taps) -> list[Scores]:
        return list(map(_in_fp32, self._prompts.read_pieces(pieces, taps)))


def _in_fp32(scores: Scores) -> Scores:
    """Scores as compiled passes return them."""
    hidden = {layer: [state.float() for state in states] for layer, states in scores.hidden.items()}
    return Scores(scores.logits.float(), hidden, scores.context)


def _order(program: Program, layers: dict[int, tuple[nn.Linear, Weight]]) -> None:
    """Have the operations of a program add up as torch does for a single token.

    Raises:
        NotCompilable: there is one that cannot.
    """
    for op in program.ops:
        kind = OpKind(op.kind)
        if kind in (OpKind.LINEAR, OpKind.GATED):
            _order_product(op, layers)
        elif kind == OpKind.ATTEND:
            _order_attention(op)
        elif kind == OpKind.RMS_NORM or (kind == OpKind.PREPARE and op.q_norm):
            _order_norm(op, op.inner if kind == OpKind.RMS_NORM else op.head)
        elif kind not in IN_ONE_ORDER:
            raise NotCompilable(f"the order of {kind.name} in torch is not known")
        if kind == OpKind.GATED:
            (name,) = program.activations
            table = table_of(name)
            program.kept.append(table)
            op.mode, op.values = TABLED, table.data_ptr()


def _order_product(op: Op, layers: dict[int, tuple[nn.Linear, Weight]]) -> None:
    both = [op.weight] if op.kind == OpKind.LINEAR else [op.weight, op.second]
    if any(weight not in layers or layers[weight][1].shape != (op.out, op.inner) for weight in both):
        raise NotCompilable("it has products of other weights than those of whole linear layers")
    columns = {columns_alone(*layers[weight]) for weight in both}
    first = columns.pop()
    if columns or first is None:
        raise NotCompilable(f"the order in which torch adds up {op.inner} columns for {op.out} results is not known")
    if first:
        op.groups, op.shift = -(-op.inner // first), first


def _order_norm(op: Op, width: int) -> None:
    if not norms_as_torch(width):
        raise NotCompilable(f"the order in which torch adds up the squares of {width} numbers is not known")
    op.mode |= ALONE


def _order_attention(op: Op) -> None:
    if op.mode or op.window or op.cap or op.sinks or op.bias or op.inner:
        raise NotCompilable("its attention has windows, biases, caps or sinks")
    mode = attention_mode(op.heads, op.kv_heads, op.head, op.scale)
    if mode is None:
        raise NotCompilable("the order in which torch adds up attention is not known")
    op.mode = mode


@cache
def table_of(activation: str) -> Tensor:
    """The results of an activation for every number in bf16, by its bits."""
    numbers = torch.arange(BF16_NUMBERS, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    with torch.no_grad():
        return ACT2FN[activation](numbers)
