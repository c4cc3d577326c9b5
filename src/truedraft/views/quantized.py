"""Rounds the weights of linear layers to int8 or int4: a pass reads a quarter or less of their bytes.

Georganas et al., "ML-SpecQD: Multi-Level Speculative Decoding with Quantized Drafts", 2025 (arXiv 2503.13565): the
weights of the target are cast to a format of four bits, and the quantised model drafts. There is no calibration.
"""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.views._base import BITS, Reduction, View


@dataclass(frozen=True)
class Quantized(View):
    """The whole decoder with weights in fewer bits, for a copy of these in memory. See `View`."""

    card = Card(
        paper="arXiv 2503.13565 (2025)",
        idea="The model drafts for itself with its weights rounded to int8 or int4.",
        family="self-drafting",
        presets={"int8-self": {"weights": "int8"}, "int4-self": {"weights": "int4"}},
        published="MXFP4 drafts of bf16 targets on CPUs: up to 2x.",
    )
    weights: str = knob("int8", form="int8 or int4", reader=list(BITS).index)  # a scale per row, or per 32 columns

    def reduction(self, layers: int) -> Reduction:
        return Reduction(bits=BITS[self.weights])
