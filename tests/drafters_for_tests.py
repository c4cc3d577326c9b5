"""Drafters that test the engine: oracle, noise, drawn drafts, probes, taps, a view of the target."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from truedraft import Card, Drafter, DraftTree
from truedraft.chance import likeliest
from truedraft.drafters._growing import laws_of
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import Accepted, Draws, Row, Scores, Taps
from truedraft.views._base import View
from truedraft.views.skip_layers import SkipLayers

_CARD = Card(paper="none", idea="For tests.", family="test")


def skipping(layers: Collection[int] | str, taps: Taps = View.taps) -> View:
    """A view without these layers; without any, the whole model."""
    text = layers if isinstance(layers, str) else ";".join(map(str, layers))
    return (SkipLayers(text) if text else View()).tapping(taps)


@dataclass
class Noise(Drafter):
    """Random trees of random tokens, siblings with the same token among them; the same after the same prefix."""

    card = _CARD
    vocabulary: int = 61  # tokens drawn from
    seed: int = 0  # of the trees
    size: int = 7  # nodes

    @property
    def width(self) -> int:
        return self.size

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        return [self.tree(row, min(self.size, nodes)) for row, nodes in zip(rows, budget, strict=True)]

    def tree(self, row: Row, nodes: int) -> DraftTree:
        self.random = random.Random(f"{self.seed} {row.tokens}")
        nodes = self.random.randint(0, nodes) if nodes else 0
        parent = (-1, *(self.random.randrange(i) for i in range(1, nodes + 1)))
        tokens = (row.tokens[-1], *(self.random.randrange(self.vocabulary) for _ in range(nodes)))
        return DraftTree(tokens, parent)


@dataclass
class Oracle(Noise):
    """Drafts up to `deep` tokens of each row's true continuation as a branch among random nodes."""

    answers: dict[int, list[int]] = field(default_factory=dict)  # row -> prompt and continuation
    deep: int = 4  # most right tokens

    @property
    def width(self) -> int:
        return self.size + self.deep

    def tree(self, row: Row, nodes: int) -> DraftTree:
        noise = super().tree(row, nodes)
        tokens, parent = list(noise.tokens), list(noise.parent)
        at = 0
        for token in self.answers[row.index][len(row.tokens) :][: self.random.randint(1, self.deep)]:
            if len(tokens) > self.size + self.deep:
                break
            tokens.append(token)
            parent.append(at)
            at = len(tokens) - 1
        return DraftTree(tuple(tokens), tuple(parent))


@dataclass
class Sampler(Noise):
    """Draws children from a random law, which it gives as `dist`: siblings at the root, one below the first."""

    siblings: int = 2  # children of the root
    drawn: Draws = "independent"
    support: int = 2  # tokens of probability above 0

    @property
    def draws(self) -> Draws:
        return self.drawn

    def law(self, tokens: Sequence[int]) -> torch.Tensor:
        """A random law that is a function of the last token."""
        scores = 2 * torch.randn(self.vocabulary, generator=torch.Generator().manual_seed(tokens[-1] + 100 * self.seed))
        return scores.masked_fill(scores < scores.topk(self.support).values[-1], -torch.inf).softmax(-1)

    def tree(self, row: Row, nodes: int) -> DraftTree:
        tokens, parent, dist = [row.tokens[-1]], [-1], [self.law(row.tokens)]
        if self.preferred(row) != "law":
            return DraftTree.chain(tokens[0], [int(dist[0].argmax())][: min(nodes, row.room - row.step - 1)])
        if row.room - row.step > 1:
            tokens += row.request.chance.draw(dist[0], row, min(self.siblings, nodes), self.drawn == "distinct")
            parent += [0] * (len(tokens) - 1)
        if row.room - row.step > 2 and len(tokens) > 1:
            tokens += row.request.chance.draw(self.law(tokens[:2]), row)
            parent.append(1)
        dist += [self.law([token]) for token in tokens[1:]]
        return DraftTree(tuple(tokens), tuple(parent), tuple(dist), draws=self.drawn)


