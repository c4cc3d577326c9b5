"""A target without a model, whose next token is a function of the prefix, with a drafter, control and oracle for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteria

from truedraft import Card, Drafter, DraftTree
from truedraft.accept._base import NodeRule
from truedraft.accept._verification import Candidates
from truedraft.chance import Chance, Replay
from truedraft.control._base import Control
from truedraft.tree import Accepted, Prompt, Row, Scores, Taps

V, END, PAD = 5, 4, 0


def next_token(prefix: Sequence[int]) -> int:
    """The target's next token after a prefix."""
    return random.Random(str(list(prefix))).randrange(V)


def random_draft(rng: random.Random, row: Row, nodes: int = 12, drawn: bool = True) -> DraftTree:
    """A random tree of fewer than `nodes` nodes, with probes, and laws if `drawn`; most tokens are right."""
    tokens, parent, probes = [row.tokens[-1]], [-1], set()
    paths = [list(row.tokens)]
    for i in range(1, rng.randint(1, nodes)):
        p = rng.choice([j for j in range(i) if j not in probes])
        tokens.append(next_token(paths[p]) if rng.random() < 0.6 else rng.randrange(V))
        parent.append(p)
        paths.append([*paths[p], tokens[-1]])
        if rng.random() < 0.15:
            probes.add(i)
    dist = tuple(torch.full((V,), float(i)) for i in range(len(tokens))) if drawn else None
    return DraftTree(tuple(tokens), tuple(parent), dist, frozenset(probes), "independent" if drawn else "certain")


@dataclass
class Plain:
    """A row of plain decoding; `end` is the length at which it ended."""

    tokens: list[int]
    longest: int
    last: int | None = END  # the token that ends it
    end: int | None = None

    def emit(self, token: int) -> None:
        self.tokens.append(token)
        if self.end is None and (token == self.last or len(self.tokens) == self.longest):
            self.end = len(self.tokens)


class Lockstep(StoppingCriteria):
    """An unknown criterion, which forces lockstep; it ends the first row at `length`, if given."""

    def __init__(self, length: int | None = None):
        self.length = length

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        done = torch.zeros(len(input_ids), dtype=torch.bool)
        done[0] = self.length is not None and input_ids.shape[1] >= self.length
        return done


@dataclass
class Likeliest(NodeRule):
    """Chooses the likeliest token, and records each call of `choose`."""

    calls: list[tuple[int, int, Candidates]] = field(default_factory=list)  # row, its step, candidates
    preferred_drafts = "likeliest"

    def choose(
        self, scores: Tensor, candidates: Sequence[Candidates], rows: Sequence[Row], chance: Chance
    ) -> list[int]:
        assert isinstance(chance, Replay)
        self.calls += [(row.index, row.step, children) for row, children in zip(rows, candidates, strict=True)]
        best, token = scores.max(-1)
        return token.masked_fill(best.isnan(), -1).tolist()


