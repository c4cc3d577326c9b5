"""The contracts of heads: modules that draft from the target's features, at once or token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from truedraft.caches.rows import RowCache
from truedraft.drafters._candidates import DraftVocabulary
from truedraft.drafters.heads._layers import Attend, HeadAttention, HeadLayer, Norm, Rotary, layer_config, rotary_of
from truedraft.errors import Refused
from truedraft.runtime.native import OpKind
from truedraft.runtime.program import Program


class Learned(nn.Module, ABC):
    """Drafts for the target that it was made for.

    Weights that are the target's (embeddings, output head) are no part of its parameters.

    layers: layers of the target whose hidden states it reads, numbered as in `Taps`.
    target_sizes: of the target that it was made for, see `sizes_of`.
    vocabulary: V of the target.
    draft_token_ids: (draft vocabulary,) target ids of its logits, ascending; None where they are those of the target.
    """

    layers: tuple[int, ...]
    draft_token_ids: Tensor | None

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self._shared = (model.get_input_embeddings(), model.get_output_embeddings())  # not submodules
        self.target_sizes = sizes_of(model)
        self.vocabulary: int = model.config.get_text_config(decoder=True).vocab_size
        self.register_buffer("draft_token_ids", None)

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """The configuration from which it can be rebuilt, its layers included."""

    def embed(self, tokens: Tensor) -> Tensor:
        """(...) ids of tokens of the target to (..., H)."""
        table: Any = self.get_input_embeddings()
        return embedding(tokens, table.weight).to(self.dtype)

    def get_input_embeddings(self) -> nn.Module:
        return getattr(self, "embed_tokens", self._shared[0])

    def placed(self, device: torch.device, dtype: torch.dtype) -> Self:
        """It, for passes beside a target on a device."""
        return self.to(device, dtype).eval()

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def draft_vocabulary(self) -> DraftVocabulary:
        """The tokens that it predicts."""
        return DraftVocabulary(self.vocabulary, self.draft_token_ids)


class LearnedHead(Learned):
    """Drafts from the target's features: its hidden states at the tokens of a text.

    config: configuration of its decoder layers.
    blocks: its decoder layers, in order.
    rotary: see `_layers.rotary_of`.
    """

    config: Any
    rotary: Any

    def __init__(self, model: PreTrainedModel, config: Any):
        super().__init__(model)
        self.config = config

    @property
    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]: ...

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """(..., layers * H of the target) to (..., H): the features that it reads."""

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """(..., H) to (..., draft vocabulary)."""

    @property
    def cached_layers(self) -> int:
        """Layers of the cache that its passes use."""
        return len(self.blocks)

    def allocate(self, cache: RowCache) -> None:
        """Allocate the layers of a new cache."""
        c, weight = self.config, next(self.parameters())
        for layer in cache.layers:
            layer.allocate(c.num_key_value_heads, c.head_dim, weight.dtype, weight.device)

    @property
    def output_head(self) -> Any:
        """The target's output head."""
        return self._shared[1]

    @property
    def size(self) -> int:
        """H of its states."""
        return self.config.hidden_size

    def make_own(self, *, embeddings: bool, output_head: bool = False, draft_vocabulary: int = 0) -> None:
        """Give it tables of its own in place of the target's.

        Args:
            draft_vocabulary: tokens that it predicts, 0 for all of the target's.
        """
        if output_head:
            self.lm_head = nn.Linear(self.size, draft_vocabulary or self.vocabulary, bias=False)
        if embeddings:
            self.embed_tokens = nn.Embedding(self.vocabulary, self.size)
        if draft_vocabulary:
            self.draft_token_ids = torch.arange(draft_vocabulary)

    def get_output_embeddings(self) -> nn.Module:
        return getattr(self, "lm_head", self._shared[1])


