"""EAGLE: a head of one decoder layer continues the target's last hidden states, and drafts a tree of fixed shape.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", ICML 2024 (arXiv 2401.15077). The head
reads the hidden state that the target's output head reads, beside the embedding of the next token, and predicts the
next hidden state. Where drafts may be drawn, the children of a node are drawn from the head without replacement. It
reads the heads of HASS (arXiv 2408.15766) too. It wins where such a head was trained for the model and passes over many
drafted tokens cost no more than over few; else the trees of EAGLE-2 are better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from truedraft.card import Card, knob
from truedraft.drafters._shapes import BRANCHES, Branching, branched
from truedraft.drafters.heads._drafter import SEQ2SEQ, HeadDrafter, TrainedDrafter
from truedraft.drafters.heads._eagle import FORMATS, EagleHead, EagleTraining
from truedraft.drafters.heads._quantize import FORM, copies_of
from truedraft.tree import Draws


@dataclass
class Eagle(TrainedDrafter, Branching, HeadDrafter):
    card = Card(
        paper="arXiv 2401.15077 (2024)",
        idea="A trained layer continues the target's last hidden states, and drafts a tree of fixed shape.",
        family="learned head",
        needs=("training",),
        cannot=SEQ2SEQ,
        presets={"eagle-published": {"branches": "4x3.2.2.1x3.2.2.1x3.0x2.0"}},
        published="2.7x to 3.5x for Llama 2 Chat 70B (GPU); about 3x for 13B, 1.6x over Medusa.",
        also={
            "eagle-1": "",
        },
    )
    learner = EagleTraining
    model: Any = None  # a checkpoint's folder, its name on the hub, or a Head
    quantize: str = knob("auto", form=FORM, reader=copies_of)  # of the weights that its passes read
    branches: str = knob("3x2x1x1x1", form=BRANCHES, reader=branched)  # of the tree; published as in `eagle-published`
    formats = FORMATS

    @staticmethod
    def rebuilt(record: dict[str, Any], model: PreTrainedModel) -> EagleHead:
        return EagleHead(record, model)

    @property
    def draws(self) -> Draws:
        return "distinct"
