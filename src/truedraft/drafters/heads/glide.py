"""GliDe: a small decoder drafts from its own reading of the text and from the target's keys and values, read in place.

Du et al., "GliDe with a CaPE: A Low-Hassle Method to Accelerate Speculative Decoding", ICML 2024 (arXiv 2402.02082).
Between the self-attention and the feed-forward of each of its layers is a cross-attention with queries and an output
alone: its keys and values are those that the target keeps of the text anyway, of its last layers. Nothing is computed
of the target's hidden states, and nothing of them is kept. What is drafted has no keys of the target yet, so drafted
tokens see those of the committed text; training masks what a token of a block of the draft's length would not have.

It drafts as a draft model does, from token to token, with what the target made of the text before: better than a draft
model of its size, and the more so where what follows depends on a long text. A head that continues the target's hidden
states (`eagle3`) begins from the state at the very last token that the target has read, which says more of the next
one. Queries are rotated as the target rotates its own; the paper's tree, with more alternatives where the drafter is
less sure, is `cape:source=glide:FOLDER`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, PreTrainedModel

from truedraft.card import Card, knob
from truedraft.drafters._learned import Batch, Metrics, target_logits
from truedraft.drafters._losses import IGNORED, LOSSES, named
from truedraft.drafters._views import check_whole
from truedraft.drafters._walking import Walk
from truedraft.drafters.heads._crossing import Cross, CrossAttention, CrossingHead, CrossingReader, source_layers
from truedraft.drafters.heads._drafter import SEQ2SEQ, HeadTree, TrainedDrafter
from truedraft.drafters.heads._head import attention_program, begin_layers, mlp_program
from truedraft.drafters.heads._layers import Attend, HeadAttention, HeadMlp, Norm, Rotary, layer_config, rotary_of
from truedraft.drafters.heads._quantize import FORM, copies_of
from truedraft.drafters.heads._unroll import HeadLearner, layer_like
from truedraft.runtime.heads import NodeAttention
from truedraft.runtime.native import OpKind
from truedraft.runtime.program import Program
from truedraft.runtime.rotations import CachedKeys
from truedraft.targets._base import Target


class GlideLayer(nn.Module):
    """Self-attention, cross-attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: Any, heads: int, keys: CachedKeys):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = HeadAttention(config, size)
        self.cross_attn = CrossAttention(size, heads, keys)
        self.mlp = HeadMlp(config)
        self.input_layernorm, self.cross_attention_layernorm, self.post_attention_layernorm = (
            Norm(size, eps) for _ in range(3)
        )

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend, cross: Cross) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, attend)
        x = x + self.cross_attn(self.cross_attention_layernorm(x), cross)
        return x + self.mlp(self.post_attention_layernorm(x))


