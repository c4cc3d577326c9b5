"""Canvases of noise over the vocabulary (`diffusion_gemma`): a step draws anew whatever it does not accept.

A row's state before a step is its canvas, the predictions of the step before, which the model reads beside it (self-
conditioning), and the steps left. With logits z of a pass, exponential noise e and uniform tokens u:

    z' = z / temperature(steps left)
    accepted = the positions of lowest entropy, as many as the bound allows
    next canvas = argmax(softmax(z') / e) where accepted, u elsewhere
    next condition = z' in the dtype of the embeddings
    done when argmax z' is that of the steps before and the mean entropy is small; argmax z' is the text

A canvas of a later step can be drafted, for e and u may be drawn ahead. Its condition cannot: it is all logits of the
pass before, so that nothing exact can be scored before that pass.

The entropy-bound sampler is that of "Accelerated Sampling from Masked Diffusion Models via Entropy
Bounded Unmasking", arXiv 2505.24857 (2025).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


@dataclass(frozen=True)
class Settings:
    """What a call asks for.

    steps: most steps of a canvas.
    bound: of the entropy of accepted positions, in nats, the largest of them left out.
    coldest, hottest: temperatures with no steps left and with all.
    stable: steps for which the likeliest tokens must not have changed.
    confident: mean entropy below which a canvas may be done.
    canvases: most of them. longest: length of a text, with its padding, from which it has no further canvas.
    ends: tokens that end a text. pad: behind its end; None for what the model says there.
    """

    steps: int
    bound: float
    coldest: float
    hottest: float
    stable: int
    confident: float
    canvases: int
    longest: int | None = None
    ends: tuple[int, ...] = ()
    pad: int | None = None

    def temperature(self, left: int, device: torch.device) -> Tensor:
        """In float32, as the model's own code has it."""
        share = torch.tensor(left, dtype=torch.int32, device=device) / self.steps
        return self.coldest + (self.hottest - self.coldest) * share

    def accepted(self, entropy: Tensor) -> Tensor:
        """(n, C) bool: the positions that a step accepts, from their entropies."""
        ordered, order = entropy.sort(-1)
        return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, ordered.cumsum(-1) - ordered <= self.bound)


@dataclass(frozen=True)
class Step:
    """What a pass over canvases led to.

    rows: that it read.
    texts: by row whose canvas is complete now, its new tokens up to the first end, included; none behind an end.
    likeliest: (B, C) the likeliest tokens of all rows, complete or not.
    last: whether all canvases are complete.
    """

    rows: list[int]
    texts: dict[int, tuple[int, ...]]
    likeliest: Tensor
    last: bool


