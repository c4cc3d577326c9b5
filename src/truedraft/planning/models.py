"""Models without weights: the modules that a configuration describes, on torch's "meta" device, and what a model of
these sizes allocates when it is hosted here."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from truedraft import assets, loading
from truedraft.bench.sizes import size_of
from truedraft.runtime import checkpoints, native
from truedraft.runtime._base import PROMPT
from truedraft.runtime.buffers import buffer_rows, buffers_of
from truedraft.runtime.forward import bytes_of_position, positions_together
from truedraft.runtime.linears import SMALLEST
from truedraft.runtime.native import OpKind
from truedraft.runtime.nodes import TOGETHER
from truedraft.runtime.panels import ROWS, SHARE, columns_of
from truedraft.runtime.position_tables import PositionTables, RotaryTables
from truedraft.runtime.processors import long_prompt
from truedraft.runtime.program import Program
from truedraft.runtime.programs import compile_program
from truedraft.runtime.releasing import copies_weights, releasable, weight_of
from truedraft.runtime.weights import ROWS as TOGETHER_ROUNDED
from truedraft.runtime.weights import Copies, NotCompilable, Weight, padded_to_16
from truedraft.targets import kinds
from truedraft.targets.hostable import keeps_states
from truedraft.targets.memory import cache_bytes, cached_layers
from truedraft.targets.quirks import switches

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # dtypes in safetensors headers
COMPILED = (torch.float32, torch.bfloat16)  # dtypes of compiled passes
GROUP = {"int8": 0, "int4": 32}  # weights of a row that share a scale; 0 for all of them
FLOAT = 4  # bytes of a number of compiled passes
ROUNDING = 4 * FLOAT  # bytes of a weight while it is rounded: itself, its magnitude, quotient and integer
KEYS = 64  # places whose keys a worker of the compiled pass reads together
CHUNK = 128  # nodes whose numbers it rounds together
LANES = 16  # numbers that its rooms are whole multiples of
META = torch.device("meta")
CPU = torch.device("cpu")


class CountedCopies(Copies):
    """Counts the copies of weights that a program would read, instead of making them.

    bits: of a number of theirs; 0 for that of the weights.
    rounding: bytes that are held besides while the largest is rounded.
    """

    def __init__(self, bits: int = 0) -> None:
        super().__init__()
        self.bits, self._counted = bits, dict[tuple[Any, ...], int]()
        self._alive: list[Tensor] = []
        self.rounding = 0

    def made(self, weight: Weight) -> Weight:
        raise NotImplementedError

    def __call__(self, weight: Weight) -> Weight:
        if weight.panels or (self.bits and weight.bits <= self.bits):
            return weight
        values = weight.values
        key = values.untyped_storage()._cdata, values.storage_offset(), values.shape
        if key not in self._counted:
            self._counted[key] = panel_bytes(weight.shape, values.dtype, self.bits)
            if self.bits:
                self.rounding = max(self.rounding, ROUNDING * min(weight.shape[0], TOGETHER_ROUNDED) * weight.shape[1])
            self._alive.append(values)
        return weight

    @property
    def bytes(self) -> int:
        return sum(self._counted.values())


def panel_bytes(shape: Sequence[int], dtype: torch.dtype, bits: int = 0, group: int = 0) -> int:
    """Bytes of a copy of a matrix (out, width) in panels, scales included. bits: 8, 4, or 0 for those of the dtype."""
    out, width = shape
    panels = -(-out // ROWS)
    if not bits:
        each = columns_of(dtype)
        return panels * ROWS * (width + -width % each) * dtype.itemsize
    groups = width // group if group else 1
    return panels * ROWS * ((width + -width % 4) * bits // 8 + groups * FLOAT)


@dataclass
class Sized:
    """A model as it would be loaded and hosted on this machine.

    Args:
        name: as the caller named it.
        model: on the meta device. source: its folder, or its name on the hub.
        quantize: see `accelerate`. stored: bytes of a quantised checkpoint, which stays as it is; else 0.
        in_place: without copies of weights, as by `runtime="in-place"`.
        once: its weights are replaced by their copies, as those of models that truedraft loads.
    """

    name: str
    model: Any
    source: Path | str
    dtype: torch.dtype
    quantize: str | None = None
    stored: int = 0
    device: torch.device = CPU
    in_place: bool = False
    once: bool = False
    why: str = field(default="", init=False)  # there is no compiled pass

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    @cached_property
    def counted(self) -> CountedCopies:
        """Copies of all weights that the compiled pass reads."""
        return CountedCopies()

    @cached_property
    def program(self) -> Program | None:
        """The compiled pass; None where there is none, for the reason in `why`."""
        self.why = self._other_pass()
        if self.why:
            return None
        _with_scalars(self.model)
        try:
            with META:
                return compile_program(self.model, self.counted)
        except NotCompilable as why:
            self.why = str(why)
        except RuntimeError as error:  # of a tensor without numbers
            self.why = f"its layers are read with their weights alone ({error})"
        return None

    def _other_pass(self) -> str:
        """Why its passes are not compiled, as far as that does not depend on its layers."""
        if self.device.type != "cpu":
            return f"it runs on {self.device}"
        if kinds.reads_sources(self.model.config):
            return "it is an encoder-decoder, whose passes are estimated"
        if switches(self.config):
            return "its rotary frequencies change with the length of a text"
        return native.missing()

    @cached_property
    def weights(self) -> int:
        """Bytes of the weights as loaded; those that are tied once."""
        if self.stored:
            return self.stored
        tensors = [*self.model.parameters(), *self.model.buffers()]
        if self.quantize is None:
            given, panels = self.replaced
            return sum(tensor.nbytes for tensor in tensors) - given + panels
        linears = [m.weight for m in self.model.modules() if isinstance(m, nn.Linear)]
        tables = {id(m.weight) for m in self.model.modules() if isinstance(m, nn.Embedding)}
        replaced = {id(weight) for weight in linears} - tables
        bits, group = (8, 0) if self.quantize == "int8" else (4, GROUP["int4"])
        packed = sum(panel_bytes(weight.shape, self.dtype, bits, group) for weight in linears)
        return packed + sum(tensor.nbytes for tensor in tensors if id(tensor) not in replaced)

    @property
    def _copied(self) -> bool:
        """Whether compiled passes read weights in panels, which the model does not have as it is."""
        plain = not (self.in_place or self.quantize or self.stored)
        return plain and self.device.type == "cpu" and copies_weights()

    @property
    def replaced(self) -> tuple[int, int]:
        """Bytes of the weights that their copies replace, and of these."""
        return self._replaceable if self.once and self._copied else (0, 0)

    @cached_property
    def _replaceable(self) -> tuple[int, int]:
        _with_scalars(self.model)
        with META:
            found = [weight_of(holders) for holders in releasable(self.model)]
        panels = (panel_bytes((weight.shape[:-1].numel(), weight.shape[-1]), weight.dtype) for weight in found)
        return sum(weight.nbytes for weight in found), sum(panels)

    def copies(self, free: int) -> int:
        """Bytes of the copies of weights in panels, beside the weights, where `free` bytes are left beside these."""
        _, replaced = self.replaced
        if not self._copied or self.weights - replaced > SHARE * free:
            return 0
        return (self.counted.bytes if self.program is not None else self._copied_linears()) - replaced

    def _copied_linears(self) -> int:
        """The copies where the model's own forward has compiled linear layers."""
        weights = {id(m.weight): m.weight for m in self.model.modules() if type(m) is nn.Linear}.values()
        read = [w for w in weights if w.numel() >= SMALLEST and w.shape[1] % 16 == 0 and w.dtype in COMPILED]
        return sum(panel_bytes(weight.shape, weight.dtype) for weight in read)

    def cache(self, rows: int, positions: int) -> int:
        """Bytes of keys and values."""
        if self.program is None:
            return cache_bytes(self.config, cached_layers(self.config), rows, positions, self.dtype)
        sizes = dict[int, int]()
        for op, at in zip(self.program.ops, self.program.layers, strict=True):
            if op.kind == OpKind.ATTEND:
                sizes[at] = op.head + op.inner if op.inner else 2 * op.kv_heads * op.head  # latents: those of all heads
        return rows * positions * sum(sizes.values()) * self.dtype.itemsize

    def tables(self, positions: int) -> int:
        """Bytes of the cosines, sines and other tables by position of the compiled pass."""
        if self.program is None:
            return 0
        with META:
            return table_bytes(self.program, positions, self.dtype)

    def buffers(self, *passes: int) -> int:
        """Bytes of the compiled pass's buffers after passes over so many nodes, in this order."""
        return 0 if self.program is None else buffer_bytes(self.program, grown_to(*passes))

    def logits(self, nodes: int) -> int:
        """Bytes of the logits of a pass; the model's own forward makes them in its dtype, and they are read in fp32."""
        if self.program is not None:
            return nodes * padded_to_16(self.program.widths["logits"]) * FLOAT
        own = self.dtype.itemsize if self.dtype != torch.float32 else 0
        return nodes * self.config.vocab_size * (own + FLOAT)

    def hidden(self, nodes: int, layers: int) -> int:
        """Bytes of the hidden states of tapped layers."""
        width = self.config.hidden_size
        return nodes * layers * (width * self.dtype.itemsize if self.program is None else padded_to_16(width) * FLOAT)

    def scratch(self, nodes: int, places: int) -> int:
        """Bytes that the threads of the compiled pass allocate for a pass; of other passes, those of activations."""
        if self.program is None:
            return nodes * bytes_of_position(self.config, self.dtype, places)
        return torch.get_num_threads() * room_numbers(self.program, nodes, places) * FLOAT

    def reading(self, prompt: int) -> int:
        """Bytes of activations while prompts are read that are too long for the compiled pass; else 0."""
        if self.program is not None and (self.quantize or prompt < long_prompt(self.dtype, self.config.hidden_size)):
            return 0
        of_position = bytes_of_position(self.config, self.dtype, prompt)
        return positions_together(prompt, of_position) * of_position

    def pieces(self, rows: int, prompt: int) -> int:
        """Nodes of the largest compiled pass over prompts."""
        return min(rows * prompt, PROMPT)

    @property
    def unknown(self) -> list[str]:
        """What a plan does not count."""
        found = []
        if keeps_states(self.model.config):
            found.append("the recurrent states of rows, whose sizes only a pass shows")
        if kinds.reads_sources(self.model.config):
            found.append("the encoder's activations, and the keys and values of sources")
        return found


