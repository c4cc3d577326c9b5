"""Gives each token fewer of its experts: those with the largest router weights.

Song et al., "BlockFFN: Towards End-Side Acceleration-Friendly Mixture-of-Experts with Chunk-Level Activation Sparsity",
COLM 2025 (arXiv 2507.08771): a pass over several drafted tokens reads the union of their experts, so that a mixture of
experts is verified for more than a token costs. A level of this draft reads a few experts of one token. It pays for
models whose bytes are in experts, and of which a token is given many; with one of two it is a far smaller model.
"""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.views._base import Experts, Reduction, View


@dataclass(frozen=True)
class FewerExperts(View):
    """A decoder with fewer experts per token; its routers divide their weights by fewer, where they do. See `View`."""

    card = Card(
        paper="arXiv 2507.08771 (2025), 2505.19645 (2025)",
        idea="The model drafts for itself with fewer experts per token.",
        family="self-drafting",
        needs=("experts",),
        presets={"blockffn": {"experts": 8, "least": 0.1}},
        published="BlockFFN: its own models, drafted for by EAGLE-2, up to 3.67x over dense ones; not fewer experts.",
        lacks={
            "blockffn": "models of this kind are read and draft for themselves with fewer experts; the paper's "
            "training for sparsity is not here, and its drafts are those of EAGLE-2 (draft='eagle2:FOLDER')",
        },
    )
    experts: int = knob(1, 1, 65536)  # per token and mixture at most; of a router with top_k, fewer than these
    least: float = knob(0.0, 0, 1)  # router weight over the strongest one's; for routers that end in a ReLU

    def reduction(self, layers: int) -> Reduction:
        return Reduction(experts=Experts(self.experts, self.least))
