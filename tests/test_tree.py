"""Draft trees, taps, prompts, rows and scores: operations against their definitions on random trees."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from truedraft import tree as trees
from truedraft.drafters._calibration import Calibration
from truedraft.drafters._trees import grafted, placed
from truedraft.stores import union as unions
from truedraft.tree import DraftTree, Prompt, Row, Scores, Taps, by_node, joined
from truedraft.tree_shape import shape_of

TREES = 60


def random_tree(seed: int, probes: bool = True) -> DraftTree:
    """Up to twelve nodes with laws and confidences; some are probes, with only probes below."""
    rng = random.Random(seed)
    n = rng.randint(1, 12)
    parent = [-1] + [rng.randrange(max(0, i - 5), i) for i in range(1, n)]
    marked: set[int] = set()
    for i in range(1, n):
        if probes and (parent[i] in marked or rng.random() < 0.2):
            marked.add(i)
    laws = tuple(torch.full((3,), float(i)) if rng.random() < 0.7 else None for i in range(n))
    tokens = tuple(rng.randrange(4) for _ in range(n))
    embeds = {i: torch.full((2,), float(i)) for i in marked if rng.random() < 0.6}
    confidence = tuple(i / 20 for i in range(20, 20 - n, -1))
    return DraftTree(tokens, tuple(parent), laws, frozenset(marked), "independent", confidence, embeds)


def ancestors(tree: DraftTree, node: int) -> list[int]:
    found = [node]
    while tree.parent[found[-1]] >= 0:
        found.append(tree.parent[found[-1]])
    return found[::-1]


@dataclass(frozen=True, eq=False)
class Named(DraftTree):
    """A tree with one more field of nodes, and one more of the whole tree."""

    names: tuple[str, ...] = field(default=(), metadata=by_node(lambda names, nodes: tuple(names[i] for i in nodes)))
    title: str = ""


def test_selections_carry_every_field() -> None:
    """Fields of nodes are selected with the nodes, the others are copied."""
    of_tree = {"draws", "title"}
    assert {f.name for f in fields(Named) if "select" not in f.metadata} == of_tree
    for seed in range(TREES):
        plain = random_tree(seed)
        given = {f.name: getattr(plain, f.name) for f in fields(plain)}
        tree = Named(**given, names=tuple(f"n{i}" for i in range(len(plain))), title="a tree")
        for kept in (tree.cut(3), tree.bare(), tree.drafting(2), tree.shallow(1)):
            assert isinstance(kept, Named) and kept.title == "a tree"
            nodes = [int(name[1:]) for name in kept.names]
            same_nodes(kept, tree, nodes)
            changed = replace(kept, confidence=None)
            assert (changed.names, changed.embeds, changed.probes) == (kept.names, kept.embeds, kept.probes)


def same_nodes(kept: DraftTree, tree: DraftTree, nodes: list[int]) -> None:
    """`kept` has these nodes of `tree`, in order, with all their fields."""
    assert len(kept) == len(nodes) and kept.draws == tree.draws
    assert kept.tokens == tuple(tree.tokens[i] for i in nodes)
    assert kept.parent == tuple(nodes.index(tree.parent[i]) if i else -1 for i in nodes)
    assert kept.probes == frozenset(nodes.index(i) for i in tree.probes if i in nodes)
    assert kept.dist is not None and tree.dist is not None
    assert all(a is tree.dist[i] for a, i in zip(kept.dist, nodes, strict=True))
    assert kept.embeds.keys() == {nodes.index(i) for i in tree.embeds if i in nodes}
    assert all(vector is tree.embeds[nodes[i]] for i, vector in kept.embeds.items())
    assert kept.confidence == tuple(tree.confidence[i] for i in nodes)  # type: ignore[index]


@pytest.mark.parametrize("seed", range(TREES))
def test_shape_follows_from_the_parents(seed: int) -> None:
    tree = random_tree(seed)
    shape, n = tree.shape, len(tree)
    paths = [ancestors(tree, i) for i in range(n)]
    assert shape.parent == tree.parent and shape is shape_of(tree.parent)
    assert shape.depth == tuple(len(path) - 1 for path in paths)
    children = [tuple(i for i in range(n) if tree.parent[i] == node) for node in range(n)]
    assert shape.children == tuple(children)
    assert shape.order == tuple(children[tree.parent[i]].index(i) if i else 0 for i in range(n))
    assert shape.height == max(shape.depth) and shape.extra_depth == tuple(shape.depth[i] for i in shape.extra)
    for node, path in enumerate(paths):
        rest = shape.extra[shape.extra_from[node] : shape.extra_from[node + 1]]
        run = next((i for i, step in enumerate(path) if step != i), len(path))
        assert (shape.run[node], rest) == (run, tuple(path[run:]))
        assert shape.mask[node].tolist() == [i in path for i in range(n)]


@pytest.mark.parametrize("seed", range(TREES))
def test_paths_children_and_sizes(seed: int) -> None:
    tree = random_tree(seed)
    assert tree.drafted == sum(1 for i in range(1, len(tree)) if i not in tree.probes)
    for node in range(len(tree)):
        assert tree.path(node) == tuple(ancestors(tree, node))
        for token in range(5):
            below = [i for i in tree.shape.children[node] if tree.tokens[i] == token and i not in tree.probes]
            assert tree.child(node, token) == (below[0] if below else None)


@pytest.mark.parametrize("seed", range(TREES))
def test_parts_of_a_tree(seed: int) -> None:
    tree = random_tree(seed)
    n, depth = len(tree), tree.shape.depth
    for nodes in range(1, n):
        same_nodes(tree.cut(nodes), tree, list(range(nodes)))
    assert tree.cut(n) is tree and tree.cut(n + 1) is tree
    same_nodes(tree.bare(), tree, [i for i in range(n) if i not in tree.probes])
    assert tree.probes or tree.bare() is tree
    for deepest in range(max(depth)):
        same_nodes(tree.shallow(deepest), tree, [i for i in range(n) if depth[i] <= deepest])
    assert tree.shallow(max(depth)) is tree and tree.shallow(n) is tree
    for count in range(n + 1):
        verified = [i for i in range(1, n) if i not in tree.probes]
        chosen = {0, *verified[:count]}
        kept = [i for i in range(n) if i in chosen or (i in tree.probes and _below(tree, i, chosen))]
        same_nodes(tree.drafting(count), tree, kept)
        assert len(kept) < n or tree.drafting(count) is tree


def _below(tree: DraftTree, probe: int, chosen: set[int]) -> bool:
    """Whether the nearest verified ancestor of a probe is among the chosen."""
    return next(i for i in reversed(ancestors(tree, probe)) if i not in tree.probes) in chosen


def test_selections_of_certain_trees_have_no_laws_or_confidences() -> None:
    tree = DraftTree((5, 6, 7, 8), (-1, 0, 0, 1), probes=frozenset({2}))
    for part in (tree.cut(3), tree.bare(), tree.shallow(1), tree.drafting(1)):
        assert part.dist is None and part.confidence is None and part.draws == "certain"
    assert tree.cut(2).probes == frozenset() and tree.cut(3).probes == {2}


def test_chains() -> None:
    chain = DraftTree.chain(5, [6, 7, 8], [0.5, 0.25, 0.125])
    assert (
        chain.tokens == (5, 6, 7, 8) and chain.parent == (-1, 0, 1, 2) and chain.confidence == (1.0, 0.5, 0.25, 0.125)
    )
    assert chain.drafted == 3 and chain.dist is None and chain.draws == "certain" and chain.probes == frozenset()
    lone = DraftTree.chain(5)
    assert (lone.tokens, lone.parent, lone.confidence, lone.drafted) == ((5,), (-1,), None, 0)
    assert DraftTree.chain(1, iter([2, 3])).tokens == (1, 2, 3)


TWO, CHAIN = dict(tokens=(1, 2), parent=(-1, 0)), dict(tokens=(1, 2, 3), parent=(-1, 0, 1))
BROKEN = [
    (dict(tokens=(), parent=()), "^0 tokens need as many parents, got 0$"),
    (dict(tokens=(1, 2), parent=(-1,)), "^2 tokens need as many parents, got 1$"),
    (dict(tokens=(1, 2), parent=(0, 0)), "^parents must be -1 for the root and point backwards"),
    (dict(tokens=(1, 2), parent=(-1, 1)), r"point backwards, got \(-1, 1\)$"),
    (dict(tokens=(1, 2), parent=(-1, -1)), "point backwards"),
    (dict(TWO, probes=frozenset({0})), r"^probes must be nodes below the root, got \[0\]"),
    (dict(TWO, probes=frozenset({2})), r"got \[2\] of 2 nodes$"),
    (dict(TWO, probes=frozenset({-1})), "below the root"),
    (dict(CHAIN, probes=frozenset({1})), "^a verified node cannot hang below a probe$"),
    (dict(TWO, dist=(None, None)), "^dist belongs to drawn children, and draws is 'certain'$"),
    (dict(TWO, draws="one"), "^dist belongs to drawn children, and draws is 'one'$"),
    (dict(TWO, dist=(None,), draws="one"), "^dist needs one law per node, got 1 for 2 nodes$"),
    (dict(TWO, confidence=(1.0,)), "^confidence needs one chance per node, got .* for 2 nodes$"),
    (dict(TWO, confidence=(1.0, 1.1)), "^confidence needs one chance"),
    (dict(TWO, confidence=(1.0, -0.1)), "^confidence needs one chance"),
]


@pytest.mark.parametrize(("fields", "message"), BROKEN)
def test_an_invalid_tree_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftTree(**fields).check()


def test_valid_trees_pass_the_check() -> None:
    for tree in (
        DraftTree((1, 2, 3), (-1, 0, 1), probes=frozenset({2}), confidence=(1.0, 0.0, 1.0)),
        DraftTree((1, 2, 3), (-1, 0, 1), probes=frozenset({1, 2})),
        DraftTree((1, 2), (-1, 0), dist=(torch.ones(3), None), draws="distinct"),
    ):
        tree.check()


def test_taps_prompts_and_rows() -> None:
    assert (Taps((3, -1)) | Taps((0, 3))).hidden == (-1, 0, 3)
    assert len(Prompt(ids=torch.tensor([1, 2, 3]))) == 3 and len(Prompt(embeds=torch.zeros(2, 5))) == 2
    row = Row(2, [5, 6, 7, 8], 3, 9)
    assert row.step == 1 and not row.ended and row.source == () and row.namespace == "" and row.ends == frozenset()
    row.end = 4
    assert row.ended
    row.given = Prompt(ids=torch.tensor([1]), source=(4, 5))
    assert row.source == (4, 5)


@pytest.mark.parametrize("seed", range(TREES))
def test_a_shape_that_grew_is_that_of_all_parents(seed: int) -> None:
    tree = random_tree(seed, probes=False)
    at = random.Random(seed).randint(1, len(tree))
    grown = shape_of(tree.parent[:at]).grown(tree.parent[at:])
    assert {f.name: getattr(grown, f.name) for f in fields(grown)} == {
        f.name: getattr(tree.shape, f.name) for f in fields(grown)
    }
    of_shape = DraftTree.of_shape(tree.tokens, grown)
    assert of_shape.shape is grown and of_shape.parent == tree.parent
    cut = of_shape.cut(at)
    assert cut.shape.parent == tree.parent[:at] and cut.shape.height == max(cut.shape.depth)


def test_shapes_are_shared() -> None:
    for a, b in pairwise([DraftTree((1, 2, 3), (-1, 0, 0)), DraftTree((4, 5, 6), (-1, 0, 0)), DraftTree.chain(1, [2])]):
        assert (a.shape is b.shape) == (a.parent == b.parent)


def scores_of(rows: int, first: int) -> Scores:
    hidden = {layer: [torch.full((2, 3), float(first + i + layer)) for i in range(rows)] for layer in (1, 4)}
    return Scores(torch.arange(first, first + rows).float()[:, None, None].expand(-1, 2, 5), hidden, [*range(rows)])


def test_scores_of_parts_are_joined_and_split() -> None:
    parts = [scores_of(2, 0), scores_of(1, 10), scores_of(3, 20)]
    assert joined(parts[:1]) is parts[0]
    for count in (2, 3):
        whole = joined(parts[:count])
        assert whole.logits[:, 0, 0].tolist() == [0, 1, 10, 20, 21, 22][: len(whole.context)]
        assert whole.context == [0, 1, 0, 0, 1, 2][: len(whole.context)] and whole.hidden.keys() == {1, 4}
        for layer in (1, 4):
            assert [float(h[0, 0]) - layer for h in whole.hidden[layer]] == whole.logits[:, 0, 0].tolist()
    assert whole.of(range(6)) is whole
    for places in ([1, 2, 3], [0, 2, 5], [4], [5, 0]):
        some = whole.of(places)
        assert torch.equal(some.logits, whole.logits[places]) and some.context == [whole.context[i] for i in places]
        assert all(
            [h is whole.hidden[layer][i] for h, i in zip(some.hidden[layer], places, strict=True)] for layer in (1, 4)
        )


@pytest.mark.parametrize("seed", range(TREES))
def test_with_probes_appends_nodes(seed: int) -> None:
    tree = random_tree(seed)
    n, vector = len(tree), torch.zeros(2)
    more = tree.with_probes((7, 8, 9), (0, n, n - 1), {1: vector})
    same_nodes(more.cut(n), tree, list(range(n)))
    assert more.tokens[n:] == (7, 8, 9) and more.parent[n:] == (0, n, n - 1) and more.probes >= {n, n + 1, n + 2}
    assert more.embeds[n + 1] is vector and more.dist is not None and more.dist[n:] == (None,) * 3


def test_embeddings_of_verified_nodes_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "CHECKS", False)
    tree = DraftTree((1, 2, 3), (-1, 0, 0), probes=frozenset({2}), embeds={1: torch.zeros(2)})
    with pytest.raises(ValueError, match=r"^embeddings are for probes, \[2\], and nodes \[1\] have one$"):
        tree.check_embeds()
    with pytest.raises(ValueError, match="embeddings are for probes"):
        tree.check()
    replace(tree, embeds={2: torch.zeros(2)}).check()


@pytest.mark.parametrize("native", [True, False])
def test_joined_drafts_keep_the_embeddings_of_probes(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(unions, "compiled", lambda: None)
    row = Row(0, [1], 1, 9)
    for seed in range(TREES):
        given = [replace(random_tree(seed + 100 * i), draws="certain", dist=None) for i in range(2)]
        given = [replace(tree, tokens=(1, *tree.tokens[1:])) for tree in given]
        origin = {id(vector): (tree, i) for tree in given for i, vector in tree.embeds.items()}
        whole = unions.union(given, 99).tree
        for joined_tree in (whole, grafted(given[0], 0, given[1]), Calibration().proposed(row, placed(given[0], 0.5))):
            joined_tree.check()
            for node, vector in joined_tree.embeds.items():
                tree, i = origin[id(vector)]
                assert [joined_tree.tokens[j] for j in joined_tree.path(node)] == [tree.tokens[j] for j in tree.path(i)]
        assert len(whole.embeds) == len(origin) and all(token >= 0 for token in whole.tokens)
