"""ETE: what is confident is fixed across blocks, and where little is, guesses at uncertain positions are tried.

Exploit: every position of the block, and of later ones within the look-ahead, whose prediction reaches a threshold is
fixed. Explore, after a pass with few of them: canvases in which an uncertain position of the block has one of its
likeliest tokens are scored beside the row's own, and the one that makes the most positions confident is kept, the row's
own where none makes more. Such a pass is one round of several times the work.

Fu et al., "From Bits to Rounds: Parallel Decoding with Exploration for Diffusion Language Models" (ETE),
arXiv 2511.21103 (2025). How hypotheses are chosen, and the constants, are this project's, to be tuned for a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.canvas._base import CanvasRow, Draft, Fixed, Predictions
from truedraft.canvas.layout import Layout
from truedraft.canvas.policies.lossy._base import LossyPolicy
from truedraft.card import Card, knob
from truedraft.errors import Refused


@dataclass
class Ete(LossyPolicy):
    card = Card(
        paper="arXiv 2511.21103 (2025)",
        idea="Fix confident positions of several blocks, and try guesses where there are few.",
        family="exploration",
        presets={"ete-exploit": {"explored": 0}},
        published="Fewer rounds than by confidence alone at the same quality, on LLaDA and Dream.",
    )
    threshold: float = knob(0.9, 0, 1)  # least probability (0.9)
    ahead: int = knob(1, 0, 64)  # later blocks of which confident positions are fixed
    few: int = knob(1, 0, 1024)  # most confident positions of a pass before guesses are tried
    explored: int = knob(1, 0, 64)  # uncertain positions that are tried; 0: none
    candidates: int = knob(3, 1, 64)  # tokens tried at each

    @property
    def canvases(self) -> int:
        """Most hypotheses of a row in a pass."""
        return self.explored * self.candidates

    def begin(self, row: CanvasRow, layout: Layout) -> None:
        if layout.attention == "blocks" and self.ahead > 1 and self.explored:
            raise Refused(
                f"lossy/ete:ahead={self.ahead}: with attention in blocks, guesses are tried with at most one block "
                "ahead; give ahead=1 or explored=0"
            )

    def reach(self, row: CanvasRow) -> int:
        return min(row.at + self.ahead, len(row.blocks) - 1)

    def choose(self, predictions: Predictions, row: CanvasRow) -> Fixed:
        found = self._confident(predictions)
        row.memory[id(self)] = len(found)
        return predictions.fix(found or predictions.inside[:1])

    def hypotheses(self, row: CanvasRow) -> list[Draft]:
        left = row.predictions
        if left is None or row.memory[id(self)] > self.few:
            return []
        uncertain = sorted(left.inside, key=lambda i: -left.entropy[i])[: self.explored]
        count = min(self.candidates, left.logits.shape[-1])
        guesses = [(i, token) for i in uncertain for token in left.logits[i].topk(count).indices.tolist()]
        return [Draft(frozenset({(left.positions[i], token)}), 1) for i, token in guesses]

    def preferred(self, predictions: Sequence[Predictions], row: CanvasRow) -> int:
        return max(range(len(predictions)), key=lambda i: len(self._confident(predictions[i])))

    def _confident(self, predictions: Predictions) -> list[int]:
        return [i for i, p in enumerate(predictions.probability) if p >= self.threshold]
