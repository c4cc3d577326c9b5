"""Weights that are no finite numbers, found before they are used."""

from __future__ import annotations

from torch import nn

from truedraft.errors import Refused


def check_finite(name: str, source: object, module: nn.Module) -> None:
    """Raises Refused where a weight or a buffer is not a finite number: its drafts would be those of no model.

    source: as the caller named it, or the module itself.
    """
    source = "the given module" if isinstance(source, nn.Module) else repr(str(source))
    for part, tensor in module.state_dict().items():
        if tensor.is_floating_point() and not tensor.is_meta and not (finite := tensor.isfinite()).all():
            what = "NaN" if tensor.isnan().any() else "infinity"
            raise Refused(
                f"{name}: {source} has {what} in {int((~finite).sum()):,} of {tensor.numel():,} numbers of "
                f"{part}: it is damaged, or its training went wrong; give another"
            )
