"""GGUF, the files of llama.cpp: rows of blocks, each with its own scales.

Names, configuration and tokenizer are those that `transformers` reads from such a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from truedraft.errors import Refused
from truedraft.runtime import native
from truedraft.runtime.checkpoints import ends
from truedraft.runtime.checkpoints._base import Checkpoint, Lazy, linear_weights, tables
from truedraft.runtime.checkpoints._blocks import BLOCKS, IN_BLOCKS
from truedraft.runtime.panel_blocks import ROWS

FLOATS = ("F32", "F16", "BF16")
TOGETHER = 1 << 20  # numbers that are read together, in whole steps of packing
DIVISORS = "rope_freqs.weight"
FACTORS = (8.0, 32.0)  # by which Llama 3.1 and 3.2 stretch the rotary embeddings of Llama 3
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Gguf(Checkpoint):
    """A file whose matrices are those of `transformers`, but for the order of their rows.

    Tensors are read from the file, some rows at a time: of its mapping into memory, which the reader of gguf has, all
    pages that were touched would be counted as this process's.

    Args:
        config: what `transformers` read from the file; completed here.
        model: how messages name it.
    """

    def __init__(self, path: Path, config: Any, model: str):
        super().__init__()
        from gguf import GGUFReader
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        self._path, self._reader = path, (reader := GGUFReader(path))
        fields = {name: reader.fields[name].contents() for name in reader.fields if not name.startswith("tokenizer")}
        self._architecture = fields["general.architecture"]
        self._processor: Any = TENSOR_PROCESSORS.get(self._architecture, TensorProcessor)(config=config.to_dict())
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        named = ((name, field.contents()) for name, field in reader.fields.items() if ends.GGUF.fullmatch(name))
        if (found := ends.of_metadata(named)) is not None:
            config.eos_token_id = found
        stretching = fields.get(f"{self._architecture}.rope.scaling.type", "none")
        if stretching != "none":
            raise Refused(f"{model}: transformers does not read its rotary embeddings ({stretching}): give a folder")
        if DIVISORS in self._tensors:
            _stretch(config, torch.from_numpy(self._tensors[DIVISORS].data.copy()), model)

    @property
    def stays_packed(self) -> bool:
        """Whether it is read here; other architectures are read by `transformers`, into plain weights."""
        from transformers import modeling_gguf_pytorch_utils as reading
        from transformers.integrations.gguf.utils import is_gguf_arch_supported

        kinds = (reading.TensorProcessor, reading.LlamaTensorProcessor, reading.Gemma2TensorProcessor)
        return type(self._processor) in kinds and not is_gguf_arch_supported(self._architecture)

    def tensors(self, model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
        from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

        self._reader.fields.clear()  # a vocabulary's take more memory than some models
        names, linear = get_gguf_hf_weights_map(model, self._processor), linear_weights(model)
        kept = linear | tables(model)  # in blocks

        def read(tensor: Any, name: str) -> Tensor:
            kind = tensor.tensor_type.name
            if name in kept and kind in IN_BLOCKS and native.takes_blocks():
                return self._in_blocks(tensor, dtype)
            if name not in linear or kind in FLOATS:
                return self._plain(tensor, dtype)
            if kind in BLOCKS:
                blocks = torch.from_numpy(numpy.concatenate([*self._rows(tensor)]))
                return self.weight(name, BLOCKS[kind](blocks), linear, dtype)
            self.unpacked.append(name)
            return self._plain(tensor, dtype)

        found = {names[name]: tensor for name, tensor in self._tensors.items() if name in names}
        return {name: Lazy(partial(read, tensor, name)) for name, tensor in found.items()}

    def _in_blocks(self, tensor: Any, dtype: torch.dtype) -> Tensor:
        """A matrix in the blocks of the file."""
        from truedraft.runtime.packed import BlocksTensor

        read = IN_BLOCKS[tensor.tensor_type.name]
        parts = (read(torch.from_numpy(rows)) for rows in self._rows(tensor))
        return BlocksTensor.of_parts(parts, len(tensor.data), dtype)

    def _plain(self, tensor: Any, dtype: torch.dtype) -> Tensor:
        from gguf import dequantize

        kind = tensor.tensor_type
        if tensor.data.ndim != 2:
            return torch.from_numpy(self._processed(dequantize(tensor.data, kind), tensor.name).copy()).to(dtype)
        made, start = torch.empty(*reversed(tensor.shape.tolist()), dtype=dtype), 0
        for rows in self._rows(tensor):
            made[start : start + len(rows)] = torch.from_numpy(dequantize(rows, kind))
            start += len(rows)
        return made

    def _rows(self, tensor: Any) -> Iterator[Any]:
        """The rows of a matrix in the order in which `transformers` has them, some at a time."""
        count, order = len(tensor.data), self._order(tensor)
        together = max(TOGETHER // int(tensor.shape[0]) // ROWS, 1) * ROWS
        if order is not None:
            found = self._read(tensor, 0, count)[order]
            yield from (found[start : start + together] for start in range(0, count, together))
            return
        for start in range(0, count, together):
            yield self._read(tensor, start, min(start + together, count))

    def _read(self, tensor: Any, first: int, last: int) -> Any:
        """The rows [first, last) of a matrix, as the file has them."""
        kind, columns = tensor.data.dtype, tensor.data.shape[1]
        start, count = int(tensor.data_offset) + first * columns * kind.itemsize, (last - first) * columns
        return numpy.fromfile(self._path, kind, count, offset=start).reshape(-1, columns)

    def _order(self, tensor: Any) -> Any:
        """The order in which `transformers` has the rows of a matrix; None where it is that of the file."""
        before = numpy.arange(len(tensor.data))
        rows = self._processed(before[:, None], tensor.name)[:, 0]
        return None if numpy.array_equal(rows, before) else rows.copy()

    def _processed(self, weights: Any, name: str) -> Any:
        """As `transformers` has them: rows of queries and keys in another order, or norms without the one added."""
        return self._processor.process(weights=weights, name=name).weights


def _stretch(config: Any, divisors: Tensor, model: str) -> None:
    """Set up the rotary embeddings of Llama 3.1 and later: the file has divisors, which `transformers` does not read.

    Raises:
        Refused: they are no such embeddings.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    base = config.rope_parameters["rope_theta"]
    for factor in FACTORS:
        config.rope_parameters = {"rope_type": "llama3", "rope_theta": base, "factor": factor, **LLAMA3}
        stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
        plain = base ** -(torch.arange(len(stretched)) / len(stretched))
        if len(divisors) == len(stretched) and torch.allclose(plain / stretched, divisors, rtol=1e-3):
            return
    raise Refused(f"{model}: its rotary embeddings are none of Llama 3 that are known here: give a folder")
