"""DiffuSpec: of what a diffusion model predicts at the masks behind the text, the path that reads best from the left.

Li et al., "DiffuSpec: Unlocking Diffusion Language Models for Speculative Decoding", 2025 (arXiv 2510.02358). One pass
gives candidates at every position, each likely given the text alone, and the likeliest of all positions need not follow
one another. A beam from the left scores paths of candidates by their log-probabilities in the diffusion model and in a
causal proxy, n-grams counted in the row's own text, and drafts the best. The number of masks follows the average length
of the paths up to an end of the text, and grows where all of it is accepted. It wins over `deer` where text repeats its
own phrases; there the lookup drafters draft without a model.

With `tree` the likeliest paths are drafted together, by the same score, normalised at every position: as the
distributions of positions are flat, trees are accepted further than the chain of as many nodes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import exp, log
from typing import Any

from torch import Tensor

from truedraft.card import Card, knob
from truedraft.drafters._base import moving_average
from truedraft.drafters._candidates import candidates
from truedraft.drafters.models._mask_drafter import SEQ2SEQ, MaskDrafter
from truedraft.tree import Accepted, DraftTree, Row, Scores

BACKOFF = 0.4  # factor of a shorter string's share, Brants et al., "Large Language Models in Machine Translation", 2007

Lattice = Sequence[Sequence[tuple[int, float]]]  # by position, tokens with their probabilities, the likeliest first


class NGrams:
    """How often every string of up to `longest` tokens occurs in a text that grows.

    A draft asks for hundreds of scores, which a table answers in less time than calls of `stores/automaton.py`.
    """

    def __init__(self, longest: int):
        self.longest = longest
        self._text: list[int] = []
        self._counts: Counter[tuple[int, ...]] = Counter()

    def follow(self, text: Sequence[int]) -> None:
        """Count what a text has beyond that of the last call."""
        for token in text[len(self._text) :]:
            self._text.append(token)
            recent = self._text[-self.longest :]
            self._counts.update(tuple(recent[i:]) for i in range(len(recent)))
        self._counts[()] = len(self._text)

    def score(self, before: Sequence[int], token: int) -> float:
        """Log of the share of a token among those that followed the last ones before it, by the longest string that
        occurs."""
        factor = 1.0
        for length in range(min(self.longest - 1, len(before)), -1, -1):
            context = tuple(before[len(before) - length :])
            if found := self._counts.get((*context, token)):
                return log(factor * found / self._counts[context])
            factor *= BACKOFF
        return log(factor / (len(self._text) + 1))


@dataclass
class RowState:
    """Of a row: the strings of its text, moving averages of lengths of paths up to their ends, and of what was accepted
    of them, and the length of the latest path that is not verified yet."""

    ngrams: NGrams
    length: float
    accepted: float = field(default=0.0)
    drafted: int = 0


@dataclass
class DiffuSpec(MaskDrafter):
    card = Card(
        paper="arXiv 2510.02358 (2025)",
        idea="Of the tokens that a diffusion model predicts at masks behind the text, draft the path that reads best.",
        family="diffusion model",
        needs=("diffusion model",),
        cannot=SEQ2SEQ,
        presets={"diffuspec-tree": {"tree": True, "mass": 1.0}},
        published="Up to 3x for Qwen2.5 32B drafted by Dream 7B, 7.0 tokens a pass on Spec-Bench (one GPU).",
    )
    model: Any = None  # a diffusion model of transformers, or its name: a folder, an embedded model, one on the hub
    depth: int = knob(30, 1, 64)  # masks at most; published 30
    shortest: int = knob(20, 1, 64)  # masks at least; published 20
    mass: float = knob(0.8, 0, 1, open=True)  # of the law that a position's candidates cover; published 0.8
    top_k: int = knob(8, 1, 256)  # candidates of a position at most
    beam: int = knob(3, 1, 64)  # paths kept at each position; published 3
    weight: float = knob(0.5, 0, 1)  # of the n-grams in the score, the rest being the diffusion model's; published 0.5
    ngram: int = knob(3, 1, 8)  # tokens of the longest string counted; published 3
    tree: bool = knob(False)  # a tree of the likeliest paths; published False
    nodes: int = knob(24, 1, 1024)  # of a tree; published: the chain
    drawn = False

    def forget(self) -> None:
        super().forget()
        self._rows: dict[Row, RowState] = {}

    @property
    def width(self) -> int:
        return self.nodes if self.tree else self.depth

    def start(self, rows: Sequence[Row]) -> None:
        super().start(rows)
        self._rows |= {row: RowState(NGrams(self.ngram), min(self.shortest, self.depth)) for row in rows}

    def end(self, row: Row) -> None:
        super().end(row)
        self._rows.pop(row, None)

    def deepest(self, row: Row) -> int:
        state = self._rows[row]
        wanted = round(state.length) + (state.accepted >= state.length)
        return min(super().deepest(row), max(wanted, self.shortest))

    def drafted(self, row: Row, laws: Tensor, most: int) -> DraftTree:
        state = self._rows[row]
        state.ngrams.follow(row.tokens)
        found = candidates(self, row, laws, range(len(laws)), self.top_k, self._vocabulary)
        lattice = pruned(found, self.mass, row.ends)
        score = PathScore(row.tokens, state.ngrams, self.weight)
        if self.tree:
            draft = best_tree(score, lattice, min(self.nodes, most), row.ends)
        else:
            path = best_path(score, lattice, self.beam)
            chances = [dict(some)[token] for token, some in zip(path, lattice, strict=True)]
            draft = DraftTree.chain(row.tokens[-1], path, chances)
        state.drafted = draft.shape.height
        return self._calibration.proposed(row, draft)

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        super().observe(rows, trees, scores, accepted)
        for row, reached in zip(rows, accepted, strict=True):
            if (state := self._rows[row]).drafted:
                state.length = moving_average(state.length, state.drafted)
                state.accepted = moving_average(state.accepted, len(reached.path) - 1)
                state.drafted = 0


@dataclass
class PathScore:
    """What a token adds to the score of a path behind a text: its log-probability in the diffusion model and, with a
    weight, in n-grams, the weights adding up to 1."""

    text: Sequence[int]
    ngrams: NGrams
    weight: float

    def __call__(self, path: Sequence[int], token: int, p: float) -> float:
        before = [*self.text[-self.ngrams.longest :], *path]
        return (1 - self.weight) * log(p) + self.weight * self.ngrams.score(before, token)


def pruned(found: Lattice, mass: float, ends: frozenset[int]) -> list[list[tuple[int, float]]]:
    """Of each position the first candidates that cover the mass, up to the first position without any, or where the
    likeliest ends the text; an end that is not the likeliest is no candidate."""
    lattice = []
    for some in found:
        if not some:
            break
        covered, kept = 0.0, list[tuple[int, float]]()
        for token, p in some:
            if not kept or token not in ends:
                kept.append((token, p))
            if (covered := covered + p) >= mass:
                break
        lattice.append(kept)
        if some[0][0] in ends:
            break
    return lattice


def best_path(score: PathScore, lattice: Lattice, beam: int) -> list[int]:
    """The path of one candidate a position with the largest score, by a search that keeps `beam` paths a position."""
    paths: list[tuple[float, list[int]]] = [(0.0, [])]
    for some in lattice:
        longer = [(total + score(path, token, p), [*path, token]) for total, path in paths for token, p in some]
        paths = sorted(longer, key=lambda one: -one[0])[:beam]
    return paths[0][1]


def best_tree(score: PathScore, lattice: Lattice, nodes: int, ends: frozenset[int]) -> DraftTree:
    """The nodes with the likeliest paths. The probabilities of a node's children are their scores, normalised to the
    sum of the candidates' in the diffusion model; nothing is below an end."""
    tokens, parents, confidence = [score.text[-1]], [-1], [1.0]
    order = count()
    heap: list[tuple[float, int, int, float, int, list[int]]] = []

    def expand(node: int, path: list[int], value: float) -> None:
        some = lattice[len(path)] if len(path) < len(lattice) and not ends.intersection(path[-1:]) else ()
        shares = [exp(score(path, token, p)) for token, p in some]
        sure = sum(p for _, p in some) / max(sum(shares), 1e-9)
        for (token, _), share in zip(some, shares, strict=True):
            chance = min(share * sure, 1.0)
            heapq.heappush(heap, (-value * chance, next(order), token, chance, node, path))

    expand(0, [], 1.0)
    while heap and len(tokens) <= nodes:
        value, _, token, chance, parent, path = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        confidence.append(chance)
        expand(len(tokens) - 1, [*path, token], -value)
    return DraftTree(tuple(tokens), tuple(parents), confidence=tuple(confidence))
