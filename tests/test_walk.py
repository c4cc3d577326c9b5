"""The walk that accepts a pass, against a loop that emits token by token, over random trees and scripted texts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.stopping_criteria import StoppingCriteriaList as Criteria

from scripted import END, PAD, Alongside, Likeliest, Plain, V, next_token, random_draft
from truedraft import Refused
from truedraft.accept._base import ArgmaxRule, AttributingRule, NodeRule, extra_probes
from truedraft.accept._verification import Candidates, Verification, first_children
from truedraft.chance import Chance, Replay
from truedraft.sampling import History, Laws
from truedraft.stopping import Stops
from truedraft.tree import Accepted, DraftTree, Row, Scores, Taps

ROOM, SEEDS = 5, 40


def texts(tree: DraftTree, row: Row) -> list[int]:
    """The target's token at every node."""
    return [next_token(row.tokens + [tree.tokens[i] for i in tree.path(node)[1:]]) for node in range(len(tree))]


def below(tree: DraftTree, node: int, token: int) -> int | None:
    """The first child with a token that stands for verification."""
    found = [i for i, p in enumerate(tree.parent) if p == node and i not in tree.probes and tree.tokens[i] == token]
    return found[0] if found else None


def by_rows(rows: Sequence[Plain], trees: Sequence[DraftTree]) -> list[Accepted]:
    """Each row emits for as long as what it emits was drafted and it has not ended."""
    found = []
    for row, tree in zip(rows, trees, strict=True):
        path: list[int] = []
        node: int | None = 0
        while node is not None:
            path.append(node)
            row.emit(next_token(row.tokens))
            node = None if row.end else below(tree, node, row.tokens[-1])
        found.append(Accepted(tuple(path), row.tokens[-1], row.end is not None))
    return found


def together(rows: Sequence[Plain], trees: Sequence[DraftTree], pads: bool) -> list[Accepted]:
    """All rows emit for as long as every one of them emits what was drafted and one has not ended."""
    paths = [[0] for _ in rows]
    while True:
        for row in rows:
            row.emit(PAD if row.end and pads else next_token(row.tokens))
        children = [below(t, path[-1], row.tokens[-1]) for t, path, row in zip(trees, paths, rows, strict=True)]
        over = all(row.end for row in rows)
        if over or None in children:
            return [Accepted(tuple(p), row.tokens[-1], over) for p, row in zip(paths, rows, strict=True)]
        for path, child in zip(paths, children, strict=True):
            path.append(child)  # type: ignore[arg-type]


def accepted(
    rows: Sequence[Row], trees: Sequence[DraftTree], rule: NodeRule, known: bool, stops: Stops, laws: Laws
) -> list[Accepted]:
    width = max(map(len, trees))
    logits = torch.full((len(rows), width, V), 0.0)
    tokens = [texts(tree, row) for tree, row in zip(trees, rows, strict=True)]
    for b, line in enumerate(tokens):
        logits[b, range(len(line)), line] = 1.0
    scores = Scores(logits, {}, [0] * len(rows))
    return walk(rows, trees, scores, tokens if known else None, laws, rule, stops)


def walk(
    rows: Sequence[Row],
    trees: Sequence[DraftTree],
    scores: Scores,
    tokens: Sequence[Sequence[int]] | None,
    laws: Laws,
    rule: NodeRule,
    stops: Stops,
) -> list[Accepted]:
    """tokens: at every node, where they are known."""
    pass_ = Verification(rows, trees, scores, laws, stops, Replay([]), PAD, tokens)
    return rule.verify(pass_) if tokens is None else pass_.followed(tokens)


def batch(rng: random.Random, ended: bool, pads: bool) -> list[Row]:
    """Rows under way, of different lengths; where they go in step, one that has ended may wait among them."""
    rows = [Row(i, [rng.randrange(V - 1) for _ in range(n)], n, ROOM) for i, n in enumerate((2, 1, 3))]
    for row in rows if ended else ():
        row.tokens.append(rng.randrange(V - 1))
    if ended:
        rows[1].tokens[-1], rows[1].end = (PAD if pads else 3), len(rows[1].tokens)
    return rows


def around(rows: Sequence[Row], lockstep: bool, pads: bool) -> tuple[Laws, Stops]:
    prompt = torch.zeros(len(rows), 3, dtype=torch.long)
    history = History(prompt, ROOM, PAD, rows)
    laws = Laws(LogitsProcessorList([TemperatureLogitsWarper(0.5)]), history)
    criteria = Criteria([MaxLengthCriteria(3 + ROOM)])
    if pads:
        criteria.append(EosTokenCriteria(END))
    if lockstep:
        criteria.append(Alongside())
    return laws, Stops(criteria, history, laws)


@pytest.mark.parametrize("known", [False, True])
def test_rows_by_themselves(known: bool) -> None:
    longest = 0
    for seed in range(SEEDS):
        rng = random.Random(seed)
        rows = batch(rng, False, True)
        trees, rule = [random_draft(rng, row) for row in rows], Likeliest()
        plain = [Plain(list(row.tokens), row.prompt + ROOM) for row in rows]
        expected = by_rows(plain, trees)
        laws, stops = around(rows, False, True)
        assert accepted(rows, trees, rule, known, stops, laws) == expected
        assert [(row.tokens, row.end) for row in rows] == [(row.tokens, row.end) for row in plain]
        assert len(rule.asked) == (0 if known else sum(len(a.path) for a in expected))
        longest = max(longest, *(len(a.path) for a in expected))
    assert longest == ROOM


