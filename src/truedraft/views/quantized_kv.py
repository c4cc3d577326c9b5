"""Reads the keys and values of a long text in int8 or int4: a quarter or an eighth of their bytes, and all positions.

Tiwari et al., "QuantSpec: Self-Speculative Decoding with Hierarchical Quantized KV Cache", ICML 2025 (arXiv
2502.10424): the draft reads weights and cache in four bits, the newest positions as they are. There, four further bits
make it the cache of eight bits that the target verifies with; here it verifies with the cache as it is, and the text is
the model's own. It pays behind texts of some thousand tokens; against a window or chosen entries it reads all.
"""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.views._base import BITS, Reduction, Rounded, View


@dataclass(frozen=True)
class QuantizedKv(View):
    """The whole decoder over its KV cache in fewer bits, for a copy of it in memory. See `View`."""

    card = Card(
        paper="arXiv 2502.10424 (2025), 2402.02750 (2024)",
        idea="The model drafts for itself, reading a long text in int8 or int4.",
        family="self-drafting",
        presets={
            "int8-kv": {"kv": "int8", "weights": ""},
            "int4-kv": {"kv": "int4", "weights": ""},
            "quantspec": {"kv": "int4", "weights": "int4"},
        },
        published="Up to 2.5x, more than 90 % of the drafts accepted, with kernels for GPUs.",
        lacks={
            "quantspec": "drafts read keys, values and weights in 4 bits, as published; verification reads the whole "
            "cache, which is kept beside them, so that memory grows instead of shrinking",
        },
        also={
            "kivi": "keys are rounded by channel and values by position, as there, in draft='int4-kv'; the text of "
            "view='lossy/int4-kv' is that of the rounded cache",
        },
    )
    kv: str = knob("int8", form="int8 or int4", reader=list(BITS).index)  # scales by chunk, by place
    weights: str = knob("", form="int8, int4 or nothing", reader=["", *BITS].index)  # as of int8-self
    recent: int = knob(128, 1, 1048576)  # last positions, read as they are; published 128 to 256

    def reduction(self, layers: int) -> Reduction:
        return Reduction(bits=BITS.get(self.weights, 0), entries=Rounded(BITS[self.kv], self.recent))
