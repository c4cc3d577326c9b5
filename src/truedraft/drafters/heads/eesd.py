"""EESD: the target drafts with its first layers, one trained layer behind them, and a trained output head.

Liu et al., "Speculative Decoding via Early-exiting for Faster LLM Inference with Thompson Sampling Control Mechanism",
Findings of ACL 2024 (arXiv 2406.03853). The first layers, their keys and values are the target's own, and frozen; the
trained layer learns the target's next token on the target's own text. A drafted token costs a pass of the first layers,
in which it sees what the target has computed of the text before it; a head as EAGLE's costs one layer, and has to guess
that. Published drafts end by a bandit (`stop=thompson`): each further token is drafted with a probability drawn from
the posterior of the row's rate of acceptance. The default, which counts what tokens cost and how sure the draft is of
them, is that of all dynamic drafts here. It wins over an untrained exit wherever it was trained, and over heads only
where the first layers are a small part of a deep model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from truedraft.card import Card, knob
from truedraft.drafters._bandit import Bandit
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._learned import Batch
from truedraft.drafters._losses import LOSSES, named
from truedraft.drafters._views import ViewTree
from truedraft.drafters.heads._drafter import SEQ2SEQ, HeadTree, TrainedDrafter
from truedraft.drafters.heads._exits import ExitReader, FirstLayers, exit_of
from truedraft.drafters.heads._head import LayerHead, begin_program, layer_program
from truedraft.drafters.heads._quantize import FORM, copies_of
from truedraft.drafters.heads._unroll import StepwiseLearner, layer_like, states_along
from truedraft.runtime.program import Program
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row, Scores

STOPS = ("cost", "thompson")


class EesdHead(LayerHead):
    """A decoder layer over exit states, a norm and an output head: the logits of the token after each.

    Args:
        record: layers (the one whose output is the exit state), layer (fields of the configuration of its own layer),
            draft_vocabulary (0 for that of the target).
    """

    def __init__(self, record: dict[str, Any], model: PreTrainedModel):
        super().__init__(record["layers"], record["layer"], model)
        self._record = record
        self.make_own(embeddings=False, output_head=True, draft_vocabulary=record["draft_vocabulary"])

    def record(self) -> dict[str, Any]:
        return self._record

    def logits(self, states: Tensor) -> Tensor:
        return self.lm_head(self.norm(states))

    def compile(self, program: Program) -> None:
        p = program
        begin_program(p, self)
        p.buffer("logits", self._record["draft_vocabulary"] or self.vocabulary)
        p.copy("features", "x")
        p.outputs.append(len(p.ops) - 1)
        layer_program(p, 0, self.layer, self.config, "h")
        p.end(self, lambda src, dst: p.rms_norm(src, dst, self.norm))
        p.fed_back = 1


@dataclass
class Training(StepwiseLearner):
    """Training of an `EesdHead` by the target's distributions over its own text (self-distillation).

    The exit states of drafted tokens are those of the text while drafts are right, so that one step is all there is.
    """

    name: ClassVar[str] = "eesd"
    steps = 1
    decay = 1.0
    exit: int = knob(0, 0, 4095)  # layers of the target before the trained one; 0 for a third; published about 5 of 40
    loss_name: str = knob("kl", form=f"one of {', '.join(LOSSES)}", reader=named)  # published: self-distillation
    vocabulary: int = knob(0, 0, 1 << 20)  # tokens of the draft vocabulary, 0 for all; published all

    def initialise(self) -> None:
        self.copy_output_head()

    def head(self, model: PreTrainedModel) -> EesdHead:
        config = model.config.get_text_config(decoder=True)
        record = dict(
            layers=(exit_of(self.exit, config.num_hidden_layers),), layer=layer_like(config),
            draft_vocabulary=self.vocabulary,
        )  # fmt: skip
        return EesdHead(record, model)

    def _passes(self, batch: Batch, tokens: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        head: Any = self.module
        states = states_along(head, batch.features[head.layers[0]].to(head.dtype))
        logits = head.logits(states)
        for step in range(len(tokens)):
            later = (pad(part[:, step + 1 :], (0, 0, 0, step)) for part in (states, logits))
            yield next(later), next(later)


@dataclass
class Eesd(TrainedDrafter, ViewTree, HeadTree):
    card = Card(
        paper="arXiv 2406.03853 (2024)",
        idea="The model drafts for itself with its first layers, and one trained layer behind them.",
        family="self-drafting",
        needs=("training",),
        cannot=SEQ2SEQ,
        presets={"eesd-published": {"stop": "thompson"}},
        published="LLaMA 2 and CodeLLaMA of 13B and 70B: faster than Medusa and Draft & Verify; no single figure.",
        also={
            "kangaroo": "draft='eesd:FOLDER' is the nearest: the first layers and a trained one behind them draft",
        },
    )
    any_shape = False
    learner = Training
    reads = ExitReader
    model: Any = None  # a checkpoint's folder, or a Head
    quantize: str = knob("auto", form=FORM, reader=copies_of)  # of the weights that the trained layer's passes read
    nodes: int = knob(24, 1, 1024)  # of the draft
    depth: int = knob(12, 1, 64)  # levels at most
    top_k: int = knob(1, 1, 64)  # nodes expanded per level, and children of each; published 1, with trees beside it
    drawn: bool = knob(False)  # a drawn chain for rejection rules
    stop: str = knob("cost", form=f"one of {', '.join(STOPS)}", reader=STOPS.index)  # what ends a draft
    formats = ()

    @staticmethod
    def rebuilt(record: dict[str, Any], model: PreTrainedModel) -> EesdHead:
        return EesdHead(record, model)

    def forget(self) -> None:
        super().forget()
        self._bandits: dict[int, Bandit] = {}  # by row
        self._drafts: dict[int, tuple[int, DraftTree]] = {}  # by row: its length, and what was drafted behind it

    @property
    def adaptive(self) -> bool:  # type: ignore[override]
        return super().adaptive and self.stop == "cost"

    def bind(self, target: Target) -> None:
        super().bind(target)
        view = FirstLayers(self.head.layers[0]).tapping(self.needs)
        self.reader.exits = self.run_under(target, [view] * self.depth)

    def continues(self, growing: GrowingTree, rows: int, active: int) -> bool:
        if self.stop == "cost" or growing.frontier == [growing.root]:
            return super().continues(growing, rows, active)
        return self._bandits.setdefault(id(growing.row), Bandit()).continues()

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        super().observe(rows, trees, scores, accepted)
        for row in rows:
            if (bandit := self._bandits.get(id(row))) is not None and id(row) in self._drafts:
                length, draft = self._drafts.pop(id(row))
                node = right = 0
                for token in row.tokens[length:]:
                    if (child := draft.child(node, token)) is None:
                        break
                    node, right = child, right + 1
                bandit.update(right, max(draft.shape.depth) - right)

    def end(self, row: Row) -> None:
        super().end(row)
        self._bandits.pop(id(row), None)
        self._drafts.pop(id(row), None)

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        drafts = super().propose(rows, budget)
        for row, draft in zip(rows, drafts, strict=True):
            self._drafts[id(row)] = len(row.tokens), draft
        return drafts
