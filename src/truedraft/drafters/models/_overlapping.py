"""Base class of drafters whose draft model goes on while the target's pass verifies what it has drafted so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from truedraft.card import method_name
from truedraft.chance import Chance, likeliest
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._worker import Worker
from truedraft.drafters.models._model import ChainDrafter
from truedraft.errors import Refused
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row, Scores


@dataclass
class Continuation:
    """How the thread chooses tokens behind a row's draft.

    verified: the last node of the draft.
    noise: depth -> (V,) noise that the target draws the token there with; empty where there is none.
    chance: what it draws tokens from; None where it chooses them.
    """

    verified: int = 0
    noise: dict[int, Tensor] = field(default_factory=dict)
    chance: Chance | None = None


class OverlappingDrafter(ChainDrafter):
    """Drafts chains; a thread continues them while the target's pass runs, and the pass decides what of that is ready.

    A draft is ready where all tokens that the pass emitted had been drafted: it is what follows them. Where fewer than
    `serial` tokens are, as many are drafted before the pass, and the thread drafts on behind these. The thread works
    from the end of `propose` to `observe`, on the draft model's own cache and on trees that nobody else reads
    meanwhile; it calls no processors but those that read scores alone.

    How far it gets depends on time, and so do the drafts. A text does not, where the rule emits the same tokens
    whatever is drafted. Rules that verify drafts against the law that these were drawn from emit others for other
    drafts: for their rows the thread drafts `length` tokens behind the next one, neither more nor fewer, and the pass
    waits for it. It draws them from a stream of its own. The first token behind what is verified, which the pass
    decides, is a guess and is never verified; it is chosen with the noise that the pass draws by. Nothing is verified
    twice. Where there is no such stream, for rules that accept other drafts, and where processors read
    the text, whole drafts are made before the pass, as by `draft-model`.

    A subclass grows trees (`grow`): the first level from all nodes of what is drafted already that may have children,
    the root included.

    Fields of every subclass: length (tokens verified by a pass at most), serial, threads (of the draft model's passes
    meanwhile).

    requested, ready: drafts that were requested for such rows so far, and those that were ready.
    """

    overlapped = True
    confidence = 0.0
    serial: int
    threads: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.requested = self.ready = 0
        self._worker = Worker(self.threads)
        self._running: set[Row] = set()
        self._trees: dict[Row, tuple[GrowingTree, int]] = {}  # the latest of a row, its tokens before that
        self._noise: dict[Row, dict[int, Tensor]] = {}  # by step, (V,) noise that the target draws with

    def bind(self, target: Target) -> None:
        super().bind(target)
        if target.device.type != "cpu":
            raise Refused(
                f"{method_name(self)} drafts in a thread while a pass of the CPU verifies, and the model is on "
                f"{target.device}: use draft-model, or move the model to the CPU"
            )
        self._like = torch.empty(0, target.vocabulary)

    @property
    def levels(self) -> int:
        return 2 * self.length + 1  # verified, the bonus token, and as many behind it

    @property
    def expansions(self) -> int:
        """Most nodes of what the thread grows, and the draft that it continues."""
        return self.levels

    def start(self, rows: Sequence[Row]) -> None:
        self._worker.stop()
        self._running |= set(rows)
        super().start(rows)

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        self._worker.stop()
        if not any(budget):
            return [DraftTree.chain(row.tokens[-1]) for row in rows]
        drafted = [
            self._drafted(row) if most > 0 and self._overlaps(row) else None
            for row, most in zip(rows, budget, strict=True)
        ]
        drafts = self._completed(rows, budget, drafted)
        if overlapped := [
            (row, tree if tree.dist is None else tree.cut(1 + most))
            for row, tree, known, most in zip(rows, drafts, drafted, budget, strict=True)
            if known is not None
        ]:
            self.requested += len(overlapped)
            self.ready += sum(known is not None and len(known) > 1 for known in drafted)
            self.reader.catch_up(rows)
            self._worker.start(self._levels([self._continued(row, tree) for row, tree in overlapped]))
        return [tree.cut(1 + most) for tree, most in zip(drafts, budget, strict=True)]

    def _completed(
        self, rows: Sequence[Row], budget: Sequence[int], drafted: Sequence[DraftTree | None]
    ) -> list[DraftTree]:
        """Drafts of `serial` tokens or more, from those that are ready; whole ones of other rows."""
        more = [
            most if known is None else max(min(most, self.serial) - known.drafted, 0) if _continues(row, known) else 0
            for row, most, known in zip(rows, budget, drafted, strict=True)
        ]
        known = [
            DraftTree.chain(row.tokens[-1]) if tree is None else tree for row, tree in zip(rows, drafted, strict=True)
        ]
        if not any(more):
            return known
        trees = super().extend_each(rows, [tree.tokens[1:] for tree in known], more)
        return [_joined(first, second) for first, second in zip(known, trees, strict=True)]

    def _overlaps(self, row: Row) -> bool:
        """Whether the thread may draft for a row."""
        request = row.request
        drawn = self.preferred(row) == "law"
        drafted = request.chance.beside() is not None if drawn else request.rule.guarantee == "tokens"
        return drafted and request.laws.drafts_pointwise

    def _drafted(self, row: Row) -> DraftTree:
        """What was drafted behind a row's tokens, a chain; nothing where it has emitted others."""
        drawn, none = self.preferred(row) == "law", DraftTree.chain(row.tokens[-1])
        if row not in self._trees:
            return none
        growing, length = self._trees[row]
        node = growing.root
        for token in row.tokens[length:]:
            found = [child for child in _children(growing, node) if growing.tokens[child] == token]
            if not found:
                return none
            node = found[0]
        if drawn and node <= growing.state.verified:
            return none
        nodes = [node]
        while below := _children(growing, nodes[-1]):
            nodes.append(below[0])
        laws = [growing.laws[parent] for parent in nodes[:-1]] if drawn else None
        return _chain([growing.tokens[node] for node in nodes], laws)

    def _continued(self, row: Row, tree: DraftTree) -> GrowingTree:
        """A row's draft as the thread continues it."""
        growing = self._growing(row, self.width)
        growing.room = self.expansions
        growing.state = Continuation(growing.root + tree.drafted)
        if growing.frontier:
            if self.preferred(row) == "law":
                growing.deepest = min(growing.deepest, tree.drafted + 1 + self.length)
                growing.state.chance = row.request.chance.beside()
                growing.state.noise = self._noise_of(row, tree.drafted + 1)
            elif self.preferred(row) == "noise":
                growing.state.noise = self._noise_of(row, growing.deepest)
            node = growing.root
            for i, token in enumerate(tree.tokens[1:]):
                (node,) = growing.add(node, [token], tree.dist[i] if tree.dist else None)
            growing.end_level(range(growing.root, node + 1))
        self._trees[row] = growing, len(row.tokens)
        return growing

    def _noise_of(self, row: Row, depth: int) -> dict[int, Tensor]:
        """By depth, the (V,) noise that the target draws the row's next tokens with; empty where that is not
        available."""
        if row.request.laws.unknown_processors:
            return {}
        steps = range(row.step, row.step + depth)
        known = {step: noise for step, noise in self._noise.get(row, {}).items() if step >= row.step}
        if new := [step for step in steps if step not in known]:
            noise = row.request.chance.target_noise(row, [step - row.step for step in new], self._like)
            if noise is None:
                return {}
            known |= zip(new, noise, strict=True)
        self._noise[row] = known
        return {step - row.step: known[step] for step in steps}

    def chosen(self, growing: GrowingTree, node: int, law: Tensor, count: int = 1) -> list[int]:
        if growing.state is None:
            return super().chosen(growing, node, law, count)
        if growing.state.chance is None or not growing.passes or not law.any():
            return likeliest(self.keys(growing, node, law), count)
        return growing.state.chance.draw(law, growing.row, count)

    @staticmethod
    def keys(growing: GrowingTree, node: int, law: Tensor) -> Tensor:
        """(V,) what tokens below a node of the thread's trees are ranked by, see `keys_of`. law: (V,)."""
        noise: Tensor | None = growing.state.noise.get(growing.depth[node])
        return law if noise is None else law / noise

    def _levels(self, trees: Sequence[GrowingTree]) -> Iterator[None]:
        """Grow trees level by level, as long as they grow."""
        while active := [tree for tree in trees if tree.frontier]:
            self._level(active)
            yield

    def extend_each(
        self, rows: Sequence[Row], after: Sequence[Sequence[int]], budget: Sequence[int]
    ) -> list[DraftTree]:
        self._worker.stop()
        return super().extend_each(rows, after, budget)

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        if any(self.preferred(row) == "law" for row in rows):
            self._worker.finish()
        self._worker.stop()

    def end(self, row: Row) -> None:
        self._running.discard(row)
        if not self._running:
            self._worker.close()
        try:
            self._worker.stop()
        finally:
            for kept in (self._trees, self._noise):
                kept.pop(row, None)
            super().end(row)


def _continues(row: Row, drafted: DraftTree) -> bool:
    """Whether tokens may follow the drafted ones."""
    return len(drafted) == 1 or drafted.tokens[-1] not in row.ends


def _chain(tokens: Sequence[int], laws: Sequence[Tensor | None] | None) -> DraftTree:
    """A chain, the pending token first, and the laws that its tokens behind that were drawn from, if they were."""
    made = DraftTree.chain(tokens[0], tokens[1:])
    return made if laws is None else made.replaced(dist=(*laws, None), draws="one")


def _joined(first: DraftTree, second: DraftTree) -> DraftTree:
    """A chain, and one behind it whose root is its last token."""
    if len(first) == 1:
        return second
    laws = [*first.dist[:-1], *second.dist[:-1]] if first.dist and second.dist else None
    return _chain([*first.tokens, *second.tokens[1:]], laws)


def _children(growing: GrowingTree, node: int) -> list[int]:
    return [child for child in range(node + 1, len(growing.tokens)) if growing.parent[child] == node]
