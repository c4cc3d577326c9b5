"""Skips feed-forwards of the middle layers, for each token those behind one that has changed its hidden state little.

Jaiswal et al., "FFN-SkipLLM: A Hidden Gem for Autoregressive Decoding with Adaptive Feed Forward Skipping", EMNLP 2024
(arXiv 2404.03865). Attention runs in every layer, so that no keys are missing. Published is a model that generates so,
which is lossy; here the skipped model drafts, and a token reads keys of the whole model up to the last verification.
So it needs no `warm` tokens: their keys are to be sound, as all committed ones are where it drafts, and those of the
prompt where a text is generated under the view.

The middle is where the similarity of the hidden states before and after a feed-forward rises from layer to layer; the
threshold on it is the one with which so many feed-forwards are skipped on the calibration's texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from truedraft.card import Card, knob
from truedraft.errors import Refused
from truedraft.views._base import Reduction, Sparing
from truedraft.views._calibrated import CalibratedLayers, Evaluator, Step
from truedraft.views._layers import check_layers

FALL = 0.02  # of the mean similarity, from its greatest so far, within the middle
MIDDLE = re.compile(r"(\d{1,4})-(\d{1,4})")


def middle_of(text: str) -> range:
    """The layers that "FIRST-LAST" names; "" for none.

    Raises:
        ValueError: another format, or fewer than two layers.
    """
    if not text:
        return range(0)
    found = MIDDLE.fullmatch(text)
    if found is None or int(found[1]) >= int(found[2]):
        raise ValueError
    return range(int(found[1]), int(found[2]) + 1)


@dataclass(frozen=True)
class FfnSkipLlm(CalibratedLayers):
    """A decoder without the feed-forwards that a token can spare. See `View`."""

    card = Card(
        paper="arXiv 2404.03865 (2024)",
        idea="The model drafts for itself without the feed-forwards that change a token's hidden state little.",
        family="self-drafting",
        needs=("calibration",),
        published="25 to 30 % of the feed-forwards of Llama 2 7B and 13B at a small loss, without verification.",
    )
    layers: str = knob("", form="the first and the last layer, as in '4-11'", reader=middle_of)  # of the middle
    file: str = knob("")  # of a calibration: layers, similarity and the share that it reached
    similarity: float = knob(0.0, 0, 1)  # threshold above which the following are skipped; 0 for that of the file
    share: float = knob(0.3, 0, 1)  # of all feed-forwards, those that are skipped; published 0.25 to 0.3
    warm: int = knob(0, 0, 4096)  # first generated tokens that skip nothing; published a few dozen
    ends: int = knob(1, 0, 64)  # layers at either end that are not of the middle; published by their similarity

    def steps(self, evaluator: Evaluator) -> Iterator[Step]:
        rows = list[Tensor]()
        for layer, row in enumerate(evaluator.similarities()):
            rows.append(row)
            yield Step((layer + 1) / evaluator.layers, f"layer {layer}: similarity {float(row.mean()):.4f}")
        similar = torch.stack(rows)
        means = similar.mean(1).tolist()
        middle = self._rising(means)
        if len(middle) < 2:
            raise Refused(f"{self.name}: similarity rises in no two layers on these texts: draft by another view")
        threshold, share = self._threshold(similar[middle.start : middle.stop - 1], len(means))
        found = f"layers {middle.start} to {middle.stop - 1}"
        record = {"layers": f"{middle.start}-{middle.stop - 1}", "similarity": threshold, "share": share}
        yield Step(1.0, f"{found}, similarity {threshold:.4f}: {share:.1%} are skipped", record)

    def _rising(self, means: list[float]) -> range:
        """The longest run of layers along which the similarity rises."""
        best = range(0)
        for first in range(self.ends, len(means) - self.ends):
            last = first
            while last + 1 < len(means) - self.ends and means[last + 1] >= max(means[first : last + 1]) - FALL:
                last += 1
            best = max(best, range(first, last + 1), key=len)
        return best

    def _threshold(self, similar: Tensor, layers: int) -> tuple[float, float]:
        """The similarity above which at most `share` of the feed-forwards of all layers are skipped, and the share.

        similar: (n, tokens), of the middle layers but the last: each that is above, or behind one that is, skips the
            next.
        """
        most = similar.cummax(0).values.flatten().sort(descending=True).values
        of_all = layers * similar.shape[1]
        threshold = most[min(round(self.share * of_all), len(most) - 1)]
        return float(threshold), float((most > threshold).sum()) / of_all

    def read(self, record: dict[str, Any]) -> None:
        middle_of(record["layers"])
        object.__setattr__(self, "similarity", self.similarity or float(record["similarity"]))
        object.__setattr__(self, "share", float(record["share"]))

    def reduction(self, layers: int) -> Reduction:
        middle = middle_of(self.found)
        check_layers(Reduction(feed_forward=frozenset(middle)), layers)
        if not self.similarity:
            raise Refused(f"{self.name}:layers={self.layers} has no threshold: give similarity, or a file")
        of_middle = min(self.share * layers / len(middle), 1.0)
        return Reduction(sparing=Sparing(frozenset(middle), self.similarity, of_middle, self.warm))
