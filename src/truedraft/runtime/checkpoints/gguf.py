"""GGUF, the files of llama.cpp: rows of blocks, each with its own scales.

Names, configuration and tokenizer are those that `transformers` reads from such a file.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from truedraft.errors import Refused
from truedraft.runtime.checkpoints import ends
from truedraft.runtime.checkpoints._base import Checkpoint, InBlocks, Integers, Lazy, linear_weights
from truedraft.runtime.checkpoints._blocks import BLOCKS

FLOATS = ("F32", "F16", "BF16")
TOGETHER = 1 << 12  # rows that are computed together, for less memory
DIVISORS = "rope_freqs.weight"
FACTORS = (8.0, 32.0)  # by which Llama 3.1 and 3.2 stretch the rotary embeddings of Llama 3
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Gguf(Checkpoint):
    """A file whose matrices are those of `transformers`, but for the order of their rows.

    Args:
        config: what `transformers` read from the file; completed here.
        model: how messages name it.
    """

    def __init__(self, path: Path, config: Any, model: str):
        super().__init__()
        from gguf import GGUFReader
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        reader = GGUFReader(path)
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

        names, linear = get_gguf_hf_weights_map(model, self._processor), linear_weights(model)

        def read(tensor: Any, name: str) -> Tensor:
            if name in linear and tensor.tensor_type.name in BLOCKS:
                return self.weight(name, self._integers(tensor), linear, dtype)
            if name in linear and tensor.tensor_type.name not in FLOATS:
                self.unpacked.append(name)
            return self._plain(tensor, dtype)

        found = {names[name]: tensor for name, tensor in self._tensors.items() if name in names}
        return {name: Lazy(partial(read, tensor, name)) for name, tensor in found.items()}

    def _integers(self, tensor: Any) -> Integers | InBlocks:
        integers = BLOCKS[tensor.tensor_type.name](torch.from_numpy(tensor.data.copy()))
        order = self._order(tensor)
        return integers if order is None else integers.rows(torch.from_numpy(order))

    def _plain(self, tensor: Any, dtype: torch.dtype) -> Tensor:
        from gguf import dequantize

        data, kind = tensor.data, tensor.tensor_type
        if data.ndim != 2 or self._order(tensor) is not None:
            return torch.from_numpy(self._processed(dequantize(data, kind), tensor.name).copy()).to(dtype)
        parts = (dequantize(data[start : start + TOGETHER], kind) for start in range(0, len(data), TOGETHER))
        return torch.cat([torch.tensor(part, dtype=dtype) for part in parts])

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
