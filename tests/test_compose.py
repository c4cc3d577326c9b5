"""Compositions of drafters: merged, chosen and continued drafts; calibration of confidences."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import truedraft
from models import ragged, tiny
from truedraft import Card, Drafter, DraftTree, Refused, registry
from truedraft.drafters._base import PassCost, PerRow
from truedraft.drafters._calibration import EDGES, BinCounts, Calibration, follow, settled
from truedraft.drafters._compose import Cascade, Fallback, Merge, Route, compose
from truedraft.drafters._trees import counted_in_python, ranked
from truedraft.stores import union as union_module
from truedraft.stores._native import trees as compiled
from truedraft.stores.union import union
from truedraft.tree import Accepted, Row, Scores


@dataclass
class FixedChain(PerRow[None]):
    """Drafts a given chain with confidences."""

    card = Card(paper="none", idea="For tests.", family="test")
    chain: Sequence[int] = ()  # drafted
    prior_confidence: float = 0.5  # of each node
    seen: list[int] = field(default_factory=list)  # passes observed, by their accepted tokens

    @property
    def width(self) -> int:
        return 8

    def begin(self, row: Row) -> None:
        return None

    def draft(self, row: Row, state: None, after: Sequence[int], budget: int) -> DraftTree:
        root = after[-1] if after else row.tokens[-1]
        tokens = self.chain[:budget]
        return DraftTree.chain(root, tokens, [self.prior_confidence] * len(tokens))

    def learn(self, row: Row, state: None, tree: DraftTree, logits: torch.Tensor, accepted: Accepted) -> None:
        self.seen.append(len(accepted.path))


def drafted(drafter: Drafter, budget: int = 8) -> tuple[Row, DraftTree]:
    row = Row(0, [1, 2], 2, 99)
    drafter.start([row])
    (tree,) = drafter.propose([row], [budget])
    tree.check()
    return row, tree


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[i] for i in tree.path(n)[1:]) for n in range(1, len(tree))}


def test_a_merge_joins_common_paths_and_keeps_the_likeliest() -> None:
    _, tree = drafted(Merge([FixedChain([5, 6, 7], 0.9), FixedChain([5, 8], 0.4)]))
    assert paths(tree) == {(5,), (5, 6), (5, 6, 7), (5, 8)}
    _, tree = drafted(Merge([FixedChain([5, 6, 7], 0.9), FixedChain([5, 8], 0.4)]), budget=3)
    assert paths(tree) == {(5,), (5, 6), (5, 6, 7)}


def test_a_union_keeps_probes_whose_parents_are_kept() -> None:
    one = DraftTree((1, 5, 9, 9), (-1, 0, 0, 1), probes=frozenset({2, 3}), confidence=(1.0, 0.1, 0.0, 0.0))
    tree = union([one, DraftTree.chain(1, [6], [0.9])], 1).tree
    tree.check()
    assert tree.tokens == (1, 6, 9) and tree.probes == {2} and tree.parent == (-1, 0, 0)


def random_tree(rng: random.Random) -> DraftTree:
    n = rng.randint(1, 12)
    parents = [-1, *(rng.randrange(i) for i in range(1, n))]
    probes: set[int] = set()
    for i in range(1, n):
        if parents[i] in probes or rng.random() < 0.1:
            probes.add(i)
    tokens = [7, *(rng.randrange(4) for _ in range(1, n))]
    return DraftTree(
        tuple(tokens), tuple(parents), probes=frozenset(probes), confidence=(1.0, *(rng.random() for _ in range(n - 1)))
    )


def exclusive(
    confidence: dict[tuple[int, ...], float], owners: dict[tuple[int, ...], int]
) -> dict[tuple[int, ...], float]:
    """Probabilities of paths, of which those that differ in their last token are exclusive: one after the other, each
    with its probability given that it is none of the likelier ones, by the trees that contain it."""
    agreed: dict[tuple[int, ...], float] = {}
    for path in sorted(confidence, key=lambda path: -confidence[path]):
        likelier = [other for other in agreed if other[:-1] == path[:-1]]
        none = 1 - sum(agreed[other] for other in likelier)
        none_as_seen = 1 - sum(confidence[other] for other in likelier if owners[other] & owners[path])
        given_none = min(confidence[path] / none_as_seen, 1.0) if none_as_seen > 0 else 1.0
        agreed[path] = min(none * given_none, confidence[path])
    return agreed


@pytest.mark.parametrize("native", ["", "0"], ids=["compiled", "python"])
def test_a_union_contains_the_likeliest_paths(native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a dictionary of paths; the compiled and the Python form."""
    monkeypatch.setenv("TRUEDRAFT_NATIVE", native)
    union_module.compiled.cache_clear()
    rng = random.Random(0)
    for _ in range(300):
        trees = [random_tree(rng) for _ in range(rng.randint(1, 5))]
        budget = rng.randint(0, 30)
        joined = union(trees, budget)
        joined.tree.check()
        confidence: dict[tuple[int, ...], float] = {}
        owners: dict[tuple[int, ...], int] = {}
        for k, tree in enumerate(trees):
            for node in set(range(1, len(tree))) - tree.probes:
                path = tuple(tree.tokens[i] for i in tree.path(node)[1:])
                confidence[path] = max(confidence.get(path, 0.0), tree.confidence[node])
                owners[path] = owners.get(path, 0) | 1 << k
        agreed = exclusive(confidence, owners)
        for i in range(len(joined.tree)):
            family = [n for n, parent in enumerate(joined.tree.parent) if parent == i and n not in joined.tree.probes]
            assert sum(joined.tree.confidence[n] for n in family) < 1 + 1e-9
        values = {path: math.prod(agreed[path[:i]] for i in range(1, len(path) + 1)) for path in confidence}
        best = sorted(values, key=values.__getitem__, reverse=True)[:budget]
        drafted = [n for n in range(1, len(joined.tree)) if n not in joined.tree.probes]
        found = [tuple(joined.tree.tokens[i] for i in joined.tree.path(n)[1:]) for n in drafted]
        likely = [path for path in best if values[path] > 1e-9]  # excluded paths come last, in any order
        assert found[: len(likely)] == likely and len(set(found)) == len(best)
        assert [joined.owners[n] for n in drafted] == [owners[path] for path in found]
    union_module.compiled.cache_clear()


