"""Drafters that have to learn: whose target it is that they learnt from, and what their training has to say."""

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
Line = tuple[list[int], list[int]]  # tokens of a source, and what the target said to it, behind its decoder's prompt

VERSION = 1
WEIGHTS = "drafter.safetensors"  # the file of a checkpoint's folder
SAMPLED = 64  # rows of the embeddings that a fingerprint looks at


class Learner(ABC):
    """A learned drafter in training. Subclasses are dataclasses whose fields are the training's knobs.

    name: of the drafter.
    module: what learns; the target's own weights are no part of it.
    share: of the training's time that has passed, kept current.
    """

    name: ClassVar[str]
    module: nn.Module
    share = 0.0

    @abstractmethod
    def begin(self, model: PreTrainedModel) -> None:
        """Make a fresh module for a target.

        Raises:
            Refused: it cannot draft for this target, or a knob makes no sense.
        """

    @abstractmethod
    def loss(self, lines: Sequence[Line]) -> Tensor:
        """What is to become less, a scalar."""

    @abstractmethod
    def judged(self, lines: Sequence[Line]) -> dict[str, float]:
        """Figures over lines that were held out; `tokens_per_pass`, among them, says which checkpoint is the best."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """What has to be known to make the module again."""

    @abstractmethod
    def resume(self, about: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Go on with what was learnt before.

        Raises:
            Refused: it was learnt with other knobs.
        """


def fingerprint(model: PreTrainedModel) -> str:
    """Of a model's kind, shape and weights: of those that quantising leaves alone, as they are in bf16."""
    config = model.config.get_text_config(decoder=True)
    table: Any = model.get_input_embeddings().weight
    kept = [*(p for p in model.parameters() if p.ndim == 1), table[:: max(len(table) // SAMPLED, 1)]]
    made = hashlib.sha256(f"{type(model).__name__} {config.vocab_size} {config.hidden_size}".encode())
    for weight in kept:
        made.update(weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return made.hexdigest()[:16]


def save_learnt(folder: Path, name: str, module: nn.Module, model: PreTrainedModel, about: dict[str, Any]) -> None:
    """Write a checkpoint, whole or not at all.

    Raises:
        OSError: it cannot be written; what stood there still does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {n: w.detach().float().cpu().numpy() for n, w in module.state_dict().items()}
    about = {**about, "target": type(model).__name__, "fingerprint": fingerprint(model)}
    file.write(folder / WEIGHTS, f"{name} drafter", VERSION, about, arrays)


def read_learnt(folder: Path, name: str, model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a checkpoint is about, and its weights.

    Raises:
        Refused: there is none, it is damaged, or it was trained for another target.
    """
    maker = f"truedraft train {name} --target MODEL --data FILE --out {folder}"
    if not folder.is_dir():
        raise Refused(f"{name}: there is no folder {str(folder)!r} (`{maker}` makes one)")
    about, arrays, _ = file.read(folder / WEIGHTS, f"{name} drafter", VERSION, maker)
    theirs, mine = about.get("fingerprint"), fingerprint(model)
    if theirs != mine:
        raise Refused(
            f"{name}: {str(folder)!r} was trained for another model (a {about.get('target')}, fingerprint {theirs}; "
            f"this is a {type(model).__name__}, {mine}): train one for this model"
        )
    return about, {n: torch.from_numpy(a.copy()) for n, a in arrays.items()}


def with_weights(module: Callable[[], Module], weights: dict[str, Tensor], name: str, folder: str | Path) -> Module:
    """The module that a checkpoint describes, with its weights, all of them.

    Raises:
        Refused: the checkpoint describes no module, or one of other weights.
    """
    try:
        made = module()
        made.load_state_dict(weights)
    except (KeyError, TypeError, ValueError, RuntimeError) as e:
        reason = " ".join(why(e).split())
        raise Refused(
            f"{name}: {str(folder)!r} does not hold the weights that it describes ({reason}): train anew"
        ) from e
    return made
