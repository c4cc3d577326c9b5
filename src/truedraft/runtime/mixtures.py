"""Operations of mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from truedraft.runtime.native import Form, OpKind
from truedraft.runtime.program import SIGMOID, Program
from truedraft.runtime.weights import NotCompilable, Weight, plain


def reserve(p: Program, mlps: Iterable[Any]) -> None:
    """Buffers for feed-forwards, some of them mixtures of experts."""
    for mlp in mlps:
        dense = mlp
        if hasattr(mlp, "experts"):
            count, hidden, inner = _mixture(mlp)
            p.buffer("router", count)
            p.buffer("routing", mlp.gate.top_k)
            p.buffer("dealt", hidden, mlp.gate.top_k)
            p.buffer("inner", inner, mlp.gate.top_k)
            p.buffer("shared", 1)
            dense = getattr(mlp, "shared_expert", None)
        if dense is not None:
            p.buffer("g", dense.down_proj.in_features)


def routed(p: Program, src: str, mlp: Any, activation: str, exact: bool = False, **routing: Any) -> None:
    """A mixture of experts; the result is in "t", and "h" is overwritten.

    exact: in a bf16 model, routing weights and their products are not rounded before the sum.
    routing: fields of the operation that chooses experts.
    """
    count, hidden, inner = _mixture(mlp)
    both, last, rows = (plain(w, p.dtype) for w in (mlp.experts.gate_up_proj, mlp.experts.down_proj, mlp.gate.weight))
    # all experts' weights are one matrix, of which the operations are given the first expert's rows
    copy = p.copy_of if inner % 16 == hidden % 16 == 0 else Weight.itself
    gate_up, downs = (copy(Weight(w.flatten(0, 1), None, None)) for w in (both, last))
    parts = gate_up.part(0, inner), gate_up.part(inner, 2 * inner), downs.part(0, hidden)
    gate, up, down, router = map(p.read, (*parts, p.copy_of(Weight(rows, None, None))))
    shared, shared_gate = getattr(mlp, "shared_expert", None), getattr(mlp, "shared_expert_gate", None)
    to: dict[str, Any] = dict(experts=count, top=mlp.gate.top_k)
    p.op(OpKind.LINEAR, src=src, dst="router", **router, wait=shared is None)
    if shared_gate is not None:
        p.linear(src, "shared", shared_gate, wait=False)
    if shared is not None:
        p.gated(src, shared, activation)
    if shared_gate is not None:
        p.op(OpKind.ACTIVATE, src="shared", dst="shared", inner=1, mode=SIGMOID, wait=False)
    p.op(
        OpKind.ROUTE, src="router", dst="routing",
        **{"mode": getattr(mlp.gate, "norm_topk_prob", True), "narrow": p.narrow and not exact, **routing}, **to,
    )  # fmt: skip
    p.op(OpKind.PLAN, **to)
    p.op(OpKind.DEAL, src=src, dst="dealt", inner=hidden, **to)
    p.op(
        OpKind.GATED, src="dealt", dst="inner", **gate, second=up["weight"], mode=p.activation(activation),
        apart=2 * inner, **to,
    )  # fmt: skip
    if shared is not None:
        p.linear("g", "h", shared.down_proj, wait=False)
    p.op(OpKind.LINEAR, src="inner", dst="dealt", **down, apart=hidden, **to)
    p.op(OpKind.COMBINE, src="dealt", other="routing", dst="t", inner=hidden, mode=exact, **to)
    if shared_gate is not None:
        p.op(OpKind.COMBINE, src="h", other="shared", dst="h", inner=hidden, top=1)
    if shared is not None:
        p.add("t", "h", "t")


def by_sigmoids(p: Program, router: Any, bias: Tensor | None, eps: float) -> dict[str, Any]:
    """Fields of an operation that chooses experts by sigmoids.

    bias: added to these where the experts are chosen.
    eps: added to the sum by which the weights are divided.
    """
    rounded = bias is not None and bias.dtype == torch.bfloat16
    return dict(
        mode=2 + bool(router.norm_topk_prob), bias=p.small(bias), form=Form.BF16 if rounded else Form.FLOAT, eps=eps,
        scale=router.routed_scaling_factor,
    )  # fmt: skip


def clamped(p: Program, src: str, mlp: Any) -> None:
    """A mixture of experts with biases and weights (in, out), whose gates are clamped; the result is in "t"."""
    router, experts = mlp.router, mlp.experts
    both, last, rows = (plain(w, p.dtype) for w in (experts.gate_up_proj, experts.down_proj, router.weight))
    count, inner, hidden = last.shape
    if both.shape != (count, hidden, 2 * inner) or rows.shape != (count, hidden) or inner % 8 or hidden % 8:
        raise NotCompilable("its experts are not of the sizes of its router, or of multiples of eight")
    p.kept += [both, last]
    to: dict[str, Any] = dict(experts=count, top=router.top_k)
    form = Form.BF16 if p.narrow else Form.FLOAT
    p.op(OpKind.LINEAR, src=src, dst="router", **p.read(p.copy_of(Weight(rows, None, router.bias))))
    p.op(OpKind.ROUTE, src="router", dst="routing", mode=True, **to)
    p.op(OpKind.PLAN, **to)
    p.op(OpKind.DEAL, src=src, dst="dealt", inner=hidden, **to)
    p.op(
        OpKind.COLUMNS, src="dealt", dst="both", weight=both.data_ptr(), inner=hidden, out=2 * inner, form=form,
        apart=2 * inner, bias=p.small(experts.gate_up_proj_bias.flatten()), bias_last=True, **to,
    )  # fmt: skip
    p.op(OpKind.GLU, src="both", dst="inner", inner=inner, scale=experts.alpha, cap=experts.limit, **to)
    p.op(
        OpKind.COLUMNS, src="inner", dst="dealt", weight=last.data_ptr(), inner=inner, out=hidden, form=form,
        apart=hidden, bias=p.small(experts.down_proj_bias.flatten()), bias_last=True, **to,
    )  # fmt: skip
    p.op(OpKind.COMBINE, src="dealt", other="routing", dst="t", inner=hidden, **to)


def _mixture(mlp: Any) -> tuple[int, int, int]:
    """Number of experts of a mixture, their input size and their hidden size."""
    for part in (mlp.gate, mlp.experts):
        if not type(part).__module__.startswith("transformers.models."):
            raise NotCompilable(f"it has a {type(part).__name__} among its experts")
    both, down, router = mlp.experts.gate_up_proj, mlp.experts.down_proj, mlp.gate.weight
    count, hidden = router.shape
    if both.ndim != 3 or both.shape != (count, 2 * down.shape[-1], hidden) or down.shape[:2] != (count, hidden):
        raise NotCompilable("its experts are not of the sizes of its router")
    return count, hidden, down.shape[-1]