def _with_scalars(model: nn.Module) -> None:
    """Give tensors of a single number one: programs read factors from them, on which no size depends."""
    for module in model.modules():
        groups: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors in groups:
            for name, tensor in tensors.items():
                if tensor is not None and tensor.numel() == 1 and tensor.is_meta:
                    one = torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
                    tensors[name] = nn.Parameter(one) if isinstance(tensor, nn.Parameter) else one


def grown_to(*passes: int) -> int:
    """Nodes for which the compiled pass has buffers after passes over so many, in this order."""
    most = 0
    for nodes in passes:
        most = buffer_rows(nodes, most)
    return most


def buffer_bytes(program: Program, nodes: int) -> int:
    """Bytes of the buffers of a program for so many nodes; the logits are allocated per pass."""
    return FLOAT * sum(rows * width for rows, width in buffers_of(program, nodes).values())


def table_bytes(program: Program, positions: int, dtype: torch.dtype) -> int:
    """Bytes of the tables by position that a program reads."""
    rotary, along, found = RotaryTables(), PositionTables(), dict[int, int]()
    for op, at in zip(program.ops, program.layers, strict=True):
        if at < 0:
            continue
        own = program.rotaries.get(at, program.rotary)
        if op.kind in (OpKind.PREPARE, OpKind.LATENT) and own is not None and at not in program.unrotated:
            for table in rotary(own, program.layer_types[at], positions, dtype):
                found[id(table)] = table.nbytes
        if op.kind == OpKind.PREPARE and at in program.factored and program.factor:
            table = along(program.factor, positions)
            found[id(table)] = table.nbytes
        if op.kind == OpKind.ATTEND and program.lean:
            table = along(program.lean, positions)
            found[id(table)] = table.nbytes
    return sum(found.values())


