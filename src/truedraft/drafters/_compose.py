"""Combines drafters: merges their drafts, chooses between them, or lets one draft behind or for another.

    a+b   merge: one tree of both drafts under one budget, what both draft once, the likeliest nodes first
    a|b   route: in each pass the draft with the most expected tokens per second
    a?b   fallback: the first that drafts anything (the published rules of SAM decoding and CopySpec)
    a>b   cascade: b continues a's draft at its leaves, and drafts alone where a drafts nothing
    a<b   review: b drafts for the target under the view a, which drafts for the whole target

Operators later in this list bind closer, except `|`, which binds least: `a>b+c|d` is `((a>b)+c)|d`. Views joined by `+`
are one: `a+b<c+d` is `((a+b)<c)+d` where a and b are views. All parts observe every pass.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from truedraft.card import Card, method_name
from truedraft.drafters._base import Continuing, Drafter, PassCost, PerRow, Plain, moving_average, usual_seconds
from truedraft.drafters._calibration import Calibration
from truedraft.drafters._joint import Joint
from truedraft.drafters._trees import grafted, placed, values_of
from truedraft.drafters.self_._drafter import SelfDrafter
from truedraft.drafters.self_._reviewer import Reviewer
from truedraft.errors import Refused
from truedraft.registry import AUTO, DEFAULT, NONE, split
from truedraft.stores.union import Union, union
from truedraft.tree import Accepted, DraftTree, Row, Scores

LEAVES = 4  # most leaves of a draft at which a cascade continues
DEAR = 0.05  # of a pass: a part whose drafting costs more is called only if it is likely to be chosen
CREDIT = 0.15  # prior contribution of a part, in tokens per pass
AGAIN = 8  # passes after which a part that did not pay is called again,
TRIED = 3  # for this many, if it contributes nothing
MORE = 1.5  # tokens that a part is expected to add where the parts called before it are wrong
SURE = 2.0  # weight of that for an autoregressive part, in such passes observed
SKIPPED = 32  # most passes for which a part is not called because others are confident
FEW = 4.0  # tokens per pass to begin with
STEADY = 0.94  # weight that the savings promised by a part, before it has read a text, keep at each later pass
MARGIN = 3.0  # times the time of reading a text that a part has to promise before it is started: few promises hold
READING = 256  # tokens of a text that a part is assumed to read in the time of a pass, until that is measured
HISTORY = 4096  # choices that a route remembers
KEPT = 0.9  # weight that a part's contribution keeps at each later pass


class Many(Joint):
    """A drafter that makes one draft from those of its parts. All of these are certain.

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
        self._calibrations: dict[int, Calibration] = {}  # of parts without confidences of their own
        self.seconds = [0.0] * len(parts)  # moving average of the seconds of a draft, by part,
        self.observing = [0.0] * len(parts)  # and of observing a pass that it drafted for
        self.reading = [0.0] * len(parts)  # and, per token, of reading the texts of rows before it drafts for them
        self._read: list[set[int]] = [set() for _ in parts]  # rows that a part has drafted for
        self._called: set[int] = set()  # parts that drafted since the last pass

    def forget(self) -> None:
        super().forget()
        self._calibrations = {}

    @property
    def name(self) -> str:
        return self.sign.join(map(name_of, self.parts))

    @property
    def width(self) -> int:
        return max([part.width for part in self.parts], default=0)

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        if not any(budget):
            return [DraftTree.chain(row.tokens[-1]) for row in rows]
        return self.joined(rows, budget)

    @abstractmethod
    def joined(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        """One draft per row, from those of the parts."""

    def propose_by(self, k: int, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        """The drafts of part k, with confidences; records their time, or that of reading rows for the first time."""
        self._called.add(k)
        unread = self.unread(k, rows)
        began = time.perf_counter()
        trees = self._with_confidence(k, rows, budget)
        spent = time.perf_counter() - began
        if unread:
            self.reading[k] = moving_average(self.reading[k], max(spent - self.seconds[k], 0.0) / unread)
            self._read[k].update(map(id, rows))
        else:
            self.seconds[k] = usual_seconds(self.seconds[k], spent)
        return trees

    def unread(self, k: int, rows: Sequence[Row]) -> int:
        """Tokens of the rows that part k has to read before its first drafts for them."""
        read = self._read[k]
        return sum([len(row.tokens) for row in rows if id(row) not in read]) if self._parts[k].reads_texts else 0

    def _with_confidence(self, k: int, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        part = self._parts[k]
        trees = [tree.cut(1 + most) for tree, most in zip(part.propose(rows, budget), budget, strict=True)]
        if all(tree.confidence is not None for tree in trees):
            return trees
        prior_confidence = part.prior_confidence
        return [
            self._calibrations.setdefault(k, Calibration()).proposed(
                row, tree if tree.confidence is not None else placed(tree, prior_confidence)
            )
            for row, tree in zip(rows, trees, strict=True)
        ]

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        for calibration in self._calibrations.values():
            calibration.update(rows)
        for k, part in enumerate(self._parts):
            if k in self._called:
                began = time.perf_counter()
                part.observe(rows, trees, scores, accepted)
                self.observing[k] = usual_seconds(self.observing[k], time.perf_counter() - began)
            elif part.attentive:
                part.observe(rows, trees, scores, accepted)
        self._called.clear()

    def end(self, row: Row) -> None:
        for calibration in self._calibrations.values():
            calibration.end(row)
        for read in self._read:
            read.discard(id(row))
        super().end(row)


class Merge(Many):
    """`a+b`: one tree of all drafts."""

    sign = "+"

    def __init__(self, parts: Sequence[Drafter]):
        super().__init__(parts)
        self._begin()

    def forget(self) -> None:
        super().forget()
        self._begin()

    def _begin(self) -> None:
        self._credit = [0.0] * len(self.parts)  # moving average of the seconds per pass that a part alone saved
        self._passes, self._rested = (
            0,
            [0] * len(self.parts),
        )  # passes so far; the pass until which a part is not called
        self._uncalled = [0] * len(self.parts)  # passes since it was called
        self._promise = [0.0] * len(self.parts)  # moving average of the seconds per pass that a part may save
        self._added = [MORE * SURE] * len(self.parts)  # decayed tokens that a part alone added,
        self._doubted = [SURE] * len(self.parts)  # and probability that the parts before it were wrong, where called
        self._tokens_per_pass = FEW  # moving average of the tokens per pass
        self._drafts: dict[int, tuple[int, Union]] = {}  # row -> its length, the union of the parts' drafts

    def open(self) -> None:
        super().open()
        self._drafts.clear()

    def joined(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        nothing, parts = [DraftTree.chain(row.tokens[-1], (), ()) for row in rows], self._parts
        drafts, doubt = [nothing] * len(parts), 1.0
        for k in sorted(range(len(parts)), key=lambda k: (parts[k].autoregressive, self.seconds[k])):
            self._uncalled[k] += 1
            if self._calls(k, doubt, rows):
                self._uncalled[k] = 0
                self._doubted[k] = KEPT * self._doubted[k] + doubt
                drafts[k] = self.propose_by(k, rows, budget)
                doubt = min(doubt, sum(map(_doubt, drafts[k])) / len(rows))
        for row, most, *trees in zip(rows, budget, *drafts, strict=True):
            self._drafts[id(row)] = len(row.tokens), union(trees, most)
        return [self._drafts[id(row)][1].tree for row in rows]

    def _calls(self, k: int, doubt: float, rows: Sequence[Row]) -> bool:
        """Whether part k is called, given the probability `doubt` that earlier parts miss the first token.

        A part that has to read the rows' texts first is called where it promises to save a multiple of that time.
        """
        if self.pass_cost is None:
            return True
        more = self._added[k] / self._doubted[k] if self._parts[k].autoregressive else MORE
        saved = doubt * more * self.pass_cost.plain - self.seconds[k]
        if unread := self.unread(k, rows):
            self._promise[k] = STEADY * self._promise[k] + (1 - STEADY) * max(saved, 0.0)
            passes = max(row.room - row.step for row in rows) / self._tokens_per_pass
            reading = self.reading[k] or self.pass_cost.plain / READING
            return passes * self._promise[k] > MARGIN * reading * unread and not self._rests(k)
        return (saved > 0 or self._uncalled[k] > SKIPPED) and not self._rests(k)

    def _rests(self, k: int) -> bool:
        return self._passes < self._rested[k]

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        if self._drafts and self.pass_cost is not None:
            self._review(self.pass_cost, rows, trees)
        self._drafts.clear()
        super().observe(rows, trees, scores, accepted)
        self._passes += 1

    def _review(self, pass_cost: PassCost, rows: Sequence[Row], trees: Sequence[DraftTree]) -> None:
        """Suspend parts whose own contribution saves less time than they cost, for some passes."""
        called = self._called
        saved, added = [0.0] * len(self._parts), [0.0] * len(self._parts)
        for row, tree in zip(rows, trees, strict=True):
            if id(row) in self._drafts:
                start, draft = self._drafts[id(row)]
                self._tokens_per_pass = moving_average(self._tokens_per_pass, len(row.tokens) - start)
                for k, (right, made) in enumerate(zip(*draft.alone(row.tokens[start:], tree.drafted), strict=True)):
                    saved[k] += right * pass_cost.plain / len(rows) - made * pass_cost.node
                    added[k] += right / len(rows)
        if not any(self._credit):
            self._credit = [CREDIT * pass_cost.plain] * len(self.parts)
        for k in called:
            self._credit[k] = KEPT * self._credit[k] + (1 - KEPT) * saved[k]
            self._added[k] = KEPT * self._added[k] + added[k]
        for k in called:
            spent = self.seconds[k] + self.observing[k]
            if self._credit[k] < spent:
                self._rested[k], self._credit[k] = self._passes + 1 + AGAIN + k, spent / KEPT**TRIED


class Fallback(Many):
    """`a?b`: the first draft that is not empty."""

    sign = "?"

    def joined(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        found = self.propose_by(0, rows, budget)
        for k in range(1, len(self.parts)):
            rest = [0 if len(tree) > 1 else most for tree, most in zip(found, budget, strict=True)]
            if any(rest):
                found = [a if len(a) > 1 else b for a, b in zip(found, self.propose_by(k, rows, rest), strict=True)]
        return found


class Route(Many):
    """`a|b`: the draft with the most expected tokens per second.

    Cheap parts are all called, and compared by their confidences. An expensive part (a model) is called where its
    earlier drafts promised more tokens per second than the best draft so far.

    history: the part chosen in each of the last passes: (row, tokens emitted before, part).
    """

    sign = "|"

    def __init__(self, parts: Sequence[Drafter]):
        super().__init__(parts)
        self.gains = [math.inf] * len(parts)  # moving average of the expected tokens of a draft
        self.history: deque[tuple[int, int, int]] = deque(maxlen=HISTORY)
        self._idle = [0] * len(parts)

    def open(self) -> None:
        super().open()
        self.history.clear()

    def joined(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        best: list[DraftTree] = []
        rates: list[float] = []
        which: list[int] = []
        for k in self._order():
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

    def _order(self) -> Sequence[int]:
        """The parts, the fastest first, which has the draft among equals; without `pass_cost` as they were given."""
        parts = range(len(self.parts))
        return parts if self.pass_cost is None else sorted(parts, key=self.seconds.__getitem__)

    def _rate(self, k: int | None, gain: float) -> float:
        """Expected tokens per second, with part k's time of drafting unless None; per pass without `pass_cost`."""
        if self.pass_cost is None:
            return gain
        return (1 + gain) / (self.pass_cost.plain + (self.seconds[k] if k is not None else 0.0))


class Cascade(Many):
    """`a>b`: each part continues the draft of the part before it."""

    sign = ">"

    def __init__(self, parts: Sequence[Drafter]):
        super().__init__(parts)
        for part in parts[1:]:
            if not isinstance(part, PerRow):
                raise Refused(f"{name_of(part)} cannot continue another's draft: put it before the '>'")

    def joined(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        found = self.propose_by(0, rows, budget)
        for part in self.parts[1:]:
            assert isinstance(part, PerRow)
            found = [self._extended(part, row, tree, most) for row, tree, most in zip(rows, found, budget, strict=True)]
        return found

    def _extended(self, part: PerRow[Any], row: Row, tree: DraftTree, budget: int) -> DraftTree:
        """A draft continued at its likeliest leaves."""
        values = values_of(tree)
        ends = sorted((i for i, below in enumerate(tree.shape.children) if not below), key=lambda i: -values[i])
        for end in ends[:LEAVES]:
            room = budget - (len(tree) - 1)
            if room <= 0 or tree.tokens[end] in row.ends:
                break
            after = [tree.tokens[i] for i in tree.path(end)[1:]]
            tree = grafted(tree, end, part.extend(row, after, room).cut(1 + room))
        return tree


class Review(Many):
    """`a<b`: a drafts by passes of the target under a view, which read what b drafts for them."""

    sign = "<"
    prior_confidence = SelfDrafter.prior_confidence

    def __init__(self, parts: Sequence[Drafter]):
        if len(parts) != 2:
            raise Refused(f"{self.sign!r} stands between a view and one drafter, got {'<'.join(map(name_of, parts))}")
        view, inner = parts
        if not isinstance(view, SelfDrafter):
            raise Refused(f"{name_of(view)} is no view, and reviews no drafts: put a view before the '<'")
        if not isinstance(inner, Continuing):
            raise Refused(
                f"{name_of(inner)} cannot continue the drafts of a view: put a lookup or draft-model after the '<'"
            )
        super().__init__([Reviewer(view, inner), inner])

    @property
    def adaptive(self) -> bool:  # type: ignore[override]
        return self.parts[0].adaptive

    def joined(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        return self.propose_by(0, rows, budget)


KINDS: dict[str, type[Many]] = {kind.sign: kind for kind in (Route, Merge, Fallback, Cascade, Review)}


def compose(spec: str, load: Callable[[str], Drafter]) -> Drafter:
    """A drafter from its string form: parts joined by signs, "auto" or "none"; `load` makes the parts.

    Raises:
        Refused: a part is missing, or `load` refuses one.
    """
    if spec == NONE:
        return Plain()
    sign, sides = split(DEFAULT if spec == AUTO else spec)
    return KINDS[sign]([compose(side, load) for side in sides]) if sign else load(spec)


def name_of(part: object) -> str:
    """Name of a part (a drafter, a rule, a control) in reports."""
    if isinstance(part, Many | SelfDrafter):
        return part.name
    if isinstance(part, Plain):
        return "plain"
    return method_name(part)


def _doubt(tree: DraftTree) -> float:
    """The probability that the first token is none of those drafted."""
    assert tree.confidence is not None
    likeliest, child = 0.0, 0
    for _ in range(tree.parent.count(0)):
        child = tree.parent.index(0, child + 1)
        likeliest = max(likeliest, tree.confidence[child])
    return 1 - likeliest