def test_a_chain_among_empty_drafts_is_its_own_union() -> None:
    """As by the merge of trees in general, which weights call for."""
    rng = random.Random(3)
    for _ in range(200):
        length, budget, count = rng.randrange(6), rng.randrange(6), rng.randint(1, 3)
        trees = [DraftTree.chain(1, (), ()) for _ in range(count)]
        confidence = [rng.choice([0.0, 1.0, rng.random()]) for _ in range(length)]
        trees[rng.randrange(count)] = DraftTree.chain(1, [rng.randrange(4) for _ in range(length)], confidence)
        (one, owners), (other, theirs) = union(trees, budget), union(trees, budget, [1.0] * count)
        assert (one.tokens, one.parent, one.confidence) == (other.tokens, other.parent, other.confidence)
        assert owners == theirs and not one.probes and len(one) == 1 + min(length, budget)


@pytest.mark.skipif(compiled() is None, reason="it was not compiled")
def test_calibration_is_equal_in_c_and_in_python() -> None:
    rng = random.Random(1)
    forms = [(follow, settled), (compiled().follow, compiled().settled)]
    tallies = [(BinCounts(), BinCounts()) for _ in forms]
    for _ in range(300):
        tree = random_tree(rng)
        assert tree.confidence is not None
        parts, emitted = (tree.tokens, tree.parent, tree.confidence, tree.probes), [rng.randrange(4) for _ in range(5)]
        node = rng.randrange(len(tree))
        found = []
        for (go, settle), (ours, mine) in zip(forms, tallies, strict=True):
            sums = (EDGES, ours.right, ours.tried, mine.right, mine.tried)
            found.append((go(parts, node, emitted, *sums, 0.99, 0.9), settle(tree.confidence, *sums, 4.0, 3.0)))
        assert found[0] == found[1]
    assert sum(tallies[0][0].tried) > 50
    for mine, theirs in zip(*tallies, strict=True):
        assert mine.right == theirs.right and mine.tried == theirs.tried


@pytest.mark.skipif(compiled() is None, reason="it was not compiled")
def test_confidences_from_counts_are_equal_in_c_and_in_python() -> None:
    rng = random.Random(1)
    for n in range(40):
        tree = random_tree(rng)
        parents, counts = [p - 1 for p in tree.parent[1:]], [rng.randrange(1, 9) for _ in tree.parent[1:]]
        given = (7, 9, list(tree.tokens[1:]), parents, counts, [0.9**i for i in range(1 + n % 3 + len(counts))])
        assert compiled().counted(*given) == counted_in_python(*given)
    with pytest.raises(ValueError, match="point backwards"):
        compiled().counted(7, 9, [1], [1], [1], [0.5])
    with pytest.raises(ValueError, match="a parent and a count"):
        compiled().counted(7, 9, [1], [], [1], [0.5])


