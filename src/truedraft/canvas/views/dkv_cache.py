"""dKV-Cache: keys and values of a position are kept one step after it was fixed, when they have changed the most.

A pass computes the masked positions and those that the last step has fixed; every few passes, and in the first two of a
block, it computes everything. `dkv-cache-prefill` keeps those of the prompt alone. `dkv-cache-greedy` computes of the
masked positions the next one and a window around it, which takes an order that is known in advance.

Ma et al., "dKV-Cache: The Cache for Diffusion Language Models", arXiv 2505.15781 (2025), section 3. Its greedy variant
draws positions at random, in an order drawn before; here it serves `left-to-right`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from truedraft.canvas._base import CanvasRow, Policy
from truedraft.canvas.views._base import CanvasView, latest, masked, steps_within, whole
from truedraft.card import Card, knob
from truedraft.errors import Refused


@dataclass
class DkvCache(CanvasView):
    card = Card(
        paper="arXiv 2505.15781 (2025)",
        idea="Keep keys and values of a position one step after it was fixed.",
        family="delayed cache",
        cannot={"attention in blocks": "keys and values of complete blocks are kept exactly"},
        presets={
            "dkv-cache-prefill": {"prompt": True},
            "dkv-cache-greedy": {"window": 4, "refresh": 2},
        },
        published="2 to 10 times on LLaDA 8B and Dream 7B, almost without loss; greedy faster, at some loss.",
    )
    refresh: int = knob(8, 1, 1024)  # passes within a block until all is computed anew (8 for LLaDA, 4 to 16 for Dream)
    prompt: bool = knob(False)  # whether the prompt alone is kept
    window: int = knob(0, 0, 1024)  # masked positions computed, those nearest to the next one (4); 0: all

    def check(self, policy: Policy) -> None:
        if self.window and not policy.ordered:
            raise Refused(
                f"lossy/dkv-cache:window={self.window} computes positions around the next one, and this rule chooses "
                "it by the predictions: choose rule='left-to-right', or window=0"
            )

    def positions(self, row: CanvasRow) -> Iterable[int]:
        steps = steps_within(row)
        if steps < 2 or steps % self.refresh == 0:
            return whole(row)
        if self.prompt:
            return range(row.prompt, len(row.canvas))
        unknown = masked(row)
        if self.window:
            unknown = sorted(unknown, key=lambda i: abs(i - unknown[0]))[: self.window]
        return [*unknown, *latest(row)]
