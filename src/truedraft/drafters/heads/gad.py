"""Generalised Aggressive Decoding: a small decoder predicts the next k tokens at once, attending to the source.

Xia et al., "Lossless Acceleration for Seq2seq Generation with Aggressive Decoding", 2022 (arXiv 2205.10350), section
3.2. k mask tokens follow the prefix; one pass of a non-autoregressive decoder predicts all of them. It wins where the
output follows from the source without repeating it, as in translation, and has to be trained for its target
(`truedraft train gad`); where the source is copied, `iad` does as well without training.

The published drafter is a whole encoder-decoder. Here it is a few layers: the encoder, the embeddings and the output
head are the target's own, and the encoder is not run again. The prefix is read causally, so its keys and values are
cached; the masks attend to all of it and to each other. Drafts are the likeliest tokens, whatever the rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import gcd
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from truedraft.card import Card, knob, shown
from truedraft.drafters._base import Drafter
from truedraft.drafters._calibration import Calibration
from truedraft.drafters._learned import Batch, Learner, Metrics, other_weights, read_learnt, with_weights
from truedraft.drafters._trees import likeliest_paths
from truedraft.drafters.heads._filling import FillerCache, filler_cache
from truedraft.drafters.heads._nn import CacheUpdate, CrossAttentionLayer, PositionEncoding, attention_bias
from truedraft.errors import Refused
from truedraft.runtime.finite import check_finite
from truedraft.runtime.modules import source_width
from truedraft.targets._base import Target
from truedraft.targets.kinds import family_of
from truedraft.tree import Accepted, DraftTree, Row, Scores

IGNORED = -100  # the label of a position without a loss
CANDIDATES = 4  # tokens per position from which a tree is built
PART = 4_000_000  # entries of the attention mask of one batch of an evaluation


@dataclass(frozen=True)
class FillerShape:
    """Sizes of a filler: layers, masks it is trained with, hidden size, heads, hidden size of the encoder."""

    layers: int
    masks: int
    size: int
    heads: int
    encoder_width: int


class MaskFiller(nn.Module):
    """Predicts the tokens of masks that follow a prefix, with the target's own embeddings and output head."""

    def __init__(self, shape: FillerShape, model: PreTrainedModel, dropout: float = 0.0):
        super().__init__()
        self.shape = shape
        self.compiled: Any = None  # its compiled pass, once one was made
        self._shared = (model.get_decoder().get_input_embeddings(), model.get_output_embeddings())  # not submodules
        self.norm_in, self.norm_out = nn.LayerNorm(shape.size), nn.LayerNorm(shape.size)
        self.norm_source = nn.LayerNorm(shape.encoder_width)
        self.mask_embeddings = nn.Parameter(torch.randn(shape.masks, shape.size) * 0.1)
        self.layers = nn.ModuleList(
            CrossAttentionLayer(shape.size, shape.heads, 4 * shape.size, shape.encoder_width, dropout)
            for _ in range(shape.layers)
        )
        with torch.no_grad():  # logits that differ by about 1
            head: Any = self._shared[1]
            self.norm_out.weight.div_(head.weight.float().std() * shape.size**0.5)

    @classmethod
    def fresh(cls, model: PreTrainedModel, layers: int, masks: int, dropout: float = 0.0) -> MaskFiller:
        """An untrained filler with the hidden size of a target."""
        size = model.get_decoder().get_input_embeddings().embedding_dim
        heads = gcd(size // 2, model.config.get_text_config(decoder=True).num_attention_heads)
        return cls(FillerShape(layers, masks, size, heads, source_width(model)), model, dropout)

    @cached_property
    def config(self) -> SimpleNamespace:
        return SimpleNamespace(hidden_size=self.shape.size, num_attention_heads=self.shape.heads)

    def get_input_embeddings(self) -> nn.Module:
        return self._shared[0]

    def get_output_embeddings(self) -> nn.Module:
        return self._shared[1]

    def turns(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary angles at (rows, width) positions, (rows, width, head size) each."""
        places = self.places(positions)
        return places.cos[..., 0, :].repeat(1, 1, 2).to(like), places.sin[..., 0, :].repeat(1, 1, 2).to(like)

    @property
    def dtype(self) -> torch.dtype:
        return self.mask_embeddings.dtype

    def places(self, positions: Tensor) -> PositionEncoding:
        return PositionEncoding.of(positions, self.shape.size, self.shape.heads, self.dtype)

    def tokens(self, ids: Tensor) -> Tensor:
        """(...) ids to (..., size)."""
        return self.norm_in(self._shared[0](ids).to(self.dtype))

    def placed(self, states: Tensor) -> Tensor:
        """Encoder states, (rows, length, encoder width), normalised and with positions added."""
        positions = torch.arange(states.shape[1], device=states.device)
        places = PositionEncoding.of(positions, self.shape.encoder_width, 1, self.dtype)
        return self.norm_source(states.to(self.dtype)) + places.sinusoid

    def encoder_kv(self, states: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each layer's cross-attention keys and values of encoder states, (rows, length, encoder width)."""
        x = self.placed(states)
        return [layer.encoder_kv(x) for layer in self.layers]  # type: ignore[operator]

    def forward(
        self, x: Tensor, places: PositionEncoding, updates: Sequence[CacheUpdate], mask: Tensor,
        sources: Sequence[tuple[Tensor, Tensor]], source_bias: Tensor, first: int,
    ) -> Tensor:  # fmt: skip
        """The last layer's states of the masks, which follow `first` tokens. See `CrossAttentionLayer`."""
        *inner, last = zip(self.layers, updates, sources, strict=True)
        for layer, update, source in inner:
            x = layer(x, places, update, mask, source, source_bias)
        layer, update, source = last
        return layer(x, places, update, mask, source, source_bias, first)

    def logits(self, x: Tensor) -> Tensor:
        """(..., size) to (..., V)."""
        head = self._shared[1]
        return head(self.norm_out(x).to(head.weight.dtype)).float()


@dataclass
class Filling(Learner):
    """Training of a `MaskFiller` on the target's outputs; masks may begin at any position of a line.

    Glancing (Qian et al., arXiv 2008.07905): a share of the tokens that the filler predicts wrongly is given to it as
    input, and the loss is taken on the rest.
    """

    name: ClassVar[str] = "gad"
    k: int = knob(8, 1, 64)  # masks; published 25, 5 in the authors' script
    layers: int = knob(2, 1, 64)  # published: as many as the target
    places: int = knob(4, 1, 1024)  # positions of a line at which masks begin, in one step
    dropout: float = knob(0.1, 0, 0.9)  # published 0.1
    glance: float = knob(0.0, 0, 1)  # share of wrong tokens shown at first; GLAT 0.5, which trained more slowly here
    glance_end: float = knob(0.3, 0, 1)  # and at the end, where `glance` is not 0; GLAT 0.3

    def begin(self, model: PreTrainedModel) -> None:
        if why := CANNOT.get(family_of(model.config)):
            raise Refused(f"{type(model).__name__} is not an encoder-decoder: {why}")
        self.module: MaskFiller = MaskFiller.fresh(model, self.layers, self.k, self.dropout)

    def config(self) -> dict[str, Any]:
        return {"shape": asdict(self.module.shape)}

    def resume(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        if config["shape"] != asdict(self.module.shape):
            raise Refused(f"--resume: the checkpoint has the shape {config['shape']}, not {self.config()['shape']}")
        self.module.load_state_dict(weights)

    def loss(self, batch: Batch) -> Tensor:
        ids, ends, device = batch.ids, batch.mask.sum(-1), batch.ids.device
        starts = 1 + (torch.rand(len(ids), self.places, device=device) * (ends[:, None] - 1)).long()
        labels = _labels(ids, ends, starts, self.k)
        scored, shown = labels != IGNORED, None
        if self.glance > 0:
            with torch.no_grad():
                wrong = self._filled(batch, starts).argmax(-1) != labels
            progress = self.glance + (self.glance_end - self.glance) * self.progress
            count = (progress * (wrong & scored).sum(-1, keepdim=True)).round()
            order = torch.rand(labels.shape, device=device).masked_fill(~scored, 2.0).argsort(-1).argsort(-1)
            shown = torch.where(order < count, labels, IGNORED)
            scored &= order >= count
        logits = self._filled(batch, starts, shown, scored)
        return cross_entropy(logits, labels[scored])

    def evaluate(self, batches: Iterable[Batch]) -> Metrics:
        """`tokens_per_pass` of decoding each line with drafts verified in full; `acceptance` after every prefix."""
        tokens = passes = 0
        accepted, offered = torch.zeros(self.k), torch.zeros(self.k)
        for batch in batches:
            length = batch.ids.shape[1]
            for part in batch.split(max(PART // (2 * length) ** 2, 1)):
                ends = part.mask.sum(-1)
                starts = torch.arange(1, length, device=ends.device).expand(len(ends), -1)
                labels = _labels(part.ids, ends, starts, self.k)
                filled = [self._filled(part, some).argmax(-1) for some in starts.split(max(length // self.k, 1), 1)]
                right = (torch.cat(filled, 1) == labels).long().cumprod(-1)
                before = torch.cat([torch.ones_like(right[..., :1]), right[..., :-1]], -1)
                accepted += right.sum((0, 1)).cpu()
                offered += (before * (labels != IGNORED)).sum((0, 1)).cpu()
                for end, reach in zip(ends.tolist(), right.sum(-1).tolist(), strict=True):
                    at = 1
                    while at < end:
                        at, passes = at + reach[at - 1] + 1, passes + 1
                    tokens += end - 1
        acceptance = (accepted / offered.clamp_min(1)).tolist()
        return {"tokens_per_pass": round(tokens / passes, 3), "acceptance": [round(rate, 4) for rate in acceptance]}

    def _filled(
        self, batch: Batch, starts: Tensor, shown: Tensor | None = None, scored: Tensor | None = None
    ) -> Tensor:
        """(rows, places, k, V) logits of masks that follow the prefixes ending before `starts`, (rows, places).

        shown: (rows, places, k) tokens given instead of masks.
        scored: (rows, places, k) bool, positions whose logits are returned, flattened; None for all.
        """
        assert batch.source is not None
        filler, (rows, length), (states, source_mask) = self.module, batch.ids.shape, batch.source
        device = states.device
        masks = filler.mask_embeddings.expand(*starts.shape, -1, -1)
        if shown is not None:
            masks = torch.where((shown != IGNORED)[..., None], filler.tokens(shown.clamp_min(0)), masks)
        before, blocks = torch.arange(length, device=device), starts.shape[1] * self.k
        at = (starts[..., None] + torch.arange(self.k, device=device)).flatten(1)
        places = filler.places(torch.cat([before.expand(rows, -1), at], 1))
        visible = torch.zeros(rows, length + blocks, length + blocks, dtype=torch.bool, device=device)
        visible[:, :length, :length] = before <= before[:, None]
        visible[:, length:, :length] = before < starts.repeat_interleave(self.k, 1)[..., None]
        block = torch.arange(blocks, device=device) // self.k
        visible[:, length:, length:] = block == block[:, None]
        mask = attention_bias(visible, states.dtype)[:, None]
        source_bias = attention_bias(source_mask, states.dtype)[:, None, None]
        x = torch.cat([filler.tokens(batch.ids), masks.flatten(1, 2)], 1) + places.sinusoid
        updates = [lambda *new: new] * len(filler.layers)
        x = filler(x, places, updates, mask, filler.encoder_kv(states), source_bias, length)
        x = x.unflatten(1, (-1, self.k))
        return filler.logits(x if scored is None else x[scored])


def _labels(ids: Tensor, ends: Tensor, starts: Tensor, k: int) -> Tensor:
    """(rows, places, k) labels of masks that begin at `starts`; `IGNORED` beyond a line's end."""
    at = starts[..., None] + torch.arange(k, device=ids.device)
    found = ids[torch.arange(len(ids), device=ids.device)[:, None, None], at.clamp_max(ids.shape[1] - 1)]
    return found.masked_fill(at >= ends[:, None, None], IGNORED)


CANNOT = {"decoder": "the drafter attends to an encoder's output, and this model has no encoder"}


@dataclass
class Gad(Drafter):
    card = Card(
        paper="arXiv 2205.10350 (2022)",
        idea="A small decoder, trained for the target, fills in the next tokens all at once from the source.",
        family="block drafter",
        needs=("training",),
        cannot=CANNOT,
        presets={"gad-tree": {"nodes": 16}},
        published="3x to 5x on translation and summarisation (encoder-decoders of 6 layers, one GPU).",
    )
    learner = Filling
    model: Any = None  # folder of a checkpoint (`truedraft train gad`), or a MaskFiller
    length: int = knob(0, 0, 1024)  # masks filled, 0 for all that were trained; published 25, authors' script 5
    nodes: int = knob(0, 0, 1024)  # of a tree of the likeliest paths; published 0: a chain of the likeliest tokens

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | PathLike | MaskFiller | None):
            raise Refused(f"gad:model={shown(self.model)}: give the folder of a checkpoint, or a MaskFiller")
        self._filler: MaskFiller | None = self.model if isinstance(self.model, MaskFiller) else None
        self._cache: FillerCache | None = None
        self._running: set[Row] = set()
        self._origin = ""  # a sentence on the target that it was trained for, where that is another
        self.forget()

    @property
    def notes(self) -> list[str]:
        return [*super().notes, *filter(None, [self._origin])]

    def forget(self) -> None:
        self._calibration = Calibration()

    def bind(self, target: Target) -> None:
        if why := self.card.cannot.get(target.family):
            raise Refused(f"gad cannot draft for {type(target.model).__name__}: {why}")
        if self.model is None:
            raise Refused("gad needs a checkpoint: draft='gad:FOLDER', made by `truedraft train gad`")
        if not isinstance(self.model, MaskFiller):
            model, tokenizer = target.model, self.target_tokenizer
            config, weights = read_learnt(Path(self.model).expanduser(), "gad", model, tokenizer)
            self._origin = other_weights(config, "gad", self.model, model, tokenizer)
            self._filler = with_weights(
                lambda: MaskFiller(FillerShape(**config["shape"]), model), weights, "gad", self.model
            )
        assert self._filler is not None
        check_finite("gad", self.model, self._filler)
        if self.length > self._filler.shape.masks:
            raise Refused(f"gad:length={self.length}: it was trained with {self._filler.shape.masks} masks; give fewer")
        self._filler.to(target.device, target.dtype).eval()

    @property
    def masks(self) -> int:
        return self.length or (self._filler.shape.masks if self._filler else 0)

    @property
    def width(self) -> int:
        return self.nodes or self.masks

    def start(self, rows: Sequence[Row]) -> None:
        self._cache = None  # until a draft is requested
        self._running |= set(rows)

    @torch.no_grad()
    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        if not any(budget):
            return [DraftTree.chain(row.tokens[-1], (), ()) for row in rows]
        if self._cache is None:
            self._cache = filler_cache(self._filler, rows, self.masks)
        self._cache.keep(rows)
        logits = self._cache.filled()
        best, tokens = logits.topk(CANDIDATES if self.nodes else 1)
        chances = (best - logits.logsumexp(-1, keepdim=True)).exp_().nan_to_num_(0.0).clamp_(max=1.0)
        drafts = {
            id(row): likeliest_paths(row.tokens[-1], candidates, confidence, self.width, row.ends)
            for row, candidates, confidence in zip(self._cache.rows, tokens.tolist(), chances.tolist(), strict=True)
        }
        return [
            self._calibration.proposed(row, drafts[id(row)].cut(1 + most))
            for row, most in zip(rows, budget, strict=True)
        ]

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        self._calibration.update(rows)

    def end(self, row: Row) -> None:
        self._calibration.end(row)
        self._running.discard(row)
        if not self._running:
            self._cache = None
