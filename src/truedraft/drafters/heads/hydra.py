"""Hydra: heads beside the target's own, each of which reads the tokens drafted before it.

Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", COLM 2024 (arXiv 2402.05109). Head i
reads the target's last state, and the embeddings of the pending token and of the i tokens drafted after it, in one
block that its vocabulary matrix follows. In Hydra++ heads are deeper, and a decoder layer passes the target's states
over the text before. The authors' tree is static; this one follows the heads' probabilities, which know their path.
It wins over `medusa` at the same depth for one small product more per level; heads with attention at every level
(`eagle3`) reach further.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

from truedraft.card import Card, knob
from truedraft.drafters._losses import LOSSES, named
from truedraft.drafters.heads._checkpoint import Foreign, Format, loaded
from truedraft.drafters.heads._drafter import SEQ2SEQ
from truedraft.drafters.heads._head import LayerHead, begin_program, layer_program
from truedraft.drafters.heads._published import layer_fields, text_config
from truedraft.drafters.heads._quantize import FORM, copies_of
from truedraft.drafters.heads._stateful import StatefulHead, StatefulLearner, StatefulTree
from truedraft.drafters.heads._unroll import layer_like
from truedraft.errors import Refused
from truedraft.runtime.native import OpKind
from truedraft.runtime.program import Program

PREFIX = "prefix_embeding_layer."  # as the authors spell it
LAYERS = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)")
OUTPUTS = re.compile(r"hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)")


class Prefix(LayerHead):
    """A decoder layer over the target's states, of a text alone; what it predicts are its own normalised states."""

    def record(self) -> dict[str, Any]:
        return {}  # it is part of another's

    def logits(self, states: Tensor) -> Tensor:
        return self.norm(states)

    def compile(self, program: Program) -> None:
        p = program
        begin_program(p, self)
        p.buffer("logits", self.size)
        p.copy("features", "x")
        p.outputs.append(len(p.ops) - 1)
        layer_program(p, 0, self.layer, self.config, "h")
        p.head_from = len(p.ops)
        p.op(OpKind.GATHER, src="x", dst="t", inner=self.size)
        p.rms_norm("t", "logits", self.norm)
        for op in p.ops[p.head_from :]:
            op.tail = 1
        p.fed_back = 1


