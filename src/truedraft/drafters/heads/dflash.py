"""DFlash: a small block-diffusion model fills in a whole block of tokens in one pass, from features of the target.

Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding", 2026 (arXiv 2602.06036). Hidden states of several
layers of the target, fused, are the keys and values of every draft layer for all tokens before the pending one. The
pending token and masks behind it attend to them and to each other, and each mask predicts its own token: the cost of a
draft does not grow with its length, so drafts may be long and the draft model several layers deep. The published draft
is a chain of the likeliest tokens; with `top_k` it is a tree of the likeliest paths, positions taken as independent. It
wins over heads that draft token by token where text is predictable for many tokens; masks do not see the tokens that
are drafted beside them, so single positions are less often right than those of `eagle3` where the text is open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from truedraft.card import Card, knob
from truedraft.drafters._learned import Batch
from truedraft.drafters.heads._blocks import BlockHead, BlockReader
from truedraft.drafters.heads._blockwise import BlockDrafter, BlockLearner
from truedraft.drafters.heads._dflash_formats import formats, published_layers
from truedraft.drafters.heads._drafter import SEQ2SEQ
from truedraft.drafters.heads._layers import Attend, HeadLayer, Norm, Rotary, layer_config, rotary_of
from truedraft.drafters.heads._quantize import FORM, copies_of
from truedraft.drafters.heads._unroll import layer_like, spread_layers
from truedraft.tree import Row


class DFlashHead(BlockHead):
    """Decoder layers as in Qwen 3 over blocks. Its parameters have the names of z-lab's, but for those of the layers.

    Args:
        record: layers (of the target), feature_size (H of the target), layer (fields of the configuration of its own
            layers), blocks (their number), head_norms (of queries and keys), block_size, mask_token_id (None where the
            mask has an embedding of its own), from_anchor (whether each token of a block predicts the next one, not
            each mask its own), causal and windows (see `BlockHead`), draft_vocabulary (0 for that of the target),
            embeddings and output_head (whether it has its own).
    """

    def __init__(self, record: dict[str, Any], model: PreTrainedModel):
        super().__init__(model, layer_config(**record["layer"]))
        self._record, self.layers = record, tuple(record["layers"])
        self.rotary = rotary_of(self.config)
        self.block_size, self.causal, self.windows = record["block_size"], record["causal"], record["windows"]
        self.drafts = self.block_size - (not record["from_anchor"])
        size, eps = self.size, self.config.rms_norm_eps
        self.fc = nn.Linear(len(self.layers) * record["feature_size"], size, bias=False)
        self.hidden_norm, self.norm = Norm(size, eps), Norm(size, eps)
        self.decoder_layers = nn.ModuleList(
            HeadLayer(self.config, norms=record["head_norms"]) for _ in range(record["blocks"])
        )
        if record["mask_token_id"] is None:
            self.mask_embedding = nn.Parameter(torch.zeros(size))
        self.make_own(
            embeddings=record["embeddings"], output_head=record["output_head"],
            draft_vocabulary=record["draft_vocabulary"],
        )  # fmt: skip

    def record(self) -> dict[str, Any]:
        return self._record

    @property
    def blocks(self) -> Sequence[HeadLayer]:
        return list(self.decoder_layers)  # type: ignore[arg-type]

    def fuse(self, features: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(features))

    def block(self, tokens: Tensor) -> Tensor:
        mask = self._record["mask_token_id"]
        masked = self.mask_embedding if mask is None else self.embed(tokens.new_tensor(mask))
        masks = masked.expand(*tokens.shape, self.block_size - 1, self.size)
        return torch.cat([self.embed(tokens)[..., None, :], masks], -2)

    def forward(self, embeds: Tensor, rotary: Rotary, attends: Sequence[Attend]) -> Tensor:
        x = embeds
        for layer, attend in zip(self.blocks, attends, strict=True):
            x = layer(x, rotary, attend)
        return x

    def drafting(self, states: Tensor) -> Tensor:
        return states[..., self.block_size - self.drafts :, :]

    def logits(self, states: Tensor) -> Tensor:
        return self.get_output_embeddings()(self.norm(states))


@dataclass
class Training(BlockLearner):
    """Training of a `DFlashHead` on the target's responses, by blocks that begin at random tokens of them."""

    name: ClassVar[str] = "dflash"
    blocks: int = knob(2, 1, 16)  # decoder layers; published 5
    block_size: int = knob(8, 2, 64)  # tokens of a block, the pending one included; published 16
    anchors: int = knob(32, 1, 4096)  # blocks of a text in a step; published 512
    decay: float = knob(0.8, 0, 1, open=True)  # weight of a position relative to the one before; published exp(-1/7)
    vocabulary: int = knob(0, 0, 1 << 20)  # tokens of a draft vocabulary with a head of its own, 0 for all; published 0
    layers: str = knob(
        "", form="layers of the target, as in '2x4x6'", reader=spread_layers
    )  # published: as many as blocks

    def head(self, model: PreTrainedModel) -> DFlashHead:
        config = model.config.get_text_config(decoder=True)
        count = config.num_hidden_layers
        layers = published_layers(self.blocks, count)
        if self.layers or list(layers) != sorted({*layers} - {0}):
            layers = spread_layers(self.layers, count)
        record = dict(
            layers=layers, feature_size=config.hidden_size, layer=layer_like(config), blocks=self.blocks,
            head_norms=True, block_size=self.block_size, mask_token_id=None, from_anchor=False, causal=False,
            windows=[0] * self.blocks, draft_vocabulary=self.vocabulary, embeddings=False,
            output_head=bool(self.vocabulary),
        )  # fmt: skip
        return DFlashHead(record, model)

    def initialise(self) -> None:
        """Begin with the mean embedding as the mask, with the last tapped layer as the feature, and with the target's
        output head."""
        head: Any = self.module
        with torch.no_grad():
            head.mask_embedding.copy_(head.get_input_embeddings().weight.mean(0))
            head.fc.weight.normal_(0, 0.02)
            head.fc.weight[:, -head.size :] += torch.eye(head.size)
            if head.draft_token_ids is not None:
                head.lm_head.weight.copy_(self.model.get_output_embeddings().weight[head.draft_token_ids])

    def block_logits(self, batch: Batch, anchors: Tensor) -> Tensor:
        head: Any = self.module
        size, length = head.block_size, batch.ids.shape[1]
        features = head.fuse(torch.cat([batch.features[layer] for layer in head.layers], -1).to(head.dtype))
        places = torch.arange(length, device=anchors.device)
        context = head.rotary(features, places[None])
        own = anchors[..., None] + torch.arange(size, device=anchors.device)
        attends = []
        for layer, window in zip(head.blocks, head.windows, strict=True):
            seen = head.visible(anchors, places, window) & (places < anchors[..., None, None])
            keys, values = layer.self_attn.keys_values(features, context)
            attends.append(BlocksInText(keys, values, seen, head.causal))
        embeds = head.block(batch.ids.gather(1, anchors)).flatten(1, 2)
        states = head(embeds, head.rotary(embeds, own.flatten(1)), attends)
        return head.logits(head.drafting(states.unflatten(1, (-1, size))))


