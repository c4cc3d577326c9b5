"""Reference logits of a model in higher precision."""

from __future__ import annotations

import copy
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.targets.kinds import reads_sources

FLOATS = (torch.float64, torch.float32)


class Precise:
    """A copy of a model in higher precision, where that is possible; else the model itself.

    Attributes:
        dtype: name of the dtype of its logits.
    """

    def __init__(self, model: PreTrainedModel):
        self.model: Any = model
        self.dtype = str(model.dtype).removeprefix("torch.")
        for dtype in FLOATS:
            if dtype.itemsize > model.dtype.itemsize and (copied := _raised(model, dtype)) is not None:
                self.model, self.dtype = copied, str(dtype).removeprefix("torch.")
                return

    @torch.no_grad()
    def __call__(self, ids: Tensor, first: int, source: Tensor | None = None) -> Tensor:
        """(n, V) logits at the positions from `first` on, by one plain forward without a cache.

        ids: (length,). source: (length,), of an encoder-decoder.
        """
        given = {"input_ids": ids} if source is None else {"input_ids": source, "decoder_input_ids": ids}
        inputs = {name: t[None].to(self.model.device) for name, t in given.items()}
        return self.model(**inputs, use_cache=False).logits[0, first:].double().cpu()


def _raised(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel | None:
    """A copy in `dtype`; None where it does not fit in memory, is quantised, or torch cannot compute it."""
    need = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    quantised = any(type(p.data) is not Tensor for p in model.parameters())
    packed = any(p.dtype not in (torch.float16, torch.bfloat16, *FLOATS) for p in model.parameters())
    if quantised or packed or need > psutil.virtual_memory().available / 2:
        return None
    copied: Any = copy.deepcopy(model)
    copied.to("cpu", dtype)
    names = ("input_ids", "decoder_input_ids") if reads_sources(model.config) else ("input_ids",)
    try:
        copied(**dict.fromkeys(names, torch.zeros(1, 2, dtype=torch.long)), use_cache=False)
    except RuntimeError:
        return None
    return copied
