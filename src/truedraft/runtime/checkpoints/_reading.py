"""A file of GGUF parsed once per load, where each of its readers would do it again.

`transformers` parses all metadata for a model's configuration and again for its tokenizer, and builds the table of
names for each module of a model; the package's own parsing of a vocabulary of 150,000 tokens takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from os import fspath
from pathlib import Path
from struct import Struct
from threading import RLock
from typing import Any

MAGIC = b"GGUF"  # what such a file begins with
LIST = 12  # bytes before the parts of a list: their type and number
_ONE_AT_A_TIME = RLock()  # what is replaced is of the whole process


@contextmanager
def parsed_once(path: Path) -> Iterator[None]:
    """Within the block, each file of GGUF is parsed once, and the names of an architecture are listed once.

    Raises:
        ValueError: the file is cut short.
    """
    gguf: Any = import_module("gguf")
    with _ONE_AT_A_TIME:
        own = gguf.GGUFReader, gguf.get_tensor_name_map
        read = cache(_reader())
        gguf.GGUFReader = lambda path: read(fspath(path))
        gguf.get_tensor_name_map = cache(gguf.get_tensor_name_map)
        try:
            with path.open("rb") as file:
                if file.read(len(MAGIC)) == MAGIC:  # else transformers says what is wrong with it
                    read(fspath(path))
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = own


def _reader() -> Any:
    """The reader of gguf, which says of a file that it is cut short; with the bytes of the file as a plain array, and
    lists without an array for the length of each string: there are several arrays for every token, each of them an
    object."""
    import numpy
    from gguf import GGUFEndian, GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        @property
        def data(self) -> Any:
            return self._bytes

        @data.setter
        def data(self, mapped: Any) -> None:
            self._bytes = numpy.asarray(mapped)

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            self._check_end(int(offset) + numpy.dtype(dtype).itemsize * int(count))
            return super()._get(offset, dtype, count, override_order)

        def _check_end(self, end: int) -> None:
            if end > (there := len(self._bytes)):
                raise ValueError(
                    f"the file is cut short, it has {there:,} of at least {end:,} bytes: download it again"
                )

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            kind, at = GGUFValueType(raw_type), orig_offs + LIST
            inner = GGUFValueType(self._get(orig_offs, numpy.uint32)[0]) if kind == GGUFValueType.ARRAY else kind
            if kind == inner or inner == GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            count = int(self._get(orig_offs + 4, numpy.uint64)[0])
            if inner == GGUFValueType.STRING:
                parts, end = self._strings(at, count)
            else:
                numbers = self._get(at, self.gguf_scalar_to_np[inner], count)
                parts, end = list(numbers[:, None]), at + numbers.nbytes
            return end - orig_offs, parts, list(range(count)), [kind, inner][: 1 + bool(count)]

        def _strings(self, at: int, count: int) -> tuple[list[Any], int]:
            """The strings of a list that begins there, and where it ends."""
            size, parts = Struct("<Q" if self.endianess == GGUFEndian.LITTLE else ">Q"), []
            memory = self._bytes.data
            for _ in range(count):
                self._check_end(start := at + size.size)
                at = start + size.unpack_from(memory, at)[0]
                parts.append(self._bytes[start:at])
            return parts, at

    return Reader
