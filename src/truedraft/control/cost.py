"""Cost model: verify as much of a draft as raises tokens per second, from measured costs and each row's own history.

The gain of a node is the chance that all tokens on its path are right: each as often as the drafter has seen of those
that it hoped as much of, or else as recent ones in its place were (Sequoia's positional acceptance). Drafts are
compared with what was emitted whether they were verified or not, token by token, so a row whose drafts do not pay
stops verifying them, keeps learning at no cost, and takes them up again as soon as its text begins to repeat. Costs:
`runtime/curve.py`, corrected by the passes at hand; now and then a promising draft is tried against them. Drafts
that are expected to pay are held to it: what they take, in passes and between them, is drawn from what they saved, and
where that is spent they are trials, as those are that are not expected to. Trials take a small share of the time; where
it is spent, passes go without drafts. The objective, accepted tokens over the measured time of the pass, is that of
Sequoia's hardware-aware budget (arXiv 2402.12374, section 3.3), here per pass and with drafts that were not verified as
evidence.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, zip_longest
from statistics import median

from truedraft.card import Card, knob
from truedraft.control._base import Control
from truedraft.control._probing import Probing
from truedraft.drafters._base import Drafter, PassCost
from truedraft.runtime import calibration
from truedraft.runtime.curve import Curve
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row

CHEAP = 0.05  # of a plain pass, for a level of a draft
FAVOUR = 0.5  # plain passes that drafts are taken to save, before anything is known
DEAR = 0.5  # of a plain pass, for a draft: it has to pay on the whole, not now and then
RECENT = 9  # drafts whose time counts
HICCUP = 4.0  # times the usual time of a draft, of which no more is held against it
DOUBT = 10.0  # nodes hoped for, before it counts how many of such nodes were right: the best drafts seem better
KEPT = 0.97  # weight that these keep at each later pass
FEW = 8  # nodes by which the price of one is measured
ROOM = 8  # nodes drafted beyond half as many more as were worth verifying
RESERVE = 4.0  # plain passes that are kept for trials, at most
CREDIT = 16.0  # plain passes that drafts which are expected to pay may lose before they have earned any
EARNED = 32.0  # plain passes that drafts saved which they may lose again, at most
FIRST = 2  # passes without drafts, before any costs are known: the very first often waits for memory
SIZES = (0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 19, 24, 32, 48, 64, 96, 128)


@dataclass
class Odds:
    """How often the first, second, ... child of a right node was right, by depth; the recent past counts most."""

    memory: float
    hope: float
    survival: float
    _seen: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)  # (right, tried)

    def add(self, depth: int, order: int, right: bool) -> None:
        """A child of that `order` (0 the first), `depth` levels below the root, under a node that was right."""
        for key in ((depth, order), (0, order)) if depth > 1 else ((depth, order),):
            before, tried = self._seen.get(key, (0.0, 0.0))
            self._seen[key] = before * self.memory + right, tried * self.memory + 1

    def chance(self, depth: int, order: int) -> float:
        """That such a child is right; below the first level, what is not known of a depth is taken from the others."""
        hope = (self.survival if depth > 1 else self.hope) * 0.5**order
        for key in ((0, order), (depth, order)) if depth > 1 else ((depth, order),):
            right, tried = self._seen.get(key, (0.0, 0.0))
            hope = (right + hope) / (tried + 1)
        return hope

    def values(self, tree: DraftTree) -> list[float]:
        """The chance of every node that it is right, the root's (1) first; 0 for probes.

        By the confidence that the drafter has in each, where it has any, else by its place in the tree.
        """
        confidence: Sequence[float]
        if tree.confidence is not None:
            confidence = tree.confidence
        else:
            shape = tree.shape
            confidence = [self.chance(d, o) for d, o in zip(shape.depth, shape.order, strict=True)]
        values = [1.0]
        for i, parent in enumerate(tree.parent[1:], 1):
            values.append(0.0 if i in tree.probes else values[parent] * confidence[i])
        return values


@dataclass
class Shadow:
    """A draft that is still being compared with what the target says."""

    tree: DraftTree
    node: int = 0

    def follow(self, tokens: Sequence[int], odds: Odds) -> bool:
        """Go on along `tokens`; true once the draft was right to its end or went wrong."""
        shape = self.tree.shape
        for token in tokens:
            right = self.tree.child(self.node, token)
            for child in shape.children[self.node]:
                if child not in self.tree.probes:
                    odds.add(shape.depth[child], shape.order[child], child == right)
            if right is None:
                return True
            self.node = right
        return not shape.children[self.node]


@dataclass
class Cost(Control):
    card = Card(
        paper="arXiv 2402.12374 (2024), section 3.3, extended",
        idea="Verify as much of each draft as raises expected tokens per second on this machine.",
        family="cost model",
    )
    memory: float = knob(0.9, 0, 1)  # weight that an observation keeps at each later one
    survival: float = knob(0.85, 0, 1)  # chance given to a later one, if those before it are right
    slack: float = knob(0.015, 0, 1)  # share of the time that drafts which are not verified, or are tried, may cost
    rate: float = knob(0.1, 0, 1)  # how fast the costs follow the passes at hand

    def __post_init__(self) -> None:
        self._rows: dict[int, Odds] = {}
        self._shadows: dict[int, list[Shadow]] = {}
        self._emitted: dict[int, int] = {}
        self._target: Target | None = None
        self._drafter: Drafter | None = None
        self._curve = Curve.typical(1, 1.0)
        self._known = False  # whether the curve is of passes that were seen
        self._first: list[tuple[float, int]] = []  # seconds and tokens of those that were, until it is

    def open(self, target: Target, drafter: Drafter, seconds: Mapping[str, float], lockstep: bool, steps: int) -> None:
        if drafter.width:
            self._measure(target, steps)
        if drafter is not self._drafter:  # what is known of one drafter is kept from call to call
            self._probing = Probing()
            self._reach = drafter.width  # nodes worth drafting, of which the best are chosen
            self._drafter = drafter
            self._hope, self._survival = drafter.hope, self.survival
            self._right = self._hoped = 0.0  # nodes verified lately: that were right, and that were hoped to be
            self._each = (0.0, 0.0)  # seconds of recent drafting after the first, and levels that it gave
            self._form = DraftTree.chain(0, range(drafter.width))  # of a full draft, as far as one was seen
            self._formed = False
            self._favour = FAVOUR  # plain passes that a draft lately saved
            self._took: deque[float] = deque(maxlen=RECENT)  # seconds of the latest drafts, a call's first left out
            self._trials = 0.0  # seconds that drafts may lose which are not expected to pay
            self._earned = 0.0  # seconds that drafts have saved of late, all that they took drawn from it
        self._probing.begin()
        self._width, self._seconds, self._lockstep = drafter.width, seconds, lockstep
        if drafter.width:
            drafter.pass_cost = self._pass_cost(1)
        self._proposed = 0
        self._asked = self._trusted = self._solvent = True
        self._resumed = False  # whether drafts were asked for again after a pause
        self._worth = self._favour * self._curve(1) if drafter.width else 0.0  # seconds that a draft lately saved
        self._drawn = self._offered_probes = self._exploring = False
        self._promised = 0.0  # nodes of the pass under way that are hoped to be right
        self._levels = 0  # of the drafts at hand
        # seconds of drafting, of all that drafts take beside passes, and of passes, when drafts were last asked for
        self._drafted = self._beside = self._passing = 0.0
        self._lost = 0.0  # seconds that the latest pass took beyond the plain passes that it saved
        self._pass: tuple[int, float] | None = None  # tokens of the pass under way, seconds of the target before it

    def _measure(self, target: Target, steps: int) -> None:
        if self._target is not target:
            self._target, self._calibration = target, calibration.of(target)
            self._known, self._first = self._calibration.kept is not None, []
            self._curve = self._calibration.kept or self._calibration.guess()
        measured = self._calibration.go_on(steps, self._curve if self._known else None)
        if measured is not None:
            self._curve, self._known = measured, True

    def start(self, rows: Sequence[Row]) -> None:
        self._admitted = True
        for row in rows:
            self._rows[id(row)] = Odds(self.memory, self._hope, self._survival)
            self._shadows[id(row)] = []

    def budget(self, rows: Sequence[Row]) -> list[int]:
        if not self._width:
            return [0] * len(rows)
        assert self._drafter is not None
        self._drafter.pass_cost = self._pass_cost(len(rows))
        for row in rows:
            self._emitted[id(row)] = len(row.tokens)
        self._settle(len(rows))
        size, self._trusted = self._plan(rows)
        self._solvent = self._trusted and self._earned >= -CREDIT * self._cost(len(rows))
        self._resumed = not self._asked
        self._asked = self._known and (self._solvent or self._trials >= 0)
        self._proposed += self._asked
        return [size if self._asked else 0] * len(rows)

    def _cost(self, tokens: int) -> float:
        """Seconds of a pass over so many tokens of its own rows."""
        return self._curve(self.beside + tokens)

    def _settle(self, rows: int) -> None:
        """Book what the latest drafts saved and took, and what passes allow for trials."""
        spent, plain = self._seconds, self._cost(rows)
        drafting, passing = spent["draft"], spent["target"] + spent["prefill"]
        beside = drafting + spent.get("observe", 0.0) + spent["control"]
        lost, self._lost = self._lost, 0.0
        asked = self._asked and self._proposed > 0
        if asked and not self._admitted:  # else prompts were read, whatever comes of it
            took = max(beside - self._beside, 0.0)
            if not self._resumed:  # else it read what had been emitted since the one before
                self._took.append(took)
            lost += min(took, HICCUP * self._drafting()) if self._took else took
            seconds, levels = self._each
            if self._levels:
                took = max(drafting - self._drafted, 0.0)
                self._each = seconds * self.memory + took, levels * self.memory + self._levels
        allowed = self.slack * max(passing - self._passing, 0.0)
        trials = self._trials + allowed - (0.0 if self._solvent else lost)
        self._trials = min(max(trials, -RESERVE * plain), RESERVE * plain)
        # as much at most, lest it is lost again where drafts turn bad, and as little that better ones soon count
        self._earned = min(max(self._earned - lost, -2 * CREDIT * plain), EARNED * plain)
        self._admitted = self._admitted and not asked
        self._beside, self._drafted, self._passing = beside, drafting, passing

    def _pass_cost(self, rows: int) -> PassCost:
        plain = self._cost(rows)
        return PassCost(plain, (self._cost(rows * (1 + FEW)) - plain) / (rows * FEW))

    def _plan(self, rows: Sequence[Row]) -> tuple[int, bool]:
        """Nodes to draft per row, and whether they are expected to pay.

        Drafts that cost next to nothing are made in full, and cut afterwards. What costs a model's passes, or may not
        be cut because it is drawn, is sized before it is made, by what full drafts look like.
        """
        if not self._drawn and not self._dear():
            return min(self._width, self._reach), self._worth > 0
        level, plain = self._level(), self._cost(len(rows))
        longest = len(self._form) - 1
        gains = self._gains(rows, [self._form] * len(rows), longest)
        depth = list(accumulate(self._form.shape.depth, max))
        rates = {
            k: (len(rows) + gains[k]) / (self._cost(len(rows) * (1 + k)) + depth[k] * level)
            for k in {min(k, longest) for k in SIZES[1:]}
        }
        best = max(rates, key=rates.__getitem__)
        return self._width if best == longest else best, rates[best] > len(rows) / plain

    def _level(self) -> float:
        """Seconds that a level of a draft takes, all rows together."""
        seconds, levels = self._each
        return seconds / levels if levels else 0.0

    def _dear(self) -> bool:
        """Whether drafting costs a share of a plain pass that must be weighed before it is done."""
        assert self._drafter is not None
        return self._drafter.autoregressive and self._level() > CHEAP * self._cost(1)

    def prune(self, rows: Sequence[Row], trees: Sequence[DraftTree]) -> list[DraftTree]:
        self._exploring, self._promised = False, 0.0
        if not self._asked:
            self._pass = None if self._known else (len(rows), self._seconds["target"])
            return list(trees)
        if self._drafter is not None and self._drafter.autoregressive:
            self._levels = max(max(tree.shape.depth) for tree in trees)
        self._drawn = any(tree.dist is not None for tree in trees)
        largest = max(trees, key=len)
        if len(largest) > 1 and (not self._formed or len(largest) >= len(self._form)):
            self._form, self._formed = largest, True
        for row, tree in zip(rows, trees, strict=True):
            if len(tree) > 1 and tree.confidence is None:
                self._shadows[id(row)].append(Shadow(tree))
        self._offered_probes = any(tree.probes for tree in trees)
        sized = self._sized(rows, trees)
        self._pass = (len(rows) * max(map(len, sized)), self._seconds["target"])
        return sized

    def _sized(self, rows: Sequence[Row], trees: Sequence[DraftTree]) -> list[DraftTree]:
        longest = max(tree.drafted for tree in trees)
        if any(tree.probes for tree in trees):
            return self._probed(trees, self._sized(rows, [tree.bare() for tree in trees]))
        if longest == 0 or self._drawn:
            return list(trees)
        hoped = self._gains(rows, trees, longest)
        sober = (self._right + DOUBT) / (self._hoped + DOUBT)
        gains = [sober * gain for gain in hoped]
        plain = best = len(rows) / self._cost(len(rows))
        size = 0
        for k in SIZES[1:]:
            k = min(k, longest)
            rate = (len(rows) + gains[k]) / self._cost(len(rows) * (1 + k))
            if rate > best:
                best, size = rate, k
            if k == longest:
                break
        spent = self._cost(len(rows) * (1 + size)) + self._drafting()
        saved = (len(rows) + gains[size]) / plain - spent
        self._worth = self.memory * self._worth + (1 - self.memory) * saved
        if saved > 0 and self._drafting() < DEAR * self._cost(len(rows)):  # quick to take up again what was given up
            self._worth = max(self._worth, saved / 2)
        elif saved < -self._cost(len(rows)):  # and to give up what costs more than a pass
            self._worth = min(self._worth, 0.0)
        self._favour = min(self._worth / self._cost(len(rows)), FAVOUR)
        self._exploring = size == 0 and gains[longest] > len(rows) and self._trials > 0
        if self._exploring:
            size = longest
        self._reach = size + size // 2 + ROOM
        self._promised = hoped[size]
        return [tree.cut(1 + size) for tree in trees]

    def _probed(self, trees: Sequence[DraftTree], sized: Sequence[DraftTree]) -> list[DraftTree]:
        """Drafts of the chosen size, with their probes where these pay."""
        self._reach = self._width
        whole = [tree.drafting(kept.drafted) for tree, kept in zip(trees, sized, strict=True)]
        least, most = (len(trees) * max(map(len, given)) for given in (sized, whole))
        more = self._cost(most) - self._cost(least)
        return whole if self._probing.decide(more, self.slack * self._seconds["target"]) else list(sized)

    def _drafting(self) -> float:
        """Seconds that drafting and learning take a pass; the median, since now and then one waits for others."""
        return median(self._took) if self._took else 0.0

    def _gains(self, rows: Sequence[Row], trees: Sequence[DraftTree], longest: int) -> list[float]:
        """Expected accepted nodes, all rows together, of the first 0, 1, ... `longest` nodes of each draft."""
        values = [self._rows[id(row)].values(tree) for row, tree in zip(rows, trees, strict=True)]
        nodes = islice(zip_longest(*values, fillvalue=0.0), 1, longest + 1)
        each = (len(rows) * math.prod(chances) if self._lockstep else sum(chances) for chances in nodes)
        return list(accumulate(each, initial=0.0))

    def observe(self, rows: Sequence[Row], trees: Sequence[DraftTree], accepted: Sequence[Accepted]) -> None:
        if self._pass is not None and self._width:
            tokens, before = self._pass
            spent = self._seconds["target"] - before
            if spent > 0 and self._target is not None and not self._target.cold:
                emitted = sum(len(row.tokens) - self._emitted.get(id(row), len(row.tokens)) for row in rows)
                self._learn(len(rows), tokens, spent, emitted)
        for row in rows:
            said = row.tokens[self._emitted.get(id(row), len(row.tokens)) :]
            odds = self._rows[id(row)]
            self._shadows[id(row)] = [shadow for shadow in self._shadows[id(row)] if not shadow.follow(said, odds)]

    def _learn(self, rows: int, tokens: int, spent: float, emitted: int) -> None:
        """From a pass over `tokens` tokens that took `spent` seconds."""
        if not self._known:  # the first passes of all: without drafts, so that what drafts save can be told
            self._first.append((spent, self.beside + tokens))
            seconds, width = min(self._first)
            self._curve, self._known = Curve.typical(width, seconds), len(self._first) >= FIRST
            return
        if self._promised:
            self._right = KEPT * self._right + emitted - rows
            self._hoped = KEPT * self._hoped + self._promised
        if self._offered_probes:
            self._probing.saw(emitted / rows, self._cost(tokens))
        if tokens > rows:
            self._lost = min(spent, HICCUP * self._cost(tokens)) - emitted / rows * self._cost(rows)
        rate = 0.5 if self._exploring else self.rate
        self._curve = self._curve.learned(self.beside + tokens, spent, rate, self.beside + rows)

    def end(self, row: Row) -> None:
        if (odds := self._rows.get(id(row))) is not None and self._dear():
            self._hope = (self._hope + odds.chance(1, 0)) / 2
            self._survival = (self._survival + odds.chance(2, 0)) / 2
        for memory in (self._rows, self._shadows, self._emitted):
            memory.pop(id(row), None)
