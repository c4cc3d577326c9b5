"""Makes canvas targets from diffusion language models, and checks them against the model's plain forward before use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.canvas._base import OWN, Canvas, CanvasRow, Draft
from truedraft.canvas.cached import CachedTarget
from truedraft.canvas.layout import Layout
from truedraft.canvas.targets import BlockTarget, CanvasTarget, WholeTarget, plain_logits
from truedraft.canvas.views._base import CanvasView
from truedraft.errors import Refused
from truedraft.targets.hostable import check_runtime

TOLERANCE = {True: 1e-3, False: 0.25}  # of logits, in their standard deviations; by whether the dtype is fp32 or wider


def hosted_canvas(
    model: Any, layout: Layout, runtime: str = "auto", strict: bool = False, view: CanvasView | None = None
) -> CanvasTarget:
    """A target for a diffusion language model.

    Args:
        runtime: see `accelerate`.
        strict: require passes whose results do not depend on their width.
        view: that all passes are made under.

    Raises:
        Refused: the model does not attend as its layout names it, or not strictly, or it cannot run under the view.
    """
    check_runtime(runtime)
    if not isinstance(model, PreTrainedModel):
        raise Refused(f"model={type(model).__name__} is not a model of transformers: load one with its auto classes")
    if not 0 <= layout.mask < model.config.get_text_config(decoder=True).vocab_size:
        raise Refused(f"the mask token {layout.mask} is outside the vocabulary of {type(model).__name__}")
    unmasked = _attends_unmasked(model, layout)
    target = _made(model, layout, runtime, unmasked, view)
    try:
        _check(target, unmasked)
    except Refused:
        if runtime == "stock" or not target.batch_invariant:
            raise
        why = f"the {target.runner.name} did not reproduce the model's forward"
        target = _made(model, layout, "stock", unmasked, view)
        target.fallback_reason = why
        _check(target, unmasked)
    if strict and not target.batch_invariant:
        why = target.fallback_reason or "runtime='stock' was requested"
        raise Refused(f"strict=True needs the compiled pass, whose results do not depend on its width, and {why}")
    return target


def _made(model: Any, layout: Layout, runtime: str, unmasked: bool, view: CanvasView | None) -> CanvasTarget:
    if view is not None:
        if layout.attention == "blocks":
            raise Refused(
                f"view={view.lossy!r} is for attention to the whole canvas: with attention in blocks keys and values "
                "of complete blocks are kept exactly; leave it out, or have the model attend to the whole canvas "
                "(--attention whole; layout=Layout(..., attention='whole'))"
            )
        if unmasked:
            raise Refused(f"view={view.lossy!r}: {type(model).__name__} takes ids alone, and keeps no keys and values")
        return CachedTarget(model, layout, runtime, view)
    if layout.attention == "blocks":
        return BlockTarget(model, layout, runtime)
    return WholeTarget(model, layout, runtime, unmasked)


def check_logits(model: Any, found: Tensor, expected: Tensor, what: str) -> None:
    """Compare (n, V) logits of a pass with those of the model's plain forwards.

    what: is compared with what, for the message.

    Raises:
        Refused: they are further apart than rounding explains.
    """
    difference = float(((found - expected).abs().amax(-1) / expected.std(-1).mean().clamp_min(1e-6)).max())
    allowed = TOLERANCE[model.dtype in (torch.float32, torch.float64)]
    if not difference <= allowed:
        raise Refused(
            f"{type(model).__name__} cannot be hosted exactly: {what} by {difference:.2g} standard deviations of the "
            f"logits (allowed {allowed})"
        )


def failed_pass(model: Any, error: Exception) -> Refused:
    """The refusal of a model whose forward raised an error."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return Refused(f"{type(model).__name__} cannot be hosted: a pass fails ({reason[:300]})")


def _attends_unmasked(model: Any, layout: Layout) -> bool:
    """Whether the forward attends to the whole text by itself, so that it is given no mask.

    Raises:
        Refused: it does not attend to the whole of a block, with a mask or without.
    """
    texts = [list(range(1, 9)), [*range(1, 8), 9]]
    size = model.config.get_text_config(decoder=True).vocab_size
    texts = [[token % size for token in text] for text in texts]
    whole = Layout(layout.mask)
    for unmasked in (False, True):
        try:
            first, second = plain_logits(model, texts, whole, unmasked)[:, 0].float()
        except (TypeError, ValueError, RuntimeError):
            continue
        if (first - second).abs().max() > 0:
            return unmasked
    raise Refused(
        f"{type(model).__name__} cannot be hosted: its forward attends to earlier positions only, whatever mask it is "
        "given, and a canvas needs attention in both directions"
    )


@torch.no_grad()
def _check(target: CanvasTarget, unmasked: bool) -> None:
    """Compare a pass over a canvas and two later ones behind a prompt with plain forwards over their texts."""
    layout, size = target.layout, target.vocabulary
    generator = torch.Generator().manual_seed(0)
    short = layout.of_length(min(layout.block, 4))
    drawn = torch.randint(1, size, (4 * short.block,), generator=generator).tolist()
    prompt = [token if token != layout.mask else 0 for token in drawn[: 2 * short.block + 1]]
    target.layout = short
    try:
        blocks = short.blocks(len(prompt), 2 * short.block)
        row = CanvasRow(0, Canvas.behind(prompt, layout.mask, blocks[-1].stop), len(prompt), blocks, frozenset(), 8)
        masked = row.canvas.masked(row.block)
        fixed = [frozenset((place, drawn[place]) for place in masked[:count]) for count in (1, len(masked))]
        drafts = [OWN, *(Draft(some, i) for i, some in enumerate(fixed, 1) if some and target.together)]
        target.reserve(1, blocks[-1].stop, len(drafts))
        row.committed = target.admit([prompt])[0]
        variants = [target.variant(row, draft) for draft in drafts]
        found = target.score([variants])[0]
        if isinstance(target, CachedTarget):  # once more, over what was stored
            found = target.score([[target.part(row, row.block)]])[0]
    except RuntimeError as error:
        raise failed_pass(target.model, error) from error
    finally:
        target.layout = layout
        target.free()
    expected = torch.cat([_plain(target.model, row, draft, short, unmasked) for draft in drafts])
    check_logits(target.model, found, expected, "a pass over several canvases differs from its plain forward")


def _plain(model: Any, row: CanvasRow, draft: Draft, layout: Layout, unmasked: bool) -> Tensor:
    canvas, block, masked = row.reached(draft.fixed)
    text = canvas.tokens if layout.attention == "whole" else canvas.tokens[: block.stop]
    return plain_logits(model, [text], layout, unmasked)[0][[place - layout.shifted for place in masked]].float()
