"""The memory plan of a server, from configurations and file headers: nothing is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from truedraft import assets, loading, registry
from truedraft.bench.sizes import size_of
from truedraft.continuous import DRAFTS
from truedraft.errors import Refused
from truedraft.layout import labelled
from truedraft.runtime import checkpoints
from truedraft.runtime._base import PROMPT
from truedraft.runtime.modules import inner_size
from truedraft.serve.config import ServeConfig
from truedraft.targets import kinds
from truedraft.targets.memory import cache_bytes, cached_layers, free_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZED = {"int8": 1.0, "int4": 0.5625}  # bytes of a weight; int4 with a scale and zero per group of 64
PROGRAM = 6  # buffers of about the width of a hidden state that a pass has, besides those of its MLP
CPU = torch.device("cpu")
WIDTHS = 4  # nodes of a row for which logits are counted


@dataclass(frozen=True)
class Part:
    """A part of the memory that a server needs: its bytes, and what they are computed from."""

    name: str
    bytes: int
    of: str


def planned(config: ServeConfig) -> list[Part]:
    """The parts, of which most are exact; the work space is an estimate.

    Raises:
        Refused: there is no such model.
    """
    parts, model_config = _model(config)
    text = model_config.get_text_config(decoder=True)
    dtype = _dtype(config, model_config)
    length = config.max_model_len or getattr(text, "max_position_embeddings", None) or 4096
    kv = cache_bytes(text, cached_layers(text), config.max_rows, length + DRAFTS, dtype)
    parts.append(Part("KV cache", kv, f"{config.max_rows} rows x {length:,} tokens and {DRAFTS} for drafts"))
    if config.prefix_bytes:
        parts.append(Part("prefixes", config.prefix_bytes, "prefix_bytes, at most"))
    parts += _drafters(config)
    nodes = max(PROMPT, config.max_rows * WIDTHS)
    space = 4 * (
        nodes * (PROGRAM * text.hidden_size + 2 * inner_size(text)) + config.max_rows * WIDTHS * text.vocab_size
    )
    parts.append(Part("work space", space, f"activations of {nodes} tokens, and logits; an estimate"))
    return parts


def _model(config: ServeConfig) -> tuple[list[Part], Any]:
    source = loading.check(config.model, config.dtype, config.quantize)
    model_config = loading.config_of(source)
    if isinstance(source, Path) and checkpoints.is_quantised(source, model_config):
        files = [source] if source.is_file() else list(source.glob("*.safetensors"))
        return [Part("weights", sum(file.stat().st_size for file in files), "quantised, as they are")], model_config
    if config.stretched is not None:
        layers, hidden = size_of(config.stretched, config.model)
        from truedraft.bench.stretched import stretched_config

        model_config = stretched_config(model_config, layers=layers, hidden=hidden)
    count = _parameters(model_config)
    size = QUANTIZED[config.quantize] if config.quantize else _dtype(config, model_config).itemsize
    kind = config.quantize or str(_dtype(config, model_config)).removeprefix("torch.")
    return [Part("weights", int(count * size), f"{count:,} parameters in {kind}")], model_config


def _parameters(model_config: Any) -> int:
    """The parameters of a model, tied ones once."""
    with torch.device("meta"):
        model = kinds.auto_class(model_config).from_config(model_config)
    return int(model.num_parameters())


def _dtype(config: ServeConfig, model_config: Any) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if config.model == "nano":
        return torch.float32
    return getattr(model_config, "dtype", None) or torch.float32


def _drafters(config: ServeConfig) -> list[Part]:
    """What drafters read from files: draft models and heads."""
    parts = []
    for name in config.drafts:
        for spec in _sides(name):
            method, knobs = registry.parsed(spec)
            folders = [Path(value).expanduser() for value in knobs.values() if isinstance(value, str)]
            embedded = assets.head(method, str(assets.ROOT / config.model))
            if embedded is not None and not folders:
                folders = [embedded]
            for folder in folders:
                files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")] if folder.is_dir() else []
                if files:
                    size = sum(file.stat().st_size for file in files)
                    parts.append(Part("drafter", size, f"{name}: weights in {folder.name}"))
    return parts


def _sides(name: str) -> Sequence[str]:
    sign, sides = registry.split(name)
    return [part for side in sides for part in _sides(side)] if sign else [name]


def described(parts: Sequence[Part]) -> str:
    """The plan as text."""
    lines = [(part.name, f"{_size(part.bytes)}: {part.of}") for part in parts]
    free = f"{_size(free_memory(CPU))} are free on this machine"
    return labelled([*lines, ("together", f"{_size(sum(part.bytes for part in parts))}; {free}")], width=100)


def check_fits(parts: Sequence[Part], config: ServeConfig) -> None:
    """Raises Refused where the parts do not fit in free memory."""
    lack = sum(part.bytes for part in parts) - free_memory(CPU)
    if lack > 0:
        raise Refused(
            f"max_rows={config.max_rows}, max_model_len={config.max_model_len}: {_size(lack)} more than there is: "
            "lower max_rows, max_model_len or prefix_bytes, or quantize"
        )


def _size(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"
