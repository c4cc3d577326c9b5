"""Cascade speculative drafting: the draft models draft for each other, and the smallest is drafted for by a statistic.

Chen et al., "Cascade Speculative Drafting for Even Faster LLM Inference", NeurIPS 2024 (arXiv 2312.11462). Vertical
cascade: a draft model does not speak token by token; what a smaller one, and at the bottom a statistic (`max-gram`),
drafted for it, it reviews in one pass, as the target will. Horizontal cascade: the first tokens of a draft, which are
the likeliest to count, come from the largest draft model, the last from the smallest and the bottom. Inner reviews
may be lenient; the review by the target is the rule's own, so the text is exact.

It wins over `draft-model` where the text repeats, so that a pass of the draft model reads several tokens; where the
bottom is rarely right it costs what `draft-model` costs. A draft model that knows less of the text than the bottom does
(a small one where all is copied) stands in the bottom's way: there the bottom alone is better. Drafts are point masses,
which every rule may judge but `k-seq`; under rules that judge drawn drafts by their law `draft-model` is accepted more
often. `draft-model>max-gram` is the horizontal cascade alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from truedraft import registry
from truedraft.card import Card, knob
from truedraft.drafters._base import PerRow
from truedraft.drafters._joint import Joint
from truedraft.drafters.models._model import NODES, laws_of, unnamed
from truedraft.drafters.models._reader import Reader, loaded
from truedraft.errors import Refused
from truedraft.targets._base import Target
from truedraft.tree import DraftTree, Row

LENGTHS = (
    "a row for the target and one for each draft model, each a length shorter than the one before, as in '13x10;10', "
    f"with 1 to {NODES:,} tokens in all for the target"
)


@dataclass(eq=False)
class Growing:
    """One row's draft while it grows.

    most: tokens that it may have. said: those that it has. over: nothing may follow them.
    """

    row: Row
    most: int
    drafted: list[int] = field(default_factory=list)
    over: bool = False

    def append(self, tokens: Sequence[int]) -> None:
        """Go on with tokens, up to one that ends the text, or -1: nothing may be behind."""
        for token in tokens:
            if not self.over:
                self.over = token < 0 or token in self.row.ends
                self.drafted += [token] if token >= 0 else []

    def taken_back(self, length: int) -> list[int]:
        """Its tokens behind the first `length`, which are for another to say."""
        later, self.drafted, self.over = self.drafted[length:], self.drafted[:length], False
        return later


@dataclass
class CsDrafting(Joint):
    card = Card(
        paper="arXiv 2312.11462 (2023)",
        idea="Draft models of falling size draft for each other, the smallest is drafted for by a statistic.",
        family="draft model",
        needs=("draft model",),
        presets={"cs-drafting-llama": {"lengths": "13x10;10"}, "cs-drafting-t5": {"lengths": "5x14x10;1x10;10"}},
        published="Up to 72% (in the later version 81%) more speed than speculative decoding with the same models.",
    )
    model: Any = None  # draft models, the largest first: a list of models, or names with ';' between; published 1 or 2
    lengths: str = knob("5x10;10", form=LENGTHS, reader=lambda text: table_of(text))  # published: see the presets
    lenience: float = knob(5.0, 1, 1e9)  # by which a draft model takes a draft to be likelier; published 2 to 5
    bottom: Any = "max-gram"  # the drafter below the models, or its name; published max-gram

    prior_confidence = 0.7
    autoregressive = True

    def __post_init__(self) -> None:
        given = self.model.split(";") if isinstance(self.model, str) else self.model
        models = given if isinstance(given, list | tuple) else [given]
        known = [loaded(model) for model in models if model is not None]
        self._readers = [Reader(model) for model, _ in known]
        self._tokenizers = [tokenizer for _, tokenizer in known if tokenizer is not None]
        self._table = table_of(self.lengths)
        below = registry.load("drafters", self.bottom) if isinstance(self.bottom, str) else self.bottom
        if not isinstance(below, PerRow):
            raise Refused(f"bottom={self.bottom!r} cannot go on from another's draft: give a drafter like 'max-gram'")
        self._bottom: PerRow[Any] = below
        self.parts = (below,)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:  # type: ignore[override]
        return self._tokenizers[0] if self._tokenizers else None

    @property
    def vocab_size(self) -> int | None:
        known = [reader.vocab_size for reader in self._readers]
        words = [tokenizer.get_vocab() for tokenizer in self._tokenizers]
        named = len(words) == len(known)  # then only the padding may differ
        if any(w != words[0] for w in words) or not (named or len(set(known)) <= 1):
            raise Refused(
                f"the draft models of cs-drafting know different tokens ({known}): give ones of one tokenizer"
            )
        return known[0] if known else None

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
            Growing(row, min(most, self.width, row.room - row.step - 1)) for row, most in zip(rows, budget, strict=True)
        ]
        if any(draft.most > 0 for draft in drafts):
            for reader in self._readers:
                reader.admit(rows)
            self._grow(0, drafts)
        return [DraftTree.chain(draft.row.tokens[-1], draft.drafted) for draft in drafts]

    def _grow(self, reviewer: int, drafts: Sequence[Growing]) -> None:
        """The tokens that a reviewer (0 the target, i the i-th model) is served, the largest drafter's first.

        Each drafter goes on until the draft has what those before it and it were to give; for a reviewer inside,
        room is left for the token that it adds itself.
        """
        goals = [len(draft.drafted) for draft in drafts]
        for k, count in enumerate(self._table[reviewer], reviewer):
            goals = [min(goal + count, draft.most - reviewer) for goal, draft in zip(goals, drafts, strict=True)]
            if k == len(self._readers):
                for draft, goal in zip(drafts, goals, strict=True):
                    self._copy(draft, goal)
                return
            while short := [
                draft
                for draft, goal in zip(drafts, goals, strict=True)
                if len(draft.drafted) < goal and not draft.over and self._follows(k, draft)
            ]:
                self._review(k, short)

    def _follows(self, k: int, draft: Growing) -> bool:
        reader = self._readers[k]
        return draft.row in reader.slot_rows and reader.fits(draft.row, draft.most)

    def _copy(self, draft: Growing, goal: int) -> None:
        """What the bottom drafts: of a tree, the path of most confidence."""
        if draft.over or len(draft.drafted) >= goal:
            return
        tree = self._bottom.extend(draft.row, draft.drafted, goal - len(draft.drafted))
        node = 0
        while below := tree.shape.children[node]:
            node = below[0] if tree.confidence is None else max(below, key=tree.confidence.__getitem__)
            draft.append([tree.tokens[node]])

    def _review(self, k: int, drafts: Sequence[Growing]) -> None:
        """A pass of model k over what those below it draft: kept as far as it agrees, and then its own word."""
        before = [len(draft.drafted) for draft in drafts]
        self._grow(k + 1, drafts)
        candidates = [draft.taken_back(n) for draft, n in zip(drafts, before, strict=True)]
        reader = self._readers[k]
        slots = [reader.slot_rows.index(draft.row) for draft in drafts]
        texts: list[list[int] | None] = [None] * len(reader.slot_rows)
        for slot, draft in zip(slots, drafts, strict=True):
            texts[slot] = draft.row.tokens + draft.drafted
        reader.catch_up(texts)
        read: list[list[int]] = [
            [] if text is None else text[len(written) :] for text, written in zip(texts, reader.written, strict=True)
        ]
        words = self._words(drafts, candidates, reader, read, slots)
        for slot, draft, proposal in zip(slots, drafts, candidates, strict=True):
            mine = list(islice(words, len(proposal) + 1))
            agreed = next((n for n, (a, b) in enumerate(zip(proposal, mine, strict=False)) if a != b), len(proposal))
            draft.append(mine[: agreed + 1])
            read[slot] += proposal[:agreed]
        reader.keep(read)

    def _words(
        self, drafts: Sequence[Growing], candidates: Sequence[list[int]], reader: Reader, read: list[list[int]],
        slots: Sequence[int],
    ) -> Iterator[int]:  # fmt: skip
        """What a draft model says behind each draft and behind each token that it is then offered, in one pass.

        It says what it is offered, if that is what it would say were it `lenience` times as likely. -1 where it may say
        nothing.

        read: by slot, what it has still to read of each row and draft.
        """
        chains = [list(new) for new in read]
        for slot, proposal in zip(slots, candidates, strict=True):
            chains[slot] += proposal
        logits = reader.read(chains)
        at = [(i, n) for i, proposal in enumerate(candidates) for n in range(1 + len(proposal))]
        rows, behind = [drafts[i].row for i, _ in at], [drafts[i].drafted + candidates[i][:n] for i, n in at]
        logits = logits[[slots[i] for i, _ in at], [len(read[slots[i]]) - 1 + n for i, n in at]]
        laws = laws_of(rows, behind, logits)
        offered = [(k, candidates[i][n]) for k, (i, n) in enumerate(at) if n < len(candidates[i])]
        laws[[k for k, _ in offered], [token for _, token in offered]] *= self.lenience
        value, token = laws.max(-1)
        tokens = token.masked_fill(value <= 0, -1).tolist()
        for i, (row, depth) in enumerate(zip(rows, map(len, behind), strict=True)):
            if self.preferred(row) == "noise" and not row.request.laws.unknown_processors:
                tokens[i] = (row.request.chance.draw_with_target_noise(laws[i], row, depth) or [-1])[0]
        return iter(tokens)


def table_of(text: str) -> list[list[int]]:
    """The upper triangle of the matrix of lengths: "13x10;10" is [[13, 10], [10]].

    Raises:
        ValueError: not such a text, rows that do not grow shorter by one, down to one of one length, or lengths that
            draft nothing or too much.
    """
    rows = [row.strip().split("x") for row in text.split(";")]
    shapes = [len(row) for row in rows] == list(range(len(rows), 0, -1))
    if not shapes or not all(n.isdecimal() for row in rows for n in row) or len(rows) < 2:
        raise ValueError
    table = [[int(n) for n in row] for row in rows]
    if not 1 <= sum(table[0]) <= NODES or max(map(max, table)) > NODES:
        raise ValueError
    return table
