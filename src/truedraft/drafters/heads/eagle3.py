"""EAGLE-3: a head of one decoder layer continues features fused from three layers of the target, and drafts a tree.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", NeurIPS 2025
(arXiv 2503.01840). The hidden states of a low, a middle and a high layer are fused to one feature; the head reads it
beside the embedding of the next token, and its own output takes the place of the feature for drafted tokens. In
training the head is unrolled over its own outputs (training-time test), so that it drafts as well at depth five as at
depth two. Trees as in EAGLE-2 (arXiv 2406.16858). It wins wherever a head was trained for the model, also on text that
repeats nothing; beside a model of a few million parameters a pass of the head costs as much as it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from truedraft.card import Card, knob
from truedraft.drafters._losses import LOSSES, named
from truedraft.drafters.heads._drafter import SEQ2SEQ, HeadTree, TrainedDrafter
from truedraft.drafters.heads._eagle3_formats import formats
from truedraft.drafters.heads._head import Head, begin_program, layer_program
from truedraft.drafters.heads._layers import Attend, HeadLayer, Norm, Rotary, layer_config, rotary_of
from truedraft.drafters.heads._quantize import FORM, copies_of
from truedraft.drafters.heads._unroll import UnrolledLearner, layer_like, spread_layers
from truedraft.runtime.program import Program


class Eagle3Head(Head):
    """A decoder layer over embeddings and features side by side, each normalised; more layers may follow it.

    Its parameters have the names of SpecForge's and SGLang's `LlamaForCausalLMEagle3`.

    Args:
        record: layers (of the target), feature_size (H of the target), layer (fields of the configuration of its own
            layers), blocks (their number), draft_vocabulary (0 for that of the target), norm_before_residual (whether
            the residual stream begins with the normalised feature), norm_output (whether the normalised state is fed
            back, EAGLE-3.1), fuse_norm ("each" tapped layer, or the "whole", is normalised before it is fused, or ""),
            fuse_bias, head_norms (of queries and keys), embeddings and output_head (whether it has its own).
    """

    def __init__(self, record: dict[str, Any], model: PreTrainedModel):
        super().__init__(model, layer_config(**record["layer"]))
        self._record, self.layers = record, tuple(record["layers"])
        self.rotary = rotary_of(self.config)
        size, eps = self.size, self.config.rms_norm_eps
        given = record["feature_size"]
        self.fc = nn.Linear(len(self.layers) * given, size, bias=record["fuse_bias"])
        if record["fuse_norm"]:
            parts = len(self.layers) if record["fuse_norm"] == "each" else 1
            self.fc_norm = nn.ModuleList(Norm(len(self.layers) * given // parts, eps) for _ in range(parts))
        self.midlayer = HeadLayer(self.config, 2 * size, record["head_norms"])
        self.midlayer.hidden_norm = Norm(size, eps)
        self.further_layers = nn.ModuleList(
            HeadLayer(self.config, norms=record["head_norms"]) for _ in range(record["blocks"] - 1)
        )
        self.norm = Norm(size, eps)
        self.make_own(
            embeddings=record["embeddings"], output_head=record["output_head"],
            draft_vocabulary=record["draft_vocabulary"],
        )  # fmt: skip

    def record(self) -> dict[str, Any]:
        return self._record

    @property
    def blocks(self) -> Sequence[HeadLayer]:
        return [self.midlayer, *self.further_layers]

    def fuse(self, features: Tensor) -> Tensor:
        if self._record["fuse_norm"]:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features)

    def forward(self, embeds: Tensor, features: Tensor, rotary: Rotary, attends: Sequence[Attend]) -> Tensor:
        normed = self.midlayer.hidden_norm(features)  # type: ignore[operator]
        x = normed if self._record["norm_before_residual"] else features
        x = self.midlayer(x, rotary, attends[0], torch.cat([self.midlayer.input_layernorm(embeds), normed], -1))
        for layer, attend in zip(self.further_layers, attends[1:], strict=True):
            x = layer(x, rotary, attend)
        return self.norm(x) if self._record["norm_output"] else x

    def logits(self, states: Tensor) -> Tensor:
        states = states if self._record["norm_output"] else self.norm(states)
        return self.get_output_embeddings()(states)

    def compile(self, program: Program) -> None:
        p, layer, size = program, self.midlayer, self.size
        begin_program(p, self)
        p.buffer("pair", 2 * size)
        p.part("feature", "pair", size)
        p.buffer("logits", self._record["draft_vocabulary"] or self.vocabulary)
        if self._record["norm_before_residual"]:
            p.rms_norm("features", "x", layer.hidden_norm)
        else:
            p.copy("features", "x")
        p.rms_norm("embeds", "pair", layer.input_layernorm)
        p.rms_norm("features", "feature", layer.hidden_norm)
        p.outputs.append(len(p.ops) - 1)
        for i, block in enumerate(self.blocks):
            layer_program(p, i, block, self.config, "pair" if i == 0 else "h")
        p.end(self, lambda src, dst: p.rms_norm(src, dst, self.norm))
        p.fed_back = -1 if self._record["norm_output"] else len(self.blocks)


@dataclass
class Training(UnrolledLearner):
    """Training of an `Eagle3Head` by the target's distributions, unrolled over the head's own outputs."""

    name: ClassVar[str] = "eagle3"
    steps: int = knob(5, 1, 16)  # of the unrolling; published 7, in speculators 3
    decay: float = knob(0.8, 0, 1, open=True)  # weight of a step relative to the one before; published 0.8
    loss_name: str = knob("kl", form=f"one of {', '.join(LOSSES)}", reader=named)  # published: kl, up to a constant
    vocabulary: int = knob(0, 0, 1 << 20)  # tokens of the draft vocabulary, 0 for all; published 32,000
    layers: str = knob("", form="layers of the target, as in '2x4x6'", reader=spread_layers)  # published: 2, n/2, n - 3

    def initialise(self) -> None:
        """Begin with the target's output head, and with the last tapped layer as the feature."""
        head: Any = self.module
        self.copy_output_head()
        with torch.no_grad():
            head.fc.weight.normal_(0, 0.02)
            head.fc.weight[:, -head.size :] += torch.eye(head.size)

    def head(self, model: PreTrainedModel) -> Eagle3Head:
        config = model.config.get_text_config(decoder=True)
        record = dict(
            layers=spread_layers(self.layers, config.num_hidden_layers), feature_size=config.hidden_size,
            layer=layer_like(config), blocks=1, draft_vocabulary=self.vocabulary, norm_before_residual=False,
            norm_output=False, fuse_norm="", fuse_bias=False, head_norms=False, embeddings=False,
            output_head=True,
        )  # fmt: skip
        return Eagle3Head(record, model)


