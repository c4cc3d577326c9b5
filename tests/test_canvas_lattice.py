"""The speculator `lattice`: what it looks up, what it learns, and that its drafts are canvases that steps may reach."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import torch

import truedraft
from test_canvas import model_of, plain
from truedraft.canvas._base import NOTHING, Canvas, CanvasRow, Draft, Predictions
from truedraft.canvas.layout import Layout
from truedraft.canvas.policies.low_confidence import LowConfidence
from truedraft.canvas.speculators.lattice import Known, Lattice

MASK, BLOCK, SIZE = 0, 4, 12


def row_of(text: list[int], masked: int) -> CanvasRow:
    """A row whose last `masked` tokens are masks, in blocks behind a prompt of whole blocks."""
    first = len(text) // BLOCK * BLOCK
    blocks = [range(start, start + BLOCK) for start in range(first, len(text) + masked, BLOCK)]
    canvas = Canvas.behind(text, MASK, blocks[-1].stop)
    return CanvasRow(0, canvas, len(text), blocks, frozenset(), masked)


def predictions(row: CanvasRow, logits: torch.Tensor) -> Predictions:
    """Those of the masks of the row's block, greedily."""
    positions = tuple(row.canvas.masked(row.block))
    scores = torch.log_softmax(logits, -1)
    best = scores.max(-1)
    return Predictions(positions, scores, scores, tuple(best.indices.tolist()), tuple(best.values.tolist()), row.block)


def test_copies_follow_the_longest_match_of_the_known_tokens_before_a_mask() -> None:
    known = Known()
    text = [1, 2, 3, 4, 5, 6, 2, 3]
    known.read(text, 8)
    masks = [8, 9, 10, 12]  # position 11 is known, and stands alone
    assert known.copies([*text, 0, 0, 0, 5, 0], masks) == {8: (4, 2, 0), 9: (5, 2, 1), 10: (6, 2, 2), 12: (6, 1, 0)}
    assert known.copies([*text, 4, 0, 0, 0, 0], [9, 10, 11, 12]) == {
        9: (5, 3, 0), 10: (6, 3, 1), 11: (2, 3, 2), 12: (3, 3, 3),
    }  # fmt: skip


def test_drafts_are_distinct_reachable_and_by_falling_chance() -> None:
    pick = torch.Generator().manual_seed(1)
    for _ in range(20):
        row = row_of([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], 6)
        row.predictions = predictions(row, torch.randn(2, SIZE, generator=pick))
        drafts = Lattice(canvases=6).propose(row, LowConfidence(), 0.0)
        assert len({draft.fixed for draft in drafts}) == len(drafts) <= 6
        assert all(a.chance >= b.chance for a, b in pairwise(drafts))
        assert sum(draft.chance for draft in drafts if draft.steps == 1) < 1
        for draft in drafts:
            places = [position for position, _ in draft.fixed]
            assert len(set(places)) == len(places) == draft.steps
            assert not any(row.canvas.known[place] for place in places)


def test_it_learns_which_steps_a_model_takes() -> None:
    """Of two masks the second one is always fixed, with the token of the copy, whatever the model predicts there."""
    noise, pick = torch.Generator().manual_seed(2), random.Random(3)
    speculator: Any = Lattice()
    policy, chances = LowConfidence(), []
    for _ in range(300):
        text = pick.sample(range(1, SIZE), 8)
        row = row_of([*text, text[0], text[1]], 2)
        row.predictions = predictions(row, torch.randn(2, SIZE, generator=noise))
        step = frozenset({(11, text[3])})
        drafts = speculator.propose(row, policy, 0.0)
        chances.append(max((draft.chance for draft in drafts if draft.fixed == step), default=0.0))
        speculator.observe(row, policy, drafts, [NOTHING | step])
    assert sum(chances[:20]) / 20 < 0.5 and sum(chances[-20:]) / 20 > 0.9


class Recorded(Lattice):
    """Records, at the start of each block, what it proposes from; and the drafts of the pass before."""

    def propose(self, row: CanvasRow, policy: Any, least: float) -> list[Draft]:
        reached = [(text, fixed) for text, fixed in self.earlier if not row.canvas.masked(range(row.block.start))]
        if row.predictions is not None and row.canvas.masked(row.block) == [*row.block] and reached:
            self.found.append((list(row.canvas.tokens), row.predictions, row.block, reached))
        drafts = super().propose(row, policy, least)
        self.earlier = [(row.canvas.after(draft.fixed), draft.fixed) for draft in drafts]
        return drafts


def test_a_block_is_drafted_by_the_predictions_of_the_canvas_most_like_the_rows() -> None:
    """Of those that the pass before scored, against plain forwards; the row's own filled the block before."""
    model, layout = model_of(), Layout(MASK, "blocks", BLOCK)
    speculator = Recorded(canvases=8)
    speculator.earlier, speculator.found = [], []
    fast: Any = truedraft.accelerate(model, layout=layout, draft=speculator, control="fixed")
    for seed in range(6):
        prompt = random.Random(seed).choices(range(1, 90), k=5)
        fast.generate(torch.tensor([prompt]), max_new_tokens=23, suppress_tokens=[MASK])
    assert len(speculator.found) >= 3
    for tokens, made, block, reached in speculator.found:
        likeness = {}
        for canvas, fixed in reached:
            if canvas.masked(range(block.start)) or not canvas.masked(block):
                continue
            logits = plain(model, canvas.tokens[: block.stop], layout)
            scores = torch.log_softmax(logits, -1)[list(made.positions)]
            same = torch.allclose(scores.exp(), made.scores.exp(), atol=1e-5)
            likeness[fixed] = sum(tokens[place] == token for place, token in fixed), same
        most = max(count for count, _ in likeness.values())
        assert any(same for count, same in likeness.values() if count == most)