class ResidualBlock(nn.Module):
    """x + SiLU(W x), with a linear map of x where the output is narrower; both have biases."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.drop = nn.Dropout(0.0)
        self.linear = nn.Linear(width, size)
        self.residual = nn.Identity() if width == size else nn.Linear(width, size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x)
        return self.residual(x) + silu(self.linear(x))


class HydraHead(StatefulHead):
    """Heads of residual blocks over a state with the embeddings of all tokens since, each with its vocabulary matrix.

    Args:
        record: layers (the one whose states it reads), steps (heads), blocks (of each), grounded (whether heads read
            embeddings), prefix (fields of the configuration of a layer before them, or None), output_head (whether
            they have their own), draft_vocabulary (0 for that of the target).
    """

    def __init__(self, record: dict[str, Any], model: PreTrainedModel):
        layers = tuple(record["layers"])
        super().__init__(model, Prefix(layers, record["prefix"], model) if record["prefix"] else None)
        self._record, self.layers, self.steps = record, layers, record["steps"]
        size, rows = self.size, record["draft_vocabulary"] or self.vocabulary
        widths = [(step + 2 if record["grounded"] else 1) * size for step in range(self.steps)]
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(width if block == 0 else size, size) for block in range(record["blocks"])))
            for width in widths
        )
        self.drop = nn.Dropout(0.0)
        self.lm_heads = nn.ModuleList(nn.Linear(size, rows) for _ in widths if record["output_head"])
        if record["draft_vocabulary"]:
            self.draft_token_ids = torch.arange(rows)

    def record(self) -> dict[str, Any]:
        return self._record

    def step(self, states: Tensor, tokens: Tensor, step: int) -> Tensor:
        return torch.cat([states, self.embed(tokens)], -1) if self._record["grounded"] else states

    def logits(self, states: Tensor, step: int = 0) -> Tensor:
        x = self.drop(self.heads[step](states))
        return self.lm_heads[step](x) if self.lm_heads else self.output_head(x)


def _read(folder: Foreign, model: PreTrainedModel) -> nn.Module:
    """Heads of the authors' format, in which `prefix-mlp` has dropout in the even slots of a head's list."""
    config, target = folder.config, text_config(model)
    arch, offset = config.get("hydra_head_arch"), config.get("hidden_state_offset", 0)
    if arch not in ("mlp", "prefix-mlp"):
        raise folder.refused(f"its hydra_head_arch is {arch!r}; give heads of the kind mlp or prefix-mlp")
    if not (type(offset) is int and 0 <= offset <= target.num_hidden_layers):
        raise folder.refused(f"its hidden_state_offset is {offset!r}; the target has {target.num_hidden_layers} layers")
    weights = dict[str, Tensor]()
    places = set[tuple[int, int]]()
    for name, tensor in folder.tensors.items():
        if (found := LAYERS.fullmatch(name)) is not None:
            head, slot = int(found[1]), int(found[2]) // (2 if arch == "prefix-mlp" else 1)
            places.add((head, slot))
            part = "residual" if found[3] == "res_connection" else "linear"
            weights[f"heads.{head}.{slot}.{part}.{found[4]}"] = tensor
        elif (found := OUTPUTS.fullmatch(name)) is not None:
            weights[f"lm_heads.{found[1]}.{found[2]}"] = tensor
        elif name.startswith(PREFIX):
            rest = name.removeprefix(PREFIX)
            if rest != "embed_tokens.weight" and not rest.endswith("rotary_emb.inv_freq"):  # which nothing reads
                weights[f"prefix.{rest.replace('layers.0.', 'layer.', 1)}"] = tensor
        else:
            weights[name] = tensor
    record = dict(
        layers=(target.num_hidden_layers - offset if offset else -1,), steps=1 + max(head for head, _ in places),
        blocks=1 + max(slot for _, slot in places), grounded=config.get("grounded_heads", True), output_head=True,
        prefix=layer_fields(folder, target.to_dict()) if arch == "prefix-mlp" else None, draft_vocabulary=0,
        source="Hydra", convention=f"before the last {offset} layers" if offset else "after the final norm",
    )  # fmt: skip
    return loaded(HydraHead(record, model), weights, folder.source)


def _matches(folder: Foreign) -> bool:
    return any(LAYERS.fullmatch(name) for name in folder.tensors)


@dataclass
class Training(StatefulLearner):
    """Training of a `HydraHead` by the target's distributions, after the tokens of its responses."""

    name: ClassVar[str] = "hydra"
    steps: int = knob(4, 1, 16)  # heads; published 4
    blocks: int = knob(1, 1, 8)  # of a head; published 1, in Hydra++ 4
    prefix: bool = knob(False)  # a decoder layer over the text before the heads; published False, in Hydra++ True
    dropout: float = knob(0.0, 0, 0.9)  # before every product of a head; published 0, in Hydra++ 0.2
    decay: float = knob(1.0, 0, 1, open=True)  # weight of a head's loss relative to the one before; published 1
    loss_name: str = knob("kl", form=f"one of {', '.join(LOSSES)}", reader=named)  # published: kl, up to a constant
    own_head: bool = knob(True)  # vocabulary matrices of their own, not the target's output head; published True
    vocabulary: int = knob(0, 0, 1 << 20)  # tokens of the draft vocabulary, 0 for all; published 0

    def begin(self, model: PreTrainedModel) -> None:
        if self.vocabulary and not self.own_head:
            raise Refused(f"hydra:vocabulary={self.vocabulary}: with own_head=False it is the target's; leave it out")
        super().begin(model)
        for module in self.module.modules():
            if isinstance(module, nn.Dropout):
                module.p = self.dropout

    def initialise(self) -> None:
        """Begin with the target's own logits at every head: blocks that pass its state on, and its output head."""
        head: Any = self.module
        given: Any = self.model.get_output_embeddings()
        with torch.no_grad():
            for block in (m for m in head.modules() if isinstance(m, ResidualBlock)):
                block.linear.weight.zero_()
                block.linear.bias.zero_()
                if isinstance(block.residual, nn.Linear):
                    nn.init.eye_(block.residual.weight)
                    block.residual.bias.zero_()
            for matrix in head.lm_heads:
                ids = head.draft_token_ids
                matrix.weight.copy_(given.weight if ids is None else given.weight[ids])
                matrix.bias.zero_()
            if head.prefix is not None:
                for part in (head.prefix.layer.self_attn.o_proj, head.prefix.layer.mlp.down_proj):
                    part.weight.zero_()

    def head(self, model: PreTrainedModel) -> HydraHead:
        config = model.config.get_text_config(decoder=True)
        record = dict(
            layers=(-1,), steps=self.steps, blocks=self.blocks, grounded=True, output_head=self.own_head,
            prefix=layer_like(config) if self.prefix else None, draft_vocabulary=self.vocabulary,
        )  # fmt: skip
        return HydraHead(record, model)


@dataclass
class Hydra(StatefulTree):
    card = Card(
        paper="arXiv 2402.05109 (2024)",
        idea="Heads beside the target's own predict the next few tokens, each from those drafted before.",
        family="learned head",
        needs=("training",),
        cannot=SEQ2SEQ,
        presets={"hydra-published": {"nodes": 63, "top_k": 10}, "hydra-drawn": {"drawn": True}},
        published="Hydra++ up to 2.70x; up to 1.31x over Medusa (Vicuna, one GPU).",
        also={
            "hydra++": "its heads are read by draft='hydra:FOLDER', and `truedraft train hydra:blocks=4,prefix=True` "
            "trains some",
        },
    )
    learner = Training
    model: Any = None  # a checkpoint's folder, its name on the hub, or a HydraHead
    quantize: str = knob("auto", form=FORM, reader=copies_of)  # of the weights that its passes read
    nodes: int = knob(16, 1, 1024)  # of the draft; published 63
    depth: int = knob(4, 1, 64)  # levels, at most its heads; published its heads
    top_k: int = knob(4, 1, 256)  # nodes expanded at each level, and children of each; published: a static tree
    drawn: bool = knob(False)  # a chain drawn from the heads, for rules that verify such drafts; published: the tree
    formats: ClassVar[Sequence[Format]] = (Format("Hydra's", _matches, _read),)

    @staticmethod
    def rebuilt(record: dict[str, Any], model: PreTrainedModel) -> HydraHead:
        return HydraHead(record, model)
