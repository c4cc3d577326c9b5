"""Trainable drafters: the contract of their training, and checkpoints bound to the target of their training."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from truedraft.errors import Refused, why
from truedraft.stores import _file as file

Module = TypeVar("Module", bound=nn.Module)
Line = tuple[list[int], list[int]]  # tokens of a source; the decoder's prompt followed by the target's output

VERSION = 2
WEIGHTS = "drafter.safetensors"  # file name in a checkpoint's folder
SAMPLED = 64  # rows of the embedding table that go into a fingerprint


class Learner(ABC):
    """A drafter in training. Subclasses are dataclasses whose fields are the training's knobs.

    name: of the drafter.
    module: the trained module; the target's own weights are not part of it.
    progress: progress of the training, 0 to 1, kept current by the trainer.
    """

    name: ClassVar[str]
    module: nn.Module
    progress = 0.0

    @abstractmethod
    def begin(self, model: PreTrainedModel) -> None:
        """Initialise the module for a target.

        Raises:
            Refused: the method cannot draft for this target, or a knob is invalid.
        """

    @abstractmethod
    def loss(self, lines: Sequence[Line]) -> Tensor:
        """The scalar to minimise."""

    @abstractmethod
    def evaluate(self, lines: Sequence[Line]) -> dict[str, float]:
        """Metrics on held-out lines; the checkpoint with the highest `tokens_per_pass` among them is kept."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The configuration from which the module can be rebuilt."""

    @abstractmethod
    def resume(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Continue from a checkpoint.

        Raises:
            Refused: it was trained with other knobs.
        """


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of a model's class, sizes and those weights that quantising leaves alone, rounded to bf16."""
    config = model.config.get_text_config(decoder=True)
    table: Any = model.get_input_embeddings().weight
    sampled = [*(p for p in model.parameters() if p.ndim == 1), table[:: max(len(table) // SAMPLED, 1)]]
    digest = hashlib.sha256(f"{type(model).__name__} {config.vocab_size} {config.hidden_size}".encode())
    for weight in sampled:
        digest.update(weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def save_learnt(folder: Path, name: str, module: nn.Module, model: PreTrainedModel, config: dict[str, Any]) -> None:
    """Write a checkpoint atomically.

    Raises:
        OSError: it cannot be written; an earlier checkpoint is left as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {n: w.detach().float().cpu().numpy() for n, w in module.state_dict().items()}
    config = {**config, "target": type(model).__name__, "fingerprint": fingerprint(model)}
    file.write(folder / WEIGHTS, f"{name} drafter", VERSION, config, arrays)


def read_learnt(folder: Path, name: str, model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the weights of a checkpoint.

    Raises:
        Refused: there is no checkpoint, it is damaged, or it was trained for another target.
    """
    command = f"truedraft train {name} --target MODEL --data FILE --out {folder}"
    if not folder.is_dir():
        raise Refused(f"{name}: there is no folder {str(folder)!r} (`{command}` makes one)")
    config, arrays, _ = file.read(folder / WEIGHTS, f"{name} drafter", VERSION, command)
    stored, given = config.get("fingerprint"), fingerprint(model)
    if stored != given:
        raise Refused(
            f"{name}: {str(folder)!r} was trained for another model (a {config.get('target')}, fingerprint {stored}; "
            f"this is a {type(model).__name__}, {given}): train one for this model"
        )
    return config, {n: torch.from_numpy(a.copy()) for n, a in arrays.items()}


def with_weights(module: Callable[[], Module], weights: dict[str, Tensor], name: str, folder: str | Path) -> Module:
    """Build the module of a checkpoint and load all of its weights.

    Raises:
        Refused: the configuration gives no module, or one with other weights.
    """
    try:
        built = module()
        built.load_state_dict(weights)
    except (KeyError, TypeError, ValueError, RuntimeError) as e:
        reason = " ".join(why(e).split())
        raise Refused(
            f"{name}: {str(folder)!r} does not hold the weights that it describes ({reason}): train again"
        ) from e
    return built
