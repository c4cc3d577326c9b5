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
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from truedraft.card import Card, knob, method_name
from truedraft.drafters._base import Continuing
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters.models._model import ModelDrafter
from truedraft.drafters.models._vocabularies import RenderedTexts, Rendering, Vocabularies
from truedraft.errors import Refused
from truedraft.targets._base import Target
from truedraft.tree import DraftTree, Row


@dataclass
class StringLevelExact(ModelDrafter, Continuing):
    card = Card(
        paper="arXiv 2502.05202 (2025)",
        idea="A smaller model with another tokenizer drafts text, which the target's tokenizer splits.",
        family="draft model",
        needs=("draft model", "tokenizer"),
        cannot={"encoder-decoder": "its sources are in the target's tokens"},
        published="Up to 2.8x on summaries, code and long contexts, with off-the-shelf draft models.",
    )
    model: Any = None  # a model of transformers, or its name: a folder, an embedded model, one on the hub
    length: int = knob(16, 1, 256)  # tokens of the draft model at most; transformers has 20
    tokens: int = knob(8, 1, 256)  # of the target at most

    @property
    def width(self) -> int:
        return self.tokens

    @property
    def levels(self) -> int:
        return self.length

    @property
    def vocab_size(self) -> int | None:
        return None

    def translate(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = None
        if self.own_tokenizer is not None:
            self._vocabularies = Vocabularies(tokenizer, self.own_tokenizer)

    def bind(self, target: Target) -> None:
        super().bind(target)
        if self._vocabularies is None:
            raise Refused(
                f"{method_name(self)} needs both tokenizers: give accelerate() the model's, and the draft model by its "
                "name"
            )
        self._texts = self.reader.texts = RenderedTexts(self._vocabularies)
        self._drafted = None

    def laws(self, rows: Sequence[Row], drafts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        """(k, n) distributions over the draft model's own tokens, which processors of the target's do not apply to."""
        return logits.softmax(-1).nan_to_num_(0.0)

    def room(self, budget: int) -> int:
        return self.length if budget > 0 else 0

    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        (node,), token = nodes, int(laws[0].argmax())
        growing.frontier = growing.add(node, [token])
        deep = growing.depth[growing.frontier[0]] >= growing.deepest or growing.room == 0
        if deep or not self._texts.vocabularies.reverse.text_of(token) or len(self._tokens(growing)) > growing.budget:
            growing.frontier = []

    def finished(self, growing: GrowingTree) -> DraftTree:
        row = growing.row
        return DraftTree.chain((growing.after or row.tokens)[-1], self._tokens(growing)[: growing.budget])

    def _tokens(self, growing: GrowingTree) -> list[int]:
        """The draft in the target's tokens."""
        drafted = growing.tokens[growing.root + 1 :]
        if not drafted:
            return []
        rendering = self._texts.rendering(growing.row, growing.after)
        return split(rendering, [*growing.row.tokens, *growing.after], drafted)

    def extend_each(
        self, rows: Sequence[Row], after: Sequence[Sequence[int]], budget: Sequence[int]
    ) -> list[DraftTree]:
        self.reader.catch_up(rows, after)
        each = zip(rows, budget, after, strict=True)
        return self._grown([self._growing(row, most, drafted) for row, most, drafted in each])


def split(rendering: Rendering, tokens: Sequence[int], drafted: Sequence[int]) -> list[int]:
    """The target's tokens that follow, for the draft model's tokens after a text.

    Args:
        rendering: of the text. tokens: the target's, of the text.
    """
    others = rendering.vocabularies.reverse
    known, first = rendering.word, rendering.first
    begun = list(tokens[len(tokens) - rendering.length :]) if known else []
    found: list[int] = []
    word = known
    for token in (*drafted, None):
        text = b"" if token is None else others.text_of(token)
        if word != known and (not text or (text[:1] == b" " and not word[-1:].isspace())):
            whole = others.word(word, first)
            found += whole[len(begun) :] if whole[: len(begun)] == begun else others.word(word[len(known) :], False)
            known, begun, word, first = b"", [], b"", False
        elif text[:1] == b" " and known and word == known and not word[-1:].isspace():
            known, begun, word, first = b"", [], b"", False  # the row's last word is complete
        if not text and token is not None:
            end = others.special(token)
            return found if end is None else [*found, end]
        word += text
    return found
