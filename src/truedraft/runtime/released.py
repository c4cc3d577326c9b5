"""Weights that are kept once: in panels alone (`panels.py`), the order in which compiled passes read them.

Compiled passes read copies of weights in panels, beside the weights of the model. Here the copy takes the place of the
weight, one after another, so that no more than one is held twice. For torch it is the same matrix: a product with few
vectors is compiled, and for any other operation the matrix is made first, bit for bit. What would write to it, save it
or train it is refused.

This is for truedraft's own calls. Where the model is called by its owner (`model.generate`, `model(ids)`), the matrices
are made once more and kept, so that a text is always compared with that of the model itself, at its own speed.

Weights of a file that is mapped into memory, as those of safetensors are, share their mapping with the tensors that
stay: the pages of the others are given back.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from math import prod
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from torch.utils._pytree import tree_map_only

from truedraft.errors import Refused
from truedraft.runtime import native
from truedraft.runtime.linears import Product
from truedraft.runtime.panels import ROWS, columns_of, empty_panels, floats_of, panels
from truedraft.runtime.releasing import copies_weights, in_call, is_in_call, releasable, weight_of
from truedraft.runtime.weights import Weight

UNMAP = 4  # MADV_DONTNEED of Linux
PAGE_OUT = 21  # MADV_PAGEOUT of Linux, from 5.4 on
THERE, OF_FILE = 1 << 63 | 1 << 62, 1 << 61  # bits of a page in pagemap
TOGETHER = 1 << 14  # rows that are moved together, whole panels of them
MANY = 64  # vectors for which torch's product with the matrix is faster, the making of it included
ALIKE = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # difference of products, in the largest number
KEPT_ONCE = (
    "the weights of this model are kept once, in the order in which compiled passes read them, and cannot be {}: load "
    "it again, and accelerate(release_weights=False)"
)
aten = torch.ops.aten


class PanelTensor(Tensor):
    """Matrices of fp32 or bf16, kept in panels: (rows, columns), or (experts, rows, columns) in one.

    Args:
        qdata: the panels; named as the numbers of torchao's tensors are.
        shape: of the matrices; of those of experts, rows are a multiple of ROWS.
        dtype: of their numbers.
    """

    scale: ClassVar[None] = None
    made: Tensor | None = None  # the matrix for calls of the model's owner

    @staticmethod
    def __new__(cls, qdata: Tensor, shape: torch.Size, dtype: torch.dtype) -> PanelTensor:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=qdata.device, requires_grad=False)

    def __init__(self, qdata: Tensor, shape: torch.Size, dtype: torch.dtype):
        self.qdata = qdata

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PanelTensor({'x'.join(map(str, self.shape))}, {self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Refused(KEPT_ONCE.format("saved"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            made: Any = PanelTensor(self.qdata.clone(), self.shape, self.dtype)
            memo[id(self)] = nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
        return memo[id(self)]

    def as_weight(self, bias: Tensor | None) -> Weight:
        """As the compiled pass reads it; the rows of experts one after another."""
        return Weight(self.qdata, None, bias, (prod(self.shape[:-1]), self.shape[-1]), True)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The matrix, in a dtype, by default its own: the weight that was given, bit for bit."""
        return floats_of(self.as_weight(None)).view(self.shape).to(dtype or self.dtype)

    @property
    def own(self) -> Tensor:
        """The matrix for an operation: in a call of truedraft made for it, else kept."""
        if is_in_call():
            return self.dequantize()
        if self.made is None:
            self.made = self.dequantize()
        return self.made

    def looked_up(self, ids: Tensor) -> Tensor:
        """The rows of these numbers, (*ids, columns)."""
        each = columns_of(self.dtype)
        found = self.qdata.unflatten(2, (ROWS, each))[ids // ROWS, :, ids % ROWS]  # (*ids, columns / each, each)
        return found.flatten(-2)[..., : self.shape[-1]].contiguous()

    def expert(self, index: int) -> PanelTensor:
        """The matrix of one of the experts, in place."""
        each = self.shape[1] // ROWS
        return PanelTensor(self.qdata[index * each : (index + 1) * each], self.shape[1:], self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is linear:
            return _linear(*args, **kwargs)
        if func is embedding:
            return _embedding(*args, **kwargs)
        if func is torch._has_compatible_shallow_copy_type:  # which torch asks where it converts a module
            if type(args[0]) is not type(args[1]):
                raise Refused(KEPT_ONCE.format("converted to another dtype or device"))
            return True
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, one = kwargs or {}, cast(Any, args[0] if args else None)
        if func in (aten.detach.default, aten.alias.default):
            return PanelTensor(one.qdata, one.shape, one.dtype)
        if func is aten.clone.default:
            return PanelTensor(one.qdata.clone(), one.shape, one.dtype)
        if func is aten.select.int and one.ndim == 3 and args[1] == 0:
            return one.expert(args[2] % len(one)) if is_in_call() else one.own[args[2]]
        written = [i for i, argument in enumerate(func._schema.arguments) if argument.is_write]
        if any(_has_panels(args[i]) for i in written if i < len(args)):
            raise Refused(KEPT_ONCE.format("written to or trained"))
        return func(*_plain(args), **_plain(kwargs))


class _Frozen(torch.autograd.Function):
    """A matrix in panels as a plain one, without gradients."""

    @staticmethod
    def forward(ctx: Any, matrix: PanelTensor) -> Tensor:
        return matrix.own.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise Refused(KEPT_ONCE.format("trained"))


def _linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """A product; that of the model's owner, and with gradients, many vectors or other dtypes, is torch's."""
    if not isinstance(weight, PanelTensor):
        return linear(*_plain((x, weight, bias)))
    if is_in_call() and x.numel() < MANY * x.shape[-1] and not x.shape[-1] % 16:
        product = Product(native.library(), weight.as_weight(None), weight.dtype)
        if product.takes(x):
            return product(x) if bias is None else product(x) + bias
    return linear(x, _with_gradient(weight), bias)


def _embedding(ids: Tensor, weight: PanelTensor, *args: Any, **kwargs: Any) -> Tensor:
    if torch.is_grad_enabled() and weight.requires_grad:
        return embedding(ids, _with_gradient(weight), *args, **kwargs)
    return weight.looked_up(ids)


def _with_gradient(weight: PanelTensor) -> Tensor:
    """The matrix, whose gradient is refused where the weight should have one."""
    if torch.is_grad_enabled() and weight.requires_grad:
        return _Frozen.apply(weight)
    return weight.own.detach()


def _has_panels(argument: Any) -> bool:
    parts = argument if isinstance(argument, list | tuple) else [argument]
    return any(isinstance(part, PanelTensor) for part in parts)


def _plain(arguments: Any) -> Any:
    """Arguments with the matrices that stand in panels."""
    return tree_map_only(PanelTensor, lambda weight: weight.own, arguments)


def release_weights(model: nn.Module) -> int:
    """Keep the weights of which compiled passes read copies in panels alone: those of linear layers, of a head that is
    tied to the embeddings, and of experts.

    Returns:
        Bytes of the weights that were replaced; 0 where compiled passes read no copies.
    """
    if not copies_weights():
        return 0
    files, replaced = _mapped_files(), 0
    for holders in releasable(model):
        before = weight_of(holders)
        made: Any = PanelTensor(_moved(before.detach().flatten(0, -2), files), before.shape, before.dtype)
        kept = nn.Parameter(made, before.requires_grad)
        replaced += before.nbytes
        for module, name in holders:
            module._parameters[name] = kept
            module.register_state_dict_pre_hook(_refuse_saving)
        del before
    trim()
    return replaced


def bring_back(model: nn.Module) -> None:
    """The weights as they were before `release_weights`, bit for bit, for what changes them."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if isinstance(weight, PanelTensor):
                if id(weight) not in made:
                    made[id(weight)] = nn.Parameter(weight.dequantize(), weight.requires_grad)
                module._parameters[name] = made[id(weight)]


def _moved(weight: Tensor, files: list[tuple[int, int]]) -> Tensor:
    """The panels of a weight whose pages are given back part by part, as they are made.

    Raises:
        Refused: a compiled product with them is not that of torch with the weight.
    """
    parts, expected = weight.split(TOGETHER), list[Tensor]()
    x = torch.randn(1, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    made = empty_panels(len(weight), weight.shape[1], weight.dtype)
    for i, part in enumerate(parts):
        panels(Weight(part, None, None), made[TOGETHER // ROWS * i :][: TOGETHER // ROWS])
        expected.append(linear(x, part))
        _give_back(part, files)
    _check(PanelTensor(made, weight.shape, weight.dtype), x, torch.cat(expected, 1))
    return made


def _check(kept: PanelTensor, x: Tensor, expected: Tensor) -> None:
    """Compare a product before its matrix is let go: from then on, checks of the model multiply by the same code."""
    with in_call():
        found = _linear(x, kept)
    largest = expected.abs().max()
    if largest.isfinite() and not (found - expected).abs().max() <= ALIKE[kept.dtype] * largest:
        raise Refused(
            "compiled products differ from those of torch on this processor: accelerate(release_weights=False, "
            'runtime="stock"), and report it'
        )


def in_panels(model: nn.Module) -> list[PanelTensor]:
    """The weights of a model that are in panels alone."""
    return [weight for weight in model.parameters() if isinstance(weight, PanelTensor)]


def bytes_in_panels(model: nn.Module) -> int:
    """Bytes of the weights of a model that are in panels alone."""
    return sum([weight.qdata.nbytes for weight in in_panels(model)])


def trim() -> None:
    """Give the memory of freed tensors that glibc has kept back to the system."""
    if sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def _refuse_saving(module: nn.Module, *given: Any) -> None:
    """Raises Refused where weights of a module are in panels, as it is asked for its state."""
    if any(isinstance(parameter, PanelTensor) for parameter in module._parameters.values()):
        raise Refused(KEPT_ONCE.format("saved"))


def _mapped_files() -> list[tuple[int, int]]:
    """Where files are mapped into the memory of this process, on Linux: first and last address of each."""
    if not sys.platform.startswith("linux"):
        return []
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, inode = line.split()[:5]
        if inode != "0":
            start, end = (int(address, 16) for address in addresses.split("-"))
            found.append((start, end))
    return found


def _give_back(weight: Tensor, files: list[tuple[int, int]]) -> None:
    """Give back the whole pages of a weight that is mapped from a file; they are read again if they are needed, and
    what was written to them is kept."""
    start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end and any(first <= start and end <= last for first, last in files):
        advice = PAGE_OUT if _written(start, end) else UNMAP
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)  # a hint: may fail


def _written(start: int, end: int) -> bool:
    """Whether pages have more than what the file has, or the system does not tell."""
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as opened:
            opened.seek(start // mmap.PAGESIZE * 8)
            pages = numpy.frombuffer(opened.read((end - start) // mmap.PAGESIZE * 8), numpy.uint64)
    except OSError:
        return True
    there = (pages & numpy.uint64(THERE)) != 0
    return len(pages) * mmap.PAGESIZE < end - start or bool((there & ((pages & numpy.uint64(OF_FILE)) == 0)).any())
