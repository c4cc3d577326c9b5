"""Which models can read a part of their KV cache, in which entries are not at the places of their positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from truedraft.caches.rows import RowCache, RowLayer
from truedraft.errors import Refused
from truedraft.runtime.native import Op, OpKind
from truedraft.runtime.rounded_entries import RoundedEntries
from truedraft.runtime.tapping import one_token
from truedraft.views._base import Reduction, Rounded


def fitted(model: Any, reduction: Reduction, by_place: bool, window: int | None, readable: bool = False) -> Reduction:
    """A reduction with as many recent positions at most as all layers attend to, because no window is applied to chosen
    entries.

    Args:
        by_place: whether attention depends on the places of keys, other than by a window.
        window: the fewest recent positions that layers attend to; None where all attend to everything.
        readable: whether there are layers whose entries can be read in fewer bits.

    Raises:
        Refused: entries are chosen, and attention depends on their places; or by attention, and there are no keys.
    """
    entries, name = reduction.entries, type(model).__name__
    if entries is None:
        return reduction
    latents = getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None)
    if isinstance(entries, Rounded):
        if latents:
            raise Refused(f"{name} cannot read its KV cache in fewer bits: it keeps latents, and no keys")
        if not readable:
            raise Refused(
                f"{name} cannot read its KV cache in fewer bits: all layers attend to windows, or heads are too wide"
            )
        return reduction
    if by_place:
        raise Refused(f"{name} cannot read a part of its KV cache: its attention depends on the places of keys")
    if entries.chunk and latents:
        raise Refused(f"{name} cannot choose entries of its KV cache by attention: it keeps latents, and no keys")
    recent = entries.recent if window is None else min(entries.recent, window)
    return replace(reduction, entries=replace(entries, recent=recent))


def over(op: Op, layer: int, part: RowCache | RoundedEntries) -> Op:
    """An operation of a layer over a part of the entries, all of which it sees where it attends, or over those in fewer
    bits."""
    if isinstance(part, RoundedEntries):
        return part.pointed(op, layer)
    copied = Op.from_buffer_copy(op)
    point(copied, part.layers[layer])
    if op.kind == OpKind.ATTEND:
        copied.window = 0
    return copied


def point(op: Op, layer: RowLayer) -> None:
    """Point an operation at keys and values."""
    op.keys, op.values = layer.keys.data_ptr(), layer.values.data_ptr()


class SeenQueries(TorchFunctionMode):
    """Within the block, notes the queries of this thread's calls of torch's attention, scaled, in `queries`."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            query = args[0] if args else given["query"]
            scale = given.get("scale")
            self.queries.append(query * (query.shape[-1] ** -0.5 if scale is None else scale))
        return func(*args, **given)


@torch.no_grad()
def check_seen(model: Any, layers: int) -> None:
    """Raises Refused where a forward does not call torch's attention once per layer."""
    with SeenQueries() as seen:
        model(input_ids=one_token(model), use_cache=False, return_dict=True)
    if len(seen.queries) != layers:
        raise Refused(
            f"{type(model).__name__} cannot choose entries of its KV cache by attention: its layers do not call "
            "torch's attention (attn_implementation='sdpa') once each"
        )
