"""A second device, simulated on the CPU: operations over tensors of both devices fail, as they would on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend


class Backend(_DummyBackendModule):
    """What torch reads of the second device's own module."""

    def get_rng_state(self, device: int) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: int) -> None:
        """Random numbers are those of the CPU."""


_setup_privateuseone_for_python_backend("far", Backend())
MOVED: list[int] = []  # numbers of the tensors that were moved from the second device, in order
CPU, FAR = torch.device("cpu"), torch.device("far:0")
MOVING = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}


class FarTensor(Tensor):
    """A tensor of the second device; its numbers are in `here`, on the CPU."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> FarTensor:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, here.shape, here.stride(), here.storage_offset(), dtype=here.dtype, device=FAR
        )
        made.here = here
        return made  # type: ignore[no-any-return]

    def tolist(self) -> Any:
        MOVED.append(self.numel())
        return self.here.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FarTensor({self.here})"

    @classmethod
    def __torch_dispatch__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(f, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl


class Devices(TorchDispatchMode):
    """Within it, tensors are made on the second device where they are asked for there."""

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(f, args, kwargs or {})


def computed(f: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operation, on the device of its arguments, or the one that it names.

    Raises:
        RuntimeError: it has tensors of both devices, other than scalars and indices.
    """
    given = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    far = any(isinstance(value, FarTensor) for value in given)
    if f in INDEXING:
        given = [args[0]]
    if far and f not in MOVING and any(not isinstance(value, FarTensor) and value.dim() for value in given):
        raise RuntimeError(f"{f}: expected all tensors to be on the same device, found cpu and {FAR}")
    asked = kwargs.get("device")
    if asked is not None:
        far, kwargs = torch.device(asked).type == FAR.type, {**kwargs, "device": CPU}
    if f is torch.ops.aten.copy_.default:
        far = isinstance(args[0], FarTensor)
    if (f is torch.ops.aten._local_scalar_dense.default and far) or (f in MOVING and not far):
        MOVED.extend(value.numel() for value in given if isinstance(value, FarTensor))
    into = args[0] if f._schema.name.endswith("_") and not f._schema.name.endswith("__") else None
    found = f(*tree_map(_here, args), **tree_map(_here, kwargs))
    if into is not None and isinstance(found, Tensor):
        return into
    return tree_map(_there, found) if far else found


def _here(value: Any) -> Any:
    return value.here if isinstance(value, FarTensor) else value


def _there(value: Any) -> Any:
    return FarTensor(value) if isinstance(value, Tensor) else value


def to_far(model: nn.Module) -> nn.Module:
    """Move a model to the second device."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(FarTensor(parameter.data), requires_grad=False)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = FarTensor(buffer)
    return model


@contextmanager
def two_devices() -> Iterator[None]:
    """Within the block there is a second device."""
    MOVED.clear()
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device=FAR)` makes one here and moves it
    try:
        with Devices():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
