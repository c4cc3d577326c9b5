"""Checkpoints of learned heads: those trained here, and those of other projects, told apart by what a folder holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from truedraft import assets, registry
from truedraft.drafters._learned import WEIGHTS, Module, other_weights, read_learnt, training, with_weights
from truedraft.drafters.heads._layouts import unread_layout
from truedraft.drafters.heads._weights import StoredWeights
from truedraft.errors import Refused, why


@dataclass(frozen=True)
class Foreign:
    """A checkpoint in the format of another project.

    source: as the caller named it. folder: where its files are.
    """

    source: str
    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its config.json; empty where there is none."""
        path = self.folder / "config.json"
        try:
            found = json.loads(path.read_bytes()) if path.exists() else {}
        except (ValueError, RecursionError) as e:
            raise Refused(f"{self.source!r}: its config.json is no JSON: download it again") from e
        if not isinstance(found, dict):
            raise Refused(f"{self.source!r}: its config.json is no JSON object: download it again")
        return found

    @cached_property
    def tensors(self) -> StoredWeights:
        """Its weights by name, each read when it is asked for; `.bin` files are read as weights only.

        Raises:
            Refused: there are none, or they are damaged.
        """
        return StoredWeights(self.source, self.folder)

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
    rebuilt: Callable[[dict[str, Any], PreTrainedModel], Module], tokenizer: PreTrainedTokenizerBase | None = None,
) -> Module:  # fmt: skip
    """The head of a checkpoint: trained here, or in the first format that matches. Its attribute `origin` is a sentence
    for reports where it was trained here for other weights of the target, else empty.

    For a stretched model (`truedraft.bench.stretched`) it is the head of the original, stretched likewise.

    Args:
        name: of the method.
        source: a folder, an embedded head or a name on the hub; None for the embedded head of the target.
        rebuilt: the untrained head of a record that was trained here.
        tokenizer: the target's.

    Raises:
        Refused: no such checkpoint, in no format that the method reads, damaged, or not made for this target.
    """
    if (stretch := getattr(model, "stretch", None)) is not None:
        head = read_head(name, source, formats, stretch.source, rebuilt, tokenizer)
        return _from(stretch.head(head, lambda record: rebuilt(record, model)), origin_of(head))
    if source is None and (source := assets.head(name, model.config.name_or_path)) is None:
        raise Refused(f"{name} needs a head: draft='{name}:FOLDER', made by `truedraft train {name}`, or others'")
    folder = folder_of(name, source)
    if (folder / WEIGHTS).exists():
        config, weights = read_learnt(folder, name, model, tokenizer, str(source))
        note = other_weights(config, name, source, model, tokenizer)
        return _from(with_weights(lambda: rebuilt(config, model), weights, name, str(source)), note)
    foreign = Foreign(str(source), folder)
    known = ", ".join(form.name for form in formats) or "none but its own"
    if layout := unread_layout(foreign.tensors, foreign.config):
        raise Refused(f"{name}: {str(source)!r} is in the layout of {layout}, which is not read here: give {known}")
    for form in formats:
        if form.matches(foreign):
            return form.read(foreign, model)
    for other in registry.names("drafters"):
        if any(form.matches(foreign) for form in getattr(registry.method("drafters", other), "formats", ())):
            raise Refused(
                f"{name}: {str(source)!r} is a checkpoint of another method: give it as draft='{other}:{source}'"
            )
    raise Refused(
        f"{name}: {str(source)!r} is in no format that it reads ({known}), nor made by `truedraft train {name}`"
    )


def _from(head: Module, origin: str) -> Module:
    object.__setattr__(head, "origin", origin)
    return head


def origin_of(head: object) -> str:
    """The attribute of a head of `read_head`; empty for others."""
    return str(getattr(head, "origin", ""))


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
        raise Refused(f"{name}: there is no folder {text!r} (`{training(name)}` makes one)")
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
    kinds = [
        f"{n} as {weights[n].dtype}".replace("torch.", "")
        for n in own
        if n in weights and weights[n].is_floating_point() != own[n].is_floating_point()
    ]
    shapes = [
        f"{n} {tuple(weights[n].shape)} instead of {tuple(own[n].shape)}"
        for n in own
        if n in weights and weights[n].shape != own[n].shape
    ]
    for fault, names in (
        ("lacks", own.keys() - weights.keys()),
        ("has foreign", weights.keys() - own.keys()),
        ("has", kinds),
        ("has", shapes),
    ):
        if names:
            some = sorted(names)[:3]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise Refused(f"{source!r} {fault} {', '.join(some)}{more}: it does not fit this drafter and target")
    module.load_state_dict(weights)
    return module
