"""MLP speculator: a state moved by one token after the other, with a small network of its own per token.

Wertheimer et al., "Accelerating Production LLMs with Combined Token/Embedding Speculators" (arXiv 2404.19124), as IBM
publishes them and vLLM runs them. The state begins as the target's hidden state after the final norm; of it and of its
own embedding of the next token, each step makes the next state and the law of the token after. A step costs two small
products and that of the vocabulary, so it wins at short drafts on targets whose passes are dear; its state sees nothing
of the text but the target's last state, so heads with attention (`eagle3`) reach further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, rms_norm
from transformers import PreTrainedModel

from truedraft.card import Card, knob
from truedraft.drafters._losses import LOSSES, named
from truedraft.drafters.heads._checkpoint import Foreign, Format, loaded
from truedraft.drafters.heads._drafter import SEQ2SEQ
from truedraft.drafters.heads._published import check_size, text_config
from truedraft.drafters.heads._quantize import FORM, copies_of
from truedraft.drafters.heads._stateful import StatefulHead, StatefulLearner, StatefulTree

EPS = 1e-6  # of its norms
PARTS = {"emb": "embeds", "proj": "projections", "ln": "norms", "head": "heads"}  # names in IBM's checkpoints, and here
NUMBERS = ("n_predict", "emb_dim", "inner_dim")  # that IBM's configuration gives


class ShiftedNorm(nn.RMSNorm):
    """Root mean square norm with a scale and a shift."""

    def __init__(self, size: int):
        super().__init__(size, EPS)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class MlpSpeculatorHead(StatefulHead):
    """State i is GELU(norm(W state + w emb(token))), by matrices of step i, which its vocabulary matrix reads.

    w gives the first state half of the last one's variance, in expectation at the beginning of training.

    Args:
        record: layers (-1 alone), steps, size (of its states), tied (whether all steps share embeddings, norm and
            vocabulary matrix, and all but the first their projection), scale_input (whether the target's state is
            normalised), draft_vocabulary (0 for that of the target).
    """

    def __init__(self, record: dict[str, Any], model: PreTrainedModel):
        super().__init__(model)
        self._record, self.layers, self.steps = record, tuple(record["layers"]), record["steps"]
        size, own = record["size"], 1 if record["tied"] else self.steps
        rows = record["draft_vocabulary"] or self.vocabulary
        widths = [self.size, *[size] * (min(self.steps, 2) if record["tied"] else self.steps)]
        self.embeds = nn.ModuleList(nn.Embedding(self.vocabulary, size) for _ in range(own))
        self.projections = nn.ModuleList(nn.Linear(width, size, bias=False) for width in widths[:-1])
        self.norms = nn.ModuleList(ShiftedNorm(size) for _ in range(own))
        self.heads = nn.ModuleList(nn.Linear(size, rows, bias=False) for _ in range(own))
        if record["draft_vocabulary"]:
            self.draft_token_ids = torch.arange(rows)

    def record(self) -> dict[str, Any]:
        return self._record

    @property
    def token_weight(self) -> float:
        """w, the weight of a token's embedding beside the projected state."""
        kept = 0.5 ** (0.5 / self.steps)
        return ((1 - kept**2) * self._record["size"] / 2) ** 0.5 / kept

    def fuse(self, features: Tensor) -> Tensor:
        if not self._record["scale_input"]:
            return features
        return rms_norm(features, features.shape[-1:], eps=EPS) / 2**0.5

    def step(self, states: Tensor, tokens: Tensor, step: int) -> Tensor:
        moved = _of(self.projections, step)(states) + self.token_weight * _of(self.embeds, step)(tokens)
        return gelu(_of(self.norms, step)(moved))

    def logits(self, states: Tensor, step: int = 0) -> Tensor:
        return _of(self.heads, step)(states)


def _of(modules: nn.ModuleList, step: int) -> nn.Module:
    """The module of a step; later steps share the last."""
    return modules[min(step, len(modules) - 1)]


