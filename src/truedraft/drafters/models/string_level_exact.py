"""String-level exact match (SLEM): a draft model of any tokenizer drafts text, which the target's tokenizer splits.

Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies",
ICML 2025 (arXiv 2502.05202); transformers has it for draft models with another tokenizer. The draft model goes on in
its own tokens; their text, with the word that the row ends in, is split by the target's tokenizer, and what follows the
row's own tokens is the draft. Such a draft has no probabilities: it is accepted where the target chooses the same
tokens. It wins over `draft-model`, which drafts the tokens that both vocabularies have, where these are few, as with a
draft model of characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from torch import Tensor

from truedraft.card import Card, knob
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters.models._strings import StringDrafter
from truedraft.tree import DraftTree, Row


@dataclass
class StringLevelExact(StringDrafter):
    card = Card(
        paper="arXiv 2502.05202 (2025)",
        idea="A smaller model with another tokenizer drafts text, which the target's tokenizer splits.",
        family="draft model",
        needs=("draft model", "tokenizer"),
        cannot={"encoder-decoder": "its sources are in the target's tokens"},
        published="Up to 2.8x on summaries, code and long contexts, with off-the-shelf draft models.",
        also={
            "slem": "",
        },
    )
    model: Any = None  # a model of transformers, or its name: a folder, an embedded model, one on the hub
    length: int = knob(16, 1, 256)  # tokens of the draft model at most; transformers has 20
    tokens: int = knob(8, 1, 256)  # of the target at most
    confidence: float = knob(0.0, 0, 1)  # end a draft after a token of lower probability; transformers has 0.4

    @property
    def width(self) -> int:
        return self.tokens

    @property
    def notes(self) -> list[str]:
        return ["the draft model has another tokenizer: the model's own splits the text that it drafts"]

    def room(self, budget: int) -> int:
        return self.length if budget > 0 else 0

    def _growing(self, row: Row, budget: int, after: Sequence[int] = ()) -> GrowingTree:
        growing = super()._growing(row, budget, after)
        if growing.frontier:  # a draft is no longer than the text of its budget and a token more
            each = self._texts.length(row) / len(row.tokens)
            growing.room = min(growing.room, ceil(each * (growing.budget + 1)))
        return growing

    def _grown(self, growing: Sequence[GrowingTree]) -> list[DraftTree]:
        ready = [tree for tree in growing if tree.frontier]
        if ready and self.reader.decode_greedily(ready, self.confidence):
            return [self.finished(tree) for tree in growing]
        return super()._grown(growing)

    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        (node,), token = nodes, int(laws[0].argmax())
        growing.frontier = growing.add(node, [token])
        deep = (
            laws[0, token] < self.confidence
            or growing.depth[growing.frontier[0]] >= growing.deepest
            or growing.room == 0
        )
        if deep or not self._texts.vocabularies.reverse.text_of(token) or len(self._tokens(growing)) > growing.budget:
            growing.frontier = []

    def finished(self, growing: GrowingTree) -> DraftTree:
        row = growing.row
        return DraftTree.chain((growing.after or row.tokens)[-1], self._tokens(growing)[: growing.budget])

    def _tokens(self, growing: GrowingTree) -> list[int]:
        """The draft in the target's tokens."""
        if not (own := growing.tokens[growing.root + 1 :]):
            return []
        rendering = self._texts.rendering(growing.row, growing.after)
        return rendering.drafted([*growing.row.tokens, *growing.after], own)
