"""Batches of a training: lines of similar lengths, with the features of the frozen target, computed as they are read.

A line is a pair of token lists. For a decoder it is a prompt and the response to it, which form one text; for an
encoder-decoder it is a source and the decoder's text, from its start token on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from truedraft.drafters._learned import Batch
from truedraft.runtime.tapping import LayerTaps

Line = tuple[list[int], list[int]]
Width = Callable[[Line], int]  # positions that a line has in a batch


def longer_side(line: Line) -> int:
    return max(map(len, line))


def both_sides(line: Line) -> int:
    return sum(map(len, line))


def bucketed(
    lines: Iterator[Line], tokens: int, seed: int, width: Width = longer_side, pool: int = 2048
) -> Iterator[list[Line]]:
    """Groups of lines of similar lengths, `tokens` positions each with padding, in random order.

    Args:
        lines: endless.
        tokens: positions of a group; a longer line is a group of its own.
        pool: lines that are sorted together.
    """
    rng = random.Random(seed)
    while True:
        groups = list(sorted_groups(islice(lines, pool), tokens, width))
        rng.shuffle(groups)
        yield from groups


def sorted_groups(lines: Iterable[Line], tokens: int, width: Width = longer_side) -> Iterator[list[Line]]:
    """All lines, the shortest first, in groups of `tokens` positions each with padding."""
    group: list[Line] = []
    widest = 0
    for line in sorted(lines, key=both_sides):
        widest = max(widest, width(line))
        if group and widest * (len(group) + 1) > tokens:
            yield group
            group, widest = [], width(line)
        group.append(line)
    if group:
        yield group


def shuffled(items: list[Line], seed: int, weights: Sequence[float] = ()) -> Iterator[Line]:
    """All items, endlessly, in a new random order each time.

    weights: how often each occurs in a round, on average; by default once.
    """
    rng = random.Random(seed)
    while True:
        counts = [int(weight + rng.random()) for weight in weights] or [1] * len(items)
        found = [item for item, count in zip(items, counts, strict=True) for _ in range(count)]
        yield from rng.sample(found, len(found))


def mixed(
    lines: list[Line], texts: list[Line], share: float, seed: int, weights: Sequence[float] = ()
) -> Iterator[Line]:
    """All lines, endlessly, of which a share is drawn from other texts, these too in a new random order each time."""
    rng = random.Random(seed)
    sides = shuffled(lines, seed, weights), shuffled(texts, seed)
    while True:
        yield next(sides[rng.random() < share])


def pad_to(rows: list[list[Any]], value: float) -> Tensor:
    """(rows, longest row), padded at the right."""
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


class Reader:
    """Lines -> a batch, with what a learner needs of a frozen decoder: the features of its layers.

    layers: numbered as in `Taps.hidden`.

    Raises:
        Refused: the model has no such layer, or its layers are not found.
    """

    width: Width = staticmethod(both_sides)

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]):
        self.model, self.layers = model, layers
        if layers:
            self._taps = LayerTaps(model)
            with self._taps.recording(layers):
                pass

    def __call__(self, lines: Sequence[Line]) -> Batch:
        texts, given = [prompt + response for prompt, response in lines], [len(prompt) for prompt, _ in lines]
        ids, mask = self._padded(texts)
        learnt = mask & (torch.arange(ids.shape[1], device=ids.device) >= torch.tensor(given).to(ids.device)[:, None])
        return Batch(ids, mask, learnt, self.features(ids, mask) if self.layers else {})

    @torch.no_grad()
    def features(self, ids: Tensor, mask: Tensor) -> dict[int, Tensor]:
        """Hidden states, layer -> (rows, length, H) in float32; those of padding mean nothing."""
        decoder: Any = self.model.base_model
        with self._taps.recording(self.layers) as states:
            decoder(input_ids=ids, attention_mask=mask.long(), use_cache=False)
        return {layer: states[layer].float() for layer in self.layers}

    def predicted(self, line: Line) -> list[int]:
        """The tokens of a line that are to be predicted."""
        return line[1]

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Ids and mask, (rows, longest row), padded at the right."""
        device = self.model.device
        ids = pad_sequence([torch.tensor(row, device=device) for row in rows], batch_first=True)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        return ids, torch.arange(ids.shape[1], device=device) < lengths[:, None]


class SourceReader(Reader):
    """Lines -> a batch, with the encoder's output of a frozen encoder-decoder."""

    width: Width = staticmethod(longer_side)

    def __call__(self, lines: Sequence[Line]) -> Batch:
        given, source_mask = self._padded([source for source, _ in lines])
        ids, mask = self._padded([text for _, text in lines])
        with torch.no_grad():
            encoder: Any = self.model.get_encoder()
            states = encoder(input_ids=given, attention_mask=source_mask.long()).last_hidden_state
        learnt = mask.clone()
        learnt[:, 0] = False
        return Batch(ids, mask, learnt, {}, (states.float(), source_mask))

    def predicted(self, line: Line) -> list[int]:
        return line[1][1:]


class Feed:
    """Endless batches of lines, in an order that depends on the seed alone.

    drawn: batches so far. tokens: tokens to predict in them.

    Args:
        texts, share: other lines, and the share of lines that is drawn from them.
        weights: of `lines`, as in `shuffled`.
    """

    def __init__(
        self, lines: list[Line], tokens: int, seed: int, read: Reader, drawn: int = 0, texts: Sequence[Line] = (),
        share: float = 0.0, weights: Sequence[float] = (),
    ):  # fmt: skip
        order = mixed(lines, [*texts], share, seed, weights) if texts else shuffled(lines, seed, weights)
        self._groups = bucketed(order, tokens, seed, read.width)
        self._read, self.drawn, self.tokens = read, 0, 0
        for _ in range(drawn):
            self._next()

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Batch:
        return self._read(self._next())

    def _next(self) -> list[Line]:
        group = next(self._groups)
        self.drawn += 1
        self.tokens += sum(len(self._read.predicted(line)) for line in group)
        return group