class BlocksInText:
    """Attention of the blocks of one layer, each over the features that it sees and over itself.

    Args:
        keys, values: (rows, KV heads, length, head size) of the features.
        seen: (rows, blocks, block size, length) bool.
        causal: see `BlockHead`.
    """

    def __init__(self, keys: Tensor, values: Tensor, seen: Tensor, causal: bool):
        self._keys, self._values, self._seen, self._causal = keys, values, seen, causal

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        share, (blocks, size) = query.shape[1] // key.shape[1], self._seen.shape[1:3]
        keys, values, key, value = (
            part.repeat_interleave(share, 1) for part in (self._keys, self._values, key, value)
        )  # fmt: skip
        query, key, value = ((part.unflatten(2, (blocks, size))) for part in (query, key, value))
        query = query * query.shape[-1] ** -0.5
        before = (query.flatten(2, 3) @ keys.mT).unflatten(2, (blocks, size)).float()
        own = (query @ key.mT).float()
        if self._causal:
            own = own.masked_fill(torch.ones_like(own[0, 0, 0], dtype=torch.bool).triu(1), -torch.inf)
        weights = torch.cat([before.masked_fill(~self._seen[:, None], -torch.inf), own], -1).softmax(-1)
        weights = weights.to(query.dtype)
        length = keys.shape[2]
        found = (weights[..., :length].flatten(2, 3) @ values).unflatten(2, (blocks, size))
        return (found + weights[..., length:] @ value).flatten(2, 3)


@dataclass
class DFlash(BlockDrafter):
    card = Card(
        paper="arXiv 2602.06036 (2026)",
        idea="A small model fills in a whole block of masked tokens in one pass, reading the target's hidden states.",
        family="learned head",
        needs=("training",),
        cannot=SEQ2SEQ,
        presets={"dflash-tree": {"top_k": 4}, "dflash-drawn": {"drawn": True}},
        published="6.2x for Qwen 3 8B, 2.5x over EAGLE-3 (one GPU).",
    )
    learner = Training
    kind = DFlashHead
    reads = BlockReader
    model: Any = None  # a checkpoint's folder, its name on the hub, or a DFlashHead
    quantize: str = knob("auto", form=FORM, reader=copies_of)  # of the weights that its passes read
    depth: int = knob(15, 1, 64)  # drafted positions, at most those of a block; published 15
    top_k: int = knob(1, 1, 256)  # tokens of a position, 1 for a chain; published 1
    nodes: int = knob(24, 1, 1024)  # of a tree; published: the chain
    drawn: bool = knob(False)  # a chain drawn from the head, for rules that verify such drafts; published False
    formats = formats(DFlashHead)

    @staticmethod
    def rebuilt(record: dict[str, Any], model: PreTrainedModel) -> DFlashHead:
        return DFlashHead(record, model)

    def filled(self, rows: Sequence[Row], depths: Sequence[int]) -> Tensor:
        return self.reader.filled(rows)