@pytest.mark.skipif(compiled() is None, reason="it was not compiled")
def test_own_nodes_and_ranks_are_equal_in_c_and_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, cases = random.Random(2), []
    for _ in range(200):
        trees = [random_tree(rng) for _ in range(3)]
        emitted, verified = [rng.randrange(4) for _ in range(rng.randrange(6))], rng.randrange(20)
        cases.append((union(trees, rng.randrange(12)), emitted, verified, trees))

    def results() -> list[object]:
        ranks = [ranked([(tree, tree.confidence or ()) for tree in trees]) for *_, trees in cases]
        return [*[joined.alone(emitted, verified) for joined, emitted, verified, _ in cases], *ranks]

    found = results()
    monkeypatch.setattr(union_module, "compiled", lambda: None)
    monkeypatch.setattr("truedraft.drafters._trees.trees", lambda: None)
    assert found == results()
    assert sum(sum(right) for right, _ in found[:200]) > 50  # type: ignore[misc, attr-defined]
    with pytest.raises(ValueError, match="point backwards"):
        compiled().ranked([((-1, 1), (1.0, 0.5), frozenset())])
    with pytest.raises(ValueError, match="a parent and a confidence"):
        compiled().ranked([((-1, 0), (1.0,), frozenset())])
    with pytest.raises(ValueError, match="a parent and owners"):
        compiled().alone([3], (1, 2), (-1, 0), frozenset(), [2], 1)


def test_the_nodes_of_several_drafts_are_ranked_by_their_paths() -> None:
    one = DraftTree.chain(1, [5, 6], [0.5, 0.5])
    other = DraftTree((1, 7, 8, 9), (-1, 0, 0, 1), probes=frozenset({2}), confidence=(1.0, 0.75, 0.9, 0.5))
    gains, of = ranked([(one, (1.0, 0.5, 0.5)), (other, (1.0, 0.75, 0.9, 0.5))])
    assert of == [1, 0, 0, 1, 1], "the probe is never right, and those behind it come after it"
    assert gains == [0.0, 0.75, 1.25, 1.5, 1.5, 1.5]


def test_confidence_is_halved_where_nodes_are_right_half_as_often() -> None:
    calibration, row = Calibration(), Row(0, [1], 1, 10**6)
    for i in range(400):
        calibration.proposed(row, DraftTree.chain(row.tokens[-1], [5], [0.8]))
        row.tokens.append(5 if i % 5 < 2 else 6)
        calibration.update([row])
    (_, prior_confidence) = calibration.proposed(row, DraftTree.chain(row.tokens[-1], [5], [0.8])).confidence or ()
    assert 0.25 < prior_confidence < 0.55


def test_a_union_attributes_nodes_that_one_draft_alone_has() -> None:
    joined = union([DraftTree.chain(1, [5, 6, 7], [0.9] * 3), DraftTree.chain(1, [5, 8], [0.9, 0.1])], 4)
    assert joined.alone([5, 6, 7, 9], 4) == ([2, 0], [2, 1])
    assert joined.alone([5, 6, 7, 9], 2) == ([1, 0], [1, 0])


def test_a_fallback_chooses_the_first_nonempty_draft() -> None:
    assert paths(drafted(Fallback([FixedChain(), FixedChain([4]), FixedChain([5])]))[1]) == {(4,)}


def test_a_route_chooses_the_most_expected_tokens_and_records_the_part() -> None:
    router = Route([FixedChain([5], 0.9), FixedChain([6, 7], 0.9), FixedChain([8, 9, 3], 0.1)])
    row, tree = drafted(router)
    assert paths(tree) == {(6,), (6, 7)}
    assert list(router.history) == [(row.index, 0, 1)]


def test_a_cascade_continues_at_the_end_of_a_draft() -> None:
    assert paths(drafted(Cascade([FixedChain([4, 5]), FixedChain([6])]))[1]) == {(4,), (4, 5), (4, 5, 6)}
    assert paths(drafted(Cascade([FixedChain(), FixedChain([6])]))[1]) == {(6,)}
    assert len(drafted(Cascade([FixedChain([4, 5]), FixedChain([6] * 8)]), budget=3)[1]) == 4


def test_parts_that_were_not_chosen_observe_every_pass() -> None:
    parts = [FixedChain([5], 0.9), FixedChain([6], 0.1)]
    drafter = Route(parts)
    row, tree = drafted(drafter)
    row.tokens += [5, 3]
    drafter.observe([row], [tree], Scores(torch.zeros(1, 2, 9), {}, [0]), [Accepted((0, 1), 3, False)])
    assert [part.seen for part in parts] == [[2], [2]]


class Watching(FixedChain):
    """Learns by `observe` itself."""

    learn = PerRow.learn

    def observe(self, *given: Any) -> None:
        super().observe(*given)
        self.seen.append(0)


class Unlearning(FixedChain):
    """Learns nothing from passes; notes what the calibration of its confidences is given."""

    learn = PerRow.learn

    def start(self, rows: Sequence[Row]) -> None:
        super().start(rows)
        self._calibration.update = self.seen.extend  # type: ignore[assignment, method-assign]


