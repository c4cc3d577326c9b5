"""EAGLE-2: the head of EAGLE drafts trees whose shape follows its own probabilities.

Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", EMNLP 2024 (arXiv 2406.16858). The
likeliest nodes of a level are expanded, and of all nodes the likeliest are verified. It reads the heads of EAGLE and
HASS (arXiv 2408.15766). It wins where such a head was trained for the model and EAGLE-3 has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from truedraft.card import Card, knob
from truedraft.drafters.heads._drafter import SEQ2SEQ, HeadTree, TrainedDrafter
from truedraft.drafters.heads._eagle import FORMATS, EagleHead, EagleTraining
from truedraft.drafters.heads._quantize import FORM, copies_of


@dataclass
class Eagle2(TrainedDrafter, HeadTree):
    card = Card(
        paper="arXiv 2406.16858 (2024)",
        idea="A trained layer continues the target's last hidden states, and drafts a tree of its likeliest tokens.",
        family="learned head",
        needs=("training",),
        cannot=SEQ2SEQ,
        presets={"eagle2-published": {"nodes": 59, "depth": 6, "top_k": 10}},
        published="3.05x to 4.26x; 1.2x to 1.4x over EAGLE (one GPU).",
        also={
            "hass": "its heads are read by draft='eagle2:FOLDER' and draft='eagle:FOLDER', and `truedraft train "
            "eagle:steps=3` trains one",
        },
    )
    learner = EagleTraining
    model: Any = None  # a checkpoint's folder, its name on the hub, or a Head
    quantize: str = knob("auto", form=FORM, reader=copies_of)  # of the weights that its passes read
    nodes: int = knob(24, 1, 1024)  # of the draft; published 59
    depth: int = knob(6, 1, 64)  # levels; published 6
    top_k: int = knob(6, 1, 256)  # nodes expanded at each level, and children of each; published 10
    drawn: bool = knob(False)  # a chain drawn from the head, for rules that verify such drafts; published: the tree
    formats = FORMATS

    @staticmethod
    def rebuilt(record: dict[str, Any], model: PreTrainedModel) -> EagleHead:
        return EagleHead(record, model)
