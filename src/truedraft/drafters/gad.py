"""Generalised Aggressive Decoding: a small decoder fills in the next k tokens at once, looking at the source.

Xia et al., "Lossless Acceleration for Seq2seq Generation with Aggressive Decoding", 2022 (arXiv 2205.10350), section
3.2. Behind what was said so far stand k masks; one pass of a decoder that is not autoregressive says all of them. It
wins where the output follows from the source but does not repeat it, as in translation, and has to be trained for its
target (`truedraft train gad`); where the source is copied, `iad` does as well without.

The published drafter is a whole encoder-decoder. Here it is a few layers: the encoder, the embeddings and the output
head are the target's own, and the encoder is not run again. What was said is read from left to right, so that it is
read once and kept; the masks see all of it and each other. Drafts are the likeliest tokens, whatever the rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from truedraft.card import Card, knob, shown
from truedraft.drafters._base import Drafter
from truedraft.drafters._filling import Kept, kept
from truedraft.drafters._learned import Learner, Line, read_learnt, with_weights
from truedraft.drafters._nn import CrossAttentionLayer, Keeping, Places, masking
from truedraft.drafters._trees import likeliest_paths
from truedraft.drafters._trust import Trust
from truedraft.errors import Refused
from truedraft.targets._base import Target
from truedraft.targets.kinds import family_of
from truedraft.tree import Accepted, DraftTree, Row, Scores

NOTHING = -100  # a label that asks for nothing
CANDIDATES = 4  # tokens of a place that a tree is made of
PART = 4_000_000  # pairs of positions that are looked at together when a drafter is judged


@dataclass(frozen=True)
class Shape:
    """Of a filler: its layers, the masks that it is trained with, the sizes of its states and of the source's."""

    layers: int
    masks: int
    size: int
    heads: int
    heard: int


