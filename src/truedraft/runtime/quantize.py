"""Weight-only quantisation by torchao: the quantised model is then the target, and exactness is relative to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from truedraft.errors import Refused
from truedraft.runtime import QUANTIZED

GROUP = 32  # weights of a row that share a scale, for int4 (torchao's own default for it)


def quantize(model: PreTrainedModel, kind: str) -> None:
    """Quantise the linear layers of a model in place, so that `model.generate` is the quantised model's.

    int8 keeps a byte per weight and a scale per row. int4 keeps values of four bits with a scale for every 32 weights;
    torchao keeps them in a byte each on a CPU, so it saves no memory over int8 there.

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


def _foreign(parameter: nn.Parameter) -> bool:
    return type(parameter.data) is not torch.Tensor
