"""Training of a draft model: a small model learns a target's distributions over the target's own responses.

The student is a small model that exists, or a fresh one of the target's architecture, of a given shape, whose
embeddings begin as those of the target, projected. Goel et al., "Direct Alignment of Draft Model for Speculative
Decoding with Chat-Fine-Tuned LLMs", 2024 (arXiv 2403.00858): pretrained on text, and then trained by the distance that
is the rate of rejection.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from truedraft.card import knob
from truedraft.drafters._learned import Batch, Learner, Metrics, ParameterGroups, target_logits
from truedraft.drafters._losses import LOSSES, named
from truedraft.drafters._walking import Walk
from truedraft.drafters.models._reader import loaded
from truedraft.errors import Refused, why
from truedraft.runtime.modules import inner_size
from truedraft.runtime.releasing import keep_originals
from truedraft.targets.hostable import check_hosted, keeps_states
from truedraft.targets.kinds import family_of
from truedraft.tree import Taps

INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")  # names of the size of a feed-forward
SHARE_OF_WIDTH, SHARE_OF_LAYERS = 4, 8  # of a target's, as published: 4 of 32 layers, 1,024 of 4,096
LAYERS = 2  # at least, where none are given
SPREAD = 0.02  # root of the mean square of the embeddings that a fresh student begins with
IGNORED = ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures")  # no part of a shape


@dataclass
class Distilling(Learner):
    """Training of a draft model on a target's responses, by its distributions there; with the loss `ce` by the tokens
    alone, without a pass of the target."""

    name: ClassVar[str] = "draft-model"
    checkpoint: ClassVar[str] = "model.safetensors"
    model: Any = None  # a model to continue, of the target's tokenizer, or its name; None for a fresh one
    layers: int = knob(0, 0, 1024)  # of a fresh one; 0 for an eighth of the target's, at least 2; published 4
    width: int = knob(0, 0, 1 << 16)  # of its hidden states; 0 for a quarter of the target's; published 1,024
    heads: int = knob(0, 0, 1024)  # of its attention; 0 for heads of the target's size; published 8
    inner: int = knob(0, 0, 1 << 18)  # of its feed-forwards; 0 for the target's proportion; published 2,816
    tied: bool = knob(True)  # whether the output head is the embeddings; published False
    loss_name: str = knob("kl", form=f"one of {', '.join(LOSSES)}", reader=named)  # published: ce, then tvd++
    drafted: int = knob(7, 1, 256)  # tokens of the drafts that an evaluation measures; published 3 to 5

    @property
    def lr(self) -> float:  # type: ignore[override]
        return 3e-3 if self.model is None else 3e-4

    def begin(self, model: PreTrainedModel) -> None:
        if family_of(model.config) != "decoder":
            raise Refused(f"{type(model).__name__} is no decoder language model: draft models are trained for these")
        self.target = model.requires_grad_(False)
        self.needs = Taps() if self.loss_name == "ce" else Taps((-1,))
        student: Any = self._fresh() if self.model is None else self._given()
        check_hosted(student.eval())
        if keeps_states(student.config):
            raise Refused(
                f"the draft model {type(student).__name__} would have states, which cannot be taken back to where its "
                "draft was accepted: train one with attention alone"
            )
        self.module = student.float().requires_grad_(True)

    def _given(self) -> PreTrainedModel:
        if self.layers or self.width or self.heads or self.inner or not self.tied:
            raise Refused(
                f"{self.name}: model= is continued in its own shape: leave layers=, width=, heads=, inner= and tied= "
                "out, or model= for a fresh one"
            )
        student, tokenizer = loaded(self.model)
        if tokenizer and self.tokenizer and tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise Refused(
                f"{self.model} has another tokenizer than the target, and a draft model learns the distributions of "
                "its own tokens: give one with the target's tokenizer, or leave model= out for a fresh one"
            )
        keep_originals(student)  # it is trained
        return student.to(self.target.device)

    def _fresh(self) -> PreTrainedModel:
        theirs = self.target.config.get_text_config(decoder=True)
        try:
            config = shaped(theirs, self.layers, self.width, self.heads, self.inner, self.tied)
            student = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            student(input_ids=torch.zeros(1, 2, dtype=torch.long, device=self.target.device))
        except Exception as e:  # a configuration that does not fit makes the constructors raise any exception
            reason = " ".join(why(e).split())[:200]
            raise Refused(
                f"{self.name}: there is no {type(self.target).__name__} of that shape ({reason}): give other "
                "layers=, width= or heads=, or a small model by model="
            ) from e
        student.generation_config = copy.deepcopy(self.target.generation_config)
        return student

    def prepare(self, counts: Tensor) -> None:
        """Begin with the target's embeddings, and its output head, projected to the width of a fresh student."""
        if self.model is not None:
            return
        for side in ("get_input_embeddings", "get_output_embeddings")[: 1 if self.tied else 2]:
            theirs, own = (getattr(model, side)().weight for model in (self.target, self.module))
            own.data.copy_(projected(theirs.float(), own.shape[1]))

    def loss(self, batch: Batch) -> Tensor:
        counted = batch.loss_mask[:, 1:]
        if not counted.any():
            return torch.zeros(())
        labels, losses = batch.ids[:, 1:][counted], []
        for logits in self.outputs(batch, counted):
            p = self._law(batch, counted, logits.shape[-1]) if self.needs.hidden else logits  # which `ce` does not read
            losses.append(LOSSES[self.loss_name](logits[:, : p.shape[-1]].log_softmax(-1), p, labels).mean())
        return torch.stack(losses).sum()

    def outputs(self, batch: Batch, counted: Tensor) -> Iterable[Tensor]:
        """(n, V) logits before each counted token, of every output that is trained."""
        return [self._logits(batch, counted)]

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Metrics:
        """Acceptance of chains of the likeliest tokens by position, over all positions of the responses, and the tokens
        per pass of decoding them with such drafts; and `overlap`, the rate at which rejection sampling accepts a token
        that is drawn there from the draft model, where the target's distributions are known."""
        walk, overlap, count = Walk(self.drafted), 0.0, 0
        for batch in batches:
            counted = batch.loss_mask[:, 1:]
            logits = self._logits(batch, counted)
            right = torch.zeros_like(counted)
            right[counted] = logits.argmax(-1) == batch.ids[:, 1:][counted]
            for row, span in zip(right.tolist(), batch.spans(), strict=True):
                walk.add(reach_of(row, self.drafted), *span)
            if self.needs.hidden:
                p = self._law(batch, counted, logits.shape[-1])
                overlap += torch.minimum(p, logits.softmax(-1)).sum().item()
                count += len(p)
        return {**walk.metrics(), **({"overlap": round(overlap / count, 4)} if count else {})}

    def _logits(self, batch: Batch, counted: Tensor) -> Tensor:
        """(n, V) logits of the student before each counted token, over the tokens that both models have."""
        student: Any = self.module
        sizes = (model.config.get_text_config(decoder=True).vocab_size for model in (student, self.target))
        return target_logits(student, states_before(student, batch)[counted])[:, : min(sizes)]

    def _law(self, batch: Batch, counted: Tensor, size: int) -> Tensor:
        """(n, size) probabilities of the target before each counted token."""
        with torch.no_grad():
            return target_logits(self.target, batch.features[-1][:, :-1][counted])[:, :size].softmax(-1)

    def config(self) -> dict[str, Any]:
        student: Any = self.module
        found = json.loads(json.dumps(student.config.to_dict(), default=str))
        return {name: value for name, value in found.items() if name not in IGNORED}

    def resume(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        own = self.config()
        if other := sorted(name for name in own.keys() | config.keys() if own.get(name) != config.get(name)):
            raise Refused(
                f"--resume: the checkpoint is of a draft model with another {', '.join(other[:3])}: give the same knobs"
            )
        self.module.load_state_dict(weights)

    def save(self, folder: Path, model: PreTrainedModel) -> None:
        """Write a folder as `save_pretrained` does, with the target's tokenizer, in the target's precision; the weights
        are replaced last."""
        folder.mkdir(parents=True, exist_ok=True)
        student: Any = copy.deepcopy(self.module).to(model.dtype)
        try:
            with TemporaryDirectory(dir=folder, prefix=".checkpoint.") as part:
                student.save_pretrained(part, max_shard_size="1TB")
                if self.tokenizer is not None:
                    self.tokenizer.save_pretrained(part)
                for file in sorted(Path(part).iterdir(), key=lambda file: file.name == self.checkpoint):
                    os.replace(file, folder / file.name)
        except SafetensorError as e:
            raise OSError(str(e)) from e

    def restore(self, folder: Path, model: PreTrainedModel) -> str:
        student, _ = loaded(folder)
        config = json.loads(json.dumps(student.config.to_dict(), default=str))
        weights = {name: weight.float() for name, weight in student.state_dict().items()}
        self.resume({name: value for name, value in config.items() if name not in IGNORED}, weights)
        return ""

    def parameter_groups(self) -> ParameterGroups:
        """Embeddings and the output head are among those that AdamW moves."""
        student: Any = self.module
        tables = {id(module.weight) for module in student.modules() if isinstance(module, nn.Embedding)}
        tables.add(id(student.get_output_embeddings().weight))
        groups: ParameterGroups = ([], [])
        for parameter in student.parameters():
            groups[0 if parameter.ndim == 2 and id(parameter) not in tables else 1].append(parameter)
        return groups


def shaped(config: Any, layers: int, width: int, heads: int, inner: int, tied: bool) -> Any:
    """A configuration of another shape; 0 for the share of the given one that is published."""
    made, size, count, head = copy.deepcopy(config), config.hidden_size, config.num_attention_heads, head_size(config)
    width = width or max(size // SHARE_OF_WIDTH // head, 1) * head
    head = min(head, width) if not heads else max(width // heads, 1)
    heads = heads or width // head
    shared = count // (getattr(config, "num_key_value_heads", None) or count)  # queries of a key
    inner = inner or max(round(width * inner_size(config) / size / 32), 1) * 32
    layers = layers or max(config.num_hidden_layers // SHARE_OF_LAYERS, LAYERS)
    for name, value in list(vars(made).items()):
        if isinstance(value, list) and len(value) == config.num_hidden_layers:  # of each layer
            setattr(made, name, [value[-1 - i % len(value)] for i in range(layers)][::-1])
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": head}
    keys = next(keys for keys in range(max(heads // shared, 1), 0, -1) if heads % keys == 0)
    sizes |= {"num_key_value_heads": keys, "word_embed_proj_dim": width, **dict.fromkeys(INNER, inner)}
    for name, value in sizes.items():
        if name in made.attribute_map or vars(made).get(name) is not None:
            setattr(made, name, value)
    made.tie_word_embeddings = tied
    for name in ("quantization_config", "auto_map"):
        if hasattr(made, name):
            delattr(made, name)
    return made


def head_size(config: Any) -> int:
    """Numbers of a head of attention."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def projected(table: Tensor, width: int) -> Tensor:
    """(V, H) embeddings -> (V, width), their coordinates along the directions in which they differ most; of a wider
    student the remaining ones are random."""
    found = torch.randn(len(table), width, device=table.device)
    _, axes = torch.linalg.eigh(table.T @ table)  # in ascending order
    kept = table @ axes[:, -min(width, table.shape[1]) :]
    found[:, : kept.shape[1]] = kept / kept.square().mean().sqrt()
    return SPREAD * found


def states_before(student: Any, batch: Batch) -> Tensor:
    """(rows, length - 1, H) hidden states of a model, after its final norm, before each token but the first."""
    read = student.base_model(input_ids=batch.ids, attention_mask=batch.mask.long(), use_cache=False)
    return read.last_hidden_state[:, :-1]


def rights(student: Any, batch: Batch) -> Tensor:
    """(rows, length - 1) bool, whether the token behind each position is to be predicted, and the likeliest one."""
    counted = batch.loss_mask[:, 1:]
    found = torch.zeros_like(counted)
    best = target_logits(student, states_before(student, batch)[counted]).argmax(-1)
    found[counted] = best == batch.ids[:, 1:][counted]
    return found


def reach_of(right: Sequence[bool], most: int) -> list[int]:
    """By position i, how many tokens from i + 2 on are right one behind the other, `most` of them at most.

    right: by position i, whether the token behind it is the likeliest one.
    """
    found, run = [0] * len(right), 0
    for i in range(len(right) - 2, -1, -1):
        run = run + 1 if right[i + 1] else 0
        found[i] = min(run, most)
    return found
