"""Reads the first and the most recent positions of the KV cache: behind a long text a pass costs as behind a short one.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024 (arXiv 2309.17453): models put much
of their attention on the first positions, whatever is there, and go wrong without them. As a draft's cache: Sun et al.,
"TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical Speculative Decoding", 2024
(arXiv 2404.11912). It pays where a pass spends its time on keys and values, behind texts of many thousand tokens, and
not where the next token copies from far back.
"""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.views._base import Reduction, Selection, View


@dataclass(frozen=True)
class WindowKv(View):
    """The whole decoder over a window of its KV cache. See `View`."""

    card = Card(
        paper="arXiv 2309.17453 (2023), 2404.11912 (2024)",
        idea="The model drafts for itself, reading the beginning and the end of a long text.",
        family="self-drafting",
        published="StreamingLLM: 4 sinks; TriForce's draft model: 16 sinks and 496 recent positions.",
        also={
            "magicdec": "its drafts by the target itself over a window are draft='window-kv'",
            "streamingllm": "view='lossy/window-kv' is the model over such a window, and draft='window-kv' drafts so",
        },
    )
    sinks: int = knob(4, 0, 4096)  # first positions; published 4 and 16
    recent: int = knob(508, 1, 1048576)  # last positions; published 496 to 2044

    def reduction(self, layers: int) -> Reduction:
        return Reduction(entries=Selection(self.sinks, self.recent))
