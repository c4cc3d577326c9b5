"""Several drafters as one: their drafts merged, the best of them chosen, or one going on where another ends.

    a+b   merge: one tree of both drafts under one budget, what both draft once, the likeliest nodes first
    a|b   route: each pass the draft with the most accepted tokens to be expected per second
    a?b   switch: the first that drafts anything (the published rules of SAM decoding and CopySpec)
    a>b   cascade: b goes on from the ends of a's draft, and drafts alone where a has nothing

The later in this list, the closer it binds, but for `|`, the loosest: `a>b+c|d` is `((a>b)+c)|d`. Whatever is drafted,
all parts see every pass.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from truedraft.card import Card
from truedraft.drafters._base import Drafter, PassCost, PerRow, Plain, moving_average
from truedraft.drafters._calibration import Calibration
from truedraft.drafters._joint import Joint
from truedraft.drafters._trees import grafted, placed, values_of
from truedraft.errors import Refused
from truedraft.registry import AUTO, DEFAULT, NONE, split
from truedraft.stores.union import Union, union
from truedraft.tree import Accepted, DraftTree, Row, Scores

LEAVES = 4  # ends of a draft that a cascade goes on from
DEAR = 0.05  # of a pass, for drafting: what costs more is asked only where it is likely to be chosen
CREDIT = 0.15  # tokens a pass that a part is taken to contribute, before anything is known
AGAIN = 8  # passes after which a part that was not worth its time is asked again,
TRIED = 3  # for so many, if it gives nothing
MORE = 1.5  # tokens that a part brings where those asked before it are wrong, if it is right
SKIPPED = 32  # passes for which no part is left out because others are sure
HICCUP = 4.0  # times the usual time of a part, of which no more is held against it
KEPT = 0.9  # weight that what a part contributed keeps at each later pass


class Many(Joint):
    """Drafters that take part in one draft. All their drafts are certain.

    Raises:
        Refused: fewer than two parts.
    """

    sign: ClassVar[str]

    def __init__(self, parts: Sequence[Drafter]):
        if len(parts) < 2:
            raise Refused(f"{self.sign!r} joins two drafters or more, got {len(parts)}")
        self.parts = tuple(parts)
        self.card = Card(  # type: ignore[misc]
            paper="none", idea=f"{len(parts)} drafters as one.", family="composition",
            needs=tuple(sorted({need for part in parts for need in part.card.needs})),
        )  # fmt: skip
        self._calibrations: dict[int, Calibration] = {}  # of parts that do not say what they hope
        self.seconds = [0.0] * len(parts)  # that a draft lately took
        self.watching = [0.0] * len(parts)  # and seeing a pass that it had drafted for
        self._called: set[int] = set()  # parts that were asked for a draft since the last pass

    def forget(self) -> None:
        super().forget()
        self._calibrations = {}

    @property
    def name(self) -> str:
        return self.sign.join(map(name_of, self.parts))

    @property
    def width(self) -> int:
        return max(part.width for part in self.parts)

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        if not any(budget):
            return [DraftTree.chain(row.tokens[-1]) for row in rows]
        return self.joined(rows, budget)

    @abstractmethod
    def joined(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        """One draft a row, from those of the parts."""

    def propose_by(self, k: int, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        """The drafts of part k, with confidence; how long they took is noted."""
        self._called.add(k)
        began = time.perf_counter()
        trees = self._hoped(k, rows, budget)
        self.seconds[k] = _timed(self.seconds[k], time.perf_counter() - began)
        return trees

    def _hoped(self, k: int, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        trees = [tree.cut(1 + most) for tree, most in zip(self.parts[k].propose(rows, budget), budget, strict=True)]
        if all(tree.confidence is not None for tree in trees):
            return trees
        prior_confidence = self.parts[k].prior_confidence
        return [
            self._calibrations.setdefault(k, Calibration()).proposed(
                row, tree if tree.confidence is not None else placed(tree, prior_confidence)
            )
            for row, tree in zip(rows, trees, strict=True)
        ]

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        for row in rows:
            for calibration in self._calibrations.values():
                calibration.update(row)
        for k, part in enumerate(self.parts):
            began = time.perf_counter()
            part.observe(rows, trees, scores, accepted)
            if k in self._called:
                self.watching[k] = _timed(self.watching[k], time.perf_counter() - began)
        self._called.clear()

    def end(self, row: Row) -> None:
        for calibration in self._calibrations.values():
            calibration.end(row)
        super().end(row)


class Merge(Many):
    """One tree of all drafts."""

    sign = "+"

    def __init__(self, parts: Sequence[Drafter]):
        super().__init__(parts)
        self._begin()

    def forget(self) -> None:
        super().forget()
        self._begin()

    def _begin(self) -> None:
        self._credit = [0.0] * len(self.parts)  # seconds a pass that lately none but this part saved
        self._resting = [0] * len(self.parts)  # passes for which a part is not asked
        self._unasked = [0] * len(self.parts)  # passes since it was
        self._drafts: dict[int, tuple[int, Union]] = {}  # row -> its length, the parts' drafts as one

    def open(self) -> None:
        super().open()
        self._drafts.clear()

    def joined(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        nothing = [DraftTree.chain(row.tokens[-1], (), ()) for row in rows]
        drafts, doubt = [nothing] * len(self.parts), 1.0
        for k in sorted(range(len(self.parts)), key=self.seconds.__getitem__):
            self._unasked[k] += 1
            if self._asks(k, doubt):
                self._unasked[k] = 0
                drafts[k] = self.propose_by(k, rows, budget)
                doubt = min(doubt, sum(map(_doubt, drafts[k])) / len(rows))
        for row, most, *trees in zip(rows, budget, *drafts, strict=True):
            self._drafts[id(row)] = len(row.tokens), union(trees, most)
        return [self._drafts[id(row)][1].tree for row in rows]

    def _asks(self, k: int, doubt: float) -> bool:
        """Whether part k is asked, where those asked before it leave so much doubt about the first token."""
        if self.pass_cost is None:
            return True
        promising = doubt * MORE * self.pass_cost.plain > self.seconds[k] or self._unasked[k] > SKIPPED
        return promising and not self._resting[k]

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        if self.pass_cost is not None and self._drafts:
            self._review(self.pass_cost, rows, trees)
        self._drafts.clear()
        super().observe(rows, trees, scores, accepted)
        self._resting = [max(left - 1, 0) for left in self._resting]

    def _review(self, pass_cost: PassCost, rows: Sequence[Row], trees: Sequence[DraftTree]) -> None:
        """A part whose own contribution saves less time than it takes rests a while, and then is tried again."""
        awake = self._called
        saved = [0.0] * len(self.parts)
        for row, tree in zip(rows, trees, strict=True):
            if id(row) in self._drafts:
                start, draft = self._drafts[id(row)]
                for k, (right, made) in enumerate(zip(*draft.alone(row.tokens[start:], tree.drafted), strict=True)):
                    saved[k] += right * pass_cost.plain / len(rows) - made * pass_cost.node
        if not any(self._credit):
            self._credit = [CREDIT * pass_cost.plain] * len(self.parts)
        for k in awake:
            self._credit[k] = KEPT * self._credit[k] + (1 - KEPT) * saved[k]
        for k in awake:
            took = self.seconds[k] + self.watching[k]
            if self._credit[k] < took:
                self._resting[k], self._credit[k] = AGAIN + k, took / KEPT**TRIED


class Switch(Many):
    """The first draft that is not empty."""

    sign = "?"

    def joined(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        found = self.propose_by(0, rows, budget)
        for k in range(1, len(self.parts)):
            rest = [0 if len(tree) > 1 else most for tree, most in zip(found, budget, strict=True)]
            if any(rest):
                found = [a if len(a) > 1 else b for a, b in zip(found, self.propose_by(k, rows, rest), strict=True)]
        return found


class Route(Many):
    """The draft of which most is expected in the time that it takes.

    Parts whose drafts cost next to nothing are all asked, and judged by what they hope. One that is dear (a model) is
    asked where its drafts lately promised more per second than the best at hand.

    history: which part was chosen in the last call, pass by pass: (row, tokens said before, part).
    """

    sign = "|"

    def __init__(self, parts: Sequence[Drafter]):
        super().__init__(parts)
        self.gains = [math.inf] * len(parts)  # that a draft lately promised
        self.history: list[tuple[int, int, int]] = []
        self._idle = [0] * len(parts)

    def open(self) -> None:
        super().open()
        self.history = []

    def joined(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        best: list[DraftTree] = []
        rates: list[float] = []
        which: list[int] = []
        for k in sorted(range(len(self.parts)), key=self.seconds.__getitem__):
            self._idle[k] += 1
            dear = self.pass_cost is not None and self.seconds[k] > DEAR * self.pass_cost.plain
            if best and dear and self._rate(k, self.gains[k]) < sum(rates) / len(rates) and self._idle[k] < AGAIN:
                continue
            self._idle[k] = 0
            trees = self.propose_by(k, rows, budget)
            promised = [sum(values_of(tree)[1:]) for tree in trees]
            self.gains[k] = moving_average(
                self.gains[k] if self.gains[k] < math.inf else 0.0, sum(promised) / len(promised)
            )
            found = [self._rate(k if dear else None, gain) for gain in promised]
            if not best:
                best, rates, which = trees, found, [k] * len(rows)
                continue
            for b, rate in enumerate(found):
                if rate > rates[b]:
                    best[b], rates[b], which[b] = trees[b], rate, k
        self.history += [(row.index, row.step, k) for row, k in zip(rows, which, strict=True)]
        return best

    def _rate(self, k: int | None, gain: float) -> float:
        """Tokens per second, with the time of drafting where it is not spent already; per pass where time is free."""
        if self.pass_cost is None:
            return gain
        return (1 + gain) / (self.pass_cost.plain + (self.seconds[k] if k is not None else 0.0))


class Cascade(Many):
    """Drafts that go on where those of the part before end."""

    sign = ">"

    def __init__(self, parts: Sequence[Drafter]):
        super().__init__(parts)
        for part in parts[1:]:
            if not isinstance(part, PerRow):
                raise Refused(f"{name_of(part)} cannot go on from another's draft: put it before the '>'")

    def joined(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        found = self.propose_by(0, rows, budget)
        for part in self.parts[1:]:
            assert isinstance(part, PerRow)
            found = [self._extended(part, row, tree, most) for row, tree, most in zip(rows, found, budget, strict=True)]
        return found

    def _extended(self, part: PerRow[Any], row: Row, tree: DraftTree, budget: int) -> DraftTree:
        """A draft that goes on from its likeliest ends."""
        values = values_of(tree)
        ends = sorted((i for i, below in enumerate(tree.shape.children) if not below), key=lambda i: -values[i])
        for end in ends[:LEAVES]:
            room = budget - (len(tree) - 1)
            if room <= 0 or tree.tokens[end] in row.ends:
                break
            after = [tree.tokens[i] for i in tree.path(end)[1:]]
            tree = grafted(tree, end, part.extend(row, after, room).cut(1 + room))
        return tree


KINDS: dict[str, type[Many]] = {kind.sign: kind for kind in (Route, Merge, Switch, Cascade)}


def compose(spec: str, load: Callable[[str], Drafter]) -> Drafter:
    """A drafter from its string form: parts with signs between them, "auto" or "none"; `load` makes the parts.

    Raises:
        Refused: a part is missing, or `load` refuses one.
    """
    if spec == NONE:
        return Plain()
    sign, sides = split(DEFAULT if spec == AUTO else spec)
    return KINDS[sign]([compose(side, load) for side in sides]) if sign else load(spec)


def name_of(part: object) -> str:
    """What a part (a drafter, a rule, a control) is called in reports."""
    if isinstance(part, Many):
        return part.name
    if isinstance(part, Plain):
        return "plain"
    return part.__class__.__module__.rpartition(".")[2].replace("_", "-")


def _doubt(tree: DraftTree) -> float:
    """The chance that the first token is none of those drafted."""
    assert tree.confidence is not None
    return 1 - max(
        (estimate for estimate, parent in zip(tree.confidence, tree.parent, strict=True) if parent == 0), default=0.0
    )


def _timed(before: float, now: float) -> float:
    """Seconds that something lately took; what waited for something else counts little."""
    return moving_average(before, min(now, HICCUP * before) if before else now)
