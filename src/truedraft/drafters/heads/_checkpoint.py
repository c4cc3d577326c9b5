"""Checkpoints of learned heads: those trained here, and those of other projects, told apart by what a folder holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from truedraft import assets
from truedraft.drafters._learned import WEIGHTS, Module, read_learnt, with_weights
from truedraft.errors import Refused, why

FILES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class Foreign:
    """A checkpoint in the format of another project.

    source: as the caller named it. folder: where its files are. files: names of weight files, in order of preference.
    """

    source: str
    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its config.json; empty where there is none."""
        path = self.folder / "config.json"
        try:
            found = json.loads(path.read_bytes()) if path.exists() else {}
        except ValueError as e:
            raise Refused(f"{self.source!r}: its config.json is no JSON") from e
        if not isinstance(found, dict):
            raise Refused(f"{self.source!r}: its config.json is no JSON object")
        return found

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Its weights by name, without a `model.` prefix.

        Raises:
            Refused: there are none, or they are damaged; `.bin` files are read as weights only.
        """
        paths = [self.folder / name for name in FILES if (self.folder / name).exists()]
        paths = paths or sorted(
            [*self.folder.glob("*.safetensors"), *self.folder.glob("*.bin"), *self.folder.glob("*.pt")]
        )
        if not paths:
            raise Refused(f"{self.source!r} has no weights: it needs one of {', '.join(FILES)}")
        try:
            if paths[0].suffix == ".safetensors":
                found = load_file(paths[0])
            else:
                found = torch.load(paths[0], map_location="cpu", weights_only=True)
        except Exception as e:  # a damaged file makes the loaders raise any exception
            raise Refused(f"{self.source!r}: {paths[0].name} cannot be read: {' '.join(why(e).split())[:200]}") from e
        return {name.removeprefix("model."): tensor for name, tensor in found.items()}

    def refused(self, reason: str) -> Refused:
        return Refused(f"{self.source!r}: {reason}")


@dataclass(frozen=True)
class Format:
    """A format of checkpoints.

    name: as records show it.
    matches: whether a folder holds it.
    read: a folder's head for a target; raises Refused where something is missing or foreign.
    """

    name: str
    matches: Callable[[Foreign], bool]
    read: Callable[[Foreign, PreTrainedModel], Any]


def read_head(
    name: str, source: str | PathLike[str] | None, formats: Sequence[Format], model: PreTrainedModel,
    rebuilt: Callable[[dict[str, Any], PreTrainedModel], Module],
) -> Module:  # fmt: skip
    """The head of a checkpoint: trained here, or in the first format that matches.

    For a stretched model (`truedraft.bench.stretched`) it is the head of the original, stretched likewise.

    Args:
        name: of the method.
        source: a folder, an embedded head or a name on the hub; None for the embedded head of the target.
        rebuilt: the untrained head of a record that was trained here.

    Raises:
        Refused: no such checkpoint, in no format that the method reads, damaged, or not made for this target.
    """
    if (stretch := getattr(model, "stretch", None)) is not None:
        head = read_head(name, source, formats, stretch.source, rebuilt)
        return stretch.head(head, lambda record: rebuilt(record, model))
    if source is None and (source := assets.head(name, model.config.name_or_path)) is None:
        raise Refused(f"{name} needs a head: draft='{name}:FOLDER', made by `truedraft train {name}`, or others'")
    folder = folder_of(name, source)
    if (folder / WEIGHTS).exists():
        config, weights = read_learnt(folder, name, model)
        return with_weights(lambda: rebuilt(config, model), weights, name, str(source))
    foreign = Foreign(str(source), folder)
    for form in formats:
        if form.matches(foreign):
            return form.read(foreign, model)
    known = ", ".join(form.name for form in formats) or "none but its own"
    raise Refused(
        f"{name}: {str(source)!r} is in no format that it reads ({known}), nor made by `truedraft train {name}`"
    )


def folder_of(name: str, source: str | PathLike[str]) -> Path:
    """The folder of a checkpoint, downloaded from the hub where the source is no folder.

    Raises:
        Refused: there is none.
    """
    folder = assets.ROOT / source if source in assets.HEADS.values() else Path(source).expanduser()
    if folder.is_dir():
        return folder
    text = str(source)
    if folder.is_absolute() or text.startswith((".", "~")) or text.count("/") != 1:
        raise Refused(
            f"{name}: there is no folder {text!r} (`truedraft train {name} --target MODEL --data FILE --out {text}` "
            "makes one)"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(text))
    except Exception as e:  # no network, no such repository, and what the hub's client raises besides
        raise Refused(f"{name}: {text!r} is no folder here, and cannot be loaded from the hub: {why(e)}") from e


def loaded(module: Module, weights: Mapping[str, Tensor], source: str) -> Module:
    """A module with the weights of a checkpoint, all of them.

    Raises:
        Refused: some are missing, foreign, or of another shape; names them.
    """
    own = module.state_dict()
    shapes = [
        f"{n} {tuple(weights[n].shape)} instead of {tuple(own[n].shape)}"
        for n in own
        if n in weights and weights[n].shape != own[n].shape
    ]
    for fault, names in (
        ("lacks", own.keys() - weights.keys()),
        ("has foreign", weights.keys() - own.keys()),
        ("has", shapes),
    ):
        if names:
            some = sorted(names)[:3]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise Refused(f"{source!r} {fault} {', '.join(some)}{more}: it does not fit this drafter and target")
    module.load_state_dict(weights)
    return module
