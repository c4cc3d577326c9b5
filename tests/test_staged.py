"""Draft models that are drafted for themselves, by lookahead decoding (`ouroboros`) and by a trigram table
(`staged-sd`): the draft models' own drafts, in fewer of their passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import truedraft
from drafters_for_tests import Noise
from models import V, ragged, sibling, tiny
from nets import corpus_of
from test_cascade import matches_generate
from truedraft import DraftTree, registry
from truedraft.drafters._base import PerRow
from truedraft.drafters._lookahead import JacobiWindow, NgramPool
from truedraft.drafters.models._reader import Reader
from truedraft.drafters.models.ouroboros import Proposed, corrected
from truedraft.errors import Refused
from truedraft.stores.katz import DISCOUNT, KEPT, Katz
from truedraft.tree import Row

RULES: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "seeded": {"do_sample": True, "top_k": 0}}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of passes of draft models since it was last set, as its only entry."""
    counted = [0]
    for name in ("score", "expand"):
        method = getattr(Reader, name)

        def call(self: Reader, *args: Any, method: Any = method) -> Any:
            counted[0] += 1
            return method(self, *args)

        monkeypatch.setattr(Reader, name, call)
    return counted


def drafts_of(
    fast: Any, inputs: dict[str, torch.Tensor], levels: int = 0, **settings: Any
) -> list[tuple[list[int], DraftTree]]:
    """The tokens of each row and its draft, of every pass of a call; those alone that may have so many levels."""
    found: list[tuple[list[int], DraftTree]] = []
    propose = fast.drafter.propose

    def proposed(rows: Any, budget: Any) -> Any:
        trees = propose(rows, budget)
        for row, tree in zip(rows, trees, strict=True):
            if row.room - row.step - 1 >= levels:
                found.append((list(row.tokens), tree))
        return trees

    fast.drafter.propose = proposed
    try:
        fast.generate(**inputs, **{"max_new_tokens": 40, "do_sample": False, **settings})
    finally:
        fast.drafter.propose = propose
    return found


def continuation(small: PreTrainedModel, text: list[int], length: int, **settings: Any) -> list[int]:
    """What a model decodes after a text by itself."""
    ids = torch.tensor([text])
    given = dict(attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, **settings)
    return small.generate(ids, **given)[0, len(text) :].tolist()  # type: ignore[no-any-return,operator]


@pytest.mark.parametrize(("length", "settings"), [(12, {}), (4, {"repetition_penalty": 1.3})], ids=["long", "penalty"])
def test_the_chain_of_ouroboros_is_what_the_draft_model_decodes(length: int, settings: dict[str, Any]) -> None:
    """Whatever its window and its pool hold, cold and warm: both are full of tokens that it would not choose."""
    model = tiny()
    small = sibling(model)
    draft = registry.load("drafters", "ouroboros", model=small, length=length, window=5, guesses=4)
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    compared = branched = 0
    for _ in range(2):
        for text, tree in drafts_of(fast, ragged(model, 2), 1, **settings):
            chain, node = list[int](), 0
            expected = continuation(small, text, min(length, tree.shape.height), **settings)
            while len(chain) < len(expected) and len(tree.shape.children[node]) == 1:
                (node,) = tree.shape.children[node]
                chain.append(tree.tokens[node])
            branched += tree.drafted > len(expected)
            compared += len(chain)
            assert chain == expected[: len(chain)]
    assert compared > 100 and branched > 10


def test_ouroboros_drafts_in_fewer_passes_of_the_draft_model(passes: list[int]) -> None:
    """Cold its window finds some phrases; warm it has those of the same text, and a pass verifies three tokens."""
    model = tiny()
    draft = registry.load("drafters", "ouroboros", model=model)
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    counts = []
    for _ in range(2):
        passes[0] = 0
        drafted = sum(min(4, tree.shape.height) for _, tree in drafts_of(fast, ragged(model, 1), max_new_tokens=60))
        counts.append((drafted, passes[0]))
    (cold_drafted, cold), (warm_drafted, warm) = counts
    assert cold < 0.9 * cold_drafted
    assert warm < 0.5 * warm_drafted
    fast.forget()
    passes[0] = 0
    drafts_of(fast, ragged(model, 1), max_new_tokens=60)
    assert passes[0] == cold, "the pool is forgotten"


