"""The canvas loop: canvases of all rows, and later ones that steps may lead to, are scored by one pass per step.

propose  later canvases of each row, by its latest predictions
score    one pass over the rows' own canvases and these
verify   from the row's own canvas on, or one that the policy prefers, follow the steps of the policy for as long as
         they lead to canvases of this pass; the last step leads beyond it, and its canvas is the row's next one
commit   keys and values of blocks that are complete
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from truedraft.canvas._base import OWN, CanvasRow, Draft, Fixed, Policy, Speculator
from truedraft.canvas.control import CanvasControl
from truedraft.canvas.predicting import Chooser
from truedraft.canvas.targets import CanvasTarget, Variant
from truedraft.stats import Emission, Pass


class CanvasEngine:
    """Fills the canvases of rows.

    Args:
        target: reserved for these rows.
        policy: the steps.
        speculator: proposes later canvases; None for one step per pass.
        chooser: of tokens.
        control: how many canvases to propose.
    """

    def __init__(
        self,
        target: CanvasTarget,
        policy: Policy,
        speculator: Speculator | None,
        chooser: Chooser,
        control: CanvasControl,
    ):
        self.target, self.policy, self.speculator = target, policy, speculator
        self.chooser, self.control = chooser, control
        self.rows: list[CanvasRow] = []

    def admit(self, rows: Sequence[CanvasRow]) -> None:
        """Begin rows, and read their prompts.

        Raises:
            Refused: the policy cannot fill canvases of this layout.
        """
        for row in rows:
            self.policy.begin(row, self.target.layout)
        committed = self.target.admit([row.canvas.tokens[: row.prompt] for row in rows])
        for row, count in zip(rows, committed, strict=True):
            row.committed = count
        self.rows += rows

    @property
    def running(self) -> bool:
        return bool(self.rows)

    def step(self) -> Pass:
        """One pass over all rows."""
        for row in self.rows:
            row.reach, row.causal = self.policy.reach(row), self.policy.causal(row)
        drafting = self.control.drafting()
        proposed = [self._propose(row) if drafting else [] for row in self.rows]
        possible = [
            [self.target.variant(row, draft) for draft in (OWN, *drafts)]
            for row, drafts in zip(self.rows, proposed, strict=True)
        ]
        kept = self.control.cut(self.rows, proposed, [[one.width for one in row] for row in possible])
        batches = [[OWN, *drafts[:count]] for drafts, count in zip(proposed, kept, strict=True)]
        variants = [row[: count + 1] for row, count in zip(possible, kept, strict=True)]
        logits = self.score(variants)
        emitted, reached = [], []
        for slot, (row, batch) in enumerate(zip(self.rows, batches, strict=True)):
            path = self._verify(slot, row, batch, variants[slot], logits[slot])
            emitted.append(Emission(row.index, row.emit(), len(path) - 1, len(batch) - 1))
            reached.append(path)
        self.control.observe(proposed, reached)
        for slot in reversed(range(len(self.rows))):
            if self.rows[slot].finished:
                self._release(slot)
        return Pass(max(sum(one.width for one in row) for row in variants), tuple(emitted))

    def score(self, variants: Sequence[Sequence[Variant]]) -> list[Tensor]:
        """The pass, whose time the control reads."""
        return self.target.score(variants)

    def _propose(self, row: CanvasRow) -> list[Draft]:
        """The drafts of a row; none that are finished, which have nothing to score."""
        drafts = self.speculator.propose(row, self.policy) if self.speculator else self.policy.hypotheses(row)
        return [draft for draft in drafts if not row.finishes(draft.fixed)]

    def _verify(
        self, slot: int, row: CanvasRow, batch: Sequence[Draft], variants: Sequence[Variant], logits: Tensor
    ) -> list[Fixed]:
        """Follow the steps of the policy from the row's own canvas, or from one that it prefers; what is fixed beyond
        the row's own after each.

        The row goes on from the last.
        """
        predictions = self.chooser.predictions(
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
        step = fixed - batch[last].fixed
        if row.predictions is not None and self.speculator is not None:
            self.speculator.observe(row, self.policy, row.predictions, path[0])
        row.canvas.fix(fixed)
        row.taken += [after - before for before, after in pairwise([OWN.fixed, *path])]
        row.at = row.blocks.index(variants[last].block)
        row.committed = self.target.commit(slot, last)
        row.predictions = predictions[last].after(step, 1)
        row.advance()
        return path

    def _release(self, slot: int) -> None:
        """Remove a row; the last one moves into its slot."""
        self.target.release(slot)
        self.rows[slot] = self.rows[-1]
        self.rows.pop()
