"""Draft model: a smaller model of the same family drafts a chain of tokens; the original speculative decoding.

Leviathan, Kalman and Matias, ICML 2023 (arXiv 2211.17192); Chen et al., 2023 (arXiv 2302.01318). Strong where a
model exists that is many times smaller and was trained on similar data; each drafted token costs a pass of it, so the
cost control limits the depth. Where no such model exists, `truedraft train draft-model` makes one (`_distilling.py`).
Drafts are greedy under `greedy`, drawn with the target's own noise under `seeded`, and sampled under the rejection
rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from truedraft.card import Card, knob
from truedraft.drafters.models._distilling import Distilling
from truedraft.drafters.models._model import ChainDrafter


@dataclass
class DraftModel(ChainDrafter):
    card = Card(
        paper="arXiv 2211.17192, 2302.01318 (2023)",
        idea="A smaller model drafts the next few tokens.",
        family="draft model",
        needs=("draft model",),
        published="T5-XXL drafted by T5-small: 2.6x to 3.4x; Chinchilla 70B by a 4B: 1.9x to 2.5x; Llama 2 Chat 7B by "
        "115M trained with TVD++ (arXiv 2403.00858): up to 2.3 tokens per pass.",
    )
    learner = Distilling
    model: Any = None  # a model of transformers, or its name: a folder, an embedded model, one on the hub
    length: int = knob(7, 1, 256)  # tokens drafted at most; published 3 to 10, with the best at 7 for T5-small
    confidence: float = knob(0.0, 0, 1)  # end a draft after a token of lower probability; transformers has 0.4
