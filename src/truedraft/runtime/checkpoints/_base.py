"""What formats of quantised checkpoints have in common: integers with scales, and tensors read one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from truedraft.errors import Refused
from truedraft.runtime.panels import NIBBLES


@dataclass(frozen=True)
class Integers:
    """Integers q that stand for q * scale + offset, computed in fp32.

    values: (out, in) int8.
    scales, offsets: (out, groups) in fp32, of columns side by side; offsets may be None.
    group_of: (in,) the group of each column, where those of a group are not side by side.
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    group_of: Tensor | None = None

    @classmethod
    def of_codes(
        cls, codes: Tensor, half: int, scales: Tensor, zeros: Tensor, group_of: Tensor | None = None
    ) -> Integers:
        """Codes (uint8) that stand for (code - zero) * scale; half: what is subtracted to make them signed."""
        away = half - zeros.float()
        offsets = away * scales.float() if away.any() else None
        return cls((codes - half).view(torch.int8), scales.float(), offsets, group_of)

    def matrix(self) -> Tensor:
        """What it stands for."""
        width = self.values.shape[1]
        group_of = torch.arange(width) * self.scales.shape[1] // width if self.group_of is None else self.group_of
        matrix = self.values.float().mul_(self.scales[:, group_of])
        return matrix if self.offsets is None else matrix.add_(self.offsets[:, group_of])

    def packed(self, dtype: torch.dtype) -> Tensor | None:
        """A `PackedTensor`; None where the compiled pass could not read it."""
        from truedraft.runtime.packed import PackedTensor

        if self.group_of is not None or self.values.shape[1] % (NIBBLES * self.scales.shape[1]):
            return None
        return PackedTensor.of_integers(self.values, self.scales, self.offsets, dtype)


class Lazy:
    """A tensor that is read when the loading of `transformers` takes all of it, `lazy[...]`."""

    def __init__(self, read: Callable[[], Tensor]):
        self._read = read

    def __getitem__(self, all_of_it: Any) -> Tensor:
        return self._read()


@dataclass
class Checkpoint(ABC):
    """A quantised checkpoint.

    unpacked: the weights of linear layers that were kept as plain weights.
    """

    unpacked: list[str] = field(default_factory=list, init=False)

    @abstractmethod
    def tensors(self, model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
        """Tensors by name, as the loading of `transformers` takes them, of a model on the meta device.

        The weights of linear layers are integers, everything else is plain.
        """

    def finished(self, model: nn.Module) -> list[str]:
        """Make embeddings of a loaded model plain, but for those in blocks, of which passes look up rows; returns the
        names of linear layers' weights that are plain, too."""
        from truedraft.runtime.packed import BlocksTensor, PackedTensor

        made: dict[int, nn.Parameter] = {}  # one of a head and the embeddings that it is tied to
        for layer in model.modules():
            weight = getattr(layer, "weight", None)
            if not isinstance(weight, PackedTensor):
                continue
            if type(layer) is nn.Linear or isinstance(weight, BlocksTensor):
                if id(weight) not in made:
                    made[id(weight)] = nn.Parameter(weight.detach(), requires_grad=False)
                layer.weight = made[id(weight)]
            else:
                layer.weight = nn.Parameter(weight.dequantize(), requires_grad=False)
        return self.unpacked

    def weight(self, name: str, integers: Integers, linear: Collection[str], dtype: torch.dtype) -> Tensor:
        """A weight of a model: packed where it is of a linear layer."""
        if name in linear:
            if (packed := integers.packed(dtype)) is not None:
                return packed
            self.unpacked.append(name)
        return integers.matrix().to(dtype)


def linear_weights(model: Any) -> set[str]:
    """Names of the weights of linear layers, that of an embedding included where the head is tied to it."""
    names = {f"{name}.weight" for name, layer in model.named_modules() if type(layer) is nn.Linear}
    return names | (tables(model) if model.config.get_text_config(decoder=True).tie_word_embeddings else set())


def tables(model: Any) -> set[str]:
    """Names of the embeddings of tokens."""
    table = model.get_input_embeddings()
    return {f"{name}.weight" for name, layer in model.named_modules() if layer is table}


class Files(Mapping[str, Tensor]):
    """The tensors of a folder's safetensors, or of a model on the hub, each read when it is asked for.

    Args:
        stem: another name of the file, which older tools gave it.
    """

    def __init__(self, source: Path | str, stem: str | None = None, **options: Any):
        from safetensors import safe_open
        from transformers.utils.hub import cached_file, get_checkpoint_shard_files

        lenient = dict(_raise_exceptions_for_missing_entries=False, **options)
        names = ["model.safetensors", *([] if stem is None else [f"{stem}.safetensors"])]
        file = next(filter(None, (cached_file(source, name, **lenient) for name in names)), None)
        index = None if file else cached_file(source, "model.safetensors.index.json", **lenient)
        if not file and not index:
            raise Refused(f"{str(source)!r} has no model.safetensors, from which quantised weights are read")
        files = [file] if file else get_checkpoint_shard_files(source, index, **options)[0]
        handles = [safe_open(name, framework="pt") for name in files]
        self._homes: dict[str, Any] = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        return self._homes[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


@dataclass
class Folder(Checkpoint):
    """A folder whose quantised weights are several tensors each: `layer.<part>`.

    settings: `quantization_config` of its config.json. model: how messages name it.
    """

    files: Files
    settings: Mapping[str, Any]
    model: str

    mark: ClassVar[str]  # the part that each quantised weight has
    parts: ClassVar[tuple[str, ...]] = ()  # the others
    optional: ClassVar[tuple[str, ...]] = ()  # those that it may have

    def __post_init__(self) -> None:
        self.check()

    @abstractmethod
    def check(self) -> None:
        """Raises Refused where the settings are not supported."""

    @abstractmethod
    def integers(self, part: Callable[[str], Tensor | None]) -> Integers:
        """A weight by its parts; those that it lacks are None."""

    def refused(self, what: str, remedy: str) -> Refused:
        return Refused(f"{self.model}: {what}, which is not read here: {remedy}")

    def tensors(self, model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
        linear = linear_weights(model)
        layers = [name.removesuffix(f".{self.mark}") for name in self.files if name.endswith(f".{self.mark}")]
        if lacking := [n for layer in layers for part in self.parts if (n := f"{layer}.{part}") not in self.files]:
            raise Refused(f"{self.model}: its checkpoint lacks {lacking[0]}: download it anew")
        read = {f"{layer}.{part}" for layer in layers for part in (self.mark, *self.parts, *self.optional)}

        def quantised(layer: str) -> Tensor:
            integers = self.integers(lambda part: self.files.get(f"{layer}.{part}"))
            return self.weight(f"{layer}.weight", integers, linear, dtype)

        plain = {name: Lazy(partial(self.files.__getitem__, name)) for name in self.files if name not in read}
        return plain | {f"{layer}.weight": Lazy(partial(quantised, layer)) for layer in layers}


def unpacked(words: Tensor, bits: int) -> Tensor:
    """(..., n) int32 to (..., n * 32 / bits) unsigned numbers of 2, 4 or 8 bits, the lowest bits first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return (words.contiguous().view(torch.uint8)[..., None] >> shifts & (1 << bits) - 1).flatten(-2)
