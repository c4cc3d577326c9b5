"""S2D: a draft model with exits: each token is drafted by the first of several depths that is sure of it.

Kavehzadeh et al., "S2D: Sorted Speculative Decoding For More Efficient Deployment of Nested Large Language Models",
2024 (arXiv 2407.01955). The draft model is trained so that some of its prefixes of layers are language models, with one
final norm and output head (sorted fine-tuning, `truedraft train s2d`): one model drafts for targets of several sizes,
and only the thresholds differ. A token whose likeliest continuation is probable enough at an exit is drafted there; if
it is not, the same hidden state goes on to the next exit.

Keys and values that the layers behind an exit lack, of tokens that were drafted at it, are made when a later token goes
on: the hidden states of all such tokens run through these layers in one pass with its own. Under cost control an exit
that saves less than its output head costs is dropped between calls. It wins over a draft model of one depth where easy
and hard tokens alternate. On the CPU passes over a part of the layers are compiled ones; of models that add positions
to their embeddings or normalise these (GPT-2, Bloom), they are made by the model's own forward, with compiled linear
layers. Each exit is a call of its own, so that beside a draft model as small as those that two cores train,
`draft-model` is faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from truedraft.card import Card, knob
from truedraft.drafters._learned import Batch
from truedraft.drafters._losses import LOSSES, named
from truedraft.drafters.models._distilling import Distilling
from truedraft.drafters.models._model import ChainDrafter
from truedraft.drafters.models._nested_reader import Exit, NestedReader
from truedraft.errors import Refused
from truedraft.runtime.segments import Segments
from truedraft.targets._base import Target
from truedraft.targets.hostable import keeps_states, layer_types

EXITS = "layers before each exit, as in '6x9x12'"
THRESHOLDS = "the least probability of the likeliest token at each exit but the last, as in '0.7x0.6', or one for all"
SHARES = (1 / 2, 3 / 4, 1)  # of the layers, before each exit; published: 6, 9 and 12 of 12


def layers_of(text: str) -> tuple[int, ...]:
    """Layers from "6x9x12", in increasing order.

    Raises:
        ValueError: another format.
    """
    found = tuple(map(int, text.split("x"))) if text else ()
    if list(found) != sorted({*found}) or (found and found[0] < 1):
        raise ValueError
    return found


def probabilities(text: str) -> tuple[float, ...]:
    """Probabilities from "0.7x0.5".

    Raises:
        ValueError: another format.
    """
    found = tuple(map(float, text.split("x")))
    if not all(0 <= one <= 1 for one in found):
        raise ValueError
    return found


def exits_of(model: PreTrainedModel, exits: Sequence[int]) -> tuple[int, ...]:
    """The layers before each exit of a model: those given, or by default those that it was trained for (`exits` of its
    configuration), or else `SHARES` of all.

    Raises:
        Refused: it has fewer layers, or they keep states.
    """
    if keeps_states(model.config):
        raise Refused(f"the draft model {type(model).__name__} keeps states of all its layers: give one of attention")
    count = len(layer_types(model))
    if exits and exits[-1] > count:
        raise Refused(f"s2d:exits={'x'.join(map(str, exits))}: the draft model has {count} layers")
    trained = getattr(model.config, "exits", ())
    return tuple(exits or trained or sorted({max(round(share * count), 1) for share in SHARES}))


class SortedLoss:
    """The loss of sorted fine-tuning: the sum of the language-model losses at all exits, through one norm and head.

    Args:
        model: the draft model. exits: layers before each exit, see `exits_of`.

    Raises:
        Refused: its layers cannot run alone.
    """

    def __init__(self, model: PreTrainedModel, exits: Sequence[int]):
        self.model, self.exits = model, exits_of(model, exits)
        self._segments = Segments(model, len(layer_types(model)))

    def __call__(self, ids: Tensor, counted: Tensor) -> Tensor:
        """ids: (rows, length). counted: (rows, length) bool, True on the tokens to predict; the first of a row is not
        predicted."""
        labels = ids[:, 1:][counted[:, 1:]]
        return torch.stack([cross_entropy(logits, labels) for logits in self.logits(ids, counted)]).sum()

    def logits(self, ids: Tensor, counted: Tensor) -> Iterator[Tensor]:
        """(n, V) fp32 logits before each counted token, exit by exit."""
        states = None
        for first, last in pairwise((0, *self.exits)):
            with self._segments.running(first, last, states) as left:
                logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
            (states,) = left
            yield logits[counted[:, 1:]].float()


@dataclass
class Sorting(Distilling):
    """Sorted fine-tuning on a target's responses: as the training of `draft-model`, with the losses of all exits."""

    name: ClassVar[str] = "s2d"
    exits: str = knob("", form=EXITS, reader=layers_of)  # of the student; published 6x9x12, of 12
    loss_name: str = knob("ce", form=f"one of {', '.join(LOSSES)}", reader=named)  # at each exit; published ce

    def begin(self, model: PreTrainedModel) -> None:
        super().begin(model)
        student: Any = self.module
        self._sorted = SortedLoss(student, layers_of(self.exits))
        student.config.exits = list(self._sorted.exits)

    def outputs(self, batch: Batch, counted: Tensor) -> Iterable[Tensor]:
        return self._sorted.logits(batch.ids, batch.loss_mask)


@dataclass
class S2d(ChainDrafter):
    card = Card(
        paper="arXiv 2407.01955 (2024)",
        idea="A draft model with exits drafts each token by the first depth that is sure enough of it.",
        family="draft model",
        needs=("draft model",),
        cannot={"encoder-decoder": "its exits are those of a decoder language model"},
        published="Vicuna 7B and 13B: 1.34x and 1.38x, LLaMA-2 70B 1.95x, 2.4 to 2.9 tokens a pass; an unsorted "
        "draft's early exit 1.22x on average (one GPU).",
        also={
            "sorted-speculative-decoding": "",
        },
    )
    learner = Sorting
    model: Any = None  # a model of transformers, or its name: a folder, an embedded model, one on the hub
    exits: str = knob("", form=EXITS, reader=layers_of)  # published 6x9x12, of 12
    thresholds: str = knob("0.7x0.6", form=THRESHOLDS, reader=probabilities)  # to draft there; published: tuned
    length: int = knob(8, 1, 64)  # tokens of the draft model at most
    confidence: float = knob(0.3, 0, 1)  # the last threshold: a draft ends after a token of lower probability

    def __post_init__(self) -> None:
        super().__post_init__()
        self._reader: Any = NestedReader(self.model, [])
        self.forget()

    def forget(self) -> None:
        if self.model is None:
            return
        layers, thresholds = exits_of(self.model, layers_of(self.exits)), probabilities(self.thresholds)
        if len(thresholds) == 1 or not self.exits:
            thresholds = (*thresholds, *thresholds[-1:] * len(layers))[: len(layers) - 1]
        if len(thresholds) != len(layers) - 1:
            raise Refused(
                f"s2d:thresholds={self.thresholds}: there are {len(layers)} exits: give {len(layers) - 1} "
                "probabilities, or one for all"
            )
        self._reader.exits = [*map(Exit, layers, (*thresholds, 0.0))]

    def bind(self, target: Target) -> None:
        if why := self.card.cannot.get(target.family):
            raise Refused(f"s2d cannot draft for {type(target.model).__name__}: {why}")
        super().bind(target)

    def open(self) -> None:
        super().open()
        if self.pass_cost is not None:
            self._reader.drop_exits()