def test_phrases_behind_the_chain_save_passes_of_the_target() -> None:
    model = tiny()
    counts = {}
    for branches in (0, 3):
        draft = registry.load("drafters", "ouroboros", model=model, branches=branches)
        fast = truedraft.accelerate(model, draft=draft, control="fixed")
        for _ in range(2):
            drafts_of(fast, ragged(model, 1), max_new_tokens=60)
        counts[branches] = len(fast.report().passes)
    assert counts[0] == 1 + math.ceil(59 / 5)
    assert counts[3] < 0.8 * counts[0]


def test_phrases_are_corrected_at_rejected_tokens() -> None:
    """By hand: 5 6 7 8 9 were drafted and rejected; the target predicts 6 7 2 9 4 after them, one after each."""
    assert corrected([5, 6, 7, 8, 9], [6, 7, 2, 9, 4], 3) == [(5, 6, 7, 2)]
    assert corrected([5, 6, 7, 8, 9], [6, 7, 2, 9, 4], 2) == [(5, 6, 7), (6, 7, 2), (8, 9, 4)]
    assert corrected([5, 6, 7, 8, 9], [6, 7, 2, 9, 4], 1) == [(5, 6), (6, 7), (7, 2), (8, 9), (9, 4)]
    assert corrected([5, 6], [6, 7], 3) == []


def test_the_window_has_what_the_draft_model_predicts() -> None:
    """In each column, by a plain forward over the text and the guesses before."""
    model = tiny()
    small = sibling(model)
    draft = registry.load("drafters", "ouroboros", model=small, length=1, window=5, phrase=3)
    seen = []
    propose = draft.propose

    def proposed(rows: Any, budget: Any) -> Any:
        trees = propose(rows, budget)
        seen.append((list(rows[0].tokens), [list(guesses) for guesses in draft._windows[rows[0]].rows]))
        return trees

    draft.propose = proposed
    inputs = ragged(model, 1)
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    fast.generate(**inputs, max_new_tokens=8, do_sample=False)
    before = JacobiWindow.of(inputs["input_ids"][0].tolist(), 5, 4).rows
    for text, after in seen[:3]:
        for column in range(5):
            path = [*before[0][: column + 1], *(guesses[column] for guesses in before[1:])]
            with torch.no_grad():
                predicted = int(small(torch.tensor([text + path])).logits[0, -1].argmax())
            assert after[-1][column] == predicted
        assert after[:-1] == before[1:]
        before = after


def test_the_pool_is_corrected_by_the_targets_choices() -> None:
    """By hand: chain 5 6 and two phrases behind it, 7 8 and 9 8; the target predicts 7 after 6, 3 after 6 7, 1 after
    6 9. A third phrase was not in the draft."""
    draft = registry.load("drafters", "ouroboros", model=tiny(), phrase=2, length=2)
    pool = NgramPool(4)
    for rest in ((1, 1), (7, 8), (9, 8)):
        pool.keep([6, *rest])
    tree = DraftTree((4, 5, 6, 9, 8, 7, 8), (-1, 0, 1, 2, 3, 2, 5))
    likeliest = [5, 6, 7, 1, 0, 3, 0]
    proposed = Proposed(1, [5, 6], [(9, 8), (7, 8)])
    draft._correct(pool, tree, likeliest, proposed, [5, 6, 7, 3])
    assert pool.newest(6) == [(7, 1), (7, 3), (1, 1)]
    assert not pool.newest(5), "nothing of the chain was rejected"
    draft._correct(pool, tree, [1, 6, 7, 1, 0, 3, 0], proposed._replace(phrases=[]), [1])
    assert pool.newest(5) == [(6, 7)]
    cut = tree.cut(4)
    draft._correct(pool, cut, [5, 6, 2, 2], proposed._replace(phrases=[(7, 3)]), [5, 6, 2])
    assert pool.newest(6) == [(7, 1), (7, 3), (1, 1)], "the target has not read that phrase"


