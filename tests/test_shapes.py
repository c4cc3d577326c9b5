"""Trees of every shape from the distributions of a draft model or of a learned head: their nodes, and the text."""

from __future__ import annotations

import heapq
import itertools
from functools import cache
from typing import Any

import pytest
import torch

import truedraft
from models import ragged, sibling, tiny
from nets import RULES, drafter
from test_cascade import matches_generate
from truedraft import registry
from truedraft.drafters._base import PassCost
from truedraft.drafters._growing import GrowingDrafter
from truedraft.drafters._shaped import ShapedDrafter
from truedraft.drafters.models._reader import Reader
from truedraft.drafters.models.sequoia import PRIOR, Ranks, best_places, shape_for
from truedraft.errors import Refused
from truedraft.tree import DraftTree
from vocabularies import tokenized

SHAPED = [n for n in registry.names("drafters") if issubclass(registry.method("drafters", n), ShapedDrafter)]
HEADS = ("eagle", "eagle2", "eagle3")


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("name", "head"), [(name, HEADS[i % 3]) for i, name in enumerate(SHAPED)])
def test_the_distributions_may_be_those_of_a_head(name: str, head: str, rule: str) -> None:
    model = tiny(dtype=torch.float32)
    draft = registry.load("drafters", name, source=drafter(head, model))
    report = matches_generate(model, draft, **RULES[rule])
    assert any(one.offered for made in report.passes for one in made.emitted)


