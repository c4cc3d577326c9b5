"""compressed-tensors, as LLM Compressor saves it: weights alone, in integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from truedraft.runtime.checkpoints._base import Folder, Integers, unpacked

BITS = (2, 4, 8)
STRATEGIES = ("tensor", "channel", "group")
PRESETS = ("W8A16", "W4A16", "W4A16_ASYM")  # schemes that are given by a name
LAYOUTS = ("pack-quantized", "int-quantized", "naive-quantized", "mixed-precision", "dense")


class CompressedTensors(Folder):
    mark = "weight_scale"
    optional = ("weight_packed", "weight", "weight_zero_point", "weight_shape", "weight_g_idx")

    def check(self) -> None:
        remedy = "give one whose weights alone are quantised, to integers (W4A16 or W8A16)"
        if (layout := self.settings.get("format")) not in LAYOUTS:
            raise self.refused(f"compressed-tensors in the layout {layout!r}", remedy)
        for name, scheme in self.settings.get("config_groups", {}).items():
            if isinstance(scheme, Mapping):
                found = _unread(scheme)
            else:
                found = None if name.upper() in PRESETS else f"the scheme {name}"
            if found is not None:
                raise self.refused(f"compressed-tensors with {found}", remedy)
        if self.settings.get("kv_cache_scheme"):
            raise self.refused("compressed-tensors with a quantised cache", remedy)
        if (self.settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise self.refused("compressed-tensors with sparse weights", remedy)
        if self.settings.get("transform_config"):
            raise self.refused("compressed-tensors with transformed activations", remedy)

    def integers(self, part: Callable[[str], Tensor | None]) -> Integers:
        scales, packed, values, zeros, shape, group_of = map(part, (self.mark, *self.optional))
        assert scales is not None
        if packed is not None:
            assert shape is not None
            out, width = shape.tolist()
            bits = 32 * packed.shape[1] // width
            values = _signed(packed, bits)[:, :width]
            if zeros is not None and zeros.dtype == torch.int32:
                zeros = _signed(zeros.T, bits)[:, :out].T
        assert values is not None
        scales = scales.float().view(len(scales), -1).expand(len(values), -1)
        offsets = None
        if zeros is not None and zeros.any():
            offsets = -zeros.float().view(len(zeros), -1).expand(len(values), -1) * scales
        ordered = group_of is not None and int(group_of.min()) >= 0
        return Integers(values, scales, offsets, group_of.long() if group_of is not None and ordered else None)


def _unread(scheme: Mapping[str, Any]) -> str | None:
    """What cannot be read of a scheme."""
    weights = scheme.get("weights") or {}
    if scheme.get("input_activations") or scheme.get("output_activations"):
        return "quantised activations"
    if weights.get("type") != "int" or weights.get("num_bits") not in BITS:
        return f"weights of {weights.get('num_bits')} bits ({weights.get('type')})"
    if weights.get("strategy") not in STRATEGIES:
        return f"scales by {weights.get('strategy')}"
    return None


def _signed(words: Tensor, bits: int) -> Tensor:
    return (unpacked(words, bits) - (1 << (bits - 1))).view(torch.int8)