def test_a_pool_keeps_the_newest_phrases_of_a_token() -> None:
    pool = NgramPool(2)
    for ngram in ([3, 1, 1], [3, 2, 2], [3, 1, 1], [3, 4, 4], [5, 6, 7]):
        pool.keep(ngram)
    assert pool.newest(3) == [(4, 4), (1, 1)] and pool.newest(3, 1) == [(4, 4)] and pool.newest(5) == [(6, 7)]
    pool.replace(3, {(1, 1): (4, 4)})
    assert pool.newest(3) == [(4, 4)]


def test_a_window_moves_on_by_what_was_predicted() -> None:
    """By hand: two iterations of three columns."""
    window, pool = JacobiWindow.of([7], 3, 3), NgramPool(9)
    window.rows = [[1, 2, 3], [4, 5, 6]]
    tree = window.below(DraftTree.chain(0, [9]))
    paths = {tuple(tree.tokens[i] for i in tree.path(node)) for node in tree.probes}
    assert paths == {(0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 4), (0, 1, 2, 5), (0, 1, 2, 3, 6)}
    window.advance([8, 8, 8], 2, [7], pool)
    assert {n: pool.newest(n) for n in (1, 2, 3)} == {1: [(4, 8)], 2: [(5, 8)], 3: [(6, 8)]}
    assert window.rows == [[5, 6, 7], [8, 8, 7]]


def level_by_level(small: PreTrainedModel, text: list[int], shape: str, least: float, nodes: int) -> set[Any]:
    """The paths of the tree of a shape with the likeliest children, by a plain forward at each node; the first so many,
    level by level."""
    level: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    found: list[tuple[int, ...]] = []
    for count in map(int, shape.split("x")):
        below = []
        for path, above in level:
            with torch.no_grad():
                law = small(torch.tensor([[*text, *path]])).logits[0, -1].softmax(-1)
            for token in sorted(range(V), key=lambda t: -float(law[t]))[:count]:
                if above * float(law[token]) >= least and len(found) < nodes:
                    below.append(((*path, token), above * float(law[token])))
                    found.append((*path, token))
        level = below
    return set(found)


@pytest.mark.covering(1)
@pytest.mark.parametrize("table", ["counted", "wrong", "of a corpus"])
@pytest.mark.parametrize(("shape", "least", "nodes"), [("3x2x1x1", 0.0, 0), ("4x1x2x1", 0.03, 0), ("3x2x2x2", 0.0, 20)])
def test_the_tree_of_staged_sd_is_the_draft_models(shape: str, least: float, nodes: int, table: str) -> None:
    """Whatever the table guesses."""
    model = tiny()
    small = sibling(model)
    corpus = corpus_of(model) if table == "of a corpus" else None
    draft = registry.load("drafters", "staged-sd", model=small, branches=shape, least=least, corpus=corpus)
    if table == "wrong":
        draft._tables.of("").count_all([t % V for k in (5, 7, 11) for t in range(0, 40 * k, k)])
    fast = truedraft.accelerate(model, draft=draft, control=registry.load("control", "fixed", nodes=nodes))
    inputs = ragged(model, 2)
    sizes = set()
    for steps in (24, 9):
        for text, tree in drafts_of(fast, inputs, shape.count("x") + 1, max_new_tokens=steps):
            paths = [tuple(tree.tokens[i] for i in tree.path(node)[1:]) for node in range(1, len(tree))]
            assert len(paths) == len(set(paths))
            assert set(paths) == level_by_level(small, text, shape, least, nodes or 1024)
            sizes.add(len(paths))
    assert sizes and (len(sizes) > 1) == (least > 0)


