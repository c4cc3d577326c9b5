"""Views whose skipped layers are found on a target's texts, and the file that keeps them."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from truedraft.errors import Refused
from truedraft.files import read_bytes
from truedraft.identity import Identity
from truedraft.views._base import Reduction, View
from truedraft.views._layers import Without, check_layers, listed


class Evaluator(Protocol):
    """Measures views of one target on texts.

    layers: of the target's decoder.
    subjects: by name, the same on texts of one subject each.
    """

    @property
    def layers(self) -> int: ...

    @property
    def subjects(self) -> Mapping[str, Evaluator]: ...

    def states(self) -> Iterable[Tensor]:
        """(H,) fp32 hidden states after the final norm, at the last token of each prompt of the texts, one by one."""

    def similarities(self) -> Iterable[Tensor]:
        """(tokens,) fp32 cosines of the hidden states before and after the feed-forward of each layer, in turn, at the
        tokens of the texts, by the whole model."""

    def loss(self, view: View) -> float:
        """Mean negative log-likelihood of a token of the texts, in nats, by the target run under the view alone."""

    def goodput(self, view: View, least: float = 0.0) -> float:
        """Emitted tokens over the weights that were read, in readings of all of them, where the target drafts under the
        view, and verifies whole: 1 without drafts.

        least: a goodput of interest; measuring ends early where the first texts show that this one is far below it.
        """


@dataclass(frozen=True)
class Step:
    """How far a calibration is.

    share: of its work that is done, 0 to 1.
    text: a line about what was found; empty where nothing new was.
    record: what the file would keep if it ended here (`layers`, and what `read` reads); None before anything was found.
    """

    share: float
    text: str = ""
    record: dict[str, Any] | None = None


class CalibratedLayers(View):
    """Skips layers that a calibration found. Fields of every subclass: layers (as of `skip-layers`), file (written by
    `truedraft calibrate`, which is read once)."""

    layers: str
    file: str

    def __post_init__(self) -> None:
        if not self.file:
            return
        try:
            record = json.loads(read_bytes(Path(self.file)))
            listed(record["layers"])
            object.__setattr__(self, "layers", record["layers"])
            object.__setattr__(self, "fitted_to", Identity.read({"fingerprint": record["fingerprint"], **record}))
            self.read(record)
        except (ValueError, KeyError, TypeError) as e:
            raise Refused(f"{self.file!r} is no file of `truedraft calibrate` for {self.name}") from e

    def read(self, record: dict[str, Any]) -> None:
        """Read what a calibration found besides `layers`.

        Raises:
            ValueError, KeyError, TypeError: it is no such record.
        """

    @abstractmethod
    def steps(self, evaluator: Evaluator) -> Iterator[Step]:
        """The calibration, a step at a time; each record is at least as good as those before it, so that it may be
        ended after any step.

        Raises:
            Refused: nothing was found, with the reason, or a package is not installed.
        """

    def calibrate(self, evaluator: Evaluator, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
        """The record of the whole calibration.

        progress: called with a line for each set that was better than those before it.

        Raises:
            Refused: as `steps`.
        """
        record: dict[str, Any] = {"layers": ""}
        for step in self.steps(evaluator):
            if step.text:
                progress(step.text)
            record = step.record or record
        return record

    @property
    def found(self) -> str:
        """The layers that were found.

        Raises:
            Refused: none were given.
        """
        if not self.layers:
            raise Refused(
                f"{self.name} has no layers to skip: `truedraft calibrate {self.name} --target MODEL --data FILE --out "
                f"OUT` finds them, draft='{self.name}:file=OUT' uses them"
            )
        return self.layers

    def reduction(self, layers: int) -> Reduction:
        left_out = listed(self.found)
        check_layers(left_out, layers)
        return left_out


def removed(evaluator: Evaluator, count: int, ends: int) -> Iterator[tuple[float, str, list[int]]]:
    """Layers removed one after another: each time that without which the loss is smallest (SLEB, arXiv 2402.09025).

    ends: layers at either end that are kept.

    Yields:
        After each loss: the share of the work that is done, a line where a layer was removed, and those removed so far.
    """
    left, gone = set(range(ends, evaluator.layers - ends)), list[int]()
    count = min(count, len(left))
    total, done = 1 + sum(len(left) - i for i in range(count)), 1
    yield done / total, f"all layers: loss {evaluator.loss(View()):.3f}", []
    while len(gone) < count:
        losses = dict[int, float]()
        for layer in sorted(left):
            some, done = frozenset((*gone, layer)), done + 1
            losses[layer] = evaluator.loss(Without(Reduction(some, some)))
            yield done / total, "", [*gone]
        least = min(losses, key=losses.__getitem__)
        left.remove(least)
        gone.append(least)
        yield done / total, f"without layers {', '.join(map(str, sorted(gone)))}: loss {losses[least]:.3f}", [*gone]