class GlideHead(CrossingHead):
    """Decoder layers over the embeddings of a text, of which layer i of n reads the target's i-th of its last n.

    Args:
        record: layer (fields of the configuration of its layers), blocks (their number), block_size (tokens of a block
            in training), draft_vocabulary (0 for that of the target).

    Raises:
        Refused: the target keeps other things than keys and values of every position, or has fewer layers.
    """

    def __init__(self, record: dict[str, Any], model: PreTrainedModel):
        super().__init__(model, layer_config(**record["layer"]))
        self._record, self.rotary = record, rotary_of(self.config)
        self.sources = source_layers(model, record["blocks"])
        target = model.config.get_text_config(decoder=True).num_attention_heads
        self.decoder_layers = nn.ModuleList(
            GlideLayer(self.config, max(target // kept.keys.heads, 1) * kept.keys.heads, kept.keys)
            for kept in self.sources
        )
        self.norm = Norm(self.size, self.config.rms_norm_eps)
        self.make_own(embeddings=False, output_head=True, draft_vocabulary=record["draft_vocabulary"])

    def record(self) -> dict[str, Any]:
        return self._record

    @property
    def blocks(self) -> Sequence[GlideLayer]:
        return list(self.decoder_layers)  # type: ignore[arg-type]

    def forward(self, embeds: Tensor, rotary: Rotary, attends: Sequence[Attend], crosses: Sequence[Cross]) -> Tensor:
        x = embeds
        for layer, attend, cross in zip(self.blocks, attends, crosses, strict=True):
            x = layer(x, rotary, attend, cross)
        return x

    def read(
        self, embeds: Tensor, rotary: Rotary, attends: Sequence[NodeAttention], crosses: Sequence[Cross]
    ) -> None:  # fmt: skip
        x, last = embeds, self.blocks[-1]
        for layer, attend, cross in zip(self.blocks[:-1], attends, crosses, strict=False):
            x = layer(x, rotary, attend, cross)
        attends[-1].update(*last.self_attn.keys_values(last.input_layernorm(x), rotary))

    def logits(self, states: Tensor) -> Tensor:
        return self.get_output_embeddings()(self.norm(states))

    def compile(self, program: Program) -> None:
        p = program
        begin_layers(p, self)
        p.buffer("logits", self._record["draft_vocabulary"] or self.vocabulary)
        p.op(OpKind.EMBED, dst="x", inner=self.size, blank=-1)
        p.outputs.append(len(p.ops) - 1)
        for i, (layer, source) in enumerate(zip(self.blocks, self.sources, strict=True)):
            p.rms_norm("x", "h", layer.input_layernorm)
            attention_program(p, i, layer.self_attn, self.config, "h")
            p.rms_norm("x", "h", layer.cross_attention_layernorm)
            layer.cross_attn.compile(p, source)
            mlp_program(p, layer, self.config)
        p.end(self, lambda src, dst: p.rms_norm(src, dst, self.norm))
        p.fed_back = len(self.blocks)


@dataclass
class Training(HeadLearner):
    """Training of a `GlideHead` on the target's responses, all tokens of a text at once.

    Texts are cut into blocks of the draft's length, from a random place on in each step; a token reads the target's
    keys and values of the blocks before its own.
    """

    name: ClassVar[str] = "glide"
    blocks: int = knob(1, 1, 16)  # decoder layers; published 1
    block_size: int = knob(5, 1, 64)  # tokens of a block; published 5, those of a draft
    loss_name: str = knob("ce", form=f"one of {', '.join(LOSSES)}", reader=named)  # published ce
    vocabulary: int = knob(0, 0, 1 << 20)  # tokens of the draft vocabulary, 0 for all; published 0

    def head(self, model: PreTrainedModel) -> GlideHead:
        layer = layer_like(model.config.get_text_config(decoder=True))
        return GlideHead(
            dict(layer=layer, blocks=self.blocks, block_size=self.block_size, draft_vocabulary=self.vocabulary), model
        )

    def initialise(self) -> None:
        self.copy_output_head()

    def loss(self, batch: Batch) -> Tensor:
        kept, states = self.target_reads(batch.ids)
        places = torch.arange(batch.ids.shape[1] - 1, device=batch.ids.device)
        begun = (places + torch.randint(self.block_size, (), device=places.device)) % self.block_size
        logits = self.text_logits(batch.ids, kept, (places - begun).clamp_min(0))
        labels = self._labels(batch.ids[:, 1:], batch.loss_mask[:, 1:])
        counted = labels != IGNORED
        if not counted.any():
            return torch.zeros(())
        ids = self.module.draft_token_ids
        target = target_logits(self.model, states[:, :-1][counted])
        p = (target if ids is None else target[:, ids]).softmax(-1)
        return LOSSES[self.loss_name](logits[counted].float().log_softmax(-1), p, labels[counted]).mean()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Metrics:
        """Acceptance of chains of the likeliest tokens by position, over all positions of the responses, and the tokens
        per pass of decoding them with such drafts."""
        walk = Walk(self.block_size)
        for batch in batches:
            for reach, span in zip(self._reach(batch).tolist(), batch.spans(), strict=True):
                walk.add(reach[1:], *span)
        return walk.metrics()

    def _reach(self, batch: Batch) -> Tensor:
        """(rows, length - 1) leading tokens of a chain drafted after each pending one that are right."""
        kept, _ = self.target_reads(batch.ids)
        places = torch.arange(batch.ids.shape[1] - 1, device=batch.ids.device)
        ids = self.module.draft_token_ids
        expected = batch.ids[:, 1:].masked_fill(~batch.loss_mask[:, 1:], -1)
        alive = torch.ones_like(expected, dtype=torch.bool)
        reach = torch.zeros_like(expected)
        for depth in range(self.block_size):
            found = self.text_logits(batch.ids, kept, (places - depth).clamp_min(0)).argmax(-1)
            right = (found if ids is None else ids[found]) == expected
            alive = alive & nn.functional.pad(right, (0, depth))[:, depth:]
            reach += alive
        return reach

    @torch.no_grad()
    def target_reads(self, ids: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """By layer of the head, the keys and values that the target has of texts, (rows, KV heads, length, head size)
        each; and its states after the final norm, (rows, length, H)."""
        head: Any = self.module
        decoder, cache = self.model.base_model, DynamicCache()  # which keeps all positions, in layers with windows too
        states = decoder(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
        kept: Any = [cache.layers[layer.index] for layer in head.sources]
        return [(layer.keys, layer.values) for layer in kept], states

    def text_logits(self, ids: Tensor, kept: Sequence[tuple[Tensor, Tensor]], bounds: Tensor) -> Tensor:
        """(rows, n, draft vocabulary) logits of the first n tokens of texts, which read the target's keys and values
        before bounds, (n,)."""
        head: Any = self.module
        places = torch.arange(len(bounds), device=ids.device)
        crosses = [
            partial(layer.attend, kv=kv, positions=places, bounds=bounds)
            for layer, kv in zip(head.sources, kept, strict=True)
        ]
        embeds = head.embed(ids[:, : len(bounds)])
        return head.logits(head(embeds, head.rotary(embeds, places[None]), [causal] * len(crosses), crosses))


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Self-attention of whole texts."""
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


@dataclass
class Glide(TrainedDrafter, HeadTree):
    card = Card(
        paper="arXiv 2402.02082 (2024)",
        idea="A small trained decoder drafts token by token; it reads the target's own keys and values of the text.",
        family="learned head",
        needs=("training",),
        cannot=SEQ2SEQ,
        presets={"glide-tree": {"nodes": 24, "depth": 6, "top_k": 6}, "glide-drawn": {"drawn": True}},
        published="Up to 2.17x for Vicuna, with CaPE 2.61x (one GPU).",
        also={
            "glide-cape": "draft='cape:source=glide:FOLDER' is both",
        },
    )
    learner = Training
    kind = GlideHead
    reads = CrossingReader
    model: Any = None  # a checkpoint's folder, or a GlideHead
    quantize: str = knob("auto", form=FORM, reader=copies_of)  # of the weights that its passes read
    nodes: int = knob(5, 1, 1024)  # of the draft; published 5
    depth: int = knob(5, 1, 64)  # levels; published 5
    top_k: int = knob(1, 1, 256)  # nodes expanded at each level, and children of each; published 1, a chain
    drawn: bool = knob(False)  # a chain drawn from the drafter, for rules that verify such drafts; published False
    formats = ()

    @staticmethod
    def rebuilt(record: dict[str, Any], model: PreTrainedModel) -> GlideHead:
        return GlideHead(record, model)

    def bind(self, target: Target) -> None:
        super().bind(target)
        check_whole(target)
        self.reader.crossing.target = target
