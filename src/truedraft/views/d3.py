"""Skips more layers the deeper a draft gets: of L layers, L times a power of `alpha` run.

Fan et al., "Position-Aware Depth Decay Decoding (D3): Boosting Large Language Model Inference Efficiency", 2025
(arXiv 2503.08524). There depth decays along the whole output, which is lossy; here along a draft, and begins anew after
each verification. A token that runs fewer layers reads the keys of those before it in each of them, so that nothing has
to be filled in. The published layers are those whose output is most like their input, between cores at both ends; here
they are those that a calibration removes, in its order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from truedraft.card import Card, knob
from truedraft.views._base import Reduction
from truedraft.views._calibrated import CalibratedLayers, Evaluator, Step, removed
from truedraft.views._layers import FORM, check_layers, listed


@dataclass(frozen=True)
class D3(CalibratedLayers):
    """A decoder of decaying depth. See `View`."""

    card = Card(
        paper="arXiv 2503.08524 (2025)",
        idea="The model drafts for itself with fewer layers for each further token of a draft.",
        family="self-drafting",
        needs=("calibration",),
        published="1.5x fewer operations of Llama 7B to 70B at below 1 % less in GSM8K and BBH, without verification.",
        lacks={
            "d3": "the depth falls with each token, as published; the order of the layers is found by SLEB's search, "
            "not by their similarity, and alpha is not searched for",
        },
    )
    layers: str = knob("", form=FORM, reader=listed)  # that may be skipped, the first of them first
    file: str = knob("")  # of the layers that were found
    alpha: float = knob(0.95, 0, 1)  # share of the layers that each further token keeps; published slightly below 1
    ends: int = knob(1, 0, 64)  # layers at either end that are kept; published by their similarity

    def steps(self, evaluator: Evaluator) -> Iterator[Step]:
        for share, text, order in removed(evaluator, evaluator.layers - 2 * self.ends, self.ends):
            yield Step(share, text, {"layers": ";".join(map(str, order))} if order else None)

    def at(self, depth: int) -> Self:
        return replace(self, alpha=self.alpha ** (depth + 1))

    def reduction(self, layers: int) -> Reduction:
        left_out = listed(";".join(self.found.split(";")[: layers - int(layers * self.alpha)]))
        check_layers(left_out, layers)
        return left_out