class MaskFiller(nn.Module):
    """Fills masks behind a prefix, for a target whose embeddings and output head it uses as they are."""

    def __init__(self, shape: Shape, model: PreTrainedModel, dropout: float = 0.0):
        super().__init__()
        self.shape = shape
        self.compiled: Any = None  # its pass, once it was wanted
        self._shared = (model.get_decoder().get_input_embeddings(), model.get_output_embeddings())  # no part of it
        self.norm_in, self.norm_out = nn.LayerNorm(shape.size), nn.LayerNorm(shape.size)
        self.norm_heard = nn.LayerNorm(shape.heard)
        self.mask_embeddings = nn.Parameter(torch.randn(shape.masks, shape.size) * 0.1)
        self.layers = nn.ModuleList(
            CrossAttentionLayer(shape.size, shape.heads, 4 * shape.size, shape.heard, dropout)
            for _ in range(shape.layers)
        )
        with torch.no_grad():  # logits that differ by about 1
            head: Any = self._shared[1]
            self.norm_out.weight.div_(head.weight.float().std() * shape.size**0.5)

    @classmethod
    def fresh(cls, model: PreTrainedModel, layers: int, masks: int, dropout: float = 0.0) -> MaskFiller:
        """As wide as a target, with nothing learnt."""
        size = model.get_decoder().get_input_embeddings().embedding_dim
        heads = gcd(size // 2, model.config.get_text_config(decoder=True).num_attention_heads)
        return cls(Shape(layers, masks, size, heads, model.config.hidden_size), model, dropout)

    @cached_property
    def config(self) -> SimpleNamespace:
        return SimpleNamespace(hidden_size=self.shape.size, num_attention_heads=self.shape.heads)

    def get_input_embeddings(self) -> nn.Module:
        return self._shared[0]

    def get_output_embeddings(self) -> nn.Module:
        return self._shared[1]

    def turns(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the turns at (rows, width) positions, (rows, width, head size) each."""
        places = self.places(positions)
        return places.cos[..., 0, :].repeat(1, 1, 2).to(like), places.sin[..., 0, :].repeat(1, 1, 2).to(like)

    @property
    def dtype(self) -> torch.dtype:
        return self.mask_embeddings.dtype

    def places(self, positions: Tensor) -> Places:
        return Places.of(positions, self.shape.size, self.shape.heads, self.dtype)

    def tokens(self, ids: Tensor) -> Tensor:
        """(...) ids to (..., size)."""
        return self.norm_in(self._shared[0](ids).to(self.dtype))

    def placed(self, states: Tensor) -> Tensor:
        """Sources, (rows, length, heard), as the layers look at them."""
        places = torch.arange(states.shape[1], device=states.device)
        return self.norm_heard(states.to(self.dtype)) + Places.of(places, self.shape.heard, 1, self.dtype).wave

    def heard(self, states: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What each layer makes of sources, (rows, length, heard)."""
        x = self.placed(states)
        return [layer.heard(x) for layer in self.layers]  # type: ignore[operator]

    def forward(
        self, x: Tensor, places: Places, keeps: Sequence[Keeping], mask: Tensor,
        sources: Sequence[tuple[Tensor, Tensor]], hears: Tensor, first: int,
    ) -> Tensor:  # fmt: skip
        """What becomes of masks in all layers; they stand behind `first` tokens. See `CrossAttentionLayer`."""
        *inner, last = zip(self.layers, keeps, sources, strict=True)
        for layer, keep, source in inner:
            x = layer(x, places, keep, mask, source, hears)
        layer, keep, source = last
        return layer(x, places, keep, mask, source, hears, first)

    def logits(self, x: Tensor) -> Tensor:
        """(..., size) to (..., V)."""
        head = self._shared[1]
        return head(self.norm_out(x).to(head.weight.dtype)).float()


@dataclass
class Filling(Learner):
    """Learning to fill masks from what the target said: any place of a line may be the one where the masks begin.

    Glancing (Qian et al., arXiv 2008.07905): of the tokens that the filler gets wrong a share is shown to it, and it
    learns the rest.
    """

    name: ClassVar[str] = "gad"
    k: int = knob(8, 1, 64)  # masks; published 25, 5 in the authors' script
    layers: int = knob(2, 1, 64)  # published: as many as the target
    places: int = knob(4, 1, 1024)  # of a line where masks begin, in one step
    dropout: float = knob(0.1, 0, 0.9)  # published 0.1
    glance: float = knob(0.0, 0, 1)  # share of wrong tokens shown at first; GLAT 0.5, which learnt more slowly here
    glance_end: float = knob(0.3, 0, 1)  # and at the end, if any are; GLAT 0.3

    def begin(self, model: PreTrainedModel) -> None:
        if why := CANNOT.get(family_of(model.config)):
            raise Refused(f"{type(model).__name__} is not an encoder-decoder: {why}")
        self.model = model.requires_grad_(False)
        self.module: MaskFiller = MaskFiller.fresh(model, self.layers, self.k, self.dropout)

    def about(self) -> dict[str, Any]:
        return {"shape": asdict(self.module.shape)}

    def resume(self, about: dict[str, Any], weights: dict[str, Tensor]) -> None:
        if about["shape"] != asdict(self.module.shape):
            raise Refused(f"--resume: what was learnt has the shape {about['shape']}, not {self.about()['shape']}")
        self.module.load_state_dict(weights)

    def loss(self, lines: Sequence[Line]) -> Tensor:
        ids, ends, heard = self._read(lines)
        starts = 1 + (torch.rand(len(lines), self.places) * (ends[:, None] - 1)).long()
        labels = _labels(ids, ends, starts, self.k)
        asked, shown = labels != NOTHING, None
        if self.glance > 0:
            with torch.no_grad():
                wrong = self._filled(ids, starts, heard).argmax(-1) != labels
            share = self.glance + (self.glance_end - self.glance) * self.share
            count = (share * (wrong & asked).sum(-1, keepdim=True)).round()
            order = torch.rand(labels.shape).masked_fill(~asked, 2.0).argsort(-1).argsort(-1)
            shown = torch.where(order < count, labels, NOTHING)
            asked &= order >= count
        logits = self._filled(ids, starts, heard, shown, asked)
        return cross_entropy(logits, labels[asked])

    def judged(self, lines: Sequence[Line]) -> dict[str, float]:
        """Tokens a pass, drafts taken in full, by following each line as decoding would, and the hits by place."""
        tokens = passes = 0
        for part in self._parts(lines):
            ids, ends, heard = self._read(part)
            starts = torch.arange(1, ids.shape[1]).expand(len(part), -1)
            said, labels = self._filled(ids, starts, heard).argmax(-1), _labels(ids, ends, starts, self.k)
            right = (said == labels).long().cumprod(-1).sum(-1).tolist()
            for (_, line), reach in zip(part, right, strict=True):
                at = 1
                while at < len(line):
                    at, passes = at + reach[at - 1] + 1, passes + 1
                tokens += len(line) - 1
        return {"tokens_per_pass": round(tokens / passes, 3)}

    def _parts(self, lines: Sequence[Line]) -> Iterator[Sequence[Line]]:
        left = sorted(lines, key=lambda line: len(line[1]))
        while left:
            count = max(PART // (len(left[-1][1]) * (1 + self.k)) ** 2, 1)
            yield left[-count:]
            del left[-count:]

    def _read(self, lines: Sequence[Line]) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Padded ids of what was said and their numbers, and what the target's encoder makes of the sources."""
        sources, said = zip(*lines, strict=True)
        ends = torch.tensor([len(line) for line in said])
        ids = pad_sequence([torch.tensor(line) for line in said], batch_first=True)
        given = pad_sequence([torch.tensor(line) for line in sources], batch_first=True)
        heard = torch.arange(given.shape[1]) < torch.tensor([[len(line)] for line in sources])
        with torch.no_grad():
            states = self.model.get_encoder()(input_ids=given, attention_mask=heard.long()).last_hidden_state
        return ids, ends, (states.float(), heard)

    def _filled(
        self, ids: Tensor, starts: Tensor, heard: tuple[Tensor, Tensor], shown: Tensor | None = None,
        asked: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """(rows, places, k, V) logits of masks behind the prefixes that end before `starts`, (rows, places).

        shown: (rows, places, k) tokens in the place of masks. asked: as many, where logits are wanted.
        """
        filler, (rows, length), (states, hears) = self.module, ids.shape, heard
        masks = filler.mask_embeddings.expand(*starts.shape, -1, -1)
        if shown is not None:
            masks = torch.where((shown != NOTHING)[..., None], filler.tokens(shown.clamp_min(0)), masks)
        before, blocks = torch.arange(length), starts.shape[1] * self.k
        at = (starts[..., None] + torch.arange(self.k)).flatten(1)
        places = filler.places(torch.cat([before.expand(rows, -1), at], 1))
        seen = torch.zeros(rows, length + blocks, length + blocks, dtype=torch.bool)
        seen[:, :length, :length] = before <= before[:, None]
        seen[:, length:, :length] = before < starts.repeat_interleave(self.k, 1)[..., None]
        block = torch.arange(blocks) // self.k
        seen[:, length:, length:] = block == block[:, None]
        mask, hears = masking(seen, states.dtype)[:, None], masking(hears, states.dtype)[:, None, None]
        x = torch.cat([filler.tokens(ids), masks.flatten(1, 2)], 1) + places.wave
        keeps = [lambda *given: given] * len(filler.layers)
        x = filler(x, places, keeps, mask, filler.heard(states), hears, length)
        x = x.unflatten(1, (-1, self.k))
        return filler.logits(x if asked is None else x[asked])


def _labels(ids: Tensor, ends: Tensor, starts: Tensor, k: int) -> Tensor:
    """(rows, places, k) what masks that begin at `starts` stand for."""
    at = starts[..., None] + torch.arange(k)
    found = ids[torch.arange(len(ids))[:, None, None], at.clamp_max(ids.shape[1] - 1)]
    return found.masked_fill(at >= ends[:, None, None], NOTHING)


CANNOT = {"decoder": "the drafter looks at what an encoder made of a source, and this model has no encoder"}


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
        self._kept: Kept | None = None
        self._going: set[Row] = set()
        self.forget()

    def forget(self) -> None:
        self._trust = Trust()

    def ready(self, target: Target) -> None:
        if why := self.card.cannot.get(target.family):
            raise Refused(f"gad cannot draft for {type(target.model).__name__}: {why}")
        if self.model is None:
            raise Refused("gad needs a checkpoint: draft='gad:model=FOLDER', made by `truedraft train gad`")
        if not isinstance(self.model, MaskFiller):
            about, weights = read_learnt(Path(self.model).expanduser(), "gad", target.model)
            self._filler = with_weights(
                lambda: MaskFiller(Shape(**about["shape"]), target.model), weights, "gad", self.model
            )
        assert self._filler is not None
        if self.length > self._filler.shape.masks:
            raise Refused(f"gad:length={self.length}: it was trained with {self._filler.shape.masks} masks; give less")
        self._filler.to(target.device, target.dtype).eval()

    @property
    def masks(self) -> int:
        return self.length or (self._filler.shape.masks if self._filler else 0)

    @property
    def width(self) -> int:
        return self.nodes or self.masks

    def start(self, rows: Sequence[Row]) -> None:
        self._kept = None  # until a draft is wanted
        self._going |= set(rows)  # those that were not ended

    @torch.no_grad()
    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        if not any(budget):
            return [DraftTree.chain(row.tokens[-1], (), ()) for row in rows]
        if self._kept is None:
            self._kept = kept(self._filler, rows, self.masks)
        self._kept.keep(rows)
        logits = self._kept.filled()
        best, tokens = logits.topk(CANDIDATES if self.nodes else 1)
        chances = (best - logits.logsumexp(-1, keepdim=True)).exp_().nan_to_num_(0.0).clamp_(max=1.0)
        drafts = {
            id(row): likeliest_paths(row.tokens[-1], said, confidence, self.width, row.ends)
            for row, said, confidence in zip(self._kept.rows, tokens.tolist(), chances.tolist(), strict=True)
        }
        return [
            self._trust.proposed(row, drafts[id(row)].cut(1 + most)) for row, most in zip(rows, budget, strict=True)
        ]

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        for row in rows:
            self._trust.heard(row)

    def end(self, row: Row) -> None:
        self._trust.end(row)
        self._going.discard(row)
        if not self._going:
            self._kept = None
