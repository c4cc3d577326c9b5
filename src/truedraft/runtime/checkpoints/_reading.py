"""A file of GGUF parsed once per load, where each of its readers would do it again.

`transformers` parses all metadata for a model's configuration and again for its tokenizer, and builds the table of
names for each module of a model; parsing a vocabulary of 150,000 tokens takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from os import fspath
from threading import RLock
from typing import Any

_ONE_AT_A_TIME = RLock()  # what is replaced is of the whole process


@contextmanager
def parsed_once() -> Iterator[None]:
    """Within the block, each file of GGUF is parsed once, and the names of an architecture are listed once."""
    gguf: Any = import_module("gguf")
    with _ONE_AT_A_TIME:
        own = gguf.GGUFReader, gguf.get_tensor_name_map
        read = cache(_reader())
        gguf.GGUFReader = lambda path: read(fspath(path))
        gguf.get_tensor_name_map = cache(gguf.get_tensor_name_map)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = own


def _reader() -> Any:
    """The reader of gguf, with the bytes of the file as a plain array: parts of a `memmap` cost an object of its class
    each, of which there are several for every token."""
    import numpy
    from gguf import GGUFReader

    class Reader(GGUFReader):
        @property
        def data(self) -> Any:
            return self._bytes

        @data.setter
        def data(self, mapped: Any) -> None:
            self._bytes = numpy.asarray(mapped)

    return Reader
