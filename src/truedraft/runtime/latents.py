"""Multi-head latent attention: the cache keeps latents that keys and values of all heads are made of.

The keys of a head are never made: a query is multiplied by the matrix that would make them, and compared with the
latents; their mean, by the weights of the attention, is multiplied by the matrix that would make the values.
"""

from __future__ import annotations

import math
from typing import Any

from truedraft.runtime.blocks import Attend, complexes_of
from truedraft.runtime.native import Form, OpKind
from truedraft.runtime.program import Program
from truedraft.runtime.weights import NotCompilable, plain

TASKS = 8  # parts of the heads that threads share


def attention(p: Program, model: Any) -> Attend:
    """Buffers, and what appends the attention of a layer; its result is in "v"."""
    c = model.config
    heads, latents, rotated, plain_part = (
        c.num_attention_heads, c.kv_lora_rank, c.qk_rope_head_dim, c.qk_nope_head_dim
    )  # fmt: skip
    value, query, wide = c.v_head_dim, plain_part + rotated, latents + rotated
    if latents % 16 or rotated % 2 or value % 8 or plain_part % 8:
        raise NotCompilable("its latents or heads are not of multiples of sixteen or eight numbers")
    p.rotary = complexes_of(model.model.rotary_emb) if c.model_type == "deepseek_v2" else model.model.rotary_emb
    p.buffer("latent_q", heads * wide)
    p.buffer("a", heads * latents)
    p.buffer("v", heads * value)
    if c.q_lora_rank is not None:
        p.buffer("low", c.q_lora_rank)
    p.buffers(model, 0, heads * query, latents + 2 * rotated)
    complexes = c.model_type == "deepseek_v2"
    layout = 1 if complexes else 2 if getattr(c, "rope_interleave", False) else 0

    def attend(src: str, index: int, module: Any) -> str:
        rows = plain(module.kv_b_proj.weight, p.dtype)
        if rows.shape != (heads * (plain_part + value), latents) or module.kv_b_proj.bias is not None:
            raise NotCompilable("its heads are not of the sizes in its configuration")
        p.kept.append(rows)
        given: dict[str, Any] = dict(
            heads=heads, weight=rows.data_ptr(), form=Form.BF16 if p.narrow else Form.FLOAT, apart=plain_part + value
        )
        p.linear(src, "k", module.kv_a_proj_with_mqa, wait=False)
        if c.q_lora_rank is None:
            p.linear(src, "q", module.q_proj)
        else:
            p.linear(src, "low", module.q_a_proj)
            p.rms_norm("low", "low", module.q_a_layernorm)
            p.linear("low", "q", module.q_b_proj)
        p.rms_norm("k", "k", module.kv_a_layernorm)
        p.op(
            OpKind.HEADS, src="q", dst="latent_q", **given, inner=plain_part, out=latents, step=query, kv_step=wide,
            mode=True,
        )  # fmt: skip
        p.op(
            OpKind.LATENT, index, src="q", other="k", dst="latent_q", heads=heads, head=latents, inner=rotated,
            step=query, k_at=plain_part, kv_step=wide, interleaved=layout, mode=complexes,
        )  # fmt: skip
        p.op(
            OpKind.ATTEND, index, src="latent_q", dst="a", heads=heads, kv_heads=math.gcd(heads, TASKS), head=latents,
            inner=rotated, step=wide, scale=module.scaling,
        )  # fmt: skip
        p.op(
            OpKind.HEADS, src="a", dst="v", **given, inner=latents, out=value, step=latents, kv_step=value,
            v_at=plain_part,
        )  # fmt: skip
        return "v"

    return attend
