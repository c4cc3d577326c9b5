"""Verification of a pass, compared with plain decoding token by token, on random trees over a scripted target."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.stopping_criteria import StoppingCriteriaList as Criteria

from scripted import END, PAD, Likeliest, Lockstep, Plain, V, next_token, random_draft
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
    """The first child with this token that is not a probe."""
    found = [i for i, p in enumerate(tree.parent) if p == node and i not in tree.probes and tree.tokens[i] == token]
    return found[0] if found else None


def independent_decoding(rows: Sequence[Plain], trees: Sequence[DraftTree]) -> list[Accepted]:
    """The oracle for independent rows: each emits until it ends or a token was not drafted."""
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


def lockstep_decoding(rows: Sequence[Plain], trees: Sequence[DraftTree], pads: bool) -> list[Accepted]:
    """The oracle for lockstep: all rows emit until all have ended or the token of one was not drafted."""
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
    rows: Sequence[Row], trees: Sequence[DraftTree], rule: NodeRule, decided: bool, stops: Stops, laws: Laws
) -> list[Accepted]:
    width = max(map(len, trees))
    logits = torch.full((len(rows), width, V), 0.0)
    tokens = [texts(tree, row) for tree, row in zip(trees, rows, strict=True)]
    for b, line in enumerate(tokens):
        logits[b, range(len(line)), line] = 1.0
    scores = Scores(logits, {}, [0] * len(rows))
    return walk(rows, trees, scores, tokens if decided else None, laws, rule, stops)


def walk(
    rows: Sequence[Row],
    trees: Sequence[DraftTree],
    scores: Scores,
    tokens: Sequence[Sequence[int]] | None,
    laws: Laws,
    rule: NodeRule,
    stops: Stops,
) -> list[Accepted]:
    """tokens: at every node, where all were decided at once."""
    pass_ = Verification(rows, trees, scores, laws, stops, Replay([]), PAD, tokens)
    return rule.verify(pass_) if tokens is None else pass_.followed(tokens)


def batch(rng: random.Random, ended: bool, pads: bool) -> list[Row]:
    """Three running rows of different lengths; with `ended`, for lockstep, the second has ended."""
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
        criteria.append(Lockstep())
    return laws, Stops(criteria, history, laws)


@pytest.mark.parametrize("decided", [False, True])
def test_independent_rows_equal_plain_decoding(decided: bool) -> None:
    longest = 0
    for seed in range(SEEDS):
        rng = random.Random(seed)
        rows = batch(rng, False, True)
        trees, rule = [random_draft(rng, row) for row in rows], Likeliest()
        plain = [Plain(list(row.tokens), row.prompt + ROOM) for row in rows]
        expected = independent_decoding(plain, trees)
        laws, stops = around(rows, False, True)
        assert accepted(rows, trees, rule, decided, stops, laws) == expected
        assert [(row.tokens, row.end) for row in rows] == [(row.tokens, row.end) for row in plain]
        assert len(rule.calls) == (0 if decided else sum(len(a.path) for a in expected))
        longest = max(longest, *(len(a.path) for a in expected))
    assert longest == ROOM


@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("decided", [False, True])
def test_lockstep_rows_equal_plain_decoding(decided: bool, pads: bool) -> None:
    longest = 0
    for seed in range(2 * SEEDS):
        rng = random.Random(seed)
        rows = batch(rng, seed % 2 == 1, pads)
        trees, rule = [random_draft(rng, row) for row in rows], Likeliest()
        if pads and rows[1].ended:
            trees[1] = DraftTree.chain(PAD, [PAD] * ROOM)
        last = END if pads else None
        plain = [Plain(list(row.tokens), row.prompt + ROOM, last, row.end) for row in rows]
        expected = lockstep_decoding(plain, trees, pads)
        laws, stops = around(rows, True, pads)
        assert stops.lockstep and stops.pads == pads
        assert accepted(rows, trees, rule, decided, stops, laws) == expected
        assert [(row.tokens, row.end) for row in rows] == [(row.tokens, row.end) for row in plain]
        longest = max(longest, *(len(a.path) for a in expected))
    assert longest > 2


def test_choose_is_called_along_the_path_with_the_candidates() -> None:
    for seed in range(SEEDS):
        rng = random.Random(seed)
        (row, *_) = batch(rng, False, True)
        tree, rule = random_draft(rng, row), Likeliest()
        laws, stops = around([row], False, True)
        (one,) = accepted([row], [tree], rule, False, stops, laws)
        assert [step for _, step, _ in rule.calls] == list(range(len(one.path)))
        for node, (_, _, candidates) in zip(one.path, rule.calls, strict=True):
            children = [i for i, p in enumerate(tree.parent) if p == node and i not in tree.probes]
            assert candidates.tokens == tuple(tree.tokens[i] for i in children) and candidates.draws == "independent"
            assert tree.dist is not None and candidates.dist is tree.dist[node]
    row, rule = Row(0, [1], 1, ROOM), Likeliest()
    laws, stops = around([row], False, True)
    accepted([row], [DraftTree.chain(1, [2])], rule, False, stops, laws)
    assert rule.calls[0][2] == Candidates((2,), "certain", None)


def test_rules_receive_processed_scores() -> None:
    """A temperature of 0.5 doubles them."""

    class Seeing(Likeliest):
        def choose(
            self, scores: Tensor, candidates: Sequence[Candidates], rows: Sequence[Row], chance: Chance
        ) -> list[int]:
            assert scores.max(-1).values.tolist() == [2.0] * len(rows) and isinstance(chance, Replay)
            return super().choose(scores, candidates, rows, chance)

    rows = batch(random.Random(0), False, True)
    laws, stops = around(rows, False, True)
    accepted(rows, [DraftTree.chain(row.tokens[-1]) for row in rows], Seeing(), False, stops, laws)


@pytest.mark.parametrize("decided", [False, True])
def test_nan_logits_are_refused(decided: bool) -> None:
    rows = batch(random.Random(0), False, True)
    laws, stops = around(rows, False, True)
    logits = torch.zeros(3, 1, V)
    logits[1] = torch.nan
    trees = [DraftTree.chain(row.tokens[-1]) for row in rows]
    sentence = r"^the target's logits are NaN: check its weights and dtype \(float16 overflows\)$"
    with pytest.raises(Refused, match=sentence):
        tokens = [[0], [-1], [0]] if decided else None
        walk(rows, trees, Scores(logits, {}, [0] * 3), tokens, laws, Likeliest(), stops)
    assert len(rows[1].tokens) == rows[1].prompt


def test_number_of_certain_candidates() -> None:
    q = torch.full((V,), 0.2)
    for tokens in ((), (1,), (1, 2, 3)):
        n = len(tokens)
        assert Candidates(tokens).fixed == n and Candidates(tokens, "last").fixed == n
        assert Candidates(tokens, "last", q).fixed == max(n - 1, 0)
        assert [Candidates(tokens, draws, q).fixed for draws in ("one", "independent", "distinct")] == [0, 0, 0]  # type: ignore[arg-type]


def test_first_children() -> None:
    tree = DraftTree((1, 2, 3, 4, 5, 6, 7), (-1, 0, 0, 2, 2, 3, 5), probes=frozenset({1, 6}))
    assert first_children(tree) == [0, 2, 3, 5]
    assert first_children(DraftTree.chain(1)) == [0]
    assert first_children(DraftTree((1, 2, 3, 4), (-1, 0, 0, 1))) == [0, 1, 3]


def test_defaults_of_a_node_rule() -> None:
    rule = Likeliest()
    assert extra_probes(rule, 7) == 0 and rule.accepts_draws is None and rule.needs == Taps()
    assert not isinstance(rule, ArgmaxRule | AttributingRule)


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("decided", [False, True])
def test_missing_tree_of_a_row_raises(decided: bool, lockstep: bool) -> None:
    rows = batch(random.Random(0), False, True)
    laws, stops = around(rows, lockstep, True)
    trees = [DraftTree.chain(row.tokens[-1]) for row in rows]
    scores, tokens = Scores(torch.zeros(3, 1, V), {}, [0] * 3), [[0], [0], [0]] if decided else None
    with pytest.raises((ValueError, IndexError)):
        walk(rows, trees[:2], scores, tokens, laws, Likeliest(), stops)
