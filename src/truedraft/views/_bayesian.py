"""Bayesian search for the halves of layers without which drafting by the rest is fastest."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import torch

from truedraft.errors import Refused
from truedraft.views._base import WHOLE, Reduction
from truedraft.views._calibrated import Evaluator, Step
from truedraft.views._layers import Without, evenly, text_of

SHARES = (0.25, 0.5)  # of the layers that the first sets skip, evenly spaced
RANDOM = 16  # sets tried at random before the search models what it has seen
FEW = (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the halves that they skip, in turn: a model that is small can spare few
HOPELESS = 40  # trials after which the search ends where no set was faster than the whole model alone
SKIPPED = 0.5  # from where on a variable means that its half is skipped; published


def spared(evaluator: Evaluator, trials: int, name: str) -> Iterator[Step]:
    """The halves to skip, as a list of layers: of `trials` sets that with the most tokens per reading of the weights
    (Draft & Verify, arXiv 2309.08168).

    name: of the view, for messages.

    Raises:
        Refused: optuna is not installed; or no set drafts faster than the whole model alone.
    """
    try:
        import optuna
    except ImportError as e:
        raise Refused(f"the calibration of {name} needs optuna: pip install 'truedraft[search]'") from e
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    halves = [(half, layer) for half in "af" for layer in range(evaluator.layers)]
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.GPSampler(seed=0, n_startup_trials=RANDOM)
    )
    for some in _first(evaluator.layers):
        study.enqueue_trial({f"{half}{layer}": float(layer in some[half]) for half, layer in halves})
    goodput, best = {WHOLE: 1.0}, WHOLE  # without drafts
    for number in range(1, trials + 1):
        with torch.enable_grad():  # which the sampler needs, also where the caller computes no gradients
            trial = study.ask()
            found, text = _suggested(trial, evaluator.layers), ""
        if found not in goodput:
            goodput[found] = evaluator.goodput(Without(found), goodput[best])
            if goodput[found] > goodput[best]:
                best = found
                text = f"without {text_of(found)}: {goodput[found]:.3f} tokens per reading of all weights"
        study.tell(trial, goodput[found])
        yield Step(number / trials, text, {"layers": text_of(best)} if best != WHOLE else None)
        if best == WHOLE and number in (HOPELESS, trials):
            raise Refused(_hopeless(name, goodput))


def _first(layers: int) -> Iterator[dict[str, frozenset[int]]]:
    """The layers whose halves the first sets skip: evenly spaced, and then at random."""
    for share in SHARES:
        yield dict.fromkeys("af", evenly(layers, share))
    chance = Random(0)
    for i in range(RANDOM - len(SHARES)):
        count = max(1, round(FEW[i % len(FEW)] * 2 * layers))
        drawn = chance.sample([(half, layer) for half in "af" for layer in range(layers)], count)
        yield {half: frozenset(layer for of, layer in drawn if of == half) for half in "af"}


def _suggested(trial: Any, layers: int) -> Reduction:
    """The set of a trial."""
    attention, feed_forward = (
        frozenset(i for i in range(layers) if trial.suggest_float(f"{half}{i}", 0, 1) >= SKIPPED) for half in "af"
    )
    return Reduction(attention, feed_forward)


def _hopeless(name: str, goodput: dict[Reduction, float]) -> str:
    """Why there is nothing to skip, after these sets were tried."""
    others = {found: value for found, value in goodput.items() if found != WHOLE}
    nearest = max(others, key=others.__getitem__, default=WHOLE)
    return (
        f"{name} finds no halves of layers that this model can spare on these texts: of {len(others)} sets none drafts "
        f"faster than the whole model alone, which emits one token per reading of its weights; the best, without "
        f"{text_of(nearest)}, emits {goodput[nearest]:.2f}: draft by another view or drafter"
    )
