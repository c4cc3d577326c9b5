"""Trees that grow over passes: nodes behind earlier ones, and chains and trees that one call makes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import truedraft
from models import ARCHITECTURES, NO_FP64, RECURRENT, V, ragged, tiny
from truedraft import registry
from truedraft.runtime._base import GreedyChain, Runner, TreeGrowth, TreeLimits
from truedraft.runtime.programs import PROGRAMS
from truedraft.stores.likeliest import ranking
from truedraft.targets.hosting import hosted
from truedraft.tree import DraftTree, Taps

PARENTS = (-1, 0, 0, 1, 2, 2, 3, 4)  # of a tree that grows level by level
LEVELS = (1, 3, 6, 8)  # its nodes after each pass
PROMPTS = ([5, 9, 11, 4, 7], [8, 3])


def plain(model: torch.nn.Module, text: list[int]) -> Tensor:
    """Logits of the token after a text, by the model's own forward without a cache."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([text])).logits[0, -1]


@pytest.mark.parametrize("runtime", ["auto", "stock"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_hidden_states_behind_earlier_nodes(kind: str, runtime: str) -> None:
    """At the same nodes as the logits, by plain forwards over their paths; of two layers at once, and of a base runner
    that computes all nodes again."""
    model = tiny(kind, torch.float32)
    target = hosted(model, runtime)
    target.reserve(2, 64)
    target.prefill([target.prompt(torch.tensor(text)) for text in PROMPTS])
    trees = [DraftTree((prompt[-1], 5, 9, 7), (-1, 0, 0, 1)) for prompt in PROMPTS]
    target.extend([tree.cut(3) for tree in trees], [0, 0], [0, 2])
    for extend in (target.extend_tapped, partial(Runner.extend, target.runner)):
        logits, states = extend(trees, [3, 1], [1, 3], Taps((1, -1)))
        nodes = [(0, 3), (1, 1), (1, 2), (1, 3)]
        for at, (row, node) in enumerate(nodes):
            text = [*PROMPTS[row][:-1], *(trees[row].tokens[i] for i in trees[row].path(node))]
            with torch.no_grad():
                found = model(input_ids=torch.tensor([text]), output_hidden_states=True)
            for got, expected in (
                (logits, found.logits), (states[1], found.hidden_states[1]), (states[-1], found.hidden_states[-1]),
            ):  # fmt: skip
                assert len(got) == len(nodes)
                assert torch.allclose(got[at], expected[0, -1], atol=2e-3, rtol=1e-4)


# by the model's own forward, and by compiled passes
KINDS = [(kind, torch.float64) for kind in ARCHITECTURES if kind not in NO_FP64]
KINDS += [(kind, torch.float32) for kind in PROGRAMS if kind not in RECURRENT]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("kind", "dtype"), KINDS, ids=lambda value: str(value).removeprefix("torch."))
def test_nodes_behind_earlier_ones_have_the_logits_of_their_paths(kind: str, dtype: torch.dtype) -> None:
    """Two rows of different lengths, one of which has no new nodes in one of the passes; then a path is committed."""
    model = tiny(kind, dtype)
    target = hosted(model)
    close = partial(torch.allclose, atol=1e-6 if dtype == torch.float64 else 2e-3, rtol=1e-4)
    texts = [list(prompt) for prompt in PROMPTS]
    target.reserve(2, 64)
    target.prefill([target.prompt(torch.tensor(text)) for text in texts])
    tokens = torch.randint(3, V, (2, len(PARENTS)), generator=torch.Generator().manual_seed(0)).tolist()
    sizes = ([0, *LEVELS], [0, 1, 3, 3, 8])
    for step in range(1, len(sizes[0])):
        trees = [
            DraftTree((text[-1], *row[1 : size[step]]), PARENTS[: size[step]])
            for text, row, size in zip(texts, tokens, sizes, strict=True)
        ]
        new = [size[step] - size[step - 1] for size in sizes]
        logits = target.extend(trees, [size[step - 1] for size in sizes], new)
        expected = [
            plain(model, text[:-1] + [tree.tokens[i] for i in tree.path(node)])
            for text, tree, count in zip(texts, trees, new, strict=True)
            for node in range(len(tree) - count, len(tree))
        ]
        assert close(logits, torch.stack(expected).to(logits.dtype))
    target.commit([trees[0].path(6), [0]])
    for text, tree, path in zip(texts, trees, (trees[0].path(6), [0]), strict=True):
        text += [tree.tokens[i] for i in path[1:]] + [6]
    logits = target.score([DraftTree.chain(6), DraftTree.chain(6)]).logits[:, 0]
    expected = [plain(model, text) for text in texts]
    assert close(logits, torch.stack(expected).to(logits.dtype))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_greedy_chains_are_the_likeliest_tokens(kind: str) -> None:
    """By plain forwards: chains of different lengths, one that an end cuts, and of some tokens alone."""
    model = tiny(kind, torch.float32)
    target = hosted(model)
    target.reserve(2, 64)
    target.prefill([target.prompt(torch.tensor(text)) for text in PROMPTS])
    trees = [DraftTree.chain(prompt[-1]) for prompt in PROMPTS]
    some = torch.arange(1, V, 3)

    def expected(text: list[int], most: int, columns: Tensor, ends: list[int], least: float) -> list[int]:
        chain: list[int] = []
        while len(chain) < most:
            law = plain(model, text + chain)[columns].softmax(-1)
            chain.append(int(columns[law.argmax()]))
            if chain[-1] in ends or law.max() < least:
                break
        return chain

    everything = torch.arange(target.vocabulary)
    full = [expected(list(prompt), 7, everything, [], 0.0) for prompt in PROMPTS]
    end = full[0][3]
    for columns, ends, least in (
        (everything, [], 0.0),
        (some, [], 0.0),
        (everything, [end], 0.0),
        (everything, [], 0.4),
    ):
        given = len(columns) if columns is everything else columns
        chains = [GreedyChain(7, ends, least, given), GreedyChain(4, [], least, given)]
        made = target.extend_greedily(trees, [0, 0], chains)
        assert made == [
            expected(list(PROMPTS[0]), 7, columns, ends, least), expected(list(PROMPTS[1]), 4, columns, [], least)
        ]  # fmt: skip
    assert target.extend_greedily(trees, [0, 0], [None, GreedyChain(3, [], 0.0, target.vocabulary)]) == [
        [],
        full[1][:3],
    ]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "mistral", "bloom"])
