"""Trainable drafters: the contract of their training, and checkpoints bound to the target of their training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from truedraft.errors import Refused, why
from truedraft.identity import Identity
from truedraft.runtime.finite import check_finite
from truedraft.runtime.identity import identity_of
from truedraft.stores import _file as file
from truedraft.stores.corpus import fingerprint as tokens_of
from truedraft.tree import Taps

Module = TypeVar("Module", bound=nn.Module)
Metrics = dict[str, float | list[float]]
ParameterGroups = tuple[list[nn.Parameter], list[nn.Parameter]]  # those that Muon moves; those that AdamW moves

VERSION = 2
MADE_FOR = "made_for"  # in a checkpoint's description: the target
WEIGHTS = "drafter.safetensors"  # file name in a checkpoint's folder


@dataclass(frozen=True)
class Batch:
    """Texts to train on, and what the frozen target computes of them.

    ids: (rows, length) tokens, padded at the right: prompt and response; of an encoder-decoder those of the decoder.
    mask: (rows, length) bool, False on padding.
    loss_mask: (rows, length) bool, True on the tokens to predict: those of the target's response.
    features: layer -> (rows, length, H) hidden states of the target, for the layers in `Learner.needs`.
    source: encoder states (rows, source length, H) and source mask, for encoder-decoders.
    """

    ids: Tensor
    mask: Tensor
    loss_mask: Tensor
    features: dict[int, Tensor]
    source: tuple[Tensor, Tensor] | None = None

    def spans(self) -> list[tuple[int, int]]:
        """By row, the prompt's last position and the length of the text."""
        firsts = (self.loss_mask.int().argmax(1) - 1).clamp_min(0)
        return list(zip(firsts.tolist(), self.mask.sum(1).tolist(), strict=True))

    def split(self, rows: int) -> Iterator[Batch]:
        """Batches of at most that many rows each, of the same length."""
        for first in range(0, len(self.ids), rows):
            part = slice(first, first + rows)
            yield replace(
                self, ids=self.ids[part], mask=self.mask[part], loss_mask=self.loss_mask[part],
                features={layer: states[part] for layer, states in self.features.items()},
                source=None if self.source is None else (self.source[0][part], self.source[1][part]),
            )  # fmt: skip


class Learner(ABC):
    """A drafter in training. Subclasses are dataclasses whose fields are the training's knobs.

    name: of the drafter.
    module: the trained module; the target's own weights are not part of it.
    needs: what the trainer supplies in `Batch.features`; set by `begin`.
    lr: peak learning rate, where none is given.
    checkpoint: file name of the weights in a checkpoint's folder.
    tokenizer: the target's; set by the trainer before `begin`.
    progress: progress of the training, 0 to 1, kept current by the trainer.
    """

    name: ClassVar[str]
    module: nn.Module
    needs = Taps()
    lr = 3e-3
    checkpoint: ClassVar[str] = WEIGHTS
    tokenizer: PreTrainedTokenizerBase | None = None
    progress = 0.0

    @abstractmethod
    def begin(self, model: PreTrainedModel) -> None:
        """Initialise the module for a target.

        Raises:
            Refused: the method cannot draft for this target, or a knob is invalid.
        """

    def prepare(self, counts: Tensor) -> None:
        """Set the module up for the data, before training starts anew.

        counts: (V,) occurrences of each token among the tokens to predict.
        """

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """The scalar to minimise."""

    @abstractmethod
    def evaluate(self, batches: Iterable[Batch]) -> Metrics:
        """Metrics on held-out lines.

        Among them are `tokens_per_pass`, by which the best checkpoint is kept, and `acceptance`, where the method
        measures it: by position of a draft, the share of drafts accepted among those whose earlier tokens are.
        """

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The configuration from which the module can be rebuilt."""

    @abstractmethod
    def resume(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Continue from a checkpoint.

        Raises:
            Refused: it was trained with other knobs.
        """

    def save(self, folder: Path, model: PreTrainedModel) -> None:
        """Write a checkpoint for a target atomically.

        Raises:
            OSError: it cannot be written; an earlier checkpoint is left as it was.
        """
        save_learnt(folder, self.name, self.module, model, self.config(), tokenizer=self.tokenizer)

    def restore(self, folder: Path, model: PreTrainedModel) -> str:
        """Continue from the checkpoint in a folder.

        Returns:
            A sentence on the target that it was trained for; empty where that is this one.

        Raises:
            Refused: it is damaged, has weights that are no finite numbers, was trained for a target of other sizes or
                tokens, or with other knobs.
        """
        config, weights = read_learnt(folder, self.name, model, self.tokenizer)
        self.resume(config, weights)
        check_finite(self.name, folder, self.module)
        return other_weights(config, self.name, folder, model, self.tokenizer)

    def parameter_groups(self) -> ParameterGroups:
        """The trained parameters: matrices, moved by Muon, and all others, moved by AdamW."""
        return split_parameters(self.module)