@dataclass
class ProbeReader(Noise):
    """Adds a probe below the root and below a draft, and drafts next the likeliest token of the last probe."""

    mask: int = 4  # the token that probes carry

    def start(self, rows: Sequence[Row]) -> None:
        self.guess: dict[int, int] = {}
        self.read = 0

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        trees = []
        for row in rows:
            draft = self.guess.get(row.index, 3)
            trees.append(
                DraftTree((row.tokens[-1], self.mask, draft, self.mask), (-1, 0, 0, 2), probes=frozenset({1, 3}))
            )
        return trees

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        for b, (row, tree) in enumerate(zip(rows, trees, strict=True)):
            if tree.probes:
                probe = max(tree.probes)
                self.guess[row.index] = int(scores.logits[b, probe].argmax())
                self.read += 1


@dataclass
class HiddenReader(Noise):
    """Taps the last hidden state, applies the model's head to it and drafts the second-best token of the last pass."""

    head: torch.nn.Module | None = None  # the model's output head
    needs = Taps(hidden=(-1,))

    def start(self, rows: Sequence[Row]) -> None:
        self.guess: dict[int, int] = {}
        self.largest_error = 0.0
        self.lengths = [len(row.tokens) for row in rows]

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        return [DraftTree.chain(row.tokens[-1], [self.guess[row.index]] * 2) for row in rows]

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        assert self.head is not None
        for b, (row, tree) in enumerate(zip(rows, trees, strict=True)):
            features = scores.features(b, range(len(tree)), (-1,))
            assert len(features) == scores.context[b] + len(tree)
            own = self.head(features[scores.context[b] :])
            self.largest_error = max(self.largest_error, (own - scores.logits[b, : len(tree)]).abs().max().item())
            self.guess[row.index] = int(own[0].topk(2).indices[1])


@dataclass
class SelfDrafter(Drafter):
    """Drafts chains by the target without some of its layers: a pass under the view for every token."""

    card = _CARD
    skipped: tuple[int, ...] = (1,)  # layers
    size: int = 3  # tokens

    @property
    def width(self) -> int:
        return self.size

    @property
    def draws(self) -> Draws:
        return "one"

    def bind(self, target: DecoderTarget) -> None:
        self.target, self.view = target, skipping(self.skipped)
        target.check_view(self.view)

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        drafts: list[list[int]] = [[] for _ in rows]
        laws: list[list[torch.Tensor]] = [[] for _ in rows]
        deepest = [min(self.size, nodes, row.room - row.step - 1) for row, nodes in zip(rows, budget, strict=True)]
        while active := [i for i, size in enumerate(deepest) if len(drafts[i]) < size]:
            trees = [DraftTree.chain((rows[i].tokens + drafts[i])[-1]) for i in active]
            slots = [rows[i].slot for i in active]
            scores = self.target.score(trees, self.view, slots)
            self.target.advance(self.view, [(0,)] * len(active), slots)
            next_laws = laws_of([rows[i] for i in active], [drafts[i] for i in active], scores.logits[:, 0])
            for i, law in zip(active, next_laws, strict=True):
                tokens = self._chosen(rows[i], law, len(drafts[i])) if law.any() else []
                deepest[i] = deepest[i] if tokens else 0
                drafts[i] += tokens
                laws[i].append(law)
        self.target.rewind()
        return [self._tree(row, draft, law) for row, draft, law in zip(rows, drafts, laws, strict=True)]

    def _chosen(self, row: Row, law: torch.Tensor, depth: int) -> list[int]:
        request, preferred = row.request, self.preferred(row)
        if preferred == "law":
            return request.chance.draw(law, row)
        if preferred == "noise" and not request.laws.unknown_processors:
            noise = request.chance.target_noise(row, [depth], law)
            return likeliest(law if noise is None else law / noise[0], 1)
        return likeliest(law, 1)

    def _tree(self, row: Row, draft: list[int], laws: list[torch.Tensor]) -> DraftTree:
        tree = DraftTree.chain(row.tokens[-1], draft)
        if self.preferred(row) != "law" or not draft:
            return tree
        return DraftTree(tree.tokens, tree.parent, (*laws[: len(draft)], None), draws="one")
