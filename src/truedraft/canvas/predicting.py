"""Predictions from logits: the token chosen at each masked position, and its confidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from truedraft.canvas._base import Predictions
from truedraft.canvas.noise import CanvasNoise

Choices = tuple[tuple[int, ...], tuple[float, ...]]


@dataclass(frozen=True)
class Chooser:
    """Chooses tokens at masked positions.

    warpers: change the logits of a position, whatever stands before it: temperature, top-k, top-p and the like.
    noise: of sampling; None for the likeliest token.
    """

    warpers: LogitsProcessorList
    noise: CanvasNoise | None = None

    def predictions(
        self, logits: Tensor, row: int, steps: Sequence[int], places: Sequence[Sequence[int]], blocks: Sequence[range]
    ) -> list[Predictions]:
        """The predictions of several canvases of a row.

        The confidence is that of the token in the model's own law, before warpers and noise, as LLaDA has it.

        Args:
            logits: (sum of n, V) fp32 at the masked positions of one canvas after another.
            row: its index, for the noise.
            steps, places, blocks: by canvas, the step, n masked positions and their block.
        """
        scores = torch.log_softmax(logits, -1)
        warped = self.warpers(None, scores) if self.warpers else scores  # type: ignore[arg-type]
        ends = list(accumulate([len(positions) for positions in places], initial=0))
        spans = [slice(*pair) for pair in pairwise(ends)]
        found, chosen = list[Predictions](), list[Choices]()
        if self.noise is None:
            likeliest = warped.argmax(-1)
            sure, tokens = scores.gather(-1, likeliest[:, None])[:, 0].tolist(), likeliest.tolist()
            chosen = [(tuple(tokens[span]), tuple(sure[span])) for span in spans]
        for i, (span, positions, step, block) in enumerate(zip(spans, places, steps, blocks, strict=True)):
            own = scores[span]
            of_canvas = own if warped is scores else warped[span]
            drawn = None
            if self.noise is not None:
                drawn = partial(self._draw, of_canvas, own, row, tuple(positions), step)
                chosen.append(drawn(range(len(positions)), 0))
            again = partial(self._again, row, tuple(positions), step)
            found.append(Predictions(tuple(positions), of_canvas, own, *chosen[i], block, drawn, again))
        return found

    def _again(self, row: int, positions: Sequence[int], step: int, scores: Tensor) -> tuple[int, ...]:
        """Tokens at the first positions by other scores."""
        own = torch.log_softmax(scores, -1)
        warped = self.warpers(None, own) if self.warpers else own  # type: ignore[arg-type]
        if self.noise is None:
            return tuple(warped.argmax(-1).tolist())
        return self._draw(warped, own, row, positions, step, range(len(own)), 0)[0]

    def _draw(
        self, warped: Tensor, scores: Tensor, row: int, positions: Sequence[int], step: int, indices: Sequence[int],
        later: int,
    ) -> Choices:  # fmt: skip
        """Tokens drawn at some of the positions with the noise of a step, and their confidence."""
        assert self.noise is not None
        if not indices:
            return (), ()
        at = list(indices)
        noise = self.noise.at(row, [positions[i] for i in at], step + later, warped.shape[-1]).to(warped.device)
        tokens = (torch.log_softmax(warped[at], -1) - noise.log()).argmax(-1)
        return tuple(tokens.tolist()), tuple(scores[at].gather(-1, tokens[:, None])[:, 0].tolist())
