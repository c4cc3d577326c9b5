"""MTP: the layers for multi-token prediction that come inside a checkpoint draft for it.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024 (arXiv 2412.19437), section 2.2; the idea of training for it is of
Gloeckle et al., "Better & Faster Large Language Models via Multi-token Prediction", ICML 2024 (arXiv 2404.19737).
Beside the target's hidden state a layer reads the embedding of the next token, and predicts the token after it. Such
layers are trained with the model, so there is nothing to train here, and `transformers` leaves them out when it loads
the model. One layer drafts any number of tokens from its own states; of several, each drafts one token more. It reads
the layouts of DeepSeek (V3, R1; GLM-4.5) and of Qwen (Qwen3-Next). It wins for models of many experts that have such
layers: these are right about the next token or two on any text, and a layer is a small part of a pass. Further tokens
are right more rarely, and a head that was trained over its own states (EAGLE-3) is then better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from truedraft.card import Card, knob
from truedraft.drafters.heads._drafter import SEQ2SEQ, HeadTree
from truedraft.drafters.heads._mtp import MtpHead, read
from truedraft.drafters.heads._quantize import FORM, copies_of
from truedraft.errors import Refused


@dataclass
class Mtp(HeadTree):
    card = Card(
        paper="arXiv 2412.19437 (2024)",
        idea="Layers for multi-token prediction, trained with the model and stored in its checkpoint, draft for it.",
        family="learned head",
        needs=("MTP layers",),
        cannot=SEQ2SEQ,
        presets={"mtp-published": {"nodes": 1, "depth": 1}, "mtp-drawn": {"drawn": True}},
        published="DeepSeek-V3: 85% to 90% of second tokens are right, 1.8x tokens per second (GPUs).",
        also={
            "multi-token-prediction": "",
            "nextn": "",
        },
    )
    any_shape = False
    model: Any = None  # a folder or a name on the hub, by default the target's own; or a Head
    quantize: str = knob("auto", form=FORM, reader=copies_of)  # of the weights that its passes read
    nodes: int = knob(3, 1, 1024)  # of the draft; published 1
    depth: int = knob(3, 1, 64)  # levels, no more than the modules where there are several; published 1
    top_k: int = knob(1, 1, 256)  # nodes expanded at each level, and children of each; published 1, a chain
    drawn: bool = knob(False)  # a chain drawn from the head, for rules that verify such drafts
    before_norm: bool = knob(False)  # features before the target's final norm; transformers, vLLM: after it
    raw_states: bool = knob(False)  # feeds back states before the module's norm; transformers: after it

    @property
    def levels(self) -> int:
        modules = len(self.head.blocks)
        return self.depth if modules == 1 else min(self.depth, modules)

    def opened(self, model: PreTrainedModel) -> MtpHead:
        source = self.model or model.config.name_or_path
        if not source:
            raise Refused(
                f"mtp: the {type(model).__name__} was not loaded from a checkpoint: give the folder of one that has "
                "its layers for multi-token prediction, draft='mtp:FOLDER'"
            )
        return read(str(source), model, self.before_norm, self.raw_states)