def split_parameters(module: nn.Module) -> ParameterGroups:
    """Parameters that require a gradient: matrices other than embeddings, and the rest."""
    groups: ParameterGroups = ([], [])
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            matrix = parameter.ndim == 2 and "embed" not in name and "shared" not in name
            groups[0 if matrix else 1].append(parameter)
    return groups


def target_logits(model: Any, states: Tensor) -> Tensor:
    """A model's logits from its hidden states after the final norm; fp32."""
    head, config = model.get_output_embeddings(), model.config.get_text_config(decoder=True)
    logits = head(states.to(head.weight.dtype)).float()
    logits = logits / (getattr(config, "logits_scaling", None) or 1.0) * (getattr(config, "logit_scale", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits


def save_learnt(
    folder: Path, name: str, module: nn.Module, model: PreTrainedModel, config: dict[str, Any],
    dtype: torch.dtype = torch.float32, tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:  # fmt: skip
    """Write a checkpoint atomically.

    Args:
        model, tokenizer: the target, and its tokenizer.
        dtype: of the matrices in the file, fp32 or bf16; other weights are in fp32.

    Raises:
        OSError: it cannot be written; an earlier checkpoint is left as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {n: w.detach().cpu() for n, w in module.state_dict().items()}
    narrow = sorted(n for n, w in weights.items() if w.is_floating_point() and w.ndim > 1 and dtype == torch.bfloat16)
    arrays = {n: (w.float() if w.is_floating_point() else w).numpy() for n, w in weights.items()}
    arrays |= {n: weights[n].to(dtype).view(torch.int16).numpy() for n in narrow}  # numpy has no bf16
    config = {**config, MADE_FOR: _identity(model, tokenizer).record(), "bfloat16": narrow}
    file.write(folder / WEIGHTS, f"{name} drafter", VERSION, config, arrays)


def read_learnt(
    folder: Path, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None,
    source: str = "",
) -> tuple[dict[str, Any], dict[str, Tensor]]:  # fmt: skip
    """The configuration and the weights of a checkpoint for a target.

    source: the folder as the caller named it.

    Raises:
        Refused: there is none, it is damaged, or it was trained for a target of other sizes or tokens.
    """
    config, weights = read_weights(folder, name, source)
    other_weights(config, name, source or folder, model, tokenizer)
    return config, weights


def other_weights(
    config: dict[str, Any], name: str, source: object, model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> str:  # fmt: skip
    """A sentence for reports where a checkpoint was trained for other weights of its target; empty where it was not.

    Raises:
        Refused: it was trained for a target of other sizes or tokens.
    """
    fitted = f"{name}: {str(source)!r} was trained"
    return origin(config).compared(_identity(model, tokenizer), fitted, "train one for this model")


def _identity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Identity:
    return identity_of(model, "" if tokenizer is None else tokens_of(tokenizer))


def origin(config: dict[str, Any]) -> Identity:
    """The target that a checkpoint was trained for."""
    return Identity.read(config.get(MADE_FOR, config))  # of earlier versions, without sizes


def read_weights(folder: Path, name: str, source: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As `read_learnt`, whatever the target that it was trained for.

    Raises:
        Refused: there is no checkpoint, it is another method's, or it is damaged.
    """
    other, ending = file.kind_of(folder / WEIGHTS), " drafter"
    if other.endswith(ending) and other != f"{name}{ending}":
        other = other.removesuffix(ending)
        raise Refused(
            f"{name}: {source or str(folder)!r} is a checkpoint of {other}, which reads it as "
            f"draft='{other}:{'head=' if other == 'specdec-pp' else ''}{source or folder}'"
        )
    if not folder.is_dir():
        raise Refused(f"{name}: there is no folder {str(folder)!r} (`{training(name)}` makes one)")
    config, arrays, _ = file.read(folder / WEIGHTS, f"{name} drafter", VERSION, training(name))
    weights = {n: torch.from_numpy(a.copy()) for n, a in arrays.items()}
    return config, weights | {n: weights[n].view(torch.bfloat16).float() for n in config.get("bfloat16", ())}


def training(name: str) -> str:
    """The command that trains a method, in messages."""
    return f"truedraft train {name} --target MODEL --data FILE --out NEW_FOLDER"


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
