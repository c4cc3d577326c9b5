"""Step-by-step decoding, plainly: one forward of the model over the whole text per step, one row at a time.

The text that a guarantee names. Written without the caches, the batches and the verification of the canvas loop, which
is compared with it by tests and by the audit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StopStringCriteria

from truedraft.canvas._base import Canvas, CanvasRow, Policy
from truedraft.canvas.layout import Layout
from truedraft.canvas.predicting import Chooser

Scorer = Callable[[Sequence[int], Layout], Tensor]  # ids of a text -> (length, V) logits of a plain forward


@torch.no_grad()
def step_by_step(
    scorer: Scorer, layout: Layout, prompt: Sequence[int], new: int, policy: Policy, chooser: Chooser,
    ends: frozenset[int] = frozenset(), index: int = 0, stops: Sequence[StopStringCriteria] = (),
) -> CanvasRow:  # fmt: skip
    """A prompt as a row that has ended: `text` are its new tokens up to the end, included.

    Args:
        new: most new tokens.
        index: of the row, for its noise.
        stops: criteria of stop strings.
    """
    blocks = layout.blocks(len(prompt), new)
    row = CanvasRow(index, Canvas.behind(prompt, layout.mask, blocks[-1].stop), len(prompt), blocks, ends, new, stops)
    policy.begin(row, layout)
    while not row.finished:
        row.reach = policy.reach(row)
        span = row.span(row.block)
        places = row.canvas.masked(span)
        text = row.canvas.tokens if layout.attention == "whole" else row.canvas.tokens[: span.stop]
        logits = scorer(text, layout)[[place - layout.shifted for place in places]].float()
        [predictions] = chooser.predictions(logits, index, [row.step], [places], [row.block])
        row.taken.append(policy.choose(predictions, row))
        row.canvas.fix(row.taken[-1])
        row.advance()
        row.emit()
    return row


def attended(length: int, layout: Layout) -> Tensor:
    """(length, length) bool: what each position of a text reads."""
    if layout.attention == "whole":
        return torch.ones(length, length, dtype=torch.bool)
    block = torch.arange(length) // layout.block
    return block[:, None] >= block
