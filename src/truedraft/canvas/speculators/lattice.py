"""Lattice: canvases by the probability that decoding reaches them, learnt while it decodes.

The next step of the reference fixes one of a few candidates: the likeliest tokens of the latest predictions at each
masked position, and the tokens that followed an earlier occurrence of the known ones before it in the row's own text. A
log-linear model over what is known of a candidate (its probability, its place in the orders of confidence and of
position, whether it is a copy) gives each its chance and leaves a share to all other steps; every observed step
improves the model. Canvases of one step or of several are verified from the likeliest on; two orders of the same
positions lead to one canvas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import exp, log1p, sqrt

from truedraft.canvas._base import NOTHING, OWN, CanvasRow, Draft, Fixed, Policy, Predictions, Speculator
from truedraft.canvas.speculators.freedave import Freedave
from truedraft.card import Card, knob
from truedraft.stores._cursor import Cursor
from truedraft.stores.automaton import Automaton, automaton

Features = tuple[tuple[int, float], ...]  # indices with values
Guesses = dict[int, list[tuple[int, float]]]  # by masked position: tokens, likeliest first, with log-probabilities

FLOOR = -8.0  # log-probability that stands for a copied token which is none of the likeliest
COPIED = 3  # place of such a token among the candidates of its position
MOST = -1e-5  # largest log-probability
LEAST = 0.01  # chance of a step below which it is no candidate

# Indices of features, the first of each kind. Of a token: its log-odds, alone, where the position before is known, and
# where it is the copied one; its probability; its place at its position (the last for copies alone). Of a position: its
# place by confidence and from the left; whether the one before it is known, and since the last step; whether the one
# behind it is known; which of the two are fixed since the predictions. Of a copy: how many tokens match (1, 2, 3 to 5,
# more), whether it is not the first of the copied; another token than that. Of all other steps: by the steps since the
# predictions.
ODDS, ODDS_BEHIND, ODDS_COPIED, PROBABILITY, PLACE, ORDER, LEFT, BEHIND, LATEST, BEFORE, SINCE = (
    0, 1, 2, 3, 4, 8, 14, 18, 19, 20, 21,
)  # fmt: skip
COPY, FAR, OTHER, NONE = 23, 27, 28, 29
PRIOR = (  # learnt on stories, Python and edits of nano-diffusion
    0.64, -0.12, -0.29, 0.49, 0.04, -0.07, -0.59, 0.41, 0.23, -0.19, -0.22, -0.19, -0.08, 0.08, -0.22, 0.27, 0.12,
    -0.49, 0.31, 0.6, 0.08, 0.68, 0.18, 0.43, 0.87, 1.01, 1.19, 0.0, -0.75, 0.33, 0.4, -0.12, -0.78,
)  # fmt: skip
CERTAINTY = 30.0  # squared gradients that stand behind it


@dataclass
class Weights:
    """The log-linear model, learnt by Adagrad.

    squares: summed squares of the gradients.
    """

    values: list[float] = field(default_factory=lambda: list(PRIOR))
    squares: list[float] = field(default_factory=lambda: [CERTAINTY] * len(PRIOR))

    def score(self, features: Features) -> float:
        return sum([self.values[i] * value for i, value in features])

    def learn(self, node: Node, step: Fixed, rate: float) -> None:
        """The next step of a canvas was this one."""
        slopes: dict[int, float] = {}
        for chance, features in (*node.options.values(), node.other):
            for i, value in features:
                slopes[i] = slopes.get(i, 0.0) - chance * value
        for i, value in node.options.get(step, node.other)[1]:
            slopes[i] = slopes.get(i, 0.0) + value
        for i, slope in slopes.items():
            self.squares[i] += slope * slope
            self.values[i] += rate * slope / sqrt(self.squares[i])


@dataclass(frozen=True)
class Node:
    """What the next step of a canvas may be.

    options: by step, its chance and its features. other: those of all other steps.
    """

    options: dict[Fixed, tuple[float, Features]]
    other: tuple[float, Features]


@dataclass
class Known:
    """What the proposals for a row are made from.

    text: its tokens before the first mask, in which others are looked up; length: how many; cursor: their end.
    nodes: of the latest proposal, by what their canvases fix.
    """

    text: Automaton = field(default_factory=automaton)
    cursor: Cursor = field(default_factory=Cursor)
    length: int = 0
    nodes: dict[Fixed, Node] = field(default_factory=dict)

    def read(self, tokens: Sequence[int], first: int) -> None:
        """Read the tokens before position `first`."""
        if self.length < first:
            self.text.read(self.cursor, tokens[self.length : first])
            self.length = first

    def copies(self, tokens: Sequence[int], masked: Sequence[int]) -> dict[int, tuple[int, int, int]]:
        """By masked position: the token that followed an earlier occurrence of the known ones before it, the number of
        tokens that match, and the distance from them."""
        found: dict[int, tuple[int, int, int]] = {}
        hidden, first = set(masked), self.length
        for position in masked:
            if position - 1 in hidden:
                continue
            start = position
            while start > first and start - 1 not in hidden:
                start -= 1
            cursor = self.cursor.copy() if start == first else Cursor()
            if start < position:
                self.text.follow(cursor, tokens[start:position])
            length = next(n for n in count(1) if position + n not in hidden)
            for i, token in enumerate(self.text.copy(cursor, 1, length)):
                found[position + i] = token, cursor.length, i
        return found


@dataclass
class Lattice(Speculator):
    card = Card(
        paper="none",
        idea="Verify the canvases that decoding most probably reaches, by what its steps so far have taught.",
        family="tree",
    )
    canvases: int = knob(16, 1, 64)  # scored per pass besides the row's own, at most
    tokens: int = knob(3, 1, 3)  # candidates at a position besides the copied one
    rate: float = knob(0.1, 0, 1)  # of learning

    def __post_init__(self) -> None:
        self._weights: dict[str, Weights] = {}  # by policy
        self._chain = Freedave(self.canvases)  # of policies that fix several positions at a time

    def propose(self, row: CanvasRow, policy: Policy, least: float) -> list[Draft]:
        known: Known = row.memory.setdefault(id(self), Known())
        known.nodes.clear()
        if row.predictions is not None and len(policy.choose(row.predictions, row)) != 1:
            return self._chain.propose(row, policy, least)
        known.read(row.canvas.tokens, row.canvas.masked(row.block)[0])
        weights = self._weights.setdefault(type(policy).__name__, Weights())
        guesses = _guesses(row.predictions, self.tokens)
        found: list[Draft] = []
        number = count()
        step = row.taken[-1] if row.taken else NOTHING
        waiting = [(-1.0, next(number), OWN, step)]
        while waiting and len(found) <= self.canvases:
            _, _, draft, step = heappop(waiting)
            if draft.fixed in known.nodes or row.finishes(draft.fixed):
                continue
            found.append(draft)
            known.nodes[draft.fixed] = node = self._node(row, known, guesses, draft, step, weights)
            for step, (chance, _) in node.options.items():
                if (chance := chance * draft.chance) >= max(least, LEAST):
                    later = Draft(draft.fixed | step, draft.steps + 1, chance)
                    heappush(waiting, (-chance, next(number), later, step))
        return found[1:]

    def _node(
        self, row: CanvasRow, known: Known, guesses: Guesses, draft: Draft, latest: Fixed, weights: Weights
    ) -> Node:
        canvas, block, masked = row.reached(draft.fixed)
        if row.predictions is not None and row.predictions.drawn is not None:
            guesses = _guesses(row.predictions.after(draft.fixed, draft.steps), 1)
        options = {}
        if block.start <= row.block.stop:
            recent = draft.fixed | row.taken[-1] if row.taken else draft.fixed
            options = _options(guesses, masked, known.copies(canvas.tokens, masked), _places(latest), _places(recent))
        features = (*options.values(), ((NONE + min(draft.steps, 3), 1.0),))
        scores = [exp(weights.score(one)) for one in features]
        total = sum(scores)
        chances = [(score / total, one) for score, one in zip(scores, features, strict=True)]
        return Node(dict(zip(options, chances, strict=False)), chances[-1])

    def observe(self, row: CanvasRow, policy: Policy, drafts: Sequence[Draft], path: Sequence[Fixed]) -> None:
        nodes = row.memory[id(self)].nodes
        if not nodes:
            self._chain.observe(row, policy, drafts, path)
        for before, after in zip((NOTHING, *path), path, strict=False):
            if (node := nodes.get(before)) is not None:
                self._weights[type(policy).__name__].learn(node, after - before, self.rate)


def _guesses(predictions: Predictions | None, count: int) -> Guesses:
    """The likeliest tokens of predictions; of those that are drawn, the drawn one."""
    if predictions is None:
        return {}
    if predictions.drawn is not None:
        pairs = zip(predictions.positions, predictions.tokens, predictions.confidence, strict=True)
        return {position: [(token, confidence)] for position, token, confidence in pairs}
    tokens = predictions.logits.topk(min(count, predictions.logits.shape[-1])).indices
    logs = predictions.scores.gather(-1, tokens)
    return {
        position: list(zip(*pair, strict=True))
        for position, *pair in zip(predictions.positions, tokens.tolist(), logs.tolist(), strict=True)
    }


def _places(fixed: Fixed) -> set[int]:
    return {position for position, _ in fixed}


def _odds(log: float) -> float:
    """Log-odds of a log-probability, limited."""
    return log - log1p(-exp(min(log, MOST)))


def _options(
    guesses: Guesses, masked: Sequence[int], copies: dict[int, tuple[int, int, int]], latest: set[int], recent: set[int]
) -> dict[Fixed, Features]:
    """The features of the candidates of a step.

    latest, recent: positions that the step before has fixed, and all since the predictions.
    """
    hidden, order = set(masked), sorted((-guesses[i][0][1], i) for i in masked if i in guesses)
    places = {position: place for place, (_, position) in enumerate(order)}
    options: dict[Fixed, Features] = {}
    for left, position in enumerate(masked):
        behind = position - 1 not in hidden
        indices = [LEFT + min(left, 3), ORDER + min(places.get(position, 5), 5)]
        indices += [BEHIND] * behind + [BEFORE] * (position + 1 not in hidden) + [LATEST] * (position - 1 in latest)
        indices += [SINCE + side for side, place in enumerate((position - 1, position + 1)) if place in recent]
        at = [(i, 1.0) for i in indices]
        copied, matched, far = copies.get(position, (None, 0, 0))
        copy = [(COPY + (min(matched, 3) - 1 if matched < 6 else 3), 1.0), (FAR, float(far > 0))]
        candidates = [(token, log, place) for place, (token, log) in enumerate(guesses.get(position, []))]
        if copied is not None and all(token != copied for token, _, _ in candidates):
            candidates.append((copied, FLOOR, COPIED))
        for token, log, place in candidates:
            odds = _odds(log)
            of_copy = [] if copied is None else [*copy, (ODDS_COPIED, odds)] if token == copied else [(OTHER, 1.0)]
            of_token = ((ODDS, odds), (ODDS_BEHIND, odds * behind), (PROBABILITY, exp(log)), (PLACE + place, 1.0))
            options[frozenset({(position, token)})] = (*of_token, *at, *of_copy)
    return options
