"""How many later canvases a pass scores: as many as raise the tokens per second, from measured costs and acceptance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from truedraft.canvas._base import CanvasRow, Draft, Fixed
from truedraft.runtime.curve import Curve
from truedraft.stats import PassTimes

BANDWIDTH = 2e10  # assumed bytes per second of reading weights, before any pass was observed


class CanvasControl(ABC):
    """Cuts the drafts of all rows. It affects the speed of decoding, never its output.

    times: seconds spent so far by part.
    """

    name: str
    times: PassTimes = PassTimes()

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

    A draft is right if all those before it in its chain are: rates are learnt by place in the chain, from drafts that
    were scored, and from the first one that was not, which the next step confirms or refutes at no cost.
    """

    name = "cost"
    memory = 0.95  # weight that an observation keeps at each later one
    prior, doubt = 0.6, 2.0  # rate before any observation, and its weight
    rate = 0.1  # learning rate of the costs of passes

    def __init__(self, weight_bytes: int):
        self._curve = Curve.typical(1, weight_bytes / BANDWIDTH)
        self._seen: list[list[float]] = []  # by place in the chain: right, observed
        self._before = 0.0
        self._width = self._plain = 0

    def cut(
        self, rows: Sequence[CanvasRow], drafts: Sequence[Sequence[Draft]], widths: Sequence[Sequence[int]]
    ) -> list[int]:
        self._before = self.times.target
        self._plain = sum(own[0] for own in widths)
        longest = max(map(len, drafts))
        steps, width, best, kept = float(len(rows)), self._plain, 0.0, 0
        chance = 1.0
        found = [(0, steps, width)]
        for place in range(longest):
            chance *= self._rate(place)
            having = [row for row, of_row in enumerate(drafts) if place < len(of_row)]
            steps += chance * len(having)
            width += sum(widths[row][place + 1] for row in having)
            found.append((place + 1, steps, width))
        for count, expected, nodes in found:
            if (goodput := expected / self._curve(nodes)) > best:
                best, kept, self._width = goodput, count, nodes
        return [min(kept, len(of_row)) for of_row in drafts]

    def _rate(self, place: int) -> float:
        right, observed = self._seen[place] if place < len(self._seen) else (0.0, 0.0)
        return (right + self.prior * self.doubt) / (observed + self.doubt)

    def observe(self, drafts: Sequence[Sequence[Draft]], reached: Sequence[Sequence[Fixed]]) -> None:
        for of_row, path in zip(drafts, reached, strict=True):
            for place, (draft, fixed) in enumerate(zip(of_row, path, strict=False)):
                while len(self._seen) <= place:
                    self._seen.append([0.0, 0.0])
                seen = self._seen[place]
                right = draft.fixed == fixed
                seen[:] = seen[0] * self.memory + right, seen[1] * self.memory + 1
                if not right:
                    break
        if (spent := self.times.target - self._before) > 0:
            self._curve = self._curve.learned(self._width, spent, self.rate, self._plain)