class Denoiser:
    """Texts of canvases, with the noise of the model's own `generate`, drawn in its order.

    model: of `transformers`, whose encoder writes keys and values and whose decoder reads them.
    ids: (B, L) prompts, then texts. mask: (B, L) bool, False at padding.
    generator: of the noise; None for torch's own.
    together: all rows are in every pass, as in the model's own `generate`: the same bits. Else rows leave when their
        canvas is complete.
    """

    def __init__(
        self, model: Any, settings: Settings, ids: Tensor, mask: Tensor, generator: torch.Generator | None = None,
        together: bool = False,
    ):  # fmt: skip
        self.model, self.settings, self.generator, self.together = model, settings, generator, together
        self.ids, self.mask, self.unread = ids, mask, ids
        self.ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        self.length, self.vocabulary = int(model.config.canvas_length), int(model.config.text_config.vocab_size)
        self.cache = DynamicCache(config=model.config.get_text_config(decoder=True))

    @property
    def device(self) -> torch.device:
        return self.ids.device

    def steps(self) -> Iterator[Step]:
        """All passes over canvases; `ids` have a canvas more after each last one."""
        settings = self.settings
        for _ in range(settings.canvases):
            self.read()
            for step in self._canvas():
                if step.last:
                    self._append(step.likeliest.clone())
                yield step
            if self.ended.all() or (settings.longest is not None and self.ids.shape[1] >= settings.longest):
                return

    def read(self) -> None:
        """Write keys and values of the text behind what was read."""
        encoder, (rows, width) = self.model.model.encoder, self.unread.shape
        positions = self._positions(self.mask.shape[1] - width, width)
        shape = torch.empty(rows, width, 0, dtype=self.model.dtype, device=self.device)
        masks = encoder.create_masks_for_generate(
            config=self.model.config, inputs_embeds=shape, attention_mask=self.mask, past_key_values=self.cache,
            position_ids=positions,
        )  # fmt: skip
        encoder(input_ids=self.unread, attention_mask=masks, past_key_values=self.cache, position_ids=positions)

    def _append(self, canvas: Tensor) -> None:
        """Complete canvases become text, padded behind its end."""
        ends = torch.isin(canvas, torch.tensor(self.settings.ends, dtype=canvas.dtype, device=self.device))
        if self.settings.pad is not None:
            canvas[self.ended] = self.settings.pad
            canvas[ends.cumsum(-1) - ends.int() > 0] = self.settings.pad
        self.ended = self.ended | ends.any(-1)
        self.ids, self.unread = torch.cat([self.ids, canvas], 1), canvas
        self.mask = torch.nn.functional.pad(self.mask, (0, self.length), value=True)

    def _canvas(self) -> Iterator[Step]:
        """The passes over one canvas of each row."""
        rows, settings = len(self.ids), self.settings
        canvas = likeliest = self._uniform()
        history = canvas.new_full((settings.stable, *canvas.shape), -1)
        done, at = torch.zeros_like(self.ended), torch.arange(rows, device=self.device)
        condition, cache = None, self.cache
        for left in range(settings.steps, 0, -1):
            scaled = self.score(canvas[at], condition, cache, at).div_(settings.temperature(left, self.device))
            entropy, running = entropy_of(scaled), ~done[at]
            drawn, now = self._drawn(scaled, at, settings.accepted(entropy)), at[running]
            canvas = canvas.index_copy(0, now, drawn[now])
            likeliest = likeliest.index_copy(0, now, scaled.argmax(-1)[running])
            same = (history[:, now] == likeliest[now]).all(-1).all(0)
            history = torch.cat([history, likeliest[None]])[1:]
            done[now] = same & (entropy[running].mean(-1) < settings.confident)
            last = bool(done.all()) or left == 1
            yield Step(at.tolist(), self._texts(likeliest, now if last else now[done[now]]), likeliest, last)
            if last:
                return
            condition = self._condition(scaled, condition, running)
            if not self.together and done[at].any():
                staying = ~done[at]
                at, condition = at[staying], condition[staying]
                cache = _rows_of(self.cache, at)

    def _condition(self, scaled: Tensor, before: Tensor | None, running: Tensor) -> Tensor:
        """(n, C, V) what the next pass reads beside its canvases: logits of this one, of complete canvases those that
        completed them."""
        condition = scaled.to(self.model.get_input_embeddings().weight.dtype)
        if before is not None and not running.all():
            condition[~running] = before[~running]
        return condition

    def _texts(self, canvas: Tensor, complete: Tensor) -> dict[int, tuple[int, ...]]:
        texts = {}
        for row in complete.tolist():
            tokens = [] if self.ended[row] else canvas[row].tolist()
            end = next((i for i, token in enumerate(tokens) if token in self.settings.ends), len(tokens))
            texts[row] = tuple(tokens[: end + 1])
        return texts

    def score(self, canvas: Tensor, condition: Tensor | None, cache: Any, rows: Tensor) -> Tensor:
        """(n, C, V) fp32 logits of one pass over the canvases of some rows."""
        seen = torch.nn.functional.pad(self.mask[rows], (0, self.length), value=True)
        return self.model(
            decoder_input_ids=canvas, self_conditioning_logits=condition, past_key_values=cache,
            decoder_attention_mask=seen, decoder_position_ids=self._positions(self.mask.shape[1], self.length),
        ).logits  # fmt: skip

    def _positions(self, first: int, count: int) -> Tensor:
        return torch.arange(first, first + count, dtype=torch.int32, device=self.device)[None]

    def _uniform(self) -> Tensor:
        """(B, C) tokens."""
        size = len(self.ids), self.length
        return torch.randint(0, self.vocabulary, size, generator=self.generator, device=self.device)

    def _drawn(self, scaled: Tensor, rows: Tensor, accepted: Tensor) -> Tensor:
        """(B, C) the canvases after a step of some rows; those of others have no meaning.

        Noise is drawn for all rows, whether they are in the pass or not, in the shape that `torch.multinomial` draws:
        what follows does not depend on when rows leave.
        """
        noise = torch.empty(len(self.ids), *scaled.shape[1:], device=self.device).exponential_(generator=self.generator)
        after = self._uniform()
        row, place = accepted.nonzero(as_tuple=True)
        probs = torch.softmax(scaled[row, place], -1, dtype=torch.float32)
        after[rows[row], place] = (probs / noise[rows[row], place]).argmax(-1)
        return after


def entropy_of(logits: Tensor) -> Tensor:
    """(..., V) -> (...) in nats, rounded as by `torch.distributions.Categorical`."""
    scores = logits - logits.logsumexp(-1, keepdim=True)
    probs = torch.softmax(scores, -1)
    return -scores.clamp_min_(torch.finfo(scores.dtype).min).mul_(probs).sum(-1)


def _rows_of(cache: DynamicCache, rows: Tensor) -> DynamicCache:
    """The keys and values of some rows, to be read."""
    part = copy.copy(cache)
    part.layers = [copy.copy(layer) for layer in cache.layers]
    part.batch_select_indices(rows)
    return part