def test_parts_observe_passes_without_drafts_where_they_learn_or_compare_drafts() -> None:
    parts = [FixedChain([5]), Watching([6]), Unlearning([7]), Merge([Unlearning([8]), Unlearning([9])])]
    drafter = Merge(parts)
    row, tree = drafted(drafter, 0)
    assert all(part.attentive for part in parts if part is not parts[2]) and not parts[2].attentive
    observed = [row], [tree], Scores(torch.zeros(1, 1, 9), {}, [0]), [Accepted((0,), 3, False)]
    drafter.observe(*observed)
    assert [part.seen for part in parts[:3]] == [[1], [0], []]
    drafter.propose([row], [8])
    assert parts[2].attentive
    drafter.observe(*observed)
    assert [len(part.seen) for part in parts[:3]] == [2, 2, 1]


def calls_in_60_passes(drafter: Merge, seconds: float, emitted: int) -> list[int]:
    """By part, the passes of 60 in which it was called. A pass takes a second and emits `emitted`; the second part's
    draft takes `seconds`."""
    drafter.pass_cost = PassCost(1.0, 0.0)
    row, _ = drafted(drafter)
    calls = [0] * len(drafter.parts)
    for _ in range(60):
        (tree,) = drafter.propose([row], [8])
        for k in drafter._called:
            calls[k] += 1
        drafter.seconds = [0.0, seconds]
        row.tokens += [emitted, 3]
        path = (0, tree.tokens.index(emitted)) if emitted in tree.tokens else (0,)
        drafter.observe([row], [tree], Scores(torch.zeros(1, len(tree), 9), {}, [0]), [Accepted(path, 3, False)])
    return calls


def test_a_merge_suspends_a_part_that_does_not_pay() -> None:
    """Both draft the same with confidence 0.5; the second costs half a pass."""
    first, second = calls_in_60_passes(Merge([FixedChain([5], 0.5), FixedChain([5], 0.5)]), 0.5, emitted=6)
    assert first == 60 and 8 <= second <= 40


def test_a_merge_calls_no_other_part_where_one_is_confident() -> None:
    confident, other = calls_in_60_passes(Merge([FixedChain([5], 0.99), FixedChain([6], 0.5)]), 0.1, emitted=5)
    assert confident == 60 and other <= 12
    _, other = calls_in_60_passes(Merge([FixedChain([5], 0.99), FixedChain([6], 0.5)]), 0.1, emitted=6)
    assert other >= 50


class Reading(FixedChain):
    autoregressive = reads_texts = True


@pytest.mark.parametrize(("emitted", "reading", "called"), [(5, 2.0, (0, 0)), (6, 0.1, (40, 59)), (6, 20.0, (0, 0))])
def test_a_merge_starts_a_part_that_reads_texts_where_that_pays(
    emitted: int, reading: float, called: tuple[int, int]
) -> None:
    """The first part drafts 5, the second 6, after it has read the text in `reading` seconds per token."""
    merge = Merge([FixedChain([5], 0.99), Reading([6], 0.5)])
    merge.reading = [0.0, reading]
    _, calls = calls_in_60_passes(merge, 0.1, emitted)
    assert called[0] <= calls <= called[1]


def test_precedence_in_the_string_form() -> None:
    made = compose("a>b+c|d?e", lambda name: FixedChain([ord(name)]))
    assert isinstance(made, Route) and isinstance(made.parts[0], Merge) and isinstance(made.parts[1], Fallback)
    assert isinstance(made.parts[0].parts[0], Cascade)
    loaded = registry.load("drafters", "suffix:alpha=2.0+token-recycling:nodes=24")
    assert isinstance(loaded, Merge) and loaded.parts[0].alpha == 2.0 and loaded.parts[1].nodes == 24


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("suffix+", "no drafter on one side"),
        ("suffix+suffiks", "did you mean 'suffix'"),
        (
            "suffix+models/small",
            "no drafter 'models/small': give a draft model as draft='draft-model:model=models/small'",
        ),
        ("suffix>draft-model", "cannot continue another's draft"),
    ],
)
def test_an_invalid_composition_is_refused(spec: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        truedraft.accelerate(tiny(), draft=spec)


def test_a_report_names_the_parts() -> None:
    fast = truedraft.accelerate(tiny(), draft="copyspec?anpd")
    fast.generate(**ragged(tiny(), 1), max_new_tokens=4)
    assert fast.report().drafter == "copyspec?anpd"


def test_lookahead_without_a_window_drafts_from_its_pool() -> None:
    model = tiny()
    inputs = ragged(model, 1)
    fast = truedraft.accelerate(model, draft="lookahead:window=0", control="fixed")
    out = fast.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert torch.equal(out, model.generate(**inputs, max_new_tokens=24, do_sample=False))
