"""S2D2: the model verifies its own drafts, reading them as blocks of one position.

A pass predicts the block as ever. Where verifying seems worth a pass, the predictions of all its masks are written, and
the next pass scores each from the tokens before it alone, as a model of blocks of one position does, which is
autoregressive: predictions of the first run of masks are fixed for as long as they are what that pass would choose, and
its own choice is fixed at the first that is not; the rest become masks again. Elsewhere every position above a
threshold is fixed.

Worth it: by the estimated number of predictions that will be accepted (those from the first mask on whose two largest
probabilities are far enough apart) less a cost, fixed or per position above the threshold; compared with a bound, with
two bounds for switching on and off, or by the length of the run alone. The paper's bandit is left out.

The paper accepts with the ratio of the two laws. Here the noise of a position is the same in both passes, so a
prediction is accepted where the verifying law draws it too: with cost=0, where everything is verified, the text is that
of `left-to-right` in blocks of one position, greedily and under any seed. This needs keys and values that are computed
so too (`causal_cache`), as in the published settings for SDAR.

Han et al., "S2D2: Fast Decoding for Diffusion LLMs via Training-Free Self-Speculation", arXiv 2603.25702 (2026), with
the constants of its code.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from math import exp

from truedraft.canvas._base import NOTHING, CanvasRow, Fixed, Predictions
from truedraft.canvas.layout import Layout
from truedraft.canvas.policies.lossy._base import LossyPolicy
from truedraft.card import Card, knob
from truedraft.errors import Refused

ROUTERS = ("bound", "hysteresis", "span")


def router(name: str) -> str:
    """The name of a router; raises ValueError for others."""
    if name not in ROUTERS:
        raise ValueError
    return name


@dataclass
class Row:
    """What the policy knows of a row: the mask token, whether the next pass verifies, and the state of hysteresis."""

    mask: int
    verifying: bool = False
    on: bool = False


@dataclass
class S2d2(LossyPolicy):
    card = Card(
        paper="arXiv 2603.25702 (2026)",
        idea="Draft a block, and verify it by the same model as one of blocks of one position.",
        family="self-speculation",
        cannot={"attention to the whole": "it verifies as a model of smaller blocks"},
        presets={
            "s2d2-always": {"cost": 0.0},
            "s2d2-hysteresis": {"router": "hysteresis", "dynamic": True, "causal_cache": False, "threshold": 0.9},
            "s2d2-span": {"router": "span", "causal_cache": False, "threshold": 0.9},
        },
        published="SDAR: up to 4.7 times autoregressive decoding and 1.57 times a tuned threshold; LLaDA2.1-Mini: 4.4 "
        "times one position per pass.",
    )
    threshold: float = knob(0.85, 0, 1)  # which a probability must exceed without verification (0.85; 0.9 to 0.95)
    router: str = knob("bound", form="bound, hysteresis or span", reader=router)  # what decides on verification
    cost: float = knob(1.0, 0, 1024)  # of verifying, in tokens (1; 4 for LLaDA 2.1)
    dynamic: bool = knob(False)  # the cost is per position above the threshold
    bound: float = knob(0.0, -1024, 1024)  # least gain (0; -5)
    on: float = knob(1.0, -1024, 1024)  # gain above which hysteresis begins to verify (1)
    off: float = knob(-5.0, -1024, 1024)  # gain below which it ends (-5)
    span: int = knob(8, 1, 1024)  # least run of masks (8)
    margin: float = knob(0.05, 0, 1)  # of the two largest probabilities where a prediction counts as accepted (0.05)
    causal_cache: bool = knob(True)  # keys and values of complete blocks as those of blocks of one position

    def begin(self, row: CanvasRow, layout: Layout) -> None:
        if layout.attention == "whole":
            raise Refused(
                "lossy/s2d2 verifies a model of blocks as one of smaller blocks, and this model attends to the whole "
                "canvas: choose lossy/guided to verify by another model"
            )
        row.memory[id(self)] = Row(layout.mask)

    def causal(self, row: CanvasRow) -> bool:
        return row.memory[id(self)].verifying

    def choose(self, predictions: Predictions, row: CanvasRow) -> Fixed:
        state: Row = row.memory[id(self)]
        tokens, sure = _choices(predictions, row)
        first = predictions.positions[0]
        run = [i for i, place in enumerate(predictions.positions) if place == first + i]
        if row.causal:
            state.verifying = False
            same = takewhile(lambda i: row.canvas.tokens[first + i] == tokens[i], run)
            count = min(len(list(same)) + 1, len(run))
            row.canvas.write(frozenset((place, state.mask) for place in predictions.positions[count:]))
            return _fixed(predictions, tokens, range(count))
        above = [i for i, p in enumerate(sure) if p > self.threshold]
        if self._verifies(predictions, run, len(above), state):
            state.verifying = True
            row.canvas.write(_fixed(predictions, tokens, range(len(tokens))))
            return NOTHING
        return _fixed(predictions, tokens, above or [max(range(len(sure)), key=sure.__getitem__)])

    def _verifies(self, predictions: Predictions, run: list[int], above: int, state: Row) -> bool:
        """Whether to verify the run of masks."""
        if self.router == "span":
            return len(run) >= self.span
        first, second = predictions.probs[run].topk(2).values.unbind(-1)
        accepted = list(takewhile(lambda apart: apart > self.margin, (first - second).tolist()))
        gain = len(accepted) - self.cost * (above if self.dynamic else 1)
        if self.router == "bound":
            return gain >= self.bound
        state.on = gain >= self.off if state.on else gain > self.on
        return state.on


def _choices(predictions: Predictions, row: CanvasRow) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Tokens and their probabilities; drawn with the noise that a position would have in blocks of one position."""
    if predictions.drawn is None:
        return predictions.tokens, predictions.probability
    later = [place - row.prompt - row.step for place in predictions.positions]
    draws = [predictions.drawn([i], steps) for i, steps in enumerate(later)]
    return tuple(tokens[0] for tokens, _ in draws), tuple(exp(sure[0]) for _, sure in draws)


def _fixed(predictions: Predictions, tokens: tuple[int, ...], indices: range | list[int]) -> Fixed:
    return frozenset((predictions.positions[i], tokens[i]) for i in indices)
