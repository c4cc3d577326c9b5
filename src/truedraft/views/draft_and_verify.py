"""Skips the attention and feed-forward halves without which drafting by the rest is fastest, found by Bayesian search.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding", ACL 2024
(arXiv 2309.08168). The published objective is tokens per second; here it is tokens per weights read, which no other
work on the machine disturbs. The published end of a draft, a threshold of confidence that follows the acceptance rate,
is that of all dynamic drafts here: a level is drafted where it raises the tokens per second that are expected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from truedraft.card import Card, knob
from truedraft.errors import Refused
from truedraft.views._base import WHOLE, Reduction
from truedraft.views._calibrated import CalibratedLayers, Evaluator
from truedraft.views._layers import FORM, Without, evenly, listed, text_of

RANDOM = 16  # sets tried at random before the search models what it has seen
SKIPPED = 0.5  # from where on a variable means that its half is skipped; published


@dataclass(frozen=True)
class DraftAndVerify(CalibratedLayers):
    """A decoder without halves that its drafts can spare. See `View`."""

    card = Card(
        paper="arXiv 2309.08168 (2023)",
        idea="The model drafts for itself without the halves of layers that its drafts can spare.",
        family="self-drafting",
        needs=("calibration",),
        published="Up to 1.73x with Llama 2 13B and 70B, summaries and code; 1,000 sets were tried.",
    )
    layers: str = knob("", form=FORM, reader=listed)  # to skip, as found before
    file: str = knob("")  # of the layers that were found
    trials: int = knob(200, 1, 100_000)  # sets that a calibration tries; published 1,000

    def search(self, evaluator: Evaluator, progress: Callable[[str], None]) -> str:
        try:
            import optuna
        except ImportError as e:
            raise Refused(f"the calibration of {self.name} needs optuna: pip install 'truedraft[search]'") from e
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        goodput: dict[Reduction, float] = {}
        best = WHOLE

        def tried(trial: Any) -> float:
            nonlocal best
            attention, feed_forward = (
                frozenset(i for i in range(evaluator.layers) if trial.suggest_float(f"{half}{i}", 0, 1) >= SKIPPED)
                for half in "af"
            )
            found = Reduction(attention, feed_forward)
            if found not in goodput:
                goodput[found] = evaluator.goodput(Without(found))
                if goodput[found] > goodput.get(best, 0.0):
                    best = found
                    progress(
                        f"without {text_of(found) or 'nothing'}: {goodput[found]:.3f} tokens per reading of all weights"
                    )
            return goodput[found]

        study = optuna.create_study(
            direction="maximize", sampler=optuna.samplers.GPSampler(seed=0, n_startup_trials=RANDOM)
        )
        for share in (0.0, 0.25, 0.5):
            even = evenly(evaluator.layers, share)
            study.enqueue_trial({f"{half}{i}": float(i in even) for half in "af" for i in range(evaluator.layers)})
        study.optimize(tried, n_trials=self.trials)
        return text_of(best)
