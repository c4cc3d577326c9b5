"""Cascade speculative drafting: draft models draft for each other, and an n-gram statistic drafts for the smallest.

Chen et al., "Cascade Speculative Drafting for Even Faster LLM Inference", NeurIPS 2024 (arXiv 2312.11462). Vertical
cascade: a draft model does not decode token by token; in one pass it verifies what a smaller one, and at the bottom a
statistic (`max-gram`), drafted for it. Horizontal cascade: the first tokens of a draft, which are the likeliest to be
accepted, come from the largest draft model, the last from the smallest and the bottom. Inner verification may be
lenient; the target verifies by the row's rule, so the text is exact.

It wins over `draft-model` where the text repeats, so that a pass of the draft model reads several tokens; where the
bottom is rarely right it costs what `draft-model` costs. Where the bottom is more often right than a draft model (a
small model where all is copied), the bottom alone is better. Drafts are point masses, which every rule but `k-seq`
accepts; under rules that verify drawn drafts against their distribution, more of `draft-model`'s are accepted.
`draft-model>max-gram` is the horizontal cascade alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from truedraft import registry
from truedraft.card import Card, knob
from truedraft.drafters._base import PerRow
from truedraft.drafters._joint import Joint
from truedraft.drafters._shapes import NODES
from truedraft.drafters.models._model import unnamed
from truedraft.drafters.models._nested import GrowingChain, verified
from truedraft.drafters.models._reader import Reader, loaded
from truedraft.errors import Refused
from truedraft.targets._base import Target
from truedraft.tree import DraftTree, Row

LENGTHS = (
    "a row for the target and one for each draft model, each a length shorter than the one before, as in '13x10;10', "
    f"with 1 to {NODES:,} tokens in all for the target"
)


@dataclass
class CsDrafting(Joint):
    card = Card(
        paper="arXiv 2312.11462 (2023)",
        idea="Draft models of falling size draft for each other, the smallest is drafted for by a statistic.",
        family="draft model",
        needs=("draft model",),
        presets={"cs-drafting-llama": {"lengths": "13x10;10"}, "cs-drafting-t5": {"lengths": "5x14x10;1x10;10"}},
        published="Up to 72% (in the later version 81%) more speed than speculative decoding with the same models.",
        also={
            "cascade-speculative-drafting": "",
        },
    )
    model: Any = None  # draft models, the largest first: a list of models, or names with ';' between; published 1 or 2
    lengths: str = knob("5x10;10", form=LENGTHS, reader=lambda text: table_of(text))  # published: see the presets
    lenience: float = knob(5.0, 1, 1e9)  # factor on a drafted token's probability in inner passes; published 2 to 5
    bottom: Any = "max-gram"  # the drafter below the models, or its name; published max-gram

    prior_confidence = 0.7
    autoregressive = reads_texts = True

    def __post_init__(self) -> None:
        given = self.model.split(";") if isinstance(self.model, str) else self.model
        models = given if isinstance(given, list | tuple) else [given]
        pairs = [loaded(model) for model in models if model is not None]
        self._readers = [Reader(model) for model, _ in pairs]
        self._tokenizers = [tokenizer for _, tokenizer in pairs if tokenizer is not None]
        self._table = table_of(self.lengths)
        below = registry.load("drafters", self.bottom) if isinstance(self.bottom, str) else self.bottom
        if not isinstance(below, PerRow):
            raise Refused(f"bottom={self.bottom!r} cannot continue another's draft: give a drafter like 'max-gram'")
        self._bottom: PerRow[Any] = below
        self.parts = (below,)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:  # type: ignore[override]
        return self._tokenizers[0] if self._tokenizers else None

    @property
    def vocab_size(self) -> int | None:
        sizes = [reader.vocab_size for reader in self._readers]
        vocabularies = [tokenizer.get_vocab() for tokenizer in self._tokenizers]
        complete = len(vocabularies) == len(sizes)  # then only the padding may differ
        if any(v != vocabularies[0] for v in vocabularies) or not (complete or len(set(sizes)) <= 1):
            raise Refused(
                f"the draft models of cs-drafting have different vocabularies ({sizes}): give ones of one tokenizer"
            )
        return sizes[0] if sizes else None

    def bind(self, target: Target) -> None:
        if not self._readers:
            raise unnamed(self)
        if len(self._table) != len(self._readers) + 1:
            raise Refused(
                f"lengths={self.lengths!r} is for {len(self._table) - 1} draft models, and there are "
                f"{len(self._readers)}: give a row for the target and one for each draft model"
            )
        for reader in self._readers:
            reader.fit(target)
        super().bind(target)

    def start(self, rows: Sequence[Row]) -> None:
        super().start(rows)
        for reader in self._readers:
            reader.start(rows, self.width)

    def end(self, row: Row) -> None:
        super().end(row)
        for reader in self._readers:
            reader.end(row)

    @property
    def width(self) -> int:
        return sum(self._table[0])

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        drafts = [
            GrowingChain(row, min(most, self.width, row.room - row.step - 1))
            for row, most in zip(rows, budget, strict=True)
        ]
        if any(draft.most > 0 for draft in drafts):
            for reader in self._readers:
                reader.admit(rows)
            self._grow(0, drafts)
        return [DraftTree.chain(draft.row.tokens[-1], draft.drafted) for draft in drafts]

    def _grow(self, verifier: int, drafts: Sequence[GrowingChain]) -> None:
        """Grow the drafts for a verifier (0 the target, i the i-th model), by the largest drafter first.

        Each drafter continues until the drafts have the length due from it and those before it; for an inner
        verifier, room is left for the token that it adds itself.
        """
        goals = [len(draft.drafted) for draft in drafts]
        for k, count in enumerate(self._table[verifier], verifier):
            goals = [min(goal + count, draft.most - verifier) for goal, draft in zip(goals, drafts, strict=True)]
            if k == len(self._readers):
                for draft, goal in zip(drafts, goals, strict=True):
                    self._extend_by_bottom(draft, goal)
                return
            while short := [
                draft
                for draft, goal in zip(drafts, goals, strict=True)
                if len(draft.drafted) < goal and not draft.over and draft.readable(self._readers[k])
            ]:
                self._verify(k, short)

    def _extend_by_bottom(self, draft: GrowingChain, goal: int) -> None:
        """Append the bottom's draft: of a tree, the path of most confidence."""
        if draft.over or len(draft.drafted) >= goal:
            return
        tree = self._bottom.extend(draft.row, draft.drafted, goal - len(draft.drafted))
        node = 0
        while below := tree.shape.children[node]:
            node = below[0] if tree.confidence is None else max(below, key=tree.confidence.__getitem__)
            draft.append([tree.tokens[node]])

    def _verify(self, k: int, drafts: Sequence[GrowingChain]) -> None:
        """Verify by model k what those below it draft, in one pass: append the agreed tokens and the model's next."""
        before = [len(draft.drafted) for draft in drafts]
        self._grow(k + 1, drafts)
        candidates = [draft.truncate(n) for draft, n in zip(drafts, before, strict=True)]
        trees = [DraftTree.chain(draft.last, proposal) for draft, proposal in zip(drafts, candidates, strict=True)]
        for draft, one in zip(drafts, verified(self, self._readers[k], drafts, trees, self.lenience), strict=True):
            draft.append(one.tokens)


def table_of(text: str) -> list[list[int]]:
    """The upper triangle of the matrix of lengths: "13x10;10" is [[13, 10], [10]].

    Raises:
        ValueError: another format, rows that do not shrink by one down to a single length, or lengths out of range.
    """
    rows = [row.strip().split("x") for row in text.split(";")]
    shapes = [len(row) for row in rows] == list(range(len(rows), 0, -1))
    if not shapes or not all(n.isdecimal() for row in rows for n in row) or len(rows) < 2:
        raise ValueError
    table = [[int(n) for n in row] for row in rows]
    if not 1 <= sum(table[0]) <= NODES or max(map(max, table)) > NODES:
        raise ValueError
    return table
