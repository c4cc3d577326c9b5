"""Weight-only quantisation by torchao: the quantised model is then the target, and exactness is relative to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from truedraft.errors import Refused
from truedraft.runtime import QUANTIZED
from truedraft.runtime.panels import NIBBLES
from truedraft.runtime.weights import integers

GROUP = 32  # weights of a row that share a scale, for int4 (torchao's own default for it)


def quantize(model: PreTrainedModel, kind: str) -> None:
    """Quantise the linear layers of a model in place, so that `model.generate` is the quantised model's.

    int8 keeps a byte per weight and a scale per row. int4 keeps values of four bits with a scale for every 32 weights;
    on a CPU two of them share a byte.

    Args:
        kind: "int8" or "int4".

    Raises:
        Refused: an unknown kind, torchao is not installed, or the model is quantised already.
    """
    if kind not in QUANTIZED:
        raise Refused(f"quantize={kind!r}: choose one of {', '.join(QUANTIZED)}")
    if getattr(model, "quantization_method", None) is not None or any(map(_foreign, model.parameters())):
        raise Refused(f"quantize={kind!r}: the model is quantised already")
    try:
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_
    except ImportError as e:
        raise Refused(f"quantize={kind!r} needs torchao: pip install 'truedraft[quantize]'") from e
    widths = [m.in_features for m in model.modules() if isinstance(m, nn.Linear)]
    if kind == "int4" and (odd := [w for w in widths if w % GROUP]):
        raise Refused(f"quantize='int4' shares scales by groups of {GROUP}, and a layer reads {odd[0]} numbers")
    config: Any = (
        Int8WeightOnlyConfig()
        if kind == "int8"
        else IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP))  # type: ignore[attr-defined]
    )
    quantize_(model, config)
    if model.device.type == "cpu":
        _pack(model)


def _pack(model: nn.Module) -> None:
    """Keep torchao's integers in the order in which the compiled pass reads them, as few bits as they have."""
    from truedraft.runtime.packed import PackedTensor

    for layer in model.modules():
        if isinstance(layer, nn.Linear) and _foreign(layer.weight) and layer.in_features % NIBBLES == 0:
            values, scales = integers(layer.weight)
            packed = PackedTensor.of_integers(values, scales.view(len(scales), -1), dtype=layer.weight.dtype)
            layer.weight = nn.Parameter(packed, requires_grad=False)


def _foreign(parameter: Tensor) -> bool:
    return type(parameter.data) is not torch.Tensor