def test_staged_sd_drafts_the_same_trees_in_fewer_passes(passes: list[int]) -> None:
    model = tiny()
    counts, drafts = {}, {}
    for guesses in (0, 32):
        draft = registry.load("drafters", "staged-sd", model=sibling(model), guesses=guesses)
        fast = truedraft.accelerate(model, draft=draft, control="fixed")
        for time in ("cold", "warm"):
            passes[0] = 0
            drafts[guesses, time] = [(text, set(_paths(tree))) for text, tree in drafts_of(fast, ragged(model, 1))]
            counts[guesses, time] = passes[0]
    assert len({str(found) for found in drafts.values()}) == 1
    assert counts[0, "cold"] == counts[0, "warm"]
    assert counts[32, "warm"] < counts[32, "cold"] < counts[0, "cold"]
    assert counts[32, "warm"] < 0.6 * counts[0, "warm"]


def test_the_table_of_a_namespace_saves_no_passes_in_another(passes: list[int]) -> None:
    """The drafts are the same in all; what a table has counted shows in the time alone."""
    model = tiny()
    counts = []
    for before in (None, "a", "b"):
        fast = truedraft.accelerate(model, draft=registry.load("drafters", "staged-sd", model=model), control="fixed")
        if before is not None:
            drafts_of(fast, ragged(model, 1), namespace=before)
        passes[0] = 0
        drafts_of(fast, ragged(model, 1), namespace="b")
        counts.append(passes[0])
    cold, other, same = counts
    assert same < other == cold


def _paths(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree))]


@pytest.mark.parametrize("rule", RULES)
def test_a_periodic_text_costs_a_pass_of_the_draft_model_per_draft(rule: str, passes: list[int]) -> None:
    """After its first period, which the table counts, all of a chain is guessed, and one pass reads it."""
    model = tiny()
    phrase = (3 + torch.randperm(50, generator=torch.Generator().manual_seed(1))[:9]).tolist()
    follows = dict(zip(phrase, phrase[1:] + phrase[:1], strict=True))
    draft = registry.load("drafters", "staged-sd", model=model, branches="1x1x1x1x1")
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    periodic = dict(prefix_allowed_tokens_fn=lambda batch, ids: [follows[int(ids[-1])]])
    out = fast.generate(torch.tensor([phrase * 2]), max_new_tokens=61, **RULES[rule], **periodic)
    assert out[0].tolist() == (phrase * 10)[: 18 + 61]
    assert len(fast.report().passes) == 1 + 10
    # the chains of the first ten tokens are read node by node, all others in one pass each
    assert passes[0] == 5 + 5 + 8


def test_katz_backs_off_to_shorter_contexts() -> None:
    """By hand: of 1 2 3, 1 2 3, 1 2 4, 5 2 6, tokens after 1 2, after 2, and of all."""
    table = Katz(1000)
    for text in ((1, 2, 3), (1, 2, 3), (1, 2, 4), (5, 2, 6)):
        table.count_all(text)
    d = Fraction(DISCOUNT)
    every = {t: Fraction(n, 12) for t, n in {1: 3, 2: 4, 3: 2, 4: 1, 5: 1, 6: 1}.items()}

    def backed(counts: dict[int, int], others: dict[int, Fraction]) -> dict[int, Fraction]:
        total = sum(counts.values())
        law = {t: (n - d) / total for t, n in counts.items()}
        left, rest = 1 - sum(law.values()), 1 - sum(others[t] for t in counts)
        return {t: law.get(t, left * p / rest) for t, p in others.items()}

    after_2 = backed({3: 2, 4: 1, 6: 1}, every)
    assert table.law([2]) == pytest.approx({t: float(p) for t, p in after_2.items()})
    after_12 = backed({3: 2, 4: 1}, after_2)
    assert table.law([9, 9, 1, 2]) == pytest.approx({t: float(p) for t, p in after_12.items()})
    assert table.law([9, 2]) == table.law([2]) and table.law([9, 9]) == pytest.approx(
        {t: float(p) for t, p in every.items()}
    )
    for before in ([], [2], [1, 2], [2, 3], [9, 9]):
        assert sum(table.law(before).values()) == pytest.approx(1.0)


