"""The weights of a folder by name, in one file or in shards: names at once, tensors when they are asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from truedraft.errors import Refused, why

INDEX = ".index.json"
FILES = tuple(name + suffix for name in ("model.safetensors", "pytorch_model.bin") for suffix in ("", INDEX))
SHARD = re.compile(r".*-\d+-of-\d+\..*")
Read = Callable[[str], Tensor]


class StoredWeights(Mapping[str, Tensor]):
    """The tensors of a folder; names lack a `model.` prefix. Of shards, those with wanted tensors alone are opened.

    Args:
        source: the folder as the caller named it.

    Raises:
        Refused: there are no weights, or what is read of them is missing or damaged.
    """

    def __init__(self, source: str, folder: Path):
        self._source, self._folder = source, folder
        self._files: dict[str, tuple[frozenset[str], Read]] = {}
        path = self._first()
        if path.name.endswith(INDEX):
            self._shards = self._indexed(path)
        else:
            self._shards = dict.fromkeys(self._opened(path.name)[0], path.name)
        self._names = {name.removeprefix("model."): name for name in self._shards}

    def __getitem__(self, name: str) -> Tensor:
        stored = self._names[name]
        shard = self._shards[stored]
        names, read = self._opened(shard)
        if stored not in names:
            raise Refused(f"{self._source!r}: {shard} lacks {stored}, which the index places there: download it again")
        try:
            return read(stored)
        except Exception as e:  # a damaged file makes the loaders raise any exception
            raise self._damaged(shard, e) from e

    def __contains__(self, name: object) -> bool:
        return name in self._names  # without reading the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _first(self) -> Path:
        """The file of the weights, or of their index."""
        paths = [path for name in FILES if (path := self._folder / name).exists()]
        others = sorted(path for ending in ("safetensors", "bin", "pt") for path in self._folder.glob(f"*.{ending}"))
        for path in [*paths, *(path for path in others if not SHARD.fullmatch(path.name))]:
            return path
        if others:
            raise Refused(f"{self._source!r} has shards, as {others[0].name}, without their index: download all of it")
        raise Refused(f"{self._source!r} has no weights: it needs one of {', '.join(FILES)}")

    def _indexed(self, path: Path) -> dict[str, str]:
        """Name -> shard, as an index has it."""
        try:
            shards = json.loads(path.read_bytes())["weight_map"]
            if not all(Path(shard).name == shard for shard in shards.values()):
                raise ValueError("it names files outside of the folder")
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise self._damaged(path.name, e) from e
        return shards

    def _opened(self, file: str) -> tuple[frozenset[str], Read]:
        if file not in self._files:
            self._files[file] = self._open(file)
        return self._files[file]

    def _open(self, file: str) -> tuple[frozenset[str], Read]:
        """The names in a file, and what reads one of them."""
        path = self._folder / file
        if not path.exists():
            raise Refused(f"{self._source!r} lacks {file}, in which its index places weights: download all of it")
        try:
            if path.suffix == ".safetensors":
                stored: Any = safe_open(path, framework="pt")
                return frozenset(stored.keys()), stored.get_tensor
            found = _unpickled(path)
            if any(not isinstance(tensor, Tensor) for tensor in found.values()):
                raise ValueError("it holds more than tensors by name")
            return frozenset(found), found.__getitem__
        except Exception as e:  # a damaged file makes the loaders raise any exception
            raise self._damaged(file, e) from e

    def _damaged(self, file: str, error: BaseException) -> Refused:
        return Refused(f"{self._source!r}: {file} cannot be read: {' '.join(why(error).split())[:200]}")


def _unpickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of torch, in memory only once they are used where its format allows."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # files before torch 1.6 cannot be mapped
        found = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}, not tensors by name")
    return found