@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("known", [False, True])
def test_rows_in_step(known: bool, pads: bool) -> None:
    longest = 0
    for seed in range(2 * SEEDS):
        rng = random.Random(seed)
        rows = batch(rng, seed % 2 == 1, pads)
        trees, rule = [random_draft(rng, row) for row in rows], Likeliest()
        if pads and rows[1].ended:
            trees[1] = DraftTree.chain(PAD, [PAD] * ROOM)
        last = END if pads else None
        plain = [Plain(list(row.tokens), row.prompt + ROOM, last, row.end) for row in rows]
        expected = together(plain, trees, pads)
        laws, stops = around(rows, True, pads)
        assert stops.lockstep and stops.pads == pads
        assert accepted(rows, trees, rule, known, stops, laws) == expected
        assert [(row.tokens, row.end) for row in rows] == [(row.tokens, row.end) for row in plain]
        longest = max(longest, *(len(a.path) for a in expected))
    assert longest > 2


def test_a_rule_is_asked_along_the_path_with_what_hangs_there() -> None:
    for seed in range(SEEDS):
        rng = random.Random(seed)
        (row, *_) = batch(rng, False, True)
        tree, rule = random_draft(rng, row), Likeliest()
        laws, stops = around([row], False, True)
        (reached,) = accepted([row], [tree], rule, False, stops, laws)
        assert [step for _, step, _ in rule.asked] == list(range(len(reached.path)))
        for node, (_, _, offered) in zip(reached.path, rule.asked, strict=True):
            children = [i for i, p in enumerate(tree.parent) if p == node and i not in tree.probes]
            assert offered.tokens == tuple(tree.tokens[i] for i in children) and offered.draws == "independent"
            assert tree.dist is not None and offered.dist is tree.dist[node]
    row, rule = Row(0, [1], 1, ROOM), Likeliest()
    laws, stops = around([row], False, True)
    accepted([row], [DraftTree.chain(1, [2])], rule, False, stops, laws)
    assert rule.asked[0][2] == Candidates((2,), "certain", None)


def test_scores_are_those_of_the_laws() -> None:
    """The rule judges processed scores: a temperature of 0.5 doubles them."""

    class Seeing(Likeliest):
        def choose(
            self, scores: Tensor, candidates: Sequence[Candidates], rows: Sequence[Row], chance: Chance
        ) -> list[int]:
            assert scores.max(-1).values.tolist() == [2.0] * len(rows) and isinstance(chance, Replay)
            return super().choose(scores, candidates, rows, chance)

    rows = batch(random.Random(0), False, True)
    laws, stops = around(rows, False, True)
    accepted(rows, [DraftTree.chain(row.tokens[-1]) for row in rows], Seeing(), False, stops, laws)


@pytest.mark.parametrize("known", [False, True])
def test_logits_that_are_not_numbers_are_refused(known: bool) -> None:
    rows = batch(random.Random(0), False, True)
    laws, stops = around(rows, False, True)
    logits = torch.zeros(3, 1, V)
    logits[1] = torch.nan
    trees = [DraftTree.chain(row.tokens[-1]) for row in rows]
    sentence = r"^the target's logits are NaN: check its weights and dtype \(float16 overflows\)$"
    with pytest.raises(Refused, match=sentence):
        tokens = [[0], [-1], [0]] if known else None
        walk(rows, trees, Scores(logits, {}, [0] * 3), tokens, laws, Likeliest(), stops)
    assert len(rows[1].tokens) == rows[1].prompt


def test_how_many_offered_tokens_are_certain() -> None:
    q = torch.full((V,), 0.2)
    for tokens in ((), (1,), (1, 2, 3)):
        n = len(tokens)
        assert Candidates(tokens).fixed == n and Candidates(tokens, "last").fixed == n
        assert Candidates(tokens, "last", q).fixed == max(n - 1, 0)
        assert [Candidates(tokens, draws, q).fixed for draws in ("one", "independent", "distinct")] == [0, 0, 0]  # type: ignore[arg-type]


def test_the_run_of_first_children() -> None:
    tree = DraftTree((1, 2, 3, 4, 5, 6, 7), (-1, 0, 0, 2, 2, 3, 5), probes=frozenset({1, 6}))
    assert first_children(tree) == [0, 2, 3, 5]
    assert first_children(DraftTree.chain(1)) == [0]
    assert first_children(DraftTree((1, 2, 3, 4), (-1, 0, 0, 1))) == [0, 1, 3]


def test_a_rule_needs_nothing_but_to_choose() -> None:
    rule = Likeliest()
    assert extra_probes(rule, 7) == 0 and rule.accepts_draws is None and rule.needs == Taps()
    assert not isinstance(rule, ArgmaxRule | AttributingRule)


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_every_row_has_a_tree(known: bool, lockstep: bool) -> None:
    rows = batch(random.Random(0), False, True)
    laws, stops = around(rows, lockstep, True)
    trees = [DraftTree.chain(row.tokens[-1]) for row in rows]
    scores, tokens = Scores(torch.zeros(3, 1, V), {}, [0] * 3), [[0], [0], [0]] if known else None
    with pytest.raises((ValueError, IndexError)):
        walk(rows, trees[:2], scores, tokens, laws, Likeliest(), stops)
