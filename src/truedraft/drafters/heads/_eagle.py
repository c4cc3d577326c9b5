"""What EAGLE-1 and EAGLE-2 share: the head of one decoder layer that continues the target's last hidden states, its
published format, and its training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from transformers import PreTrainedModel

from truedraft.card import knob
from truedraft.drafters._learned import Batch
from truedraft.drafters._losses import IGNORED, LOSSES, named
from truedraft.drafters.heads._checkpoint import Foreign, Format, loaded
from truedraft.drafters.heads._head import Head, begin_program, layer_program
from truedraft.drafters.heads._layers import Attend, HeadLayer, Rotary, layer_config, rotary_of
from truedraft.drafters.heads._published import check_size, layer_fields, own_weights, text_config
from truedraft.drafters.heads._unroll import UnrolledLearner, layer_like
from truedraft.runtime.native import OpKind
from truedraft.runtime.program import Program

NOISE_LENGTH = 512  # tokens of a text whose features have noise of the amplitude of the knob; longer texts have less


class EagleHead(Head):
    """A decoder layer without a norm before its attention, over embeddings and features joined by a linear layer.

    Its features are the target's hidden states after the final norm, as are its own states, which the target's output
    head reads.

    Args:
        record: layers (-1 alone), layer (fields of the configuration of its layer), fuse_bias (of the linear layer),
            embeddings (whether it has its own).
    """

    def __init__(self, record: dict[str, Any], model: PreTrainedModel):
        super().__init__(model, layer_config(**record["layer"]))
        self._record, self.layers = record, tuple(record["layers"])
        self.rotary = rotary_of(self.config)
        self.fc = nn.Linear(2 * self.size, self.size, bias=record["fuse_bias"])
        self.midlayer = HeadLayer(self.config, normed=False)
        self.make_own(embeddings=record["embeddings"])

    def record(self) -> dict[str, Any]:
        return self._record

    @property
    def blocks(self) -> Sequence[HeadLayer]:
        return [self.midlayer]

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def forward(self, embeds: Tensor, features: Tensor, rotary: Rotary, attends: Sequence[Attend]) -> Tensor:
        return self.midlayer(self.fc(torch.cat([embeds, features], -1)), rotary, attends[0])

    def logits(self, states: Tensor) -> Tensor:
        return self.output_head(states)

    def compile(self, program: Program) -> None:
        p = program
        begin_program(p, self)
        p.buffer("pair", 2 * self.size)
        p.part("feature", "pair", self.size)
        p.buffer("logits", self.vocabulary)
        p.op(OpKind.SCALE, src="embeds", dst="pair", inner=self.size)
        p.copy("features", "feature")
        p.linear("pair", "x", self.fc)
        p.outputs.append(len(p.ops) - 1)
        layer_program(p, 0, self.midlayer, self.config, "h")
        p.end(self, p.copy)
        p.fed_back = 1


def _read(folder: Foreign, model: PreTrainedModel) -> nn.Module:
    """A head of SafeAILab, or of HASS, which has the same names."""
    config, target = folder.config, text_config(model)
    weights = {name.replace("layers.0.", "midlayer.", 1): w for name, w in own_weights(folder, model).items()}
    check_size(folder, "vocab_size", config.get("vocab_size"), target.vocab_size)
    fields = layer_fields(folder, config)
    check_size(folder, "hidden_size", fields["hidden_size"], target.hidden_size)
    if config.get("qkv_bias"):
        fields |= dict(attention_bias=True, output_bias=False)
    record = dict(
        layers=(-1,), layer=fields, fuse_bias=config.get("bias", True), embeddings="embed_tokens.weight" in weights,
        source="SafeAILab", convention="after the final norm",
    )  # fmt: skip
    return loaded(EagleHead(record, model), weights, folder.source)


def _matches(folder: Foreign) -> bool:
    names = folder.tensors
    return (
        "fc.weight" in names and "layers.0.mlp.up_proj.weight" in names and "layers.0.hidden_norm.weight" not in names
    )


FORMATS = (Format("SafeAILab's", _matches, _read),)


@dataclass
class EagleTraining(UnrolledLearner):
    """Training of an `EagleHead`: regression on the target's features, and its distributions with a smaller weight.

    One step is EAGLE's training; with three, the head reads its own states as in HASS (arXiv 2408.15766).
    """

    name: ClassVar[str] = "eagle"  # of EAGLE-2 as well: they have the same heads
    vocabulary = 0  # all tokens: its output head is the target's
    steps: int = knob(1, 1, 16)  # of the unrolling; published 1, in HASS 3
    decay: float = knob(1.0, 0, 1, open=True)  # weight of a step relative to the one before; published 1, in HASS
    loss_name: str = knob("kl", form=f"one of {', '.join(LOSSES)}", reader=named)  # published: kl, up to a constant
    weight: float = knob(0.1, 0, 100)  # of that loss beside the regression; published 0.1
    noise: float = knob(0.1, 0, 10)  # amplitude of the uniform noise in features, less in long texts; published 0.1

    def initialise(self) -> None:
        """Begin with the feature of the token before."""
        fc: Any = self.module.fc
        with torch.no_grad():
            fc.weight.normal_(0, 0.02)
            fc.weight[:, -self.module.size :] += torch.eye(self.module.size)
            fc.bias.zero_()

    def head(self, model: PreTrainedModel) -> EagleHead:
        layer = layer_like(model.config.get_text_config(decoder=True))
        return EagleHead(dict(layers=(-1,), layer=layer, fuse_bias=True, embeddings=False), model)

    def loss(self, batch: Batch) -> Tensor:
        total, weight = torch.zeros(()), 1.0
        compute = LOSSES[self.loss_name]
        for step, (states, logits, p, labels, _) in enumerate(self._unrolled(batch, self.steps)):
            counted = labels != IGNORED
            if counted.any():
                rows, places = counted.nonzero(as_tuple=True)
                features = batch.features[-1][rows, places + 1 + step].float()
                found = self.weight * compute(logits[counted].float().log_softmax(-1), p(counted), labels[counted])
                total = total + weight * (smooth_l1_loss(states[counted].float(), features) + found.mean())
            weight *= self.decay
        return total

    def noised(self, states: Tensor, batch: Batch) -> Tensor:
        if not torch.is_grad_enabled():
            return states  # in evaluation
        amplitude = self.noise * NOISE_LENGTH / batch.mask.sum(1).clamp_min(1)
        return states + (2 * torch.rand_like(states) - 1) * amplitude[:, None, None].to(states.dtype)