@pytest.mark.covering(1)
@pytest.mark.parametrize("head", [False, True], ids=["model", "head"])
@pytest.mark.parametrize("name", SHAPED)
def test_greedy_drafts_from_ranked_tokens_are_those_from_whole_distributions(
    name: str, head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which compiled code ranks, and torch computes; of three rows."""
    model = tiny(dtype=torch.float32)
    given = {"source": drafter("eagle", model)} if head else {"model": sibling(model)}
    ranked = [tree for _, tree in trees_of(registry.load("drafters", name, **given), model, rows=3)]
    monkeypatch.setattr(GrowingDrafter, "greedy", lambda self, growing: False)
    whole = [tree for _, tree in trees_of(registry.load("drafters", name, **given), model, rows=3)]
    assert [(tree.tokens, tree.parent) for tree in ranked] == [(tree.tokens, tree.parent) for tree in whole]
    assert any(tree.drafted for tree in whole)


@pytest.mark.parametrize("plain", [10.0, 1e-6], ids=["dear passes", "cheap passes"])
@pytest.mark.parametrize("name", ["opt-tree", "specexec", "opt-tree:gain=1e-9"])
def test_a_tree_ends_where_a_level_costs_more_than_it_saves(name: str, plain: float) -> None:
    """Levels of these models take about a thousandth of a second; the first draft measures one. A least gain that is
    given replaces the costs."""
    model = tiny(dtype=torch.float32)
    draft: Any = registry.load("drafters", name, model=sibling(model))
    found = trees_of(draft, model, 40, pass_cost=PassCost(plain, 0.0))[2:]
    deep = plain > 1 or "gain" in name
    assert found and all((max(tree.shape.depth) > 1) == deep for _, tree in found[:3])


GROWN = (
    "opt-tree", "opt-tree:gain=0.2,nodes=9", "specexec:nodes=20,beam=3", "specexec:decay=1.0,length=2",
    "specexec:decay=0.3,nodes=20", "cape:length=7", "sequoia", "gumbel-top-k:branches=3x2.0.1x2", "greedy-multi-draft",
    "stochastic-beam:beam=16", "dyspec", "dyspec:beam=2,length=5,nodes=20", "dyspec:threshold=0.1,beam=3,length=3",
)  # fmt: skip


@pytest.mark.parametrize("cost", [None, PassCost(1e-3, 1e-5), PassCost(3e-3, 1e-4)], ids=["no", "low", "high"])
@pytest.mark.parametrize("name", GROWN)
def test_trees_grown_in_one_call_are_those_grown_level_by_level(
    name: str, cost: PassCost | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows with different budgets and lengths; a level is taken to cost 0.1 ms."""
    model = tiny(dtype=torch.float32, sharpen=40.0)
    calls: list[list[float]] = []
    grow = Reader.grow_greedily

    def counted(self: Any, *given: Any) -> list[float]:
        calls.append(grow(self, *given))
        return calls[-1]

    def found() -> list[Any]:
        draft: Any = registry.load("drafters", name, model=sibling(model))
        propose, finished, read = draft.propose, draft.finished, list[tuple[int, set[int]]]()
        draft.finished = lambda tree: (read.append((tree.passes, tree.expanded)), finished(tree))[1]
        draft.propose = lambda rows, most: propose(rows, [24 - 9 * row.index for row in rows])
        draft._of_level = 1e-4
        draft._measure = lambda seconds, begins: None
        trees = trees_of(draft, model, 20, rows=3, pass_cost=cost, eos_token_id=list(range(0, 40, 3)))
        return [(tree.tokens, tree.parent, tree.confidence) for _, tree in trees] + read

    monkeypatch.setattr(Reader, "grow_greedily", counted)
    together = found()
    monkeypatch.setattr(Reader, "grow_greedily", lambda self, *given: [])
    assert together == found()
    assert len(calls) > 2 and all(0 < took < 10 for call in calls for took in call)
    assert max(map(len, calls)) > 1 or cost or name == "opt-tree"


def trees_of(
    draft: Any, model: Any, steps: int = 12, rows: int = 1, pass_cost: PassCost | None = None, **given: Any
) -> list[tuple[list[int], DraftTree]]:
    """The drafts of a call, with the tokens that their rows had."""
    found: list[tuple[list[int], DraftTree]] = []
    propose = draft.propose

    def proposed(running: Any, budget: Any) -> Any:
        draft.pass_cost = pass_cost
        made = propose(running, budget)
        found.extend((list(row.tokens), tree) for row, tree in zip(running, made, strict=True))
        return made

    draft.propose = proposed
    fast = tokenized(model, draft=draft, control="fixed")
    fast.generate(**ragged(model, rows), max_new_tokens=steps, do_sample=False, **{"eos_token_id": None, **given})
    return found


def laws_along(model: Any, text: list[int], tree: DraftTree) -> dict[int, list[float]]:
    """By node of a tree, the distribution of a plain forward over its path."""
    laws = {}
    for node in range(len(tree)):
        path = [tree.tokens[i] for i in tree.path(node)][1:]
        with torch.no_grad():
            laws[node] = model(torch.tensor([text + path])).logits[0, -1].softmax(-1).tolist()
    return laws


@pytest.mark.parametrize("name", ["opt-tree", "stochastic-beam"])
def test_levels_have_the_likeliest_paths(name: str) -> None:
    """By a beam search over plain forwards; `opt-tree` drafts the best nodes of all levels."""
    model, small = tiny(), sibling(tiny())
    knobs = {"opt-tree": {"nodes": 11, "gain": 1e-9}, "stochastic-beam": {}}[name]
    draft = registry.load("drafters", name, model=small, beam=5, length=4, **knobs)
    text, tree = trees_of(draft, model)[0]
    found: dict[tuple[int, ...], float] = {}
    level = {(): 1.0}
    for _ in range(4):
        longer = {}
        for path, above in level.items():
            with torch.no_grad():
                law = small(torch.tensor([text + list(path)])).logits[0, -1].softmax(-1)
            longer |= {(*path, token): above * chance for token, chance in enumerate(law.tolist())}
        level = dict(sorted(longer.items(), key=lambda one: -one[1])[:5])
        found |= level
    best = sorted(found, key=lambda path: -found[path])[: 11 if name == "opt-tree" else None]
    paths = [tuple(tree.tokens[i] for i in tree.path(node)[1:]) for node in range(len(tree))]
    assert set(paths[1:]) == set(best)
    if name == "opt-tree":  # nothing is known that would calibrate them
        chances = [found[path] / found.get(path[:-1], 1.0) for path in paths[1:]]
        assert tree.confidence == pytest.approx((1.0, *chances), rel=1e-4)


def test_specexec_drafts_the_best_nodes_of_all() -> None:
    """By an independent best-first search over plain forwards, with as many expansions as it likes."""
    model, small = tiny(), sibling(tiny())
    draft = registry.load("drafters", "specexec", model=small, nodes=9, beam=9, branches=6, length=6, decay=0.9)
    text, tree = trees_of(draft, model, 8)[0]
    assert tree.tokens[0] == text[-1]
    heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    best: list[tuple[int, ...]] = []
    while len(best) < 10:
        score, path = heapq.heappop(heap)
        best.append(path)
        if len(path) < 6:
            with torch.no_grad():
                law = small(torch.tensor([text + list(path)])).logits[0, -1].softmax(-1)
            for chance, token in zip(*(part.tolist() for part in law.topk(6)), strict=True):
                heapq.heappush(heap, (score * 0.9 * chance, (*path, token)))
    found = {tuple(tree.tokens[i] for i in tree.path(node)[1:]) for node in range(len(tree))}
    assert found == set(best)
    assert len({tree.shape.depth[node] for node in range(len(tree))}) > 2


def test_cape_drafts_more_where_the_draft_model_is_less_sure() -> None:
    """Counts of children by the probability of the likeliest, section 3.3 of the paper, by plain forwards."""
    model = tiny(sharpen=40.0)
    small = sibling(model)
    draft = registry.load("drafters", "cape", model=small)
    counts = set()
    text, tree = trees_of(draft, model, 30)[0]
    laws = laws_along(small, text, tree)
    node = 0
    for _ in range(5):
        children, sure = tree.shape.children[node], max(laws[node])
        assert len(children) == (8 if sure < 0.3 else 6 if sure < 0.6 else 4 if sure < 0.8 else 2)
        order = sorted(range(len(laws[node])), key=lambda token: -laws[node][token])
        assert [tree.tokens[child] for child in children] == order[: len(children)]
        counts.add(len(children))
        node = children[0]
    assert not tree.shape.children[node]
    assert len(counts) > 1


@pytest.mark.parametrize("beam", [1, 8])
def test_dyspec_fills_the_most_valuable_places(beam: int) -> None:
    """Greedily: every place that is filled is worth as much as any that is not, by plain forwards over the paths, with
    as many passes of the draft model as are needed."""
    model = tiny(sharpen=40.0)
    small = sibling(model)
    draft = registry.load("drafters", "dyspec", model=small, nodes=14, length=20, beam=beam)
    text, tree = max(trees_of(draft, model, 40)[:12], key=lambda draft: draft[1].shape.height)
    laws = laws_along(small, text, tree)
    value, filled, left_out = {0: 1.0}, [], []
    for node in range(len(tree)):
        left, place = 1.0, value[node]
        for child in tree.shape.children[node]:
            filled.append(place)
            share = laws[node][tree.tokens[child]] / left
            value[child] = place * share
            place, left = place * (1 - share), left - laws[node][tree.tokens[child]]
        left_out.append(place)
    assert len(tree) == 15 and tree.shape.height > 1
    assert min(filled) >= max(left_out) - 1e-9


@cache
def best_of(rates: tuple[float, ...], nodes: int, levels: int) -> float:
    """The most expected accepted nodes below a node, by trying all allocations of nodes to its children."""
    if levels == 0 or nodes == 0:
        return 0.0
    most = 0.0
    for count in range(1, min(nodes, len(rates)) + 1):
        for parts in itertools.product(range(nodes), repeat=count):
            if sum(parts) + count <= nodes:
                gain = sum(p * (1 + best_of(rates, own, levels - 1)) for p, own in zip(rates, parts, strict=False))
                most = max(most, gain)
    return most


@pytest.mark.parametrize("rates", [(0.6, 0.2, 0.1), (0.9, 0.05, 0.0), (0.3, 0.3, 0.3)])
def test_shapes_of_sequoia_are_the_best_of_their_size(rates: tuple[float, ...]) -> None:
    """Against an exhaustive search; and what a shape is worth is what the chances of its places say."""
    for levels, nodes in itertools.product((1, 2, 3), range(1, 7)):
        gain = sum(place.chance for place in best_places(rates, 6, levels)[:nodes])
        assert gain == pytest.approx(best_of(rates, nodes, levels))
        shape = shape_for(rates, nodes, levels)
        assert len(shape) <= levels and sum(map(sum, shape)) <= nodes
        reached, worth = [1.0], 0.0
        for level in shape:
            below = [above * rates[rank] for above, n in zip(reached, level, strict=True) for rank in range(n)]
            reached, worth = below, worth + sum(below)
        assert worth == pytest.approx(gain)


def test_rates_of_sequoia_follow_what_is_accepted() -> None:
    """Of 3,000 nodes of two children each, the first is accepted in a half, the second in a third."""
    ranks = Ranks()
    for i in range(3000):
        ranks.observe(2, (0, 1, None, 0, 1, 0)[i % 6])
    rates = ranks.rates()
    assert rates[0] == pytest.approx(0.5, abs=0.05) and rates[1] == pytest.approx(1 / 3, abs=0.05)
    assert rates[2:] == pytest.approx(PRIOR[2:], abs=0.011) and min(rates) > 0
    ranks.observe(2, 0)
    assert ranks.rates() is rates, "they are kept until one differs"
    for _ in range(100):
        ranks.observe(2, 1)
    assert ranks.rates()[0] < 0.1


def test_sequoia_takes_the_shape_of_most_tokens_per_second() -> None:
    """Where nodes cost nothing, all of them; where each costs a pass, one; where a level costs much, one level, with as
    many nodes as there are ranks."""
    draft = registry.load("drafters", "sequoia", model=tiny(), nodes=12, length=4)
    assert draft.size(PRIOR, 12, 4) == (12, 4)
    for node, level, size in ((0.0, 0.0, (12, 4)), (1.0, 0.0, (1, 1)), (0.0, 5.0, (len(PRIOR), 1))):
        draft.pass_cost, draft._of_level = PassCost(1.0, node), level
        assert draft.size(PRIOR, 12, 4) == size


@pytest.mark.parametrize("rates", [PRIOR, (0.9, 0.05, 0.01), (0.3, 0.3, 0.3, 0.2)])
@pytest.mark.parametrize("rows", [1, 5])
def test_sizes_of_sequoia_are_the_best_of_all(rates: tuple[float, ...], rows: int) -> None:
    """Against all sizes, over costs of nodes and levels, in plain passes; rows share these and levels."""
    draft = registry.load("drafters", "sequoia", model=tiny(), nodes=12, length=4)
    found = set()
    for node, level in itertools.product((0.002, 0.01, 0.05, 0.2), (0.01, 0.2, 0.6)):
        draft.pass_cost, draft._of_level, draft._together = PassCost(rows, node), rows * level, rows
        goodput = {}
        for deep, count in itertools.product(range(1, 5), range(1, 11)):
            worth = sum(place.chance for place in best_places(rates, 12, deep)[:count])
            goodput[count, deep] = (1 + worth) / (1 + count * node + deep * level)
        found.add(size := draft.size(rates, 10, 4))
        assert goodput[size] == pytest.approx(max(goodput.values()))
    assert len(found) > 2


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (lambda: {"source": "suffix"}, "its distributions are not those of any node of a tree"),
        (lambda: {"source": "medusa"}, "its distributions are not those of any node of a tree"),
        (lambda: {"source": "eagle3", "model": tiny()}, "give one of them"),
    ],
)
@pytest.mark.parametrize("name", SHAPED)
def test_other_sources_are_refused(name: str, knobs: Any, message: str) -> None:
    with pytest.raises(Refused, match=message):
        registry.load("drafters", name, **knobs())
    with pytest.raises(Refused, match=r"needs a draft model.*or a learned head"):
        truedraft.accelerate(tiny(), draft=name).generate(**ragged(tiny(), 1), max_new_tokens=2)
