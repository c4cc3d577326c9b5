"""Runs the neurons of feed-forwards that matter for a token, as small predictors say.

Liu et al., "Deja Vu: Contextual Sparsity for Efficient LLMs at Inference Time", ICML 2023 (arXiv 2310.17157). By layer,
an MLP of two low-rank layers reads the hidden state and predicts the neurons with large activations, trained as a
binary classifier on activations of the model. There it reads the state of an earlier layer, so that it runs beside this
one, of models with ReLU, whose other activations are zero; here it reads the layer's own input, and the activations of
models with gates, of which none are zero, count by what they add to the hidden state. Neurons are chosen in groups of
sixteen that lie together in memory, and heads are not: keys and values are always computed. A node of a pass has the
neurons that its own token needs, and the pass reads those of all its nodes: narrow passes gain most.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any

from truedraft.card import Card, knob, shown
from truedraft.drafters.self_._neurons import Training, check_predictors, read_predictors
from truedraft.errors import Refused
from truedraft.views._base import Reduction, View
from truedraft.views._neurons import Neurons, Predictors


@dataclass(frozen=True)
class DejaVu(View):
    """The whole decoder with some of the neurons of each feed-forward. See `View`."""

    card = Card(
        paper="arXiv 2310.17157 (2023)",
        idea="The model drafts for itself with the neurons that a small network predicts for each token.",
        family="self-drafting",
        needs=("training",),
        cannot={"encoder-decoder": "its predictors are of a decoder language model's layers"},
        published="OPT 175B, ReLU: over 2x lower latency than FasterTransformer on GPUs, alone, no loss.",
        lacks={
            "deja-vu": "neurons of feed-forwards are predicted; attention heads are not, and a predictor reads its own "
            "layer's input instead of an earlier one's",
        },
    )
    learner = Training
    model: Any = None  # a checkpoint's folder, or `Predictors`
    kept: float = knob(0.5, 0, 1)  # of the neurons of a layer, for a token; published about 0.2, with ReLU

    def __post_init__(self) -> None:
        if isinstance(self.model, str | PathLike):
            predictors, fitted_to = read_predictors(str(self.model))
            check_predictors(self.model, predictors)
            object.__setattr__(self, "model", predictors)
            object.__setattr__(self, "fitted_to", fitted_to)
        elif not isinstance(self.model, Predictors | None):
            raise Refused(f"deja-vu:model={shown(self.model)}: give the folder of a checkpoint")
        elif self.model is not None:
            check_predictors(self.model, self.model)

    def reduction(self, layers: int) -> Reduction:
        if self.model is None:
            raise Refused(
                "deja-vu has no predictors: `truedraft train deja-vu --target MODEL --data FILE --out FOLDER` makes "
                "some, draft='deja-vu:FOLDER' uses them"
            )
        return Reduction(neurons=Neurons(self.model, self.kept))