def test_katz_counts_parts_of_tokens_and_stops_at_separators() -> None:
    table = Katz(1000)
    table.count([1, 2], 3, 0.25)
    table.count([1, 2], 4, 0.75)
    assert table.law([1, 2]) == pytest.approx({3: 0.25, 4: 0.75})
    copied = table.copy()
    copied.count_all([7, -1, 8])
    assert 8 in copied.law([7]) and not any(-1 in context or context == (7,) for context in copied._counts)
    assert 7 not in table.law([])


def test_katz_is_bounded() -> None:
    table = Katz(50)
    table.count_all([(7 * i * i) % 1000 for i in range(3000)])
    assert len(table._counts) <= 50 and max(map(len, table._counts.values())) <= KEPT


@dataclass
class Fives(PerRow[None]):
    """Drafts the token 5."""

    card = Noise.card
    width = 10

    def begin(self, row: Row) -> None: ...

    def draft(self, row: Row, state: None, after: Sequence[int], budget: int) -> DraftTree:
        return DraftTree.chain((after or row.tokens)[-1], [5] * min(self.width, budget))


def test_a_lenient_draft_model_accepts_what_it_would_not_choose() -> None:
    model = tiny()
    for lenience, right in ((1.0, False), (1e9, True)):
        knobs = {"lengths": "10x0;10", "lenience": lenience, "bottom": Fives()}
        fast = truedraft.accelerate(
            model, draft=registry.load("drafters", "cs-drafting", model=model, **knobs), control="fixed"
        )
        trees = [tree for _, tree in drafts_of(fast, ragged(model, 1), 10) if tree.drafted]
        assert trees and all((tree.tokens[1:10] == (5,) * 9) == right for tree in trees)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["ouroboros", "staged-sd"])
@pytest.mark.parametrize("rule", ["rejection", "multi-round", "block"])
def test_drafts_are_certain_for_rules_that_accept_drawn_drafts(name: str, rule: str) -> None:
    model = tiny()
    draft = registry.load("drafters", name, model=sibling(model))
    fast = truedraft.accelerate(model, draft=draft, rule=rule, control="fixed")
    trees = drafts_of(fast, ragged(model, 3), do_sample=True, seed=1, max_new_tokens=20)
    assert trees and all(tree.draws == "certain" and tree.dist is None for _, tree in trees)


@pytest.mark.parametrize(("name", "length"), [("ouroboros", 4), ("staged-sd", 5)])
def test_drafts_under_seeded_follow_the_targets_noise(name: str, length: int) -> None:
    """The target as its own draft model predicts what it will draw."""
    model = tiny()
    draft = registry.load("drafters", name, model=model)
    report = matches_generate(model, draft, rows=1, **RULES["seeded"])
    assert len(report.passes) <= 1 + math.ceil(39 / (1 + length))


@pytest.mark.parametrize("name", ["ouroboros", "staged-sd"])
def test_a_draft_model_of_another_vocabulary(name: str) -> None:
    model = tiny()
    with pytest.raises(Refused, match="has 40 tokens, the model 61"):
        truedraft.accelerate(model, draft=registry.load("drafters", name, model=tiny("llama", vocabulary=40)))
    with pytest.raises(Refused, match=f"{name} needs a draft model"):
        truedraft.accelerate(model, draft=name)