def test_trees_grown_in_one_call_have_the_likeliest_paths(kind: str) -> None:
    """By a beam search over plain forwards: rows of different lengths and depths, some tokens alone, and an end."""
    model = tiny(kind, torch.float32)
    target = hosted(model)
    target.reserve(2, 96)
    texts = [[*PROMPTS[0], *range(20, 32)], PROMPTS[1]]
    target.prefill([target.prompt(torch.tensor(text)) for text in texts])
    trees = [DraftTree.chain(text[-1]) for text in texts]
    growth = TreeGrowth(children=3, width=4, levels=6, beam=4, rank=ranking())

    def expected(text: list[int], depth: int, columns: Tensor, ends: list[int]) -> dict[tuple[int, ...], float]:
        found: dict[tuple[int, ...], float] = {}
        level = {(): 1.0}
        for _ in range(depth):
            longer = {}
            for path, above in level.items():
                law = plain(model, text + list(path))[columns].softmax(-1).topk(3)
                for chance, at in zip(law.values.tolist(), law.indices.tolist(), strict=True):
                    longer[(*path, int(columns[at]))] = above * chance
            best = dict(sorted(longer.items(), key=lambda one: -one[1])[:4])
            found |= best
            level = {path: score for path, score in best.items() if path[-1] not in ends}
        return found

    everything, some = torch.arange(target.vocabulary), torch.arange(1, V, 2)
    end = next(iter(expected(texts[0], 1, everything, [])))[0]
    for columns, ends in ((everything, []), (some, []), (everything, [end])):
        given = len(columns) if columns is everything else columns
        limits = [TreeLimits(30, deepest, 30, ends, given) for deepest in (5, 3)]
        made = target.extend_trees(trees, [0, 0], growth, limits)
        assert made is not None and len(made[1]) == 5
        for text, grown, limit in zip(texts, made[0], limits, strict=True):
            assert grown is not None
            paths: list[tuple[int, ...]] = [()]
            for token, parent in zip(grown.tokens, grown.parents, strict=True):
                paths.append((*paths[parent], token))
            best = expected(text, limit.deepest, columns, ends)
            assert dict(zip(paths[1:], grown.scores, strict=True)) == pytest.approx(best, rel=2e-3)
    only = target.extend_trees(trees, [0, 0], growth, [None, TreeLimits(7, 3, 30, [], target.vocabulary)])
    assert only is not None and only[0][0] is None and only[0][1] is not None and len(only[0][1].tokens) == 7


