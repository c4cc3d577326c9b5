"""Skips the attention and feed-forward halves without which drafting by the rest is fastest, found by Bayesian search.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding", ACL 2024
(arXiv 2309.08168). The published objective is tokens per second; here it is tokens per weights read, which no other
work on the machine disturbs. The published end of a draft, a threshold of confidence that follows the acceptance rate,
is that of all dynamic drafts here: a level is drafted where it raises the tokens per second that are expected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.views._bayesian import spared
from truedraft.views._calibrated import CalibratedLayers, Evaluator, Step
from truedraft.views._layers import FORM, listed


@dataclass(frozen=True)
class DraftAndVerify(CalibratedLayers):
    """A decoder without halves that its drafts can spare. See `View`."""

    card = Card(
        paper="arXiv 2309.08168 (2023)",
        idea="The model drafts for itself without the halves of layers that its drafts can spare.",
        family="self-drafting",
        needs=("calibration",),
        published="Up to 1.73x with Llama 2 13B and 70B, summaries and code; 1,000 sets were tried.",
        also={
            "self-speculative-decoding": "",
            "self-speculative": "",
        },
    )
    layers: str = knob("", form=FORM, reader=listed)  # to skip, as found before
    file: str = knob("")  # of the layers that were found
    trials: int = knob(200, 1, 100_000)  # sets that a calibration tries; published 1,000

    def steps(self, evaluator: Evaluator) -> Iterator[Step]:
        return spared(evaluator, self.trials, self.name)