def room_numbers(program: Program, nodes: int, places: int) -> int:
    """Numbers of a worker's rooms, as in `rooms_of` of native/pass.c, without those of recurrent layers."""
    attending = [op for op in program.ops if op.kind in (OpKind.ATTEND, OpKind.CROSS)]
    if not attending:
        return LANES
    queries = TOGETHER * max(op.heads // op.kv_heads for op in attending)
    head = max(op.head for op in attending)
    beside = min(nodes, CHUNK) * max(program.widths.values()) // 2 if program.narrow else 0
    return queries * (places + 2 * ROWS) + queries * head + nodes + KEYS * head + beside


def sized(
    name: str, dtype: str = "auto", quantize: str | None = None, stretched: str | None = None, argument: str = "MODEL"
) -> Sized:
    """A model by its name, as `loading.load` would load it.

    Raises:
        Refused: there is no such model, it is damaged, or its configuration is of no model of transformers.
    """
    source = loading.model_of(loading.check(name, dtype, quantize, argument), name, argument)
    config = loading.config_of(source, name, argument)
    device = loading.device_of(name, argument)
    name, _ = loading.split(name)
    files = _quantised(source, config)
    found = DTYPES.get(dtype) or _stored_dtype(name, source, config)
    model = _empty(config, found)
    if stretched is not None:
        from truedraft.bench.stretched import LayerMap, Stretch, stretched_config

        layers, hidden = size_of(stretched, name)
        original, model = model, _empty(stretched_config(config, layers=layers, hidden=hidden), found)
        mapped = LayerMap(config.num_hidden_layers, layers)
        model.stretch = Stretch(original, mapped, config.hidden_size, hidden, 0.0, True)
    model.config.name_or_path = str(source)
    stored = sum(file.stat().st_size for file in files)
    return Sized(name, model, source, found, quantize, stored, device, once=True)


def _empty(config: Any, dtype: torch.dtype) -> Any:
    """A model without weights."""
    with META:
        return kinds.auto_class(config).from_config(config, dtype=dtype).eval()


def _quantised(source: Path | str, config: Any) -> list[Path]:
    """The files of a quantised checkpoint, whose weights stay as they are."""
    if not (isinstance(source, Path) and checkpoints.is_quantised(source, config)):
        return []
    return [source] if source.is_file() else list(source.glob("*.safetensors"))


def _stored_dtype(name: str, source: Path | str, config: Any) -> torch.dtype:
    """The dtype of "auto": that of the configuration, or of the first weights of the checkpoint."""
    if name in assets.names():
        return torch.float32
    if isinstance(source, Path) and checkpoints.is_gguf(source):
        return DTYPES[loading.precision_of(source, config)]
    if isinstance(found := getattr(config, "dtype", None), torch.dtype):
        return found
    files = sorted(source.glob("*.safetensors")) if isinstance(source, Path) and source.is_dir() else []
    dtypes = [entry["dtype"] for file in files[:1] for key, entry in header(file).items() if key != "__metadata__"]
    return next((STORED[dtype] for dtype in dtypes if dtype in STORED), torch.float32)


def header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file: by tensor its dtype, shape and place; none of its numbers is read."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        found: dict[str, Any] = json.loads(opened.read(length))
    return found
