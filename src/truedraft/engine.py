"""The causal loop: draft a tree, score it in one pass, keep what the target would have said itself."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from truedraft.accept._base import Rule, walk
from truedraft.chance import Chance
from truedraft.control._base import Control
from truedraft.drafters._base import Drafter
from truedraft.sampling import History, Laws
from truedraft.stats import Emission, Pass, Stopwatch
from truedraft.stopping import Stops
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import Accepted, DraftTree, Prompt, Row, Scores


@dataclass
class Engine:
    """One batch from prompts to the end of its last row. The parts say what is done; the engine says when.

    rows: those that drafter and control have not been told the end of.
    """

    target: DecoderTarget
    drafter: Drafter
    rule: Rule
    control: Control
    laws: Laws
    stops: Stops
    chance: Chance
    history: History
    watch: Stopwatch
    rows: list[Row] = field(default_factory=list, init=False)

    def run(self, rows: Sequence[Row], prompts: Sequence[Prompt]) -> Generator[Pass, None, None]:
        """Decode, one pass of the target per item; `row.tokens` grows as it goes. The target's cache is reserved."""
        ready = self.watch.timed("prefill", self.target.ready)
        prefill = self.watch.timed("prefill", self.target.prefill)
        propose = self.watch.timed("draft", self.drafter.propose)
        begin = self.watch.timed("observe", self.drafter.start)
        observe = self.watch.timed("observe", self.drafter.observe)
        score = self.watch.timed("target", self.target.score)
        foresee = self.watch.timed("target", self._foresee)
        size = self.watch.timed("control", self.control.budget)
        prune = self.watch.timed("control", self.control.prune)
        learn = self.watch.timed("control", self.control.observe)

        def drafted() -> list[DraftTree]:
            budget = size(rows)
            drafts = [self._fitted(row, tree) for row, tree in zip(rows, propose(rows, budget), strict=True)]
            return self.rule.dress(self._padded(rows, _unpicked(drafts, prune(rows, drafts))))

        self.target.taps = self.drafter.needs | self.rule.needs
        calibrate = self.watch.timed("calibrate", self.control.open)
        self.rows = rows = list(rows)
        steps = max(row.room - row.step for row in rows)
        try:
            calibrate(self.target, self.drafter, self.watch.seconds, self.stops.in_step, steps)
            self.drafter.open(self.laws, self.chance, self.rule.wants)
            begin(rows)
            self.control.start(rows)
            if ready(prompts):
                trees = drafted()
                scores = score(trees)
            else:
                trees = [DraftTree.chain(row.tokens[-1] if row.tokens else 0) for row in rows]
                scores = prefill(prompts)
            while True:
                before = [len(row.tokens) for row in rows]
                said = foresee(rows, trees, scores)
                accepted = walk(
                    rows, trees, scores, said, self.laws, self.rule, self.stops, self.chance, self.history.pad
                )
                self.chance.reached(max(row.step for row in rows))
                self.target.commit([a.path for a in accepted])
                observe(rows, trees, scores, accepted)
                self.rule.observe(rows, trees, scores, accepted)
                learn(rows, trees, accepted)
                yield _record(rows, before, trees, accepted)

                self._retire(rows, accepted)
                if not rows:
                    return
                trees = drafted()
                scores = score(trees)
        finally:
            self.close()

    def close(self) -> None:
        """End the rows that are left, wherever `run` was cut short; once more, even if that was cut short itself."""
        while self.rows:
            self._end(self.rows[-1])
            self.rows.pop()

    def _foresee(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores
    ) -> Sequence[Sequence[int]] | None:
        """What the rule says at every node, if it knows already; here the host waits for the pass, as part of it."""
        self.rule.see(scores, rows, trees)
        said = self.rule.ahead(scores.logits, rows, trees, self.laws, self.chance)
        if said is None:
            self.target.wait()
        return said

    def _fitted(self, row: Row, tree: DraftTree) -> DraftTree:
        """A drafter's tree without the nodes that could not be emitted any more."""
        if tree.tokens[0] != row.tokens[-1]:
            raise ValueError(f"a draft must begin with the pending token {row.tokens[-1]}, got {tree.tokens[0]}")
        return tree.cut(1 + self.drafter.width).shallow(row.room - row.step - 1)

    def _padded(self, rows: Sequence[Row], trees: list[DraftTree]) -> list[DraftTree]:
        """Rows that ended and wait for the others say padding, as deep as the others may get."""
        if not self.stops.pads or not any(row.ended for row in rows):
            return trees
        pad, depth = self.history.pad, max(max(tree.shape.depth) for tree in trees)
        return [
            DraftTree.chain(row.tokens[-1], [pad] * depth) if row.ended else tree
            for row, tree in zip(rows, trees, strict=True)
        ]

    def _end(self, row: Row) -> None:
        self.drafter.end(row)
        self.control.end(row)

    def _retire(self, rows: list[Row], accepted: Sequence[Accepted]) -> None:
        """Rows that ended leave; as in the cache, the last slot takes a freed slot's place.

        Wherever this is cut short, every row that was not ended is among `rows` still.
        """
        for slot in reversed(range(len(rows))):
            if accepted[slot].ended:
                self._end(rows[slot])
                self.target.release(slot)
                rows[slot] = rows[-1]
                rows.pop()
        if rows:
            self.chance.passed(min(row.step for row in rows))


def _unpicked(drafts: Sequence[DraftTree], pruned: Sequence[DraftTree]) -> list[DraftTree]:
    """Drafts that were drawn stay whole: a choice among them after the draw would change the law of what is said."""
    return [draft if draft.dist is not None else kept for draft, kept in zip(drafts, pruned, strict=True)]


def _record(
    rows: Sequence[Row], before: Sequence[int], trees: Sequence[DraftTree], accepted: Sequence[Accepted]
) -> Pass:
    emitted = []
    for row, n, tree, a in zip(rows, before, trees, accepted, strict=True):
        said = tuple(row.tokens[n : row.end])
        if said:  # a row that waits for the others says nothing
            emitted.append(Emission(row.index, said, min(len(a.path) - 1, len(said)), tree.drafted))
    return Pass(max(map(len, trees)), tuple(emitted))
