"""The canvas loop: canvases of all rows, and later ones that steps may lead to, are scored by one pass per step.

propose  later canvases of each row, by its latest predictions
score    one pass over the rows' own canvases and these
verify   from the row's own canvas on, or one that the policy prefers, follow the steps of the policy for as long as
         they lead to canvases of this pass; the last step leads beyond it, and its canvas is the row's next one
commit   keys and values of blocks that are complete
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from truedraft.canvas._base import OWN, CanvasRow, Draft, Fixed, Policy, Predictions, Speculator
from truedraft.canvas.control import CanvasControl
from truedraft.canvas.predicting import Chooser
from truedraft.canvas.targets import CanvasTarget, Variant
from truedraft.stats import Emission, Pass
from truedraft.stopwatch import Stopwatch


@dataclass(frozen=True)
class Verified:
    """The steps of a row in a pass.

    path: what is fixed beyond the row's own after each; the last one leads beyond the pass.
    last: index of the canvas that it starts from.
    predictions: at all canvases of the row.
    """

    path: list[Fixed]
    last: int
    predictions: list[Predictions]


class CanvasEngine:
    """Fills the canvases of rows.

    Args:
        target: reserved for these rows.
        policy: the steps.
        speculator: proposes later canvases; None for one step per pass.
        control: how many canvases to propose.
    """

    def __init__(
        self,
        target: CanvasTarget,
        policy: Policy,
        speculator: Speculator | None,
        control: CanvasControl,
    ):
        self.target, self.policy, self.speculator = target, policy, speculator
        self.control = control
        self.rows: list[CanvasRow] = []
        self._given: list[tuple[Chooser, bool]] = []  # by slot: of tokens; whether canvases are proposed

    def time(self, watch: Stopwatch) -> None:
        """Count the time of the parts of passes; the control reads it."""
        for part, name in (("draft", "propose"), ("target", "score"), ("target", "verify"), ("observe", "observe")):
            setattr(self, name, watch.timed(part, getattr(self, name)))
        self.control.times = watch.times

    def admit(self, rows: Sequence[CanvasRow], chooser: Chooser, drafting: bool = True) -> None:
        """Begin rows, and read their prompts.

        Args:
            chooser: of their tokens.
            drafting: whether canvases are proposed for them.

        Raises:
            Refused: the policy cannot fill canvases of this layout.
        """
        for row in rows:
            self.policy.begin(row, self.target.layout)
        committed = self.target.admit([row.canvas.tokens[: row.prompt] for row in rows])
        for row, count in zip(rows, committed, strict=True):
            row.committed = count
        self.rows += rows
        self._given += [(chooser, drafting)] * len(rows)

    @property
    def running(self) -> bool:
        return bool(self.rows)

    def step(self) -> Pass:
        """One pass over all rows."""
        for row in self.rows:
            row.reach, row.causal = self.policy.reach(row), self.policy.causal(row)
        own = [self.target.variant(row, OWN) for row in self.rows]
        drafting = self.control.drafting()
        proposed = self.propose([one.width for one in own]) if drafting else [[] for _ in self.rows]
        possible = [
            [one, *(self.target.variant(row, draft) for draft in drafts)]
            for row, one, drafts in zip(self.rows, own, proposed, strict=True)
        ]
        kept = self.control.cut(proposed, [[one.width for one in row] for row in possible])
        batches = [[OWN, *drafts[:count]] for drafts, count in zip(proposed, kept, strict=True)]
        variants = [row[: count + 1] for row, count in zip(possible, kept, strict=True)]
        verified = self.verify(batches, variants, self.score(variants))
        paths = [row.path for row in verified]
        if drafting:
            self.observe(proposed, paths)
        self.control.observe(proposed, paths)
        emitted = []
        for slot, (row, batch, found) in enumerate(zip(self.rows, batches, verified, strict=True)):
            self._advance(slot, row, found, batch, [one.block for one in variants[slot]])
            emitted.append(Emission(row.index, row.emit(), len(found.path) - 1, len(batch) - 1))
        for slot in reversed(range(len(self.rows))):
            if self.rows[slot].finished:
                self.release(slot)
        return Pass(max(sum(one.width for one in row) for row in variants), tuple(emitted))

    def propose(self, widths: Sequence[int]) -> list[list[Draft]]:
        """The drafts of all rows; none that are finished, which have nothing to score.

        widths: nodes of the rows' own canvases.
        """
        least = self.control.least(widths)
        found = []
        for row, (_, drafting) in zip(self.rows, self._given, strict=True):
            drafts: list[Draft] = []
            if drafting and self.speculator is None:
                drafts = self.policy.hypotheses(row)
            elif drafting and self.speculator is not None:
                drafts = self.speculator.propose(row, self.policy, least)
            found.append([draft for draft in drafts if not row.finishes(draft.fixed)])
        return found

    def score(self, variants: Sequence[Sequence[Variant]]) -> list[Tensor]:
        """The pass: by row, the logits of its variants."""
        return self.target.score(variants)

    def verify(
        self, batches: Sequence[Sequence[Draft]], variants: Sequence[Sequence[Variant]], logits: Sequence[Tensor]
    ) -> list[Verified]:
        """The steps of all rows."""
        return [self._verify(*of_row) for of_row in zip(range(len(self.rows)), batches, variants, logits, strict=True)]

    def observe(self, drafts: Sequence[Sequence[Draft]], paths: Sequence[Sequence[Fixed]]) -> None:
        """Let the speculator learn from what the rows have fixed after each step."""
        if self.speculator is not None:
            for row, (_, drafting), of_row, path in zip(self.rows, self._given, drafts, paths, strict=True):
                if drafting:
                    self.speculator.observe(row, self.policy, of_row, path)

    def _verify(self, slot: int, batch: Sequence[Draft], variants: Sequence[Variant], logits: Tensor) -> Verified:
        """Follow the steps of the policy from the row's own canvas, or from one that it prefers."""
        row = self.rows[slot]
        predictions = self._given[slot][0].predictions(
            logits, row.index, [row.step + draft.steps for draft in batch], [one.masked for one in variants],
            [one.block for one in variants],
        )  # fmt: skip
        places = {draft: i for i, draft in enumerate(batch)}
        at: int | None = self.policy.preferred(predictions, row)
        path: list[Fixed] = [batch[at].fixed] if at else []
        while at is not None:
            last = at
            fixed = batch[at].fixed | self.policy.choose(predictions[at], row)
            path.append(fixed)
            at = places.get(Draft(fixed, len(path)))
        return Verified(path, last, predictions)

    def _advance(
        self, slot: int, row: CanvasRow, verified: Verified, batch: Sequence[Draft], blocks: Sequence[range]
    ) -> None:
        """Move a row to the canvas behind its last step.

        blocks: those that the canvases of the batch fill.
        """
        path, last = verified.path, verified.last
        row.canvas.fix(path[-1])
        row.taken += [after - before for before, after in pairwise([OWN.fixed, *path])]
        row.at = row.blocks.index(blocks[last])
        row.committed = self.target.commit(slot, last)
        row.predictions = verified.predictions[last].after(path[-1] - batch[last].fixed, 1)
        row.advance()
        if row.predictions is None and self.speculator is not None:
            row.predictions = self._of_another(row, verified, batch, blocks)

    def _of_another(
        self, row: CanvasRow, verified: Verified, batch: Sequence[Draft], blocks: Sequence[range]
    ) -> Predictions | None:
        """The predictions of the canvas of the pass that is most like the row's, a wrong one, at the start of a block:
        the right one fills the block before it, and predicts nothing here."""
        fixed, steps = verified.path[-1], len(verified.path)
        reached = [i for i, block in enumerate(blocks) if row.at < len(row.blocks) and block == row.block]
        if not reached:
            return None
        best = max(reached, key=lambda i: len(batch[i].fixed & fixed))
        return verified.predictions[best].after(fixed, steps - batch[best].steps)

    def release(self, slot: int) -> None:
        """Remove a row; the last one moves into its slot."""
        self.target.release(slot)
        self.rows[slot], self._given[slot] = self.rows[-1], self._given[-1]
        self.rows.pop()
        self._given.pop()
