"""Removes the layers that a text needs least, one after another: each time the one without which the loss is smallest.

Song et al., "SLEB: Streamlining LLMs through Redundancy Verification and Elimination of Transformer Blocks", ICML 2024
(arXiv 2402.09025). The reduced model is evaluated again after each removal, because what is redundant depends on what
is left. Alone it is lossy; here it drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.views._base import Reduction
from truedraft.views._calibrated import CalibratedLayers, Evaluator, Step, removed
from truedraft.views._layers import FORM, listed, text_of


@dataclass(frozen=True)
class Sleb(CalibratedLayers):
    """A decoder without its most redundant layers. See `View`."""

    card = Card(
        paper="arXiv 2402.09025 (2024)",
        idea="The model drafts for itself without the layers that its texts need least.",
        family="self-drafting",
        needs=("calibration",),
        published="20 % of the layers of Llama 2 70B at a small loss of perplexity, 1.2x alone, without verification.",
    )
    layers: str = knob("", form=FORM, reader=listed)  # to skip, as found before
    file: str = knob("")  # of the layers that were found
    share: float = knob(0.4, 0, 1)  # of the layers that a calibration removes; published 0.1 to 0.2, alone
    ends: int = knob(1, 0, 64)  # layers at either end that are kept; published 1

    def steps(self, evaluator: Evaluator) -> Iterator[Step]:
        for share, text, gone in removed(evaluator, round(self.share * evaluator.layers), self.ends):
            layers = text_of(Reduction(frozenset(gone), frozenset(gone)))
            yield Step(share, text, {"layers": layers} if layers else None)
