"""What a pass under a view costs: the bytes of weights that it reads, over those of the whole model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from truedraft.runtime.skipping import ATTENTION, FEED_FORWARD, module_named
from truedraft.runtime.tapping import blocks_of
from truedraft.runtime.weights import stored
from truedraft.views._base import Reduction


def weight_share(model: PreTrainedModel, layers: int, reduction: Reduction) -> float:
    """The share of its weights that a model reads under a view, where each pass reads all weights but those of
    embeddings; mixtures of experts count whole, and what nodes skip by themselves as far as it is expected.

    layers: of the decoder.
    """
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embeddings.weight
    whole, lighter = (
        _bytes(model.parameters(), bits) - (0 if tied else _bytes(embeddings.parameters(), bits))
        for bits in (0, reduction.bits)
    )
    blocks = blocks_of(model, layers) or []
    left_out: float = sum(
        _bytes(part.parameters(), reduction.bits)
        for i, block in enumerate(blocks)
        for part in _left_out(block, i in reduction.attention, i in reduction.feed_forward)
    )
    if reduction.sparing:
        left_out += reduction.sparing.share * sum(
            _bytes(part.parameters(), reduction.bits)
            for i, block in enumerate(blocks)
            if i in reduction.spared
            for part in _left_out(block, False, True)
        )
    if reduction.output_head and head is not None:
        left_out += _bytes(head.parameters(), reduction.bits)
    return (lighter - left_out) / whole


def _left_out(block: nn.Module, attention: bool, feed_forward: bool) -> list[nn.Module]:
    if attention and feed_forward:
        return [block]
    halves = ((attention, ATTENTION), (feed_forward, FEED_FORWARD))
    found = [module_named(block, pattern) for skipped, pattern in halves if skipped]
    return [module for module in found if module is not None]


def _bytes(parameters: Iterable[nn.Parameter], bits: int) -> int:
    """Bytes of parameters; bits: those that numbers of matrices have at most, or 0 for as many as they have."""
    with_scales = bits + (bits == 4)  # one of fp32 for 32 numbers
    return sum(min(stored(p), p.numel() * with_scales // 8) if bits and p.ndim > 1 else stored(p) for p in parameters)
