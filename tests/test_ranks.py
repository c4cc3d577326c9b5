"""The likeliest tokens at the nodes of a pass, read once for all: against torch, and against walks in Python."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from test_tree import random_tree
from truedraft.accept._verification import agreed
from truedraft.sampling import History, Laws
from truedraft.stopping import RowwiseCriterion, Stops
from truedraft.stores._native import trees as compiled
from truedraft.stores.ranks import COUNT, Ranks, ranks_of
from truedraft.stores.successors import Successors
from truedraft.tree import DraftTree, Row, Scores

pytestmark = pytest.mark.skipif(compiled() is None, reason="the structures were not compiled")
SHAPES = [(1, 1, 3), (2, 5, 40), (3, 4, 700), (2, 3, 5000), (1, 2, 40_000)]


def awkward(shape: tuple[int, ...]) -> Tensor:
    """Scores with ties, -inf, and lines of which nothing, or NaN, is left."""
    scores = torch.randn(*shape).mul(3).round()
    lines = scores.flatten(0, -2)
    lines[torch.rand_like(lines) < 0.1] = -torch.inf
    if len(lines) > 3:
        lines[1] = -torch.inf
        lines[2, torch.randint(shape[-1], ())] = torch.nan
    return scores


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padded", [0, 9])
def test_ranks_are_those_of_a_stable_sort(shape: tuple[int, int, int], padded: int) -> None:
    torch.manual_seed(0)
    for _ in range(6):
        scores = awkward(shape)
        ranks = Ranks(torch.nn.functional.pad(scores, (0, padded), value=99.0)[..., : shape[-1]])
        possible = scores.masked_fill(scores.isnan(), -torch.inf)
        ordered = possible.flatten(0, 1).sort(dim=-1, descending=True, stable=True)
        values, tokens = ordered.values[:, :COUNT], ordered.indices[:, :COUNT]
        tokens = torch.nn.functional.pad(tokens.masked_fill(values == -torch.inf, -1), (0, COUNT), value=-1)
        found = np.zeros((shape[0] * shape[1], COUNT), np.int32)
        kept = [
            DraftTree.chain(row * shape[1], range(row * shape[1] + 1, (row + 1) * shape[1])) for row in range(shape[0])
        ]
        ranks.recycle(kept, found)
        assert (found - 1).tolist() == tokens[:, :COUNT].tolist()
        wide = torch.nn.functional.pad(values, (0, 2), value=-torch.inf)[:, :2].unflatten(0, shape[:2])
        paths = [tuple(random.sample(range(shape[1]), k=random.randrange(shape[1] + 1))) for _ in range(shape[0])]
        expected = [wide[row, list(path)] for row, path in enumerate(paths)]
        assert pairs(ranks.two_largest(paths)) == torch.cat(expected).tolist()
        best = possible.argmax(-1).masked_fill(scores.isnan().any(-1), -1)
        assert [list(row) for row in ranks] == best.tolist()


def pairs(found: bytes) -> list[list[float]]:
    return [list(pair) for pair in struct.iter_unpack("ff", found)]


def test_paths_are_those_of_a_walk_in_python() -> None:
    rng = random.Random(0)
    reached = 0
    for seed in range(300):
        drafts = [random_tree(rng.randrange(10**6)) for _ in range(3)]
        width = max(map(len, drafts))
        tokens = sorted({token for tree in drafts for token in tree.tokens})
        scores = torch.randn(3, width, max(tokens) + 2)
        for row, tree in enumerate(drafts):
            for node in range(len(tree)):
                if below := [i for i, parent in enumerate(tree.parent) if parent == node]:
                    scores[row, node, tree.tokens[rng.choice(below)]] = 9.0
        if seed % 5 == 0:
            scores[rng.randrange(3), rng.randrange(width), 0] = torch.nan
        ranks = Ranks(scores)
        expected = [agreed(tree, line) for tree, line in zip(drafts, ranks, strict=True)]
        fresh = Ranks(scores)
        found = fresh.paths(drafts)
        assert [(list(path), token) for path, token in found] == [(list(path), token) for path, token in expected]
        part = fresh.of([2, 0])
        assert part.paths([drafts[2], drafts[0]]) == [found[2], found[0]] and list(part[1]) == list(ranks[0])
        reached += sum(len(path) - 1 for path, _ in found)
    assert reached > 300


def test_lines_are_read_once_whoever_asks() -> None:
    scores = Scores(torch.randn(3, 4, 50), {}, [0, 0, 0])
    ranks = ranks_of(scores)
    assert ranks is not None and ranks_of(scores) is ranks
    some = scores.of([2, 1])
    part, inner = ranks_of(some), ranks_of(some.of([1]))
    assert part is not None and inner is not None
    expected = scores.logits.argmax(-1).tolist()
    assert [list(row) for row in part] == [expected[2], expected[1]] and [list(row) for row in inner] == [expected[1]]
    scores.logits.zero_()  # what was read is kept
    assert list(ranks[1]) == expected[1] and list(ranks[2]) == expected[2] and list(ranks[0]) == [0] * 4
    assert pairs(ranks.two_largest([(1,), (), ()])) == [[0.0, 0.0]]
    for given in ([(4,), (9,), ()], [(-1,), (), ()], [(1,), ()]):
        with pytest.raises(ValueError, match="within their lines"):
            ranks.two_largest(given)
    assert ranks_of(Scores(scores.logits.double(), {}, [0, 0, 0])) is None


def test_successors_learn_the_same_from_ranks() -> None:
    rng = random.Random(1)
    torch.manual_seed(1)
    for count in (1, 3, 8, 11):
        one, other = Successors(count), Successors(count)
        for _ in range(40):
            logits = awkward((2, 4, 60))
            tokens = [rng.randrange(70) for _ in range(8)]
            tokens[rng.randrange(8)] = tokens[rng.randrange(8)] = 5
            trees = [DraftTree.chain(tokens[0], tokens[1:4]), DraftTree.chain(tokens[4], tokens[5:7])]
            one.learn([*tokens[:7], -1], logits)
            other.learn_pass(trees, Scores(logits, {}, [0, 0]))
        assert any(one.of(token) for token in range(70))
        assert [one.of(token) for token in range(70)] == [other.of(token) for token in range(70)]


class Never(RowwiseCriterion):
    """Ends no row: makes criteria be called after each token."""

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:  # type: ignore[override]
        return torch.zeros(len(input_ids), dtype=torch.bool)


def stops(row: Row, most: int, ends: Sequence[int], *others: StoppingCriteria) -> Stops:
    history = History(torch.tensor([row.tokens]), 99, 0, [row])
    criteria: list[Any] = [MaxLengthCriteria(row.prompt + most), *others]
    criteria += [EosTokenCriteria(torch.tensor(list(ends)))] if ends else []
    return Stops(StoppingCriteriaList(criteria), history, Laws(LogitsProcessorList(), history))


def test_tokens_are_emitted_together_as_one_by_one() -> None:
    rng = random.Random(2)
    early = 0
    for _ in range(400):
        rows = [Row(0, [3, 4], 2, 9) for _ in range(2)]
        most, ends = rng.randint(1, 7), rng.sample(range(6), k=rng.randrange(3))
        together, apart = stops(rows[0], most, ends), stops(rows[1], most, ends, Never())
        assert together.plain and not apart.plain
        while not rows[0].ended:
            tokens = [rng.randrange(9) for _ in range(rng.randint(1, 5))]
            before, kept = len(rows[1].tokens), together.emit(rows[0], tokens)
            for token in tokens:
                rows[1].tokens.append(token)
                apart([rows[1]])
                if rows[1].ended:
                    break
            assert (rows[0].tokens, rows[0].end, kept) == (rows[1].tokens, rows[1].end, len(rows[1].tokens) - before)
            early += kept < len(tokens)
    assert early > 50
