"""How many later canvases a pass scores: as many as raise the tokens per second, from measured costs and acceptance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from truedraft.canvas._base import CanvasRow, Draft, Fixed
from truedraft.runtime.curve import Curve
from truedraft.stats import PassTimes

LONGEST = 32  # passes from one proposal to the next
BANDWIDTH = 2e10  # assumed bytes per second of reading weights, before any pass was observed


class CanvasControl(ABC):
    """Cuts the drafts of all rows. It affects the speed of decoding, never its output.

    times: seconds spent so far by part.
    """

    name: str
    times: PassTimes = PassTimes()

    def drafting(self) -> bool:
        """Whether the next pass is drafted for."""
        return True

    @abstractmethod
    def cut(
        self, rows: Sequence[CanvasRow], drafts: Sequence[Sequence[Draft]], widths: Sequence[Sequence[int]]
    ) -> list[int]:
        """How many of each row's drafts are scored, the first ones.

        widths: by row, the nodes of its own canvas and of each draft.
        """

    def observe(self, drafts: Sequence[Sequence[Draft]], reached: Sequence[Sequence[Fixed]]) -> None:
        """The outcome of the pass: what each row had fixed after each step."""


class FixedCanvases(CanvasControl):
    """All drafts are scored."""

    name = "fixed"

    def cut(
        self, rows: Sequence[CanvasRow], drafts: Sequence[Sequence[Draft]], widths: Sequence[Sequence[int]]
    ) -> list[int]:
        return [len(of_row) for of_row in drafts]


class CanvasCosts(CanvasControl):
    """As many drafts as raise the expected steps per second.

    How often a draft is right is learnt by its place among those of its row, also from drafts that were not scored,
    where the steps that the row took confirm or refute them. While none pay, they are proposed in fewer and fewer
    passes, for that alone.
    """

    name = "cost"
    memory = 0.95  # weight that an observation keeps at each later one
    prior, doubt = 0.6, 2.0  # rate of a first draft before any observation, and its weight
    rate = 0.1  # learning rate of the costs of passes

    def __init__(self, weight_bytes: int):
        self._curve = Curve.typical(1, weight_bytes / BANDWIDTH)
        self._seen: list[list[float]] = []  # by place: right, observed
        self._before = 0.0
        self._width = self._plain = 0
        self._idle = self._paused = 0  # proposals in a row of which none was scored; passes until the next one

    def drafting(self) -> bool:
        self._paused -= 1
        return self._paused < 0

    def cut(
        self, rows: Sequence[CanvasRow], drafts: Sequence[Sequence[Draft]], widths: Sequence[Sequence[int]]
    ) -> list[int]:
        self._before = self.times.target
        self._plain = nodes = sum(own[0] for own in widths)
        steps, best, kept = float(len(rows)), 0.0, 0
        for count in range(max(map(len, drafts)) + 1):
            if count:
                having = [row for row, of_row in enumerate(drafts) if count <= len(of_row)]
                steps += sum(self._chance(count - 1, drafts[row][count - 1].steps) for row in having)
                nodes += sum(widths[row][count] for row in having)
            if (goodput := steps / self._curve(nodes)) > best:
                best, kept, self._width = goodput, count, nodes
        if any(drafts):
            self._idle = 0 if kept else self._idle + 1
            self._paused = min(2**self._idle, LONGEST) - 1
        return [min(kept, len(of_row)) for of_row in drafts]

    def _chance(self, place: int, steps: int) -> float:
        right, observed = self._seen[place] if place < len(self._seen) else (0.0, 0.0)
        return (right + self.prior**steps * self.doubt) / (observed + self.doubt)

    def observe(self, drafts: Sequence[Sequence[Draft]], reached: Sequence[Sequence[Fixed]]) -> None:
        for of_row, path in zip(drafts, reached, strict=True):
            for place, draft in enumerate(of_row):
                if draft.steps > len(path) and draft.fixed >= path[-1]:
                    continue  # the row has not come so far
                right = draft.steps <= len(path) and draft.fixed == path[draft.steps - 1]
                while len(self._seen) <= place:
                    self._seen.append([0.0, 0.0])
                seen = self._seen[place]
                seen[:] = seen[0] * self.memory + right, seen[1] * self.memory + 1
        if (spent := self.times.target - self._before) > 0:
            self._curve = self._curve.learned(self._width, spent, self.rate, self._plain)
