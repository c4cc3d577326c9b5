"""What a pass under a view costs: the bytes of weights that it reads, over those of the whole model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from truedraft.runtime.modules import ATTENTION, FEED_FORWARD, feed_forward_linears
from truedraft.runtime.skipping import module_named
from truedraft.runtime.tapping import blocks_of
from truedraft.runtime.weights import stored
from truedraft.views._base import Reduction
from truedraft.views._neurons import Neurons


def weight_share(model: PreTrainedModel, layers: int, reduction: Reduction) -> float:
    """The share of its weights that a model reads under a view, where each pass reads all weights but those of
    embeddings; mixtures of experts count whole.

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
    if reduction.neurons is not None:
        run = (i for i in range(len(blocks)) if i not in reduction.feed_forward)
        left_out += sum(_not_chosen(blocks[i], reduction.neurons, i, reduction.bits) for i in run)
    if reduction.output_head and head is not None:
        left_out += _bytes(head.parameters(), reduction.bits)
    return (lighter - left_out) / whole


def _left_out(block: nn.Module, attention: bool, feed_forward: bool) -> list[nn.Module]:
    if attention and feed_forward:
        return [block]
    halves = ((attention, ATTENTION), (feed_forward, FEED_FORWARD))
    found = [module_named(block, pattern) for skipped, pattern in halves if skipped]
    return [module for module in found if module is not None]


def _not_chosen(block: nn.Module, neurons: Neurons, layer: int, bits: int) -> float:
    """Bytes of neurons of a layer that a pass over one node does not run, less those of their predictor."""
    predictor = neurons.predictors.layers[layer]
    part = 1 - neurons.count(layer) / neurons.predictors.groups[layer]
    weights = (p for linear in feed_forward_linears(block) for p in linear.parameters())
    return part * _bytes(weights, bits) - _bytes(predictor.parameters(), 0)


def _bytes(parameters: Iterable[nn.Parameter], bits: int) -> int:
    """Bytes of parameters; bits: those that numbers of matrices have at most, or 0 for as many as they have."""
    with_scales = bits + (bits == 4)  # one of fp32 for 32 numbers
    return sum(min(stored(p), p.numel() * with_scales // 8) if bits and p.ndim > 1 else stored(p) for p in parameters)
