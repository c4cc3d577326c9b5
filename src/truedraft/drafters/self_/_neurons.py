"""Training of predictors of neurons (`views/_neurons.py`) on activations of the frozen target, and reading them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedModel

from truedraft.card import knob
from truedraft.drafters._learned import Batch, Learner, Metrics, origin, read_weights, with_weights
from truedraft.errors import Refused
from truedraft.identity import Identity
from truedraft.runtime.finite import check_finite
from truedraft.runtime.overrides import overridden
from truedraft.runtime.sparse import Feeds
from truedraft.runtime.tapping import blocks_of
from truedraft.targets.kinds import family_of
from truedraft.views._base import NONE
from truedraft.views._neurons import PANEL, Neurons, Predictors, highest

NAME = "deja-vu"
DRAFTED = 8  # tokens of a draft that an evaluation supposes


@dataclass
class Training(Learner):
    """Training of `Predictors` as binary classifiers of groups of neurons, on whole texts.

    Positive are the groups of a layer whose activations, times the norms of what each neuron adds to the hidden state,
    are the largest, and not zero: `share` of them.
    """

    name: ClassVar[str] = NAME
    rank: int = knob(64, 16, 4096)  # of a predictor, in sixteens; published about 1000, of models of 7B and more
    group: int = knob(1, 1, PANEL)  # adjacent neurons that are chosen together, a divisor of 16; published 1
    share: float = knob(0.25, 0, 1, open=True)  # of a layer's groups that are positive

    def begin(self, model: PreTrainedModel) -> None:
        if family_of(model.config) != "decoder":
            raise Refused(f"{type(model).__name__} is no decoder language model: {NAME} predicts for the layers of one")
        if self.rank % 16:
            raise Refused(f"{NAME}:rank={self.rank}: give a multiple of sixteen")
        if PANEL % self.group:
            raise Refused(f"{NAME}:group={self.group}: give a divisor of {PANEL}")
        config, name = model.config.get_text_config(decoder=True), type(model).__name__
        layers = blocks_of(model, config.num_hidden_layers)
        if layers is None:
            raise Refused(f"the layers of {name} are not found")
        self.model = model.requires_grad_(False)
        self.feeds = Feeds(layers, config.hidden_size, name)
        if bad := next((size for size in self.feeds.sizes if size % self.group), None):
            raise Refused(f"{NAME}:group={self.group} divides no {bad} neurons of a layer: give a divisor of them")
        groups = [size // self.group for size in self.feeds.sizes]
        self.module = Predictors(config.hidden_size, groups, self.group, self.rank)

    def loss(self, batch: Batch) -> Tensor:
        found = [
            binary_cross_entropy_with_logits(self.module(layer, states), important.float())
            for layer, (states, important) in enumerate(self._observed(batch))
        ]
        return torch.stack(found).mean()

    @torch.no_grad()
    def _observed(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """By layer, its input at all tokens, (n, H), and which of its groups are positive, (n, groups)."""
        states, activations = list[Tensor](), list[Tensor]()
        decoder: Any = self.model.base_model
        with overridden(self.feeds.noting(states, activations)):
            decoder(input_ids=batch.ids, attention_mask=batch.mask.long(), use_cache=False)
        found = list[tuple[Tensor, Tensor]]()
        for given, active, norms in zip(states, activations, self.feeds.norms(), strict=True):
            squares = (active.view(*batch.mask.shape, -1)[batch.mask].float() * norms).square()
            added = squares.unflatten(-1, (-1, self.group)).sum(-1)
            found.append((given[batch.mask], highest(added, self._neurons.count(len(found))) & (added > 0)))
        return found

    @property
    def _neurons(self) -> Neurons:
        assert isinstance(self.module, Predictors)
        return Neurons(self.module, self.share)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Metrics:
        """recall: the share of positive groups among as many that have the highest scores. agreement: the share of
        tokens whose likeliest successor is that of the whole model, by the model that runs these groups alone.
        tokens_per_pass: what drafts of DRAFTED tokens would have, were each of them right with that probability."""
        right = positive = agreed = tokens = 0
        neurons = self._neurons
        for batch in batches:
            for layer, (states, important) in enumerate(self._observed(batch)):
                right += int((neurons.chosen(layer, states) & important).sum())
                positive += int(important.sum())
            given: dict[str, Any] = dict(input_ids=batch.ids, attention_mask=batch.mask.long(), use_cache=False)
            plain = self.model(**given).logits.argmax(-1)
            with overridden(self.feeds.without(neurons, NONE)):
                sparse = self.model(**given).logits.argmax(-1)
            agreed += int((plain == sparse)[batch.mask].sum())
            tokens += int(batch.mask.sum())
        agreement = agreed / max(tokens, 1)
        return {
            "tokens_per_pass": sum(agreement**i for i in range(DRAFTED + 1)), "agreement": agreement,
            "recall": right / max(positive, 1),
        }  # fmt: skip

    def config(self) -> dict[str, Any]:
        made = self._neurons.predictors
        return {"hidden": made.hidden, "groups": made.groups, "size": made.size, "rank": made.rank}

    def resume(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        own = json.loads(json.dumps(self.config()))  # as it is read from a checkpoint
        if {k: v for k, v in config.items() if k in own} != own:
            raise Refused(f"--resume: the checkpoint is of predictors {config}, not {own}: give the same knobs")
        self.module.load_state_dict(weights)


def check_predictors(source: object, predictors: Predictors) -> None:
    """Raises Refused where a weight is no finite number. source: as the caller named them, or they themselves."""
    check_finite(NAME, source, predictors)


def read_predictors(folder: str) -> tuple[Predictors, Identity]:
    """The predictors of a checkpoint, and the model that they were trained for.

    Raises:
        Refused: there is none, or it is damaged.
    """
    config, weights = read_weights(Path(folder).expanduser(), NAME)
    made = with_weights(
        lambda: Predictors(config["hidden"], config["groups"], config["size"], config["rank"]), weights, NAME, folder
    )  # fmt: skip
    return made.requires_grad_(False), origin(config)
