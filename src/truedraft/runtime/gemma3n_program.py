"""The program of Gemma 3n, whose layers pass several hidden states of each token to each other.

A layer predicts all of them, computes the first, and corrects the others by it (Baykal et al., 2023, "Alternating
Updates for Efficient Transformers", arXiv 2301.13310). The first is "x", all are "streams".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from truedraft.runtime.blocks import final
from truedraft.runtime.gemma_programs import (
    attend,
    embed_by_layer,
    embedding_scale,
    read_own_embedding,
    reserve_by_layer,
    rounded,
    sources,
)
from truedraft.runtime.native import OpKind
from truedraft.runtime.program import Program
from truedraft.runtime.text import TextModel
from truedraft.runtime.weights import Derived, NotCompilable

LEAST = torch.tensor(1e-5)  # of the mean of the squares of a hidden state


def gemma3n(p: Program, model: Any) -> None:
    """Gemma 3n: beside attention a product of low rank; feed-forwards of their largest activations alone; norms,
    embeddings of layers and shared keys and values as in Gemma 4."""
    c, body = model.config, model.model
    if c.altup_active_idx != 0:
        raise NotCompilable("its layers do not compute the first of its hidden states")
    of, norm = sources(c), partial(p.rms_norm, once=True)
    p.tapped = False
    p.rotary = body.rotary_emb
    _reserve(p, c, body.layers[0].self_attn.head_dim)
    p.buffers(model, max(c.intermediate_size), p.widths["q"], p.widths["k"])
    p.embed(model.get_input_embeddings(), embedding_scale(model.get_input_embeddings(), p))
    if isinstance(model, TextModel):
        _embed_soft(p, model.whole.model)
    embed_by_layer(p, model)
    for stream, projection in _others(body.altup_projections):
        p.linear("x", "t", projection)
        _match(p, stream)
    p.outputs = [len(p.ops) - 1]
    for i, layer in enumerate(body.layers):
        altup = layer.altup
        _mix(p, "x", altup, altup.prediction_coefs, "streams", c.altup_num_inputs)
        _compute(p, layer, partial(attend, p, "h", of[i], layer.self_attn, c), c.hidden_activation)
        p.copy("x", "before", -1.0)
        p.add("t", "before", "before")
        _mix(p, "t", altup, altup.correction_coefs, "before", 1, added=1.0)
        src = "x"
        if c.altup_correct_scale:
            src, scale = "before", p.small(altup.correct_output_scale)
            p.op(OpKind.SCALE, src="x", dst=src, inner=c.hidden_size, other_bias=scale)
        read_own_embedding(p, src, layer, i, c.hidden_activation)
        norm("t", "t", layer.post_per_layer_input_norm)
        for stream, _ in _others(body.altup_projections):
            p.add("t", stream, stream)
        p.outputs.append(len(p.ops) - 1)
    for stream, projection in _others(body.altup_unembed_projections):
        p.linear(stream, "t", projection)
        _match(p, stream)
    count = c.altup_num_inputs
    mean = p.small(torch.full((count,), 1 / count))
    p.op(OpKind.MIX, src="streams", dst="x", bias=mean, heads=count, kv_heads=1, head=c.hidden_size)
    final(p, model, norm, c.final_logit_softcapping or 0.0)


def _embed_soft(p: Program, whole: Any) -> None:
    """The embeddings of tokens that stand for images and sounds."""
    vision, audio = whole.embed_vision, whole.embed_audio
    first, second, count = vision.vocab_offset, audio.vocab_offset, p.vocab_size
    if first >= count:
        return
    if not first < second <= first + vision.vocab_size or not second < count <= second + audio.vocab_size:
        raise NotCompilable("its tokens of images and sounds are not those of their tables")

    @torch.no_grad()
    def made() -> Tensor:
        parts = ((vision, torch.arange(first, second)), (audio, torch.arange(second, count)))
        return torch.cat([embedder(input_ids=ids) for embedder, ids in parts]).contiguous()

    table = Derived(made, [*vision.parameters(), *audio.parameters()])
    p.derived.append(table)
    p.ops[0].heads, p.ops[0].offsets = first, table.tensor.data_ptr()


def _others(projections: Iterable[Any]) -> Iterable[tuple[str, Any]]:
    """The hidden states beside the first, and what each of them has."""
    return ((f"stream {i}", projection) for i, projection in enumerate(projections, 1))


def _reserve(p: Program, c: Any, head: int) -> None:
    wide, count = c.hidden_size, c.altup_num_inputs
    reserve_by_layer(p, c)
    p.buffer("streams", count * wide)
    for i in range(count):
        p.part(f"stream {i}" if i else "x", "streams", i * wide, wide)
    for name, width in (
        ("laurel", wide), ("before", wide), ("low", c.laurel_rank), ("router", count), ("factors", count * count),
        ("up", max(c.intermediate_size)), ("q", c.num_attention_heads * head), ("k", c.num_key_value_heads * head),
    ):  # fmt: skip
        p.buffer(name, width)


def _match(p: Program, stream: str) -> None:
    """The row in "t" brought to the magnitude of "x"."""
    p.op(OpKind.MATCH, src="t", other="x", dst=stream, inner=p.widths["t"], eps=rounded(LEAST, p))


def _mix(p: Program, judged: str, altup: Any, factors: Any, src: str, parts: int, added: float = 0.0) -> None:
    """Add hidden states to all, by factors made of one.

    src, parts: where those that are added are, and how many. added: to the factors.
    """
    count = altup.config.altup_num_inputs
    p.rms_norm(judged, "h", altup.router_norm, once=True)
    p.copy("h", "h", rounded(altup.router_input_scale, p))
    p.linear("h", "router", altup.modality_router)
    p.op(OpKind.CAP, src="router", dst="router", inner=count, cap=1.0)
    p.linear("router", "factors", factors)
    p.op(
        OpKind.MIX, src=src, other="factors", dst="streams", heads=parts, kv_heads=count, head=p.widths["x"], mode=1,
        eps=added,
    )  # fmt: skip


def _compute(p: Program, layer: Any, attention: Callable[[], None], activation: str) -> None:
    """What a layer makes of "x"; in "t"."""
    norm = partial(p.rms_norm, once=True)
    norm("x", "h", layer.input_layernorm)
    p.linear("h", "low", layer.laurel.linear_left)
    p.linear("low", "laurel", layer.laurel.linear_right)
    norm("laurel", "laurel", layer.laurel.post_laurel_norm)
    p.add("h", "laurel", "laurel")
    attention()
    p.linear("a", "t", layer.self_attn.o_proj)
    norm("t", "t", layer.post_attention_layernorm)
    p.add("x", "t", "t")
    p.add("t", "laurel", "before")
    p.copy("before", "before", 2**-0.5)
    norm("before", "h", layer.pre_feedforward_layernorm)
    _largest(p, "h", layer.mlp, activation)
    p.linear("g", "t", layer.mlp.down_proj)
    norm("t", "t", layer.post_feedforward_layernorm)
    p.add("before", "t", "t")


def _largest(p: Program, src: str, mlp: Any, activation: str) -> None:
    """A gated feed-forward whose gates are their largest numbers alone, where it says so; in "g"."""
    if mlp.activation_sparsity == 0.0:
        p.gated(src, mlp, activation)
        return
    width = mlp.down_proj.in_features
    spreads = torch.distributions.Normal(0, 1).icdf(torch.tensor(mlp.activation_sparsity))
    p.linear(src, "g", mlp.gate_proj, wait=False)
    p.linear(src, "up", mlp.up_proj)
    p.op(OpKind.EXCEED, src="g", dst="g", inner=width, scale=rounded(spreads, p))
    p.op(OpKind.ACTIVATE, src="g", dst="g", inner=width, mode=p.activation(activation))
    p.op(OpKind.MULTIPLY, src="g", other="up", dst="g", inner=width)
