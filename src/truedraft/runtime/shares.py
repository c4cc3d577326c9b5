"""What a pass under a view costs: the bytes of weights that it reads, over those of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from truedraft.runtime.experts import shares
from truedraft.runtime.modules import ATTENTION, FEED_FORWARD, feed_forward_linears
from truedraft.runtime.skipping import module_named
from truedraft.runtime.tapping import blocks_of
from truedraft.runtime.weights import stored
from truedraft.views._base import Reduction
from truedraft.views._neurons import Neurons


def weight_share(model: PreTrainedModel, layers: int, reduction: Reduction) -> float:
    """The share of its weights that a model reads under a view, where a pass over one token reads all weights but those
    of embeddings, of experts those that the token is given, and what nodes skip by themselves as far as it is expected.

    layers: of the decoder.
    """
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embeddings.weight
    whole, lighter = (
        _Bytes(bits, shares(model, experts)) for bits, experts in ((0, None), (reduction.bits, reduction.experts))
    )
    blocks = blocks_of(model, layers) or []
    left_out = sum(
        lighter(part)
        for i, block in enumerate(blocks)
        for part in _left_out(block, i in reduction.attention, i in reduction.feed_forward)
    )
    if reduction.sparing:
        left_out += reduction.sparing.share * sum(
            lighter(part)
            for i, block in enumerate(blocks)
            if i in reduction.spared
            for part in _left_out(block, False, True)
        )
    if reduction.neurons is not None:
        run = (i for i in range(len(blocks)) if i not in reduction.feed_forward)
        left_out += sum(_not_chosen(blocks[i], reduction.neurons, i, lighter) for i in run)
    if reduction.output_head and head is not None:
        left_out += lighter(head)
    of_all, of_view = (of(model) - (0 if tied else of(embeddings)) for of in (whole, lighter))
    return (of_view - left_out) / of_all


def _left_out(block: nn.Module, attention: bool, feed_forward: bool) -> list[nn.Module]:
    if attention and feed_forward:
        return [block]
    halves = ((attention, ATTENTION), (feed_forward, FEED_FORWARD))
    found = [module_named(block, pattern) for skipped, pattern in halves if skipped]
    return [module for module in found if module is not None]


def _not_chosen(block: nn.Module, neurons: Neurons, layer: int, lighter: _Bytes) -> float:
    """Bytes of neurons of a layer that a pass over one node does not run, less those of their predictor."""
    part = 1 - neurons.count(layer) / neurons.predictors.groups[layer]
    predictor = _Bytes(0, {})(neurons.predictors.layers[layer])
    return part * sum(map(lighter, feed_forward_linears(block))) - predictor


@dataclass(frozen=True)
class _Bytes:
    """The bytes of a module's weights that a pass reads.

    bits: those that numbers of matrices have at most, or 0 for as many as they have.
    shares: of weights that are not read whole, by id.
    """

    bits: int
    shares: Mapping[int, float]

    def __call__(self, module: nn.Module) -> float:
        return sum(self._of(weight) * self.shares.get(id(weight), 1.0) for weight in module.parameters())

    def _of(self, weight: nn.Parameter) -> int:
        with_scales = self.bits + (self.bits == 4)  # one of fp32 for 32 numbers
        whole = stored(weight)
        return min(whole, weight.numel() * with_scales // 8) if self.bits and weight.ndim > 1 else whole
