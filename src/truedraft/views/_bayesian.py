"""Bayesian search for the halves of layers without which drafting by the rest is fastest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from truedraft.errors import Refused
from truedraft.views._base import WHOLE, Reduction
from truedraft.views._calibrated import Evaluator
from truedraft.views._layers import Without, evenly, text_of

RANDOM = 16  # sets tried at random before the search models what it has seen
SKIPPED = 0.5  # from where on a variable means that its half is skipped; published


def spared(evaluator: Evaluator, trials: int, name: str, progress: Callable[[str], None]) -> str:
    """The halves to skip, as a list of layers: of `trials` sets that with the most tokens per reading of the weights
    (Draft & Verify, arXiv 2309.08168).

    name: of the view, for messages.

    Raises:
        Refused: optuna is not installed.
    """
    try:
        import optuna
    except ImportError as e:
        raise Refused(f"the calibration of {name} needs optuna: pip install 'truedraft[search]'") from e
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
    study.optimize(tried, n_trials=trials)
    return text_of(best)