@dataclass
class Eagle3(TrainedDrafter, HeadTree):
    card = Card(
        paper="arXiv 2503.01840 (2025)",
        idea="A trained layer continues features of three of the target's layers, and drafts a tree of likely tokens.",
        family="learned head",
        needs=("training",),
        cannot=SEQ2SEQ,
        presets={"eagle3-published": {"nodes": 59, "depth": 8, "top_k": 10}, "eagle3-drawn": {"drawn": True}},
        published="Up to 6.5x; 1.4x over EAGLE-2; mean acceptance length 6.1 for Llama 3.1 8B on MT-bench (one GPU).",
        also={
            "vocabtrim": "`truedraft train eagle3:vocabulary=N` trains a head with N tokens, as other heads have; "
            "trimming one that exists is not here",
            "fr-spec": "`truedraft train eagle3:vocabulary=N` trains a head with the N most frequent tokens; its files "
            "of frequencies are not read",
        },
    )
    learner = Training
    model: Any = None  # a checkpoint's folder, its name on the hub, or a Head
    quantize: str = knob("auto", form=FORM, reader=copies_of)  # of the weights that its passes read
    nodes: int = knob(24, 1, 1024)  # of the draft; published 59
    depth: int = knob(6, 1, 64)  # levels; published 8
    top_k: int = knob(6, 1, 256)  # nodes expanded at each level, and children of each; published 10
    drawn: bool = knob(False)  # a chain drawn from the head, for rules that verify such drafts; published: the tree
    formats = formats(Eagle3Head)

    @staticmethod
    def rebuilt(record: dict[str, Any], model: PreTrainedModel) -> Eagle3Head:
        return Eagle3Head(record, model)
