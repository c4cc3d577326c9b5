"""Fingerprints of models: everything but the values of weights that can change what a model computes.

A compiled pass is built from the modules of a model at one moment. While the fingerprint is equal, the pass still
replaces the model's forward; when it differs, the pass has to be built and compared again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import GenerationConfig, PreTrainedConfig

from truedraft.runtime.overrides import Dispatcher
from truedraft.runtime.rotary import changes

SMALL = 4096  # largest buffer compared by value: programs read scales and frequencies once
# torch's own attributes of every module, and what transformers notes with the hooks by which it records outputs
_OWN = (frozenset(vars(nn.Module())) - {"training"}) | {"_output_capturing_hooks_installed"}
_VALUES = frozenset({bool, int, float, str, type(None)})


class Same:
    """Compares by identity; holds the object, so that its address is not reused."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    __hash__ = object.__hash__


def fingerprint(model: nn.Module) -> list[object]:
    """Everything that a pass is built from but the values of weights, which are read in place.

    Of every module its class, the forward of that class, whether hooks or replaced methods do more, its children's
    names, and its plain attributes (an eps, a scaling, an activation); of every weight and buffer its layout (address,
    shape, strides, dtype); the values of small buffers; and the configurations. Of rotary embeddings whose frequencies
    change with the length of a text nothing but the class.
    """
    found: list[object] = [*_global_forward_pre_hooks, *_global_forward_hooks]
    configs: dict[int, PreTrainedConfig] = {}
    waiting: list[nn.Module] = [model]
    while waiting:
        module = waiting.pop()
        kind = type(module)
        attributes = vars(module).copy()  # atomically: other threads may be in a pass
        found += (kind, kind.forward, does_more(module), *module._modules)
        plain: dict[str, object] = {}
        buffers = module._buffers
        if changes(module):  # in its own calls, and no pass is built from it
            attributes, buffers = {}, {}
        for name in attributes.keys() - _OWN:
            value = attributes[name]
            if type(value) in _VALUES:
                plain[name] = value
            elif isinstance(value, PreTrainedConfig):
                configs[id(value)] = value
            elif not isinstance(value, Dispatcher | GenerationConfig):
                plain[name] = _attribute(value)
        found.append(plain)
        found += map(layout, module._parameters.values())
        for buffer in buffers.values():
            found += (layout(buffer), _values(buffer))
        waiting += [part for part in module._modules.values() if part is not None]
    return [*found, *(repr(vars(config)) for config in configs.values())]


def layout(tensor: Any) -> object:
    """Address, shape, strides, dtype and device of a tensor; of a quantised one, those of its integers and scales."""
    if tensor is None:
        return None
    if hasattr(tensor, "qdata"):
        return layout(tensor.qdata), layout(tensor.scale), type(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _attribute(value: Any) -> object:
    """A value that compares as the attribute does, also after the attribute was changed in place.

    Tensors that are neither weights nor buffers are ignored: a forward caches them for its next call (the positions of
    images).
    """
    if isinstance(value, Tensor):
        return None
    if isinstance(value, int | float | str):
        return value
    return repr(value) if isinstance(value, list | tuple | dict | set) else Same(value)


def _values(buffer: Tensor | None) -> bytes | None:
    if buffer is None or buffer.numel() > SMALL or buffer.device.type != "cpu":
        return None
    return buffer.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def does_more(module: Any) -> bool:
    """Whether calling a module does more than the forward of its class.

    The hooks with which transformers captures outputs do not count.
    """
    own = vars(module)
    if own["_forward_pre_hooks"] or ("forward" in own and not isinstance(own["forward"], Dispatcher | None)):
        return True
    hooks = own["_forward_hooks"].values()
    return any(not getattr(h, "__module__", "").startswith("transformers.utils.output_capturing") for h in hooks)


def hooked(model: nn.Module) -> list[str]:
    """Names of the modules for which `does_more` holds."""
    if _global_forward_pre_hooks or _global_forward_hooks:
        return ["every module"]
    return [name or type(module).__name__ for name, module in model.named_modules() if does_more(module)]
