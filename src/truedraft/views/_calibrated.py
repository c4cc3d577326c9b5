"""Views whose skipped layers are found on a target's texts, and the file that keeps them."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
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

    def states(self) -> Tensor:
        """(prompts, H) fp32 hidden states after the final norm, at the last token of each prompt of the texts."""

    def similarities(self) -> Tensor:
        """(layers, tokens) fp32 cosines of the hidden states before and after the feed-forward of each layer, at the
        tokens of the texts, by the whole model."""

    def loss(self, view: View) -> float:
        """Mean negative log-likelihood of a token of the texts, in nats, by the target run under the view alone."""

    def goodput(self, view: View) -> float:
        """Emitted tokens over the weights that were read, in readings of all of them, where the target drafts under the
        view, and verifies whole: 1 without drafts."""


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

    def calibrate(self, evaluator: Evaluator, progress: Callable[[str], None]) -> dict[str, Any]:
        """What the file keeps: `layers`, found by `search`, and what `read` reads.

        progress: called with a line for each set that was tried.
        """
        return {"layers": self.search(evaluator, progress)}

    @abstractmethod
    def search(self, evaluator: Evaluator, progress: Callable[[str], None]) -> str:
        """The layers to skip, as of `skip-layers`.

        progress: called with a line for each set that was tried.
        """

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


def removed(evaluator: Evaluator, count: int, ends: int, progress: Callable[[str], None]) -> list[int]:
    """Layers removed one after another: each time that without which the loss is smallest (SLEB, arXiv 2402.09025).

    ends: layers at either end that are kept.
    """
    progress(f"all layers: loss {evaluator.loss(View()):.3f}")
    left, gone = set(range(ends, evaluator.layers - ends)), list[int]()
    while left and len(gone) < count:
        sets = {layer: frozenset((*gone, layer)) for layer in sorted(left)}
        losses = {layer: evaluator.loss(Without(Reduction(some, some))) for layer, some in sets.items()}
        least = min(losses, key=losses.__getitem__)
        left.remove(least)
        gone.append(least)
        progress(f"without layers {', '.join(map(str, sorted(gone)))}: loss {losses[least]:.3f}")
    return gone