def _read(folder: Foreign, model: PreTrainedModel) -> nn.Module:
    """A speculator in IBM's format. Of tensors that steps share, a file may hold the first names alone."""
    config, target = folder.config, text_config(model)
    if wrong := [name for name in NUMBERS if not (type(config.get(name)) is int and config[name] >= 0)]:
        raise folder.refused(f"its {wrong[0]} is {config.get(wrong[0])!r}: its config.json must give a number")
    check_size(folder, "emb_dim", config["emb_dim"], target.hidden_size)
    check_size(folder, "vocab_size", config.get("vocab_size"), target.vocab_size)
    tied, steps = bool(config.get("tie_weights")), config["n_predict"]
    stored = {name.removeprefix("speculator."): tensor for name, tensor in folder.tensors.items()}
    weights: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        part, _, rest = name.partition(".")
        step, _, kind = rest.partition(".")
        own, last = part in PARTS and step.isdecimal(), 1 if part == "proj" else 0
        if own and tied and last < int(step) < steps:
            shared = stored.get(f"{part}.{last}.{kind}")
            if shared is not None and torch.equal(shared, tensor):
                continue
        weights[f"{PARTS[part]}.{rest}" if own else name] = tensor
    record = dict(
        layers=(-1,), steps=steps, size=config["inner_dim"] or config["emb_dim"], tied=tied,
        scale_input=bool(config.get("scale_input")), draft_vocabulary=0,
        source="IBM", convention="after the final norm",
    )  # fmt: skip
    return loaded(MlpSpeculatorHead(record, model), weights, folder.source)


def _matches(folder: Foreign) -> bool:
    return {"emb.0.weight", "proj.0.weight", "ln.0.weight"} <= {n.removeprefix("speculator.") for n in folder.tensors}


@dataclass
class Training(StatefulLearner):
    """Training of a `MlpSpeculatorHead` on the tokens of the target's responses."""

    name: ClassVar[str] = "mlp-speculator"
    steps: int = knob(4, 1, 16)  # tokens that it predicts; published 3 to 5
    size: int = knob(0, 0, 1 << 16)  # of its states, 0 for that of the target; published 3072 to 8192
    tied: bool = knob(False)  # one set of weights for all steps; published False, for the largest targets True
    scale_input: bool = knob(False)  # published False, for the largest targets True
    decay: float = knob(1.0, 0, 1, open=True)  # weight of a step relative to the one before; published 1
    loss_name: str = knob("ce", form=f"one of {', '.join(LOSSES)}", reader=named)  # published: ce
    vocabulary: int = knob(0, 0, 1 << 20)  # tokens of the draft vocabulary, 0 for all; published 0

    def initialise(self) -> None:
        """Draw matrices and embeddings of variance 1 / size, in which the weights of states and tokens are balanced."""
        head: Any = self.module
        for part in (*head.embeds, *head.projections, *head.heads):
            nn.init.trunc_normal_(part.weight, 0.0, head.record()["size"] ** -0.5)

    def head(self, model: PreTrainedModel) -> MlpSpeculatorHead:
        config = model.config.get_text_config(decoder=True)
        record = dict(
            layers=(-1,), steps=self.steps, size=self.size or config.hidden_size, tied=self.tied,
            scale_input=self.scale_input, draft_vocabulary=self.vocabulary,
        )  # fmt: skip
        return MlpSpeculatorHead(record, model)


@dataclass
class MlpSpeculator(StatefulTree):
    card = Card(
        paper="arXiv 2404.19124 (2024)",
        idea="A small network turns the target's last state, token by token, into guesses of the next few.",
        family="learned head",
        needs=("training",),
        cannot=SEQ2SEQ,
        presets={
            "mlp-speculator-chain": {"nodes": 3, "depth": 3, "top_k": 1},
            "mlp-speculator-drawn": {"drawn": True},
        },
        published="2x to 3x over optimised serving of Llama 2 and Granite models (one GPU).",
    )
    learner = Training
    model: Any = None  # a checkpoint's folder, its name on the hub, or a MlpSpeculatorHead
    quantize: str = knob("auto", form=FORM, reader=copies_of)  # of the weights that its passes read
    nodes: int = knob(16, 1, 1024)  # of the draft; published 5 chains, by the likeliest 5, 4 and 3 tokens of a level
    depth: int = knob(4, 1, 64)  # levels, at most its steps; published its steps
    top_k: int = knob(4, 1, 256)  # nodes expanded at each level, and children of each; published 5, 4 and 3
    drawn: bool = knob(False)  # a chain drawn from the head, for rules that verify such drafts; published: the tree
    formats: ClassVar[Sequence[Format]] = (Format("IBM's", _matches, _read),)

    @staticmethod
    def rebuilt(record: dict[str, Any], model: PreTrainedModel) -> MlpSpeculatorHead:
        return MlpSpeculatorHead(record, model)
