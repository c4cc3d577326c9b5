"""Attention of a part of a prompt to all positions before it, at the rate and in the memory of causal attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Mask(NamedTuple):
    """A mask, the first position that any query sees under it, and whether each sees all positions up to its own."""

    mask: Tensor
    first: int
    causal: bool


class PartAttention(TorchFunctionMode):
    """Within the block, this thread's calls of torch's attention on the CPU read only the positions that a query sees.

    torch knows causal attention of as many queries as keys; of fewer, models mask it. The keys before the queries' own
    need no mask, and their own are causal: both are attended to alone, and joined by the logarithms of the sums of
    their softmax. Under other boolean masks, those of windows, the keys before the first that is seen are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._masks: dict[tuple[int, torch.Size, int], _Mask] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        mask = given.get("attn_mask")
        if (
            func is not torch.nn.functional.scaled_dot_product_attention or len(args) != 3 or mask is None
            or mask.device.type != "cpu" or mask.dtype != torch.bool or mask.shape[:-2] != (1, 1)
            or mask.shape[-2:] != (args[0].shape[-2], args[1].shape[-2])
        ):  # fmt: skip
            return func(*args, **given)
        (query, key, value), found = args, self._read(mask)
        plain = all(one.stride(-1) == 1 and one.dtype != torch.float64 for one in args)
        if plain and found.causal and key.shape == value.shape and query.shape[:2] == key.shape[:2]:
            return _joined(query, key, value, given.get("scale"))
        key, value, mask = key[..., found.first :, :], value[..., found.first :, :], mask[..., found.first :]
        return func(query, key, value, **{**given, "attn_mask": mask})

    def _read(self, mask: Tensor) -> _Mask:
        place = mask.data_ptr(), mask.shape, mask._version
        if place not in self._masks:
            queries, keys = mask.shape[-2:]
            own = torch.ones(queries, queries, dtype=torch.bool).tril_()
            causal = queries <= keys and torch.equal(mask[0, 0, :, keys - queries :], own)
            causal = causal and bool(mask[..., : keys - queries].all())
            first = 0 if causal else int(mask.any(-2).int().argmax())
            self._masks[place] = _Mask(mask, first, causal)
        return self._masks[place]


def _joined(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Causal attention of the last positions, (1, heads, queries, size), to all, (1, heads, keys, size)."""
    attend: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    before = key.shape[-2] - query.shape[-2]
    own, of_own = attend(query, key[..., before:, :], value[..., before:, :], is_causal=True, scale=scale)
    if not before:
        return own
    other, of_other = attend(query, key[..., :before, :], value[..., :before, :], scale=scale)
    weight = (of_other - of_own).sigmoid()[..., None]
    return own.float().lerp_(other.float(), weight).to(own.dtype)