class Head(LearnedHead):
    """Predicts the token after each pair of a feature and the token that follows it.

    The feature of a token is made of the target's hidden states there. Of a pair, the feature of token i and token
    i + 1, the head computes a state, which stands for the feature of token i + 1, and the logits of token i + 2. For
    drafted tokens the head's own states are the features.
    """

    def __init__(self, model: PreTrainedModel, config: Any):
        super().__init__(model, config)
        self.runner: Any = None  # computes its passes; None for the best here, one per reader, as each has a cache

    @abstractmethod
    def forward(self, embeds: Tensor, features: Tensor, rotary: Rotary, attends: Sequence[Attend]) -> Tensor:
        """The states of pairs, (rows, width, H).

        Args:
            embeds: (rows, width, H) embeddings of their tokens.
            features: (rows, width, H), fused, or own states.
            attends: attention over the cache, by block.
        """

    @abstractmethod
    def compile(self, program: Program) -> None:
        """Append its operations: from "embeds" and "features" to "x", the states, and "logits".

        Raises:
            NotCompilable: there is no compiled pass for it.
        """


class LayerHead(Head):
    """A head of one decoder layer and a norm, over features alone.

    Args:
        layers: of the target, whose states are the features.
        layer: fields of the configuration of its layer.
    """

    def __init__(self, layers: Sequence[int], layer: dict[str, Any], model: PreTrainedModel):
        super().__init__(model, layer_config(**layer))
        self.layers, self.rotary = tuple(layers), rotary_of(self.config)
        self.layer = HeadLayer(self.config)
        self.norm = Norm(self.size, self.config.rms_norm_eps)

    @property
    def blocks(self) -> Sequence[HeadLayer]:
        return [self.layer]

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def forward(self, embeds: Tensor, features: Tensor, rotary: Rotary, attends: Sequence[Attend]) -> Tensor:
        return self.layer(features, rotary, attends[0])


def sizes_of(model: PreTrainedModel) -> tuple[int, int]:
    """Vocabulary and hidden size of a target."""
    config = model.config.get_text_config(decoder=True)
    return config.vocab_size, config.hidden_size


def check_target(name: str, sizes: tuple[int, int], model: PreTrainedModel) -> None:
    """Raises:
    Refused: a head was made for a target of other sizes.
    """
    given = sizes_of(model)
    if sizes != given:
        own, other = (f"{count:,} tokens and hidden size {size}" for count, size in (sizes, given))
        raise Refused(f"{name}: model= is a head for a target of {own}, and this one has {other}: give its own head")


def begin_program(p: Program, head: Head) -> None:
    """The buffers of a head's layers, "embeds" and "features" among them, with the embeddings given for each node."""
    begin_layers(p, head)
    for name in ("embeds", "features"):
        p.buffer(name, head.size)
    p.op(OpKind.EMBED, dst="embeds", inner=head.size, blank=-1)


def begin_layers(p: Program, head: LearnedHead) -> None:
    """The buffers of a head's layers."""
    c = head.config
    for name in ("x", "h", "t"):
        p.buffer(name, head.size)
    for name in ("q", "a"):
        p.buffer(name, c.num_attention_heads * c.head_dim)
    for name in ("k", "v"):
        p.buffer(name, c.num_key_value_heads * c.head_dim)
    p.buffer("g", c.intermediate_size)


def layer_program(p: Program, index: int, layer: HeadLayer, config: Any, given: str) -> None:
    """A layer from "x" to "x". given: the buffer that its attention reads; "h" for "x", normalised where it is."""
    if given == "h":
        if layer.normed:
            p.rms_norm("x", "h", layer.input_layernorm)
        else:
            p.copy("x", "h")
    attention_program(p, index, layer.self_attn, config, given)
    mlp_program(p, layer, config)


def attention_program(p: Program, index: int, attention: HeadAttention, config: Any, given: str) -> None:
    """The attention of a layer over its own cache, added to "x". given: the buffer that it reads."""
    p.qkv(given, attention, config)
    p.attend(index, attention, config, per_head=0.0 if attention.norms else None)
    p.linear("a", "x", attention.o_proj, add=True)


def mlp_program(p: Program, layer: Any, config: Any) -> None:
    """The feed-forward of a layer, added to "x", which is then its result."""
    p.rms_norm("x", "h", layer.post_attention_layernorm)
    p.gated("h", layer.mlp, config.hidden_act)
    p.linear("g", "x", layer.mlp.down_proj, add=True)
    p.outputs.append(len(p.ops) - 1)
