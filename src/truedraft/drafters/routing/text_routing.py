"""Routes each row to a drafter for its language, or subject: that whose example texts are like the row's prompt.

Yi et al., "Towards Fast Multilingual LLM Inference: Speculative Decoding and Specialized Drafters", EMNLP 2024 (arXiv
2406.16758): small drafters that were trained on one source language each, and the requests of a language drafted for by
its own. Here the language is that of examples which the caller gives, a few sentences of each: every token of a prompt
votes by how often they have it (`_votes.py`). Where no specialist is clear, "otherwise" drafts. Rows of one specialist
are drafted for together, and a specialist reads no text but that of its rows, so that the others cost nothing. It wins
over one drafter for all where drafters are so small that they do not learn all languages or subjects equally well, and
where each row has one of these; where rows mix them, `confidence-routing` chooses in each pass, at the cost of all
drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from truedraft import registry
from truedraft.card import Card, knob
from truedraft.drafters._base import Drafter
from truedraft.drafters._joint import Joint
from truedraft.drafters.routing._specialists import Examples, distinct, drafters_of, note, read_file, token_ids
from truedraft.drafters.routing._votes import Votes
from truedraft.errors import NoRoom, Refused
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row, Scores

NAME, OTHERWISE = "text-routing", "otherwise"


@dataclass
class TextRouting(Joint):
    card = Card(
        paper="arXiv 2406.16758 (2024)",
        idea="Each row is drafted for by the drafter whose example texts are like its prompt.",
        family="routing",
        needs=("specialists",),
        presets={"multilingual-drafters": {"every": 0}},
        published="A 68M drafter per source language (de, fr, ja, ru, zh to en) beats generic ones with Vicuna 7B.",
    )
    specialists: Any = None  # by name, drafters, their names, or draft models; "otherwise" is by default "auto"
    examples: Any = None  # by name, texts like those of each specialist, or token ids; of "otherwise" optional
    file: str = knob("")  # of both, in TOML: a table for each specialist, with draft and examples
    lead: float = knob(0.1, 0, 1)  # of the votes, that a specialist needs over the next; unpublished
    ngram: int = knob(2, 1, 8)  # tokens of an n-gram that votes, at most; unpublished
    window: int = knob(256, 1, 1_000_000)  # last tokens of a prompt, which vote; unpublished
    every: int = knob(32, 0, 1_000_000)  # emitted tokens after which these vote anew; published 0, by the prompt alone

    alternating = True

    def __post_init__(self) -> None:
        self._chosen: dict[int, str] = {}  # name of the specialist of each row
        self._due: dict[int, int] = {}  # tokens after which a row is classified anew
        self._votes: Votes | None = None
        given, examples = self.specialists, self.examples
        if self.file:
            if given is not None or examples is not None:
                raise Refused(f"{NAME}:file={self.file!r} names specialists, and others are given: leave one out")
            given, examples = read_file(NAME, Path(self.file))
        self._drafters = drafters_of(NAME, given)
        self._examples: Examples = examples or {}
        if self._drafters and OTHERWISE not in self._drafters:
            self._drafters[OTHERWISE] = registry.load("drafters", registry.AUTO)
        for name in self._drafters:
            if name not in self._examples and name != OTHERWISE:
                raise Refused(f"{NAME}: {name!r} has no examples: give some texts like those that it is for")
        for name in self._examples:
            if name not in self._drafters:
                raise Refused(f"{NAME}: there are examples of {name!r}, and no such specialist: leave them out")
        self.parts = distinct(self._drafters)
        self.alone = True

    @property
    def alone(self) -> bool:
        """As of every drafter; a specialist's drafts are verified as they are if those of the whole are."""
        return self._alone

    @alone.setter
    def alone(self, alone: bool) -> None:
        self._alone = alone
        for part in self.parts:
            part.alone = alone

    @property
    def name(self) -> str:
        return NAME

    @property
    def prior_confidence(self) -> float:  # type: ignore[override]
        return max((part.prior_confidence for part in self.parts), default=Drafter.prior_confidence)

    @property
    def width(self) -> int:
        return max((part.width for part in self.parts), default=0)

    def bind(self, target: Target) -> None:
        if not self.parts:
            raise Refused(
                f"{NAME} needs specialists: draft='{NAME}:file=NAME.toml', or TextRouting(specialists, examples) in "
                "Python"
            )
        self._vocabulary = target.vocabulary
        super().bind(target)

    def read(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        super().read(tokenizer)
        self._classes = list(self._examples)
        self._votes = Votes(
            [token_ids(NAME, name, self._examples[name], tokenizer, self._vocabulary) for name in self._classes],
            self.ngram,
        )

    def like(self, tokens: Sequence[int]) -> str | None:
        """The name of the specialist for a text, which begins with a call; None where none is clear."""
        assert self._votes is not None
        found = self._votes.clear(tokens, self.lead)
        return None if found is None else self._classes[found]

    def start(self, rows: Sequence[Row]) -> None:
        for row in rows:
            text = row.source or row.tokens
            self._chosen[id(row)] = name = self.like(text[-self.window :]) or OTHERWISE
            self._due[id(row)] = self.every
            note(row, name, 0)
        for part, places in self._by_part(rows):
            part.start([rows[i] for i in places])

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        trees: dict[int, DraftTree] = {}
        for part, places in self._by_part(rows):
            proposed = part.propose([rows[i] for i in places], [budget[i] for i in places])
            trees |= zip(places, proposed, strict=True)
        for i, row in enumerate(rows):
            note(row, self._chosen[id(row)], len(trees[i]) > 1)
        return [trees[i] for i in range(len(rows))]

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        for part, places in self._by_part(rows):
            own = (
                [rows[i] for i in places],
                [trees[i] for i in places],
                scores.of(places),
                [accepted[i] for i in places],
            )
            part.observe(*own)
        if self.every:
            for row, one in zip(rows, accepted, strict=True):
                if row.step >= self._due[id(row)] and not (one.ended or row.ended):
                    self._due[id(row)] = row.step + self.every
                    self._move(row, self.like(row.tokens[-self.every :]) or self._chosen[id(row)])

    def _move(self, row: Row, name: str) -> None:
        """Give a row to a specialist, unless that needs hidden states of its text, or more memory than there is."""
        old, new = self._drafters[self._chosen[id(row)]], self._drafters[name]
        if new is not old:
            if new.needs.hidden:
                return
            try:
                new.start([row])
            except NoRoom:
                new.end(row)
                return
            old.end(row)
        self._chosen[id(row)] = name
        note(row, name, 0)

    def end(self, row: Row) -> None:
        super().end(row)
        self._chosen.pop(id(row), None)
        self._due.pop(id(row), None)

    def _by_part(self, rows: Sequence[Row]) -> Iterator[tuple[Drafter, list[int]]]:
        """Each specialist of any of the rows, with the places of its own."""
        found: dict[int, tuple[Drafter, list[int]]] = {}
        for place, row in enumerate(rows):
            part = self._drafters[self._chosen[id(row)]]
            found.setdefault(id(part), (part, []))[1].append(place)
        yield from found.values()