def test_places_are_filled_with_possible_tokens_alone() -> None:
    """Fewer than a node may have children; what rounding leaves of their probabilities fills no place."""
    model = tiny(dtype=torch.float32)
    target = hosted(model)
    target.reserve(1, 64)
    target.prefill([target.prompt(torch.tensor(PROMPTS[0]))])
    growth = TreeGrowth(children=9, width=4, levels=3, places=True, rank=ranking())
    limits = [TreeLimits(60, 3, 60, [], columns := torch.tensor([5, 11, 30]))]
    made = target.extend_trees([DraftTree.chain(7)], [0], growth, limits)
    assert made is not None and (grown := made[0][0]) is not None
    assert len(grown.tokens) > 9 and set(grown.tokens) <= set(columns.tolist())
    assert len(set(zip(grown.parents, grown.tokens, strict=True))) == len(grown.tokens)


def test_chains_outside_the_cache_are_refused() -> None:
    model = tiny(dtype=torch.float32)
    target = hosted(model)
    target.reserve(1, 16)
    target.prefill([target.prompt(torch.tensor(PROMPTS[0]))])
    with pytest.raises(IndexError, match="outside the cache"):
        target.extend_greedily([DraftTree.chain(7)], [0], [GreedyChain(40, [], 0.0, target.vocabulary)])
    with pytest.raises(IndexError, match="do not exist"):
        target.extend_greedily([DraftTree.chain(7)], [0], [GreedyChain(3, [], 0.0, torch.tensor([4, 3]))])
    growth = TreeGrowth(children=2, width=4, levels=6, beam=4, rank=ranking())
    with pytest.raises(IndexError, match="outside the cache"):
        target.extend_trees([DraftTree.chain(7)], [0], growth, [TreeLimits(40, 6, 40, [], target.vocabulary)])
    for wrong in ({"beam": 5}, {"rank": 0}, {"children": 17}, {"levels": 3}):
        with pytest.raises(IndexError, match="do not exist"):
            target.extend_trees(
                [DraftTree.chain(7)], [0], growth._replace(**wrong), [TreeLimits(9, 4, 9, [], target.vocabulary)]
            )


@pytest.mark.parametrize("draft", ["draft-model", "opt-tree", "stochastic-beam"])
def test_accepted_nodes_are_not_read_again(draft: str) -> None:
    """The draft model is the target: beside the prompt, it reads each token of the text once, up to those that no draft
    contains."""
    model = tiny(dtype=torch.float32)
    fast = truedraft.accelerate(model, draft=registry.load("drafters", draft, model=model), control="fixed")
    reader, read = fast.drafter.reader, [0]
    target = reader.target
    extend, chains = target.extend, target.extend_greedily

    def counted(trees, written, last):  # type: ignore[no-untyped-def]
        read[0] += sum(map(len, trees)) - sum(written)
        return extend(trees, written, last)

    def counted_chains(trees, written, given):  # type: ignore[no-untyped-def]
        made = chains(trees, written, given)
        read[0] += sum(map(len, trees)) - sum(written) + sum(len(chain) - 1 for chain in made)
        return made

    target.extend, target.extend_greedily = counted, counted_chains
    fast.generate(**ragged(model, 1), max_new_tokens=40, do_sample=False)
    passes = fast.report().passes
    drafted = sum(emission.offered for made in passes for emission in made.emitted)
    assert read[0] <= drafted + 2 * len(passes)
