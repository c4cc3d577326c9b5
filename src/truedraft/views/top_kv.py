"""Reads the positions of the KV cache that get the most attention, and the most recent ones.

Zhang et al., "Sparse-to-Dense: A Free Lunch for Lossless Acceleration of Video Understanding in LLMs", 2025
(arXiv 2505.19155): positions are chosen once, after the prompt, in each layer by the attention of its last tokens.
Sun et al., "TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical Speculative Decoding", 2024
(arXiv 2404.11912): by chunks of eight, each by its mean key, and by the last query alone. Here too that is one query,
of the first token behind the prompt.
Wu et al., "From Hours to Minutes: Lossless Acceleration of Ultra Long Sequence Generation up to 100K Tokens", 2025
(arXiv 2502.18890, TokenSwift): positions are chosen anew while a long text is written, so that they follow its subject.
Of that method this is the part that reads little of the cache, without its heads and its n-grams.
It pays behind texts of many thousand tokens; against a window it finds what is far back, for one pass of the whole
model per choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.views._base import Reduction, Selection, View


@dataclass(frozen=True)
class TopKv(View):
    """The whole decoder over the entries of its KV cache with the most attention. See `View`."""

    card = Card(
        paper="arXiv 2505.19155 (2025), 2404.11912 (2024), 2502.18890 (2025)",
        idea="The model drafts for itself, reading what it attends to the most in a long text, and its end.",
        family="self-drafting",
        presets={
            "sparse-to-dense": {"entries": 1024, "chunk": 1},
            "retrieval-kv": {"entries": 4096, "chunk": 8},
            "tokenswift": {"entries": 2048, "recent": 2048, "refresh": 2048},
        },
        published="Sparse-to-Dense: up to 1.94x on video models; TriForce: 2.31x behind 122K tokens; TokenSwift: 3x.",
        lacks={
            "sparse-to-dense": "the positions with the most attention are read, as published; the paper keeps all of "
            "the text and chooses among the positions of a video, and here those of the text are chosen from too",
            "tokenswift": "a part of the cache is read and chosen anew while the text grows, as published; the three "
            "trained heads, their tree and the repeated 4-grams are not here",
        },
        also={
            "triforce": "its three levels are draft='retrieval-kv:depth=6,nodes=6<draft-model:SMALL'; the window of "
            "the small model's cache and a sampling middle level are not here",
        },
    )
    entries: int = knob(1024, 1, 1048576)  # chosen positions by layer and head; published 1024, and 4096 in chunks
    chunk: int = knob(1, 1, 1024)  # adjacent positions that are chosen together; published 1 and 8
    recent: int = knob(512, 1, 1048576)  # last positions, those of new tokens among them
    refresh: int = knob(0, 0, 1048576)  # new tokens after which positions are chosen anew; published 0 for never, 2048

    def reduction(self, layers: int) -> Reduction:
        kept = max(self.entries // self.chunk, 1) * self.chunk
        return Reduction(entries=Selection(kept, self.recent, self.chunk, self.refresh))
