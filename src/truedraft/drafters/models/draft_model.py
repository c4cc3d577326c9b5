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
        also={
            "speculative-decoding": "draft='draft-model:model=NAME' drafts, and rule='rejection' verifies as published",
            "speculative-sampling": "draft='draft-model:model=NAME' drafts, and rule='rejection' verifies as published",
            "assisted-generation": "",
            "assistant": "",
            "heterogeneous-vocab": "draft='draft-model:model=NAME' drafts the tokens that both models have, "
            "draft='string-level-exact:model=NAME' and draft='string-level-rejection:model=NAME' all of the draft "
            "model's own",
            "tli": "",
            "distillspec": "`truedraft train draft-model` distils a draft model on the target's own responses, by the "
            "loss of loss_name=NAME",
            "tvd++": "`truedraft train draft-model:loss_name=tvd++` trains a draft model with its loss",
            "dovetail": "draft='draft-model:NAME@cuda' runs a draft model on another device than the target; its gated "
            "fusion is not here",
            "pard": "its models draft as others do, draft='draft-model:model=NAME'; their masks are not used",
        },
    )
    learner = Distilling
    model: Any = None  # a model of transformers, or its name: a folder, an embedded model, one on the hub
    length: int = knob(7, 1, 256)  # tokens drafted at most; published 3 to 10, with the best at 7 for T5-small
    confidence: float = knob(0.0, 0, 1)  # end a draft after a token of lower probability; transformers has 0.4
