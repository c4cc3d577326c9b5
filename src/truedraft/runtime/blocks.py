"""What the programs of architectures share: blocks of attention and a feed-forward, and kinds of feed-forwards."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor

from truedraft.runtime import mixtures
from truedraft.runtime.program import Program

Norm = Callable[[str, str, Any], None]
Feed = Callable[[str, Any], Any]
Attend = Callable[[str, int, Any], str]  # of what it reads, the layer and its attention; returns the result's buffer

# The norms of a block, by their names: before and after attention, before and after the feed-forward.
Norms = tuple[str | None, str | None, str | None, str | None]
BEFORE: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
AFTER: Norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
AROUND: Norms = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)  # fmt: skip
OF_GLM: Norms = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def blocks(
    p: Program, model: Any, norm: Norm, feed: Feed, norms: Norms = BEFORE, scale: float = 1.0,
    whole: Norm | None = None, clip: float | None = None, mixed: Attend | None = None,
    after: Callable[[int, Any], None] | None = None, **attending: Any,
) -> None:  # fmt: skip
    """Blocks of attention and then a feed-forward, each with norms around it and added to the residual.

    feed: writes the hidden activations of a layer's feed-forward to "g", and returns the linear layer after them; or
        writes its whole result to "t", and returns None. Its arguments are the buffer that it reads and the layer.
    norms: the names of the norms; None where there is none.
    scale: factor on the output of each block.
    whole, clip: see `Program.qkv`.
    mixed: another attention than that of `Program.qkv` and `Program.attend`.
    after: appends what follows the feed-forward, from the layer's number and the layer.
    attending: further arguments of `Program.attend`.
    """
    c = model.config
    before_attention, after_attention, before_feed, after_feed = norms

    def enter(layer: Any, name: str | None) -> str:
        if name is None:
            return "x"
        norm("x", "h", getattr(layer, name))
        return "h"

    def leave(layer: Any, name: str | None, src: str, last: Any) -> None:
        if name is None and last is not None:
            p.linear(src, "x", last, add=True, scale=scale)
            return
        if last is not None:
            p.linear(src, "t", last)
        if name is not None:
            norm("t", "t", getattr(layer, name))
        if scale != 1.0:
            p.copy("t", "t", scale)
        p.add("x", "t", "x")

    for i, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        src, result = enter(layer, before_attention), "a"
        if mixed is not None:
            result = mixed(src, i, attention)
        else:
            p.qkv(src, attention, c, whole, clip)
            p.attend(i, attention, c, **attending)
        leave(layer, after_attention, result, attention.o_proj)
        leave(layer, after_feed, "g", feed(enter(layer, before_feed), layer))
        if after is not None:
            after(i, layer)
        p.outputs.append(len(p.ops) - 1)


def gate(p: Program, activation: str) -> Feed:
    """Gated feed-forwards."""

    def feed(src: str, layer: Any) -> Any:
        p.gated(src, layer.mlp, activation)
        return layer.mlp.down_proj

    return feed


def ungated(p: Program, activation: str, first: str = "up_proj", last: str = "down_proj") -> Feed:
    """Feed-forwards without a gate; the names of their layers."""

    def feed(src: str, layer: Any) -> Any:
        p.activated(src, getattr(layer.mlp, first), activation)
        return getattr(layer.mlp, last)

    return feed


def experts(
    p: Program, activation: str, exact: bool = False, routing: mixtures.Routing | None = None,
    of: Callable[[Any], Any] = attrgetter("mlp"),
) -> Feed:  # fmt: skip
    """Mixtures of experts, gated feed-forwards among them; see `mixtures.routed`. of: that of a layer."""

    def feed(src: str, layer: Any) -> Any:
        mlp = of(layer)
        if hasattr(mlp, "experts"):
            mixtures.routed(p, src, mlp, activation, exact, routing)
            return None
        p.gated(src, mlp, activation)
        return mlp.down_proj

    return feed


def spread(rotary: Any) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """The tables of a rotary embedding whose cosines are those of two halves, for neighbours that rotate together."""

    def tables(like: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            table[..., : table.shape[-1] // 2].repeat_interleave(2, -1) for table in rotary(like, positions)
        )  # fmt: skip

    return tables


def complexes_of(rotary: Any) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """The tables of a rotary embedding that gives complex numbers, one for each pair of neighbours."""

    def tables(like: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        turns = rotary(like, positions)
        return turns.real.repeat_interleave(2, -1), turns.imag.repeat_interleave(2, -1)

    return tables


def rotate_by_layer(p: Program, model: Any) -> None:
    """The rotary embedding of each layer, where each has its own base or zero, for none."""
    if hasattr(model.model, "rotary_embs"):
        bases, by_base = model.config.layer_rope_theta, model.model.rotary_embs
        p.rotaries = {
            i: r for i, base in enumerate(bases) for r in by_base if r.config.rope_parameters["rope_theta"] == base
        }
        p.unrotated = set(range(len(bases))) - set(p.rotaries)


def final(p: Program, model: Any, norm: Norm, cap: float = 0.0, scale: float = 1.0) -> None:
    """The final norm and the output head."""
    p.end(model, lambda src, dst: norm(src, dst, model.model.norm), cap, scale)
