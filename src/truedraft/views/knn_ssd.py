"""Skips, for each row, the layers that its subject can spare: that of the nearest prompt which was calibrated.

Song et al., "KNN-SSD: Enabling Dynamic Self-Speculative Decoding via Nearest Neighbor Layer Set Optimization", Findings
of EACL 2026 (arXiv 2505.16162). Per subject a set is searched as for `draft-and-verify`, and the hidden states at the
ends of its prompts are summed up in centroids by k-means. A row whose prompt is farther from the nearest centroid than
any prompt that this was made of drafts by the set that was found on all subjects together. It pays where requests are
of several subjects, each with layers of its own to spare; rows of different sets are drafted for in separate passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from truedraft.card import Card, knob
from truedraft.errors import Refused
from truedraft.views._base import View
from truedraft.views._bayesian import spared
from truedraft.views._calibrated import CalibratedLayers, Evaluator, Step
from truedraft.views._layers import FORM, listed

DIGITS = 5  # of the numbers of a centroid in a file


class _Subject(NamedTuple):
    """A subject: its view, its (n, H) centroids, and the distance from the nearest of them within which prompts are."""

    view: View
    anchors: Tensor
    reach: float


def _record(layers: Mapping[str, str], anchors: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the file keeps of the layers that were found, by subject, and of the centroids; None before any were found
    on all subjects together, whose name is ""."""
    if "" not in layers:
        return None
    subjects = {name: {"layers": layers.get(name, layers[""]), **of_subject} for name, of_subject in anchors.items()}
    return {"layers": layers[""], "subjects": subjects}


@dataclass(frozen=True)
class KnnSsd(CalibratedLayers):
    """A decoder without what the subject of a row can spare. See `View`."""

    card = Card(
        paper="arXiv 2505.16162 (2025)",
        idea="The model drafts for itself without the halves of layers that the subject of a prompt can spare.",
        family="self-drafting",
        needs=("calibration",),
        published="1.3x to 1.6x with Llama 2 13B and Qwen 2.5 14B on mixed subjects; 1,000 sets per subject.",
    )
    layers: str = knob("", form=FORM, reader=listed)  # to skip where no subject is near, as found before
    file: str = knob("")  # of the subjects, their layers and their centroids
    trials: int = knob(200, 1, 100_000)  # sets that a calibration tries per subject; published 1,000
    centroids: int = knob(10, 1, 1024)  # per subject; published 10
    _subjects: ClassVar[tuple[_Subject, ...]] = ()  # of a file

    def steps(self, evaluator: Evaluator) -> Iterator[Step]:
        """The prompts are read first, so that every set that is found makes a record: of a subject whose own was not
        searched yet, or has none, it is that of all subjects together."""
        if len(evaluator.subjects) < 2:
            raise Refused(f"{self.name} chooses between subjects: give the texts of two or more, each its file")
        parts, anchors = 2 + len(evaluator.subjects), dict[str, Any]()
        for number, (name, of_subject) in enumerate(evaluator.subjects.items()):
            states = list[Tensor]()
            for state in of_subject.states():
                states.append(state)
                yield Step(number / len(evaluator.subjects) / parts)
            if not states:
                raise Refused(f"{self.name}: no prompt of {name} fits the model's context: give shorter texts")
            anchors[name] = self.clustered(torch.stack(states))
        layers = dict[str, str]()  # by subject; of all of them together by ""
        for number, (name, some) in enumerate({"": evaluator, **evaluator.subjects}.items(), 1):
            for step in self._searched(some, name):
                if step.record is not None:
                    layers[name] = step.record["layers"]
                text = f"{name}: {step.text}" if name and step.text else step.text
                yield Step((number + step.share) / parts, text, _record(layers, anchors))

    def _searched(self, evaluator: Evaluator, subject: str) -> Iterator[Step]:
        """The search for a subject, which may find nothing, or for all of them together, "", which has to find some."""
        try:
            yield from spared(evaluator, self.trials, self.name)
        except Refused as nothing:
            if not subject:
                raise
            yield Step(1.0, f"{nothing}; its rows draft by the set of all subjects")

    def clustered(self, states: Tensor) -> dict[str, Any]:
        """The centroids of (n, H) states, two states each at least on average, and the distance within which all are.

        Raises:
            Refused: scipy is not installed.
        """
        try:
            from scipy.cluster.vq import kmeans2
        except ImportError as e:
            raise Refused(f"the calibration of {self.name} needs scipy: pip install 'truedraft[search]'") from e
        count = min(self.centroids, max(len(states) // 2, 1))
        centroids, nearest = kmeans2(states.double().numpy(), count, minit="++", seed=0)
        anchors = [[float(f"{x:.{DIGITS}g}") for x in centroids[i].tolist()] for i in sorted({*nearest.tolist()})]
        reach = torch.cdist(states.double(), torch.tensor(anchors, dtype=torch.float64)).amin(1).amax()
        return {"anchors": anchors, "reach": float(reach)}

    def read(self, record: dict[str, Any]) -> None:
        found = []
        for subject in record["subjects"].values():
            listed(subject["layers"])
            view = replace(self, file="", layers=subject["layers"])
            found.append(_Subject(view, torch.tensor(subject["anchors"], dtype=torch.float32), float(subject["reach"])))
        if len({subject.anchors.shape[1:] for subject in found}) != 1:
            raise ValueError
        object.__setattr__(self, "_subjects", tuple(found))

    @property
    def alternatives(self) -> Sequence[View]:
        return [subject.view for subject in self._subjects]

    def behind(self, state: Tensor) -> View:
        distances = [float((subject.anchors - state.float().cpu()).norm(dim=1).min()) for subject in self._subjects]
        nearest = min(range(len(distances)), key=distances.__getitem__)
        subject = self._subjects[nearest]
        return subject.view if distances[nearest] <= subject.reach else self
