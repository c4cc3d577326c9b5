"""Operations of mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from truedraft.runtime.native import Form, OpKind
from truedraft.runtime.program import SIGMOID, Program
from truedraft.runtime.weights import NotCompilable, Weight, matrix, pair, plain

Routing = Callable[[Program, Any], dict[str, Any]]  # from a router in fp32, the fields of ROUTE


def reserve(p: Program, mlps: Iterable[Any]) -> None:
    """Buffers for feed-forwards, some of them mixtures of experts."""
    for mlp in mlps:
        dense = mlp
        if hasattr(mlp, "experts"):
            count, hidden, inner = _mixture(mlp)
            p.buffer("router", count)
            p.buffer("routing", max(mlp.gate.top_k, getattr(mlp.gate, "num_group", None) or 0))
            p.buffer("dealt", hidden, mlp.gate.top_k)
            p.buffer("inner", inner, mlp.gate.top_k)
            p.buffer("shared", 1)
            dense = _beside(mlp)
        if dense is not None:
            p.buffer("g", dense.down_proj.in_features)


def corrected(p: Program, gate: Any) -> dict[str, Any]:
    """The router of DeepSeek 3: sigmoids, a correction for the choice, groups of experts judged by the best two."""
    return dict(
        bias=p.small(gate.e_score_correction_bias), mode=2 + bool(gate.norm_topk_prob), norm_once=True, eps=1e-20,
        scale=float(gate.routed_scaling_factor), **_groups(gate, 2),
    )  # fmt: skip


def balanced(p: Program, gate: Any) -> dict[str, Any]:
    """The router of ERNIE 4.5: a softmax, and a correction for the choice."""
    return dict(
        bias=p.small(gate.moe_statics.e_score_correction_bias[0]), mode=1, norm_once=True, cap=float(gate.norm_min)
    )


def by_scores(p: Program, gate: Any) -> dict[str, Any]:
    """The router of Kolibri 1: sigmoids of corrected scores, without the correction."""
    return dict(bias=p.small(gate.e_score_correction_bias), mode=6 + bool(gate.norm_topk_prob), norm_once=True)


def uncorrected(p: Program, gate: Any) -> dict[str, Any]:
    """The router of Flint: sigmoids."""
    return dict(mode=2 + bool(gate.norm_topk_prob), norm_once=True)


def limited(p: Program, gate: Any) -> dict[str, Any]:
    """The router of DeepSeek 2: a softmax, perhaps within the groups of the best experts."""
    if gate.topk_method not in ("greedy", "group_limited_greedy"):
        raise NotCompilable(f"its experts are chosen by {gate.topk_method}")
    groups = _groups(gate, 1) if gate.topk_method == "group_limited_greedy" else {}
    return dict(mode=0, norm_once=True, scale=float(gate.routed_scaling_factor), **groups)


def one_by_one(p: Program, gate: Any) -> dict[str, Any]:
    """The router of PhiMoE: two experts, each by a softmax over those whose scores are close to the best one left."""
    if gate.top_k != 2:
        raise NotCompilable(f"it has {gate.top_k} experts per token, not two")
    return dict(mode=4, eps=2 * gate.jitter)


def _groups(gate: Any, judged: int) -> dict[str, Any]:
    """Groups of experts, of which a router keeps some; judged: experts that a group is judged by."""
    count, groups, kept = len(gate.weight), gate.num_group, gate.topk_group
    if count % groups or count // groups < judged or kept * (count // groups) < gate.top_k:
        raise NotCompilable("its groups of experts are too small")
    return dict(heads=groups, kv_heads=kept, window=judged) if kept < groups else {}


def routed(
    p: Program, src: str, mlp: Any, activation: str, exact: bool = False, routing: Routing | None = None,
    judged: str | None = None, **chosen: Any,
) -> None:  # fmt: skip
    """A mixture of experts; the result is in "t", and "h" is overwritten.

    exact: in a bf16 model, routing weights and their products are not rounded before the sum.
    routing: of a router that computes in fp32, from scores that are rounded where it says so; None for scores in the
        model's dtype.
    judged: the buffer that the router reads, if another than `src`.
    chosen: fields of ROUTE for these; by default those of a softmax.
    """
    count, hidden, inner = _mixture(mlp)
    both, last = (matrix(w, p.dtype) for w in (mlp.experts.gate_up_proj, mlp.experts.down_proj))
    scores = mlp.gate.weight
    rows = plain(scores, torch.float32 if routing and scores.dtype == torch.float32 else p.dtype)
    # all experts' weights are one matrix, of which the operations are given the first expert's rows
    copy = p.copy_of if inner % 16 == hidden % 16 == 0 else Weight.itself
    gate_up, downs = map(copy, (both, last))
    parts = gate_up.part(0, inner), gate_up.part(inner, 2 * inner), downs.part(0, hidden)
    gate, up, down, router = map(p.read, (*parts, p.copy_of(Weight(rows, None, None))))
    shared, shared_gate = _beside(mlp), getattr(mlp, "shared_expert_gate", None)
    rounded = p.narrow and (routing is None or getattr(mlp.gate, "rounded", False))
    to: dict[str, Any] = dict(experts=count, top=mlp.gate.top_k)
    p.op(OpKind.LINEAR, src=judged or src, dst="router", **router, wait=shared is None, narrow=rounded)
    if shared_gate is not None:
        p.linear(src, "shared", shared_gate, wait=False)
    if shared is not None:
        p.gated(src, shared, activation)
    if shared_gate is not None:
        p.op(OpKind.ACTIVATE, src="shared", dst="shared", inner=1, mode=SIGMOID, wait=False)
    given = routing(p, mlp.gate) if routing else {"mode": getattr(mlp.gate, "norm_topk_prob", True), **chosen}
    p.op(OpKind.ROUTE, src="router", dst="routing", narrow=p.narrow and not exact, **given, **to)
    p.op(OpKind.PLAN, **to)
    p.op(OpKind.DEAL, src=src, dst="dealt", inner=hidden, **to)
    p.op(
        OpKind.GATED, src="dealt", dst="inner", **pair(gate, up), mode=p.activation(activation), apart=2 * inner,
        **to,
    )  # fmt: skip
    if shared is not None:
        p.linear("g", "h", shared.down_proj, wait=False)
    p.op(OpKind.LINEAR, src="inner", dst="dealt", **down, apart=hidden, **to)
    p.op(OpKind.COMBINE, src="dealt", other="routing", dst="t", inner=hidden, mode=exact, **to)
    if (factor := getattr(mlp, "factor", 1.0)) != 1.0:
        p.copy("t", "t", factor)
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


def reserve_ungated(p: Program, moe: Any) -> None:
    """Buffers for `ungated`."""
    count, inner, hidden = moe.experts.up_proj.shape
    for name, width, rows in (
        ("router", count, 1), ("routing", moe.gate.top_k, 1), ("dealt", hidden, moe.gate.top_k),
        ("inner", inner, moe.gate.top_k), ("g", moe.shared_experts.up_proj.out_features, 1),
    ):  # fmt: skip
        p.buffer(name, width, rows)


def ungated(p: Program, src: str, moe: Any, activation: str) -> None:
    """A mixture of experts without gates, chosen in fp32, beside a feed-forward; the result is in "t", and "h" is
    overwritten."""
    experts, router = moe.experts, moe.gate
    first, last = (matrix(w, p.dtype) for w in (experts.up_proj, experts.down_proj))
    rows = plain(router.weight, p.dtype)
    count, inner, hidden = experts.up_proj.shape
    if experts.down_proj.shape != (count, hidden, inner) or rows.shape != (count, hidden) or p.widths["h"] != hidden:
        raise NotCompilable("its experts are not of the sizes of its router")
    if router.num_group != 1:
        raise NotCompilable("its experts are chosen by groups")
    if not type(experts).__module__.startswith("transformers.models."):
        raise NotCompilable(f"it has a {type(experts).__name__} among its experts")
    copy = p.copy_of if inner % 16 == hidden % 16 == 0 else Weight.itself
    up, down = (p.read(copy(w).part(0, n)) for w, n in ((first, inner), (last, hidden)))
    to: dict[str, Any] = dict(experts=count, top=router.top_k)
    chosen = by_sigmoids(p, router, router.e_score_correction_bias, 1e-20) | {"form": Form.FLOAT}
    p.op(OpKind.LINEAR, src=src, dst="router", **p.read(p.copy_of(Weight(rows, None, None))), narrow=False, wait=False)
    p.activated(src, moe.shared_experts.up_proj, activation)
    p.op(OpKind.ROUTE, src="router", dst="routing", narrow=False, **chosen, **to)
    p.op(OpKind.PLAN, **to)
    p.op(OpKind.DEAL, src=src, dst="dealt", inner=hidden, **to)
    p.op(OpKind.LINEAR, src="dealt", dst="inner", **up, apart=inner, **to)
    p.op(OpKind.ACTIVATE, src="inner", dst="inner", inner=inner, mode=p.activation(activation), **to)
    p.linear("g", "h", moe.shared_experts.down_proj, wait=False)
    p.op(OpKind.LINEAR, src="inner", dst="dealt", **down, apart=hidden, **to)
    p.op(OpKind.COMBINE, src="dealt", other="routing", dst="t", inner=hidden, mode=True, **to)
    p.add("t", "h", "t")


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


def reserve_columns(p: Program, moe: Any) -> None:
    """Buffers for `by_columns`."""
    count, inner, hidden = moe.experts.down_proj.shape
    top, shared = moe.router.top_k, _beside(moe)
    for name, width, rows in (
        ("router", count, 1), ("routing", top, 1), ("dealt", hidden, top), ("inner", inner, top), ("both", inner, top),
        ("g", shared.down_proj.in_features, 1),
    ):  # fmt: skip
        p.buffer(name, width, rows)


def by_columns(p: Program, src: str, moe: Any, activation: str, inputs: bool, experts_activation: str) -> None:
    """A mixture of experts with weights (in, out), beside a feed-forward; the result is in "t", and "h" is overwritten.

    inputs: those of experts are scaled by the sigmoids of their scores, not their outputs by a softmax over them.
    """
    experts, shared = moe.experts, _beside(moe)
    both, last, rows = (plain(w, p.dtype) for w in (experts.gate_up_proj, experts.down_proj, moe.router.weight))
    count, inner, hidden = last.shape
    if both.shape != (count, hidden, 2 * inner) or rows.shape != (count, hidden) or inner % 8 or hidden % 8:
        raise NotCompilable("its experts are not of the sizes of its router, or of multiples of eight")
    p.kept += [both, last]
    to: dict[str, Any] = dict(experts=count, top=moe.router.top_k)
    form = Form.BF16 if p.narrow else Form.FLOAT
    p.op(OpKind.LINEAR, src=src, dst="router", **p.read(p.copy_of(Weight(rows, None, None))), wait=False)
    p.gated(src, shared, activation)
    p.op(OpKind.ROUTE, src="router", dst="routing", mode=6 if inputs else 1, **to)
    p.op(OpKind.PLAN, **to)
    p.op(OpKind.DEAL, src=src, other="routing", dst="dealt", inner=hidden, mode=inputs, **to)
    for dst, first in (("inner", 0), ("both", inner)):
        p.op(
            OpKind.COLUMNS, src="dealt", dst=dst, weight=both[..., first:].data_ptr(), inner=hidden, out=inner,
            form=form, apart=2 * inner, wait=first > 0, **to,
        )  # fmt: skip
    p.op(OpKind.ACTIVATE, src="inner", dst="inner", inner=inner, mode=p.activation(experts_activation), **to)
    p.op(OpKind.MULTIPLY, src="inner", other="both", dst="inner", inner=inner, **to)
    p.linear("g", "h", shared.down_proj, wait=False)
    p.op(
        OpKind.COLUMNS, src="inner", dst="dealt", weight=last.data_ptr(), inner=inner, out=hidden, form=form,
        apart=hidden, **to,
    )  # fmt: skip
    p.op(OpKind.COMBINE, src="dealt", other="routing", dst="t", inner=hidden, mode=2 * inputs, **to)
    p.add("t", "h", "t")


def of_granite(layer: Any) -> Any:
    """The feed-forward of a layer of Granite by the names of others: a mixture, perhaps beside a feed-forward, or that
    alone."""
    moe, shared = layer.block_sparse_moe, getattr(layer, "shared_mlp", None)
    if shared is not None:
        shared = SimpleNamespace(gate_up_proj=shared.input_linear, down_proj=shared.output_linear)
    return shared if moe is None else SimpleNamespace(gate=moe.router, experts=moe.experts, shared_expert=shared)


def of_jamba(layer: Any) -> Any:
    """The feed-forward of a layer of Jamba by the names of others."""
    moe = layer.feed_forward
    return SimpleNamespace(gate=moe.router, experts=moe.experts) if hasattr(moe, "experts") else moe


def with_correction(layer: Any) -> Any:
    """The feed-forward of a layer by the names of DeepSeek 3, where a mixture and not its router has the correction."""
    mlp = layer.mlp
    correction = getattr(mlp, "e_score_correction_bias", getattr(mlp, "expert_bias", None))
    if correction is None:
        return mlp
    router = getattr(mlp, "router", None) or mlp.gate
    scale = getattr(router, "router_scaling_factor", None)  # HY 3, which does not round scores
    gate = SimpleNamespace(
        weight=getattr(router, "gate", router).weight, top_k=router.top_k, e_score_correction_bias=correction,
        norm_topk_prob=True, routed_scaling_factor=getattr(router, "route_scale", 1.0) if scale is None else scale,
        num_group=1, topk_group=1, rounded=scale is None,
    )  # fmt: skip
    return SimpleNamespace(gate=gate, experts=mlp.experts, shared_experts=getattr(mlp, "shared_experts", None))


def of_laguna(layer: Any) -> Any:
    """The feed-forward of a layer of Laguna by the names of others; factor: of what the experts give."""
    mlp = layer.mlp
    if not hasattr(mlp, "experts"):
        return mlp
    if mlp.gate.router_logit_softcapping > 0:
        raise NotCompilable("the scores of its experts are capped")
    gate = SimpleNamespace(
        weight=mlp.gate.weight, top_k=mlp.gate.top_k, e_score_correction_bias=mlp.gate.e_score_correction_bias,
        norm_topk_prob=True, routed_scaling_factor=1.0, num_group=1, topk_group=1, rounded=True,
    )  # fmt: skip
    factor = mlp.routed_scaling_factor
    return SimpleNamespace(gate=gate, experts=mlp.experts, shared_experts=mlp.shared_experts, factor=factor)


def of_phi(layer: Any) -> Any:
    """The mixture of a layer of PhiMoE by the names of others."""
    router = layer.mlp.router
    gate = SimpleNamespace(weight=router.weight, top_k=router.top_k, jitter=router.router_jitter_noise, rounded=True)
    return SimpleNamespace(gate=gate, experts=layer.mlp.experts)


def of_hunyuan(layer: Any) -> Any:
    """The feed-forward of a layer of HunYuan by the names of others."""
    mlp = layer.mlp
    if not hasattr(mlp, "experts"):
        return mlp
    gate = SimpleNamespace(weight=mlp.gate.wg.weight, top_k=mlp.gate.top_k)
    return SimpleNamespace(gate=gate, experts=mlp.experts, shared_expert=mlp.shared_mlp)


def _beside(mlp: Any) -> Any:
    """The feed-forward beside a mixture's experts, or None."""
    return getattr(mlp, "shared_expert", None) or getattr(mlp, "shared_experts", None)


def _mixture(mlp: Any) -> tuple[int, int, int]:
    """Number of experts of a mixture, their input size and their hidden size."""
    for part in (mlp.gate, mlp.experts):
        if type(part) is not SimpleNamespace and not type(part).__module__.startswith("transformers.models."):
            raise NotCompilable(f"it has a {type(part).__name__} among its experts")
    both, down, router = mlp.experts.gate_up_proj, mlp.experts.down_proj, mlp.gate.weight
    count, hidden = router.shape
    if both.ndim != 3 or both.shape != (count, 2 * down.shape[-1], hidden) or down.shape[:2] != (count, hidden):
        raise NotCompilable("its experts are not of the sizes of its router")
    return count, hidden, down.shape[-1]
