"""How many later canvases a pass scores: as many as raise the tokens per second, from measured costs and acceptance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import ceil, inf

from truedraft.canvas._base import Draft, Fixed, Rates
from truedraft.canvas.targets import CanvasTarget
from truedraft.canvas.timing import CanvasPasses
from truedraft.runtime import latency
from truedraft.runtime.curve import WIDTHS, Curve
from truedraft.stats import PassTimes

LONGEST = 32  # passes from one proposal to the next, and from one pass without drafts to the next
SHARE = 0.01  # of the time of passes, for proposals that do not pay
MARGIN = 0.7  # of the least chance of a proposal, since passes of some widths cost little more


class CanvasControl(ABC):
    """Cuts the drafts of all rows. It affects the speed of decoding, never its output.

    times: seconds spent so far by part.
    """

    name: str
    times: PassTimes = PassTimes()

    def open(self, target: CanvasTarget, steps: int) -> None:
        """Before a call of so many new tokens, with no cache reserved yet."""

    def drafting(self) -> bool:
        """Whether the next pass is drafted for."""
        return True

    @abstractmethod
    def least(self, widths: Sequence[int]) -> float:
        """Chance below which a canvas is not to be proposed; `widths` are the nodes of the rows' own canvases."""

    @abstractmethod
    def cut(self, drafts: Sequence[Sequence[Draft]], widths: Sequence[Sequence[int]]) -> list[int]:
        """How many of each row's drafts are scored, the first ones.

        widths: by row, the nodes of its own canvas and of each draft.
        """

    def observe(self, drafts: Sequence[Sequence[Draft]], reached: Sequence[Sequence[Fixed]]) -> None:
        """The outcome of the pass: what each row had fixed after each step."""


class FixedCanvases(CanvasControl):
    """All drafts are scored."""

    name = "fixed"

    def least(self, widths: Sequence[int]) -> float:
        return 0.0

    def cut(self, drafts: Sequence[Sequence[Draft]], widths: Sequence[Sequence[int]]) -> list[int]:
        return [len(of_row) for of_row in drafts]


class CanvasCosts(CanvasControl):
    """As many drafts as raise the expected steps per second.

    The chances that speculators give are calibrated: how often such drafts are right is learnt, also from drafts that
    were not scored, where the steps that the row took confirm or refute them. While none pay, with the time of
    proposing them, they are proposed in fewer and fewer passes, within a small share of the time.
    """

    name = "cost"
    rate = 0.1  # learning rate of the costs of passes
    bins, doubt, memory = 8, 8.0, 0.97  # of chances; weight of the given ones in each; weight that an observation keeps

    def __init__(self) -> None:
        self._target: CanvasTarget | None = None
        self._curve = Curve.typical(1, 1.0)
        self._rates = Rates([(i + 0.5) / self.bins for i in range(self.bins)], self.doubt, self.memory)
        self._before = self._proposing = 0.0
        self._proposal = 0.0  # seconds of proposing for a pass, a moving average
        self._width = self._plain = 0
        self._idle = self._paused = 0  # proposals in a row that did not pay; passes until the next one
        self._scored = LONGEST  # passes with drafts in a row

    def open(self, target: CanvasTarget, steps: int) -> None:
        """Measure passes within a small share of the call's time, until enough are measured."""
        known: Curve | None = self._curve
        if self._target is not target:
            self._target, self._profile = target, latency.of(CanvasPasses(target))
            self._curve, known = self._profile.kept or self._profile.initial(), self._profile.kept
        self._curve = self._profile.measure(steps, known, WIDTHS[-1]) or self._curve

    def drafting(self) -> bool:
        self._paused -= 1
        self._proposing = self.times.draft + self.times.observe
        return self._paused < 0 and self._scored < LONGEST

    def least(self, widths: Sequence[int]) -> float:
        plain = sum(widths)
        more = self._curve(plain + plain // len(widths))
        return MARGIN * (more / self._curve(plain) - 1) * len(widths)

    def cut(self, drafts: Sequence[Sequence[Draft]], widths: Sequence[Sequence[int]]) -> list[int]:
        self._plain = nodes = sum(own[0] for own in widths)
        steps, plain, kept = float(len(drafts)), len(drafts) / self._curve(nodes), [0] * len(drafts)
        best, gained, self._width, counts = plain, steps, nodes, list(kept)
        for chance, row, width in self._likeliest(drafts, widths):
            counts[row] += 1
            steps, nodes = steps + chance, nodes + width
            if (goodput := steps / self._curve(nodes)) > best:
                best, kept, self._width, gained = goodput, list(counts), nodes, steps
        if any(drafts):
            spent = self._spent()
            self._pause(gained / (self._curve(self._width) + spent) > plain, spent / self._curve(self._plain))
        self._scored = self._scored + 1 if any(kept) else 0
        self._before = self.times.target
        return kept

    def _likeliest(
        self, drafts: Sequence[Sequence[Draft]], widths: Sequence[Sequence[int]]
    ) -> list[tuple[float, int, int]]:
        """Chance, row and nodes of all drafts, by falling chance per node; those of a row in their order."""
        found = []
        for row, of_row in enumerate(drafts):
            most = inf
            for draft, width in zip(of_row, widths[row][1:], strict=True):
                chance = self._calibrated(draft.chance)
                most = min(most, chance / width)
                found.append((most, chance, row, width))
        return [(chance, row, width) for _, chance, row, width in sorted(found, key=lambda one: -one[0])]

    def _calibrated(self, chance: float) -> float:
        place = self._bin(chance)
        return min(chance * self._rates[place] / ((place + 0.5) / self.bins), 1.0)

    def _bin(self, chance: float) -> int:
        return min(int(chance * self.bins), self.bins - 1)

    def _spent(self) -> float:
        """Mean seconds of proposing for a pass."""
        spent = self.times.draft + self.times.observe - self._proposing
        self._proposal += self.rate * (spent - self._proposal)
        return self._proposal

    def _pause(self, pays: bool, cost: float) -> None:
        """cost: of a proposal, in passes."""
        self._idle = 0 if pays else self._idle + 1
        self._paused = min(2**self._idle, max(ceil(cost / SHARE), 1), LONGEST) - 1

    def observe(self, drafts: Sequence[Sequence[Draft]], reached: Sequence[Sequence[Fixed]]) -> None:
        for of_row, path in zip(drafts, reached, strict=True):
            for draft in of_row:
                if draft.steps <= len(path):
                    self._rates.observe(self._bin(draft.chance), draft.fixed == path[draft.steps - 1])
                elif not draft.fixed >= path[-1]:
                    self._rates.observe(self._bin(draft.chance), False)
        if (spent := self.times.target - self._before) > 0:
            self._curve = self._curve.learned(self._width, spent, self.rate, self._plain)