class Target:
    """A target that stores the committed tokens of each slot, and scores trees after them."""

    branching = True

    def __init__(self, note: Callable[..., None], begins_with_drafts: bool = False):
        self.slots: list[list[int]] = []
        self.trees: list[DraftTree] = []
        self.taps = Taps()
        self.note, self.begins_with_drafts = note, begins_with_drafts

    def admit(self, prompts: Sequence[Prompt]) -> Scores | None:
        self.note("admit")
        first = len(self.slots)
        self._begin(prompts)
        if self.begins_with_drafts:
            return None
        last = [prompt.ids[-1].item() if prompt.ids is not None else 0 for prompt in prompts]
        return self._scores([DraftTree.chain(token) for token in last], first)  # type: ignore[arg-type]

    def _begin(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            tokens = prompt.ids.tolist() if prompt.ids is not None else [0] * len(prompt)
            self.slots.append(tokens[:-1])

    def score(self, trees: Sequence[DraftTree]) -> Scores:
        self.note("score")
        return self._scores(trees)

    def _scores(self, trees: Sequence[DraftTree], first: int = 0) -> Scores:
        assert len(trees) == len(self.slots) - first
        self.trees = list(trees)
        logits = torch.zeros(len(trees), max(map(len, trees)), V)
        for row, (slot, tree) in enumerate(zip(self.slots[first:], trees, strict=True)):
            for node in range(len(tree)):
                logits[row, node, next_token(slot + [tree.tokens[i] for i in tree.path(node)])] = 1.0
        return Scores(logits, {}, [0] * len(trees))

    def wait(self) -> None:
        self.note("wait")

    def commit(self, paths: Sequence[Sequence[int]], first: int = 0) -> None:
        self.note("commit")
        for slot, tree, path in zip(self.slots[first:], self.trees, paths, strict=True):
            assert tuple(path) == tree.path(path[-1])
            slot += [tree.tokens[i] for i in path]

    def release(self, slot: int) -> None:
        self.note("release")
        self.slots[slot] = self.slots[-1]
        self.slots.pop()


@dataclass
class RandomDrafts(Drafter):
    """Random drafts, some deeper and larger than allowed; checks in `observe` that rows have the accepted tokens."""

    note: Callable[..., None]
    seed: int = 0
    drawn: bool = False
    size: int = 6  # its declared width
    needs = Taps((1,))
    card = Card(paper="none", idea="For tests.", family="test")

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.under_way: list[Row] = []
        self.ended: list[int] = []
        self.budgets: list[list[int]] = []
        self.seen: list[tuple[list[int], list[DraftTree], list[Accepted]]] = []

    def start(self, rows: Sequence[Row]) -> None:
        self.note("start")
        self.under_way = list(rows)

    @property
    def width(self) -> int:
        return self.size

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        self.note("propose")
        self.budgets.append(list(budget))
        return [random_draft(self.random, row, 12, self.drawn) for row in rows]

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        self.note("observe")
        assert len(scores.logits) == len(rows) == len(trees) and scores.logits.shape[1] >= max(map(len, trees))
        for row, tree, one in zip(rows, trees, accepted, strict=True):
            drafted = [tree.tokens[i] for i in one.path]
            assert row.tokens[-len(drafted) - 1 :] == [*drafted, one.token][-len(row.tokens) :]
        self.seen.append(([row.index for row in rows], list(trees), list(accepted)))

    def end(self, row: Row) -> None:
        self.note("drafter ends")
        self.ended.append(row.index)


@dataclass
class Pruning(Control):
    """Budgets 10 nodes and a row's index, prunes drafts to random sizes, and records its calls."""

    note: Callable[..., None]
    seed: int = 0
    card = Card(paper="none", idea="For tests.", family="test")

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.ended: list[int] = []
        self.pruned: list[list[DraftTree]] = []
        self.before: list[list[DraftTree]] = []
        self.learnt: list[tuple[list[Row], list[DraftTree], list[Accepted]]] = []
        self.opened: list[tuple[Any, ...]] = []
        self.started: list[Row] = []
        self.budgeted: list[list[Row]] = []

    def open(self, *opened: Any) -> None:
        self.note("open")
        self.opened.append(opened)

    def start(self, rows: Sequence[Row]) -> None:
        self.started += rows

    def budget(self, rows: Sequence[Row]) -> list[int]:
        self.budgeted.append(list(rows))
        return [10 + row.index for row in rows]

    def prune(self, rows: Sequence[Row], trees: Sequence[DraftTree]) -> list[DraftTree]:
        self.note("prune")
        assert [tree.tokens[0] for tree in trees] == [row.tokens[-1] for row in rows]
        self.before.append(list(trees))
        self.pruned.append([tree.cut(self.random.randint(1, len(tree))) for tree in trees])
        return self.pruned[-1]

    def observe(self, rows: Sequence[Row], trees: Sequence[DraftTree], accepted: Sequence[Accepted]) -> None:
        self.note("learn")
        assert len(rows) == len(trees) == len(accepted)
        self.learnt.append((list(rows), list(trees), list(accepted)))

    def end(self, row: Row) -> None:
        self.note("control ends")
        self.ended.append(row.index)
