"""S3D: the target, without its middle layers, reads trained masks behind the pending token, one for each further token.

Zhong & Bharadwaj, "S3D: A Simple and Cost-Effective Self-Speculative Decoding Scheme for Low-Memory GPUs", 2024 (arXiv
2405.20314). A draft costs one pass of the layers that are kept, whatever its length, and nothing but the embeddings of
the masks is added. They alone are trained, and no layer of the model, so that the text is that of the user's own model.
Layers of the middle are skipped, because the last ones turn states into tokens.

Which layers to skip, and how many masks to train, follows from the rate `a` at which each token is right whose earlier
ones are: with m masks and a pass of the share c of the weights, a draft gives (1 - a^(m + 2)) / (1 - a) tokens for the
time of 1 + c passes of the whole model. Fewer layers lower `a` and c; `truedraft train` shows the rates. It wins where
there is no memory for a head and middle layers are redundant, as in large models; a trained head predicts more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from truedraft.caches.rows import CacheCursor
from truedraft.card import Card, knob
from truedraft.drafters._learned import Batch
from truedraft.drafters._views import check_whole
from truedraft.drafters.heads._blockwise import BlockDrafter, BlockLearner
from truedraft.drafters.heads._drafter import SEQ2SEQ
from truedraft.drafters.heads._head import Learned
from truedraft.drafters.heads._quantize import NONE
from truedraft.errors import Refused
from truedraft.runtime.embedding import check_embeddings_given, token_embeddings
from truedraft.runtime.forward import ForwardPass
from truedraft.runtime.padded import Padded
from truedraft.runtime.panels import Int8Copies
from truedraft.runtime.skipping import SkippableLayers
from truedraft.targets._base import Target
from truedraft.targets.hostable import keeps_states, layer_types
from truedraft.targets.quirks import window_of
from truedraft.tree import Accepted, DraftTree, Row, Scores, Taps
from truedraft.views._base import Reduction
from truedraft.views._layers import FORM, Without, check_layers, listed


@dataclass(frozen=True)
class MaskedPass(Without):
    """How the target reads masks."""

    @property
    def name(self) -> str:
        return "s3d"

    def reduction(self, layers: int) -> Reduction:
        check_layers(self.left_out, layers)
        return self.left_out


class Masks(Learned):
    """Input embeddings of masks behind a pending token. That token predicts the next one, and each mask a further one.

    Args:
        record: masks (their number), skip (layers that their passes leave out, see `views._layers.listed`).
    """

    layers = ()

    def __init__(self, record: dict[str, Any], model: PreTrainedModel):
        super().__init__(model)
        self._record, self.view = record, MaskedPass(listed(record["skip"]))
        self.mask_embeddings = nn.Parameter(torch.randn(record["masks"], self.target_sizes[1]))

    def record(self) -> dict[str, Any]:
        return self._record

    @property
    def drafts(self) -> int:
        return 1 + len(self.mask_embeddings)

    @property
    def block_size(self) -> int:
        return 1 + len(self.mask_embeddings)

    def behind(self, token: int, count: int) -> DraftTree:
        """A pending token and the first masks behind it."""
        return DraftTree.chain(token).with_probes(
            [token] * count, range(count), dict(enumerate(self.mask_embeddings.detach()[:count]))
        )


class Blocks(Padded):
    """Blocks at several places of texts, as nodes behind the whole texts; each attends to what is before its place, and
    to its own nodes up to each.

    Args:
        anchors: (rows, blocks) places of their pending tokens.
        size: nodes of a block.
        length: of the texts.
    """

    def __init__(self, anchors: Tensor, size: int, length: int):
        rows, blocks = anchors.shape
        super().__init__(rows, blocks * size, anchors.device)
        self.positions.copy_((anchors[..., None] + torch.arange(size, device=anchors.device)).flatten(1))
        self.written.copy_(self.positions)
        self.lengths.fill_(length)
        inside = torch.ones(size, size, dtype=torch.bool, device=anchors.device).tril()
        self.ancestors.copy_(torch.block_diag(*[inside] * blocks))
        self._before = anchors.repeat_interleave(size, 1)

    def seen(self, extent: int) -> Tensor:
        at = torch.arange(extent, device=self.positions.device)
        written = at >= self.lengths[:, None, None]
        return torch.where(written, super().seen(extent), at < self._before[..., None])


class TextCache(DynamicCache):
    """The keys and values of texts, and of the blocks behind them."""

    def __init__(self, rows: int, extent: int):
        super().__init__()
        self.cursor = CacheCursor(rows, extent)


def middle(layers: int) -> str:
    """The middle half of a decoder's layers.

    Raises:
        Refused: there are no layers left.
    """
    count = max(layers // 2, 1)
    if count == layers:
        raise Refused("s3d leaves out layers, and the decoder has one: use another drafter")
    first = (layers - count + 1) // 2
    return f"{first}-{first + count - 1}"


@dataclass
class Training(BlockLearner):
    """Training of masks on the target's responses, through the layers that are kept; see `BlockLearner`."""

    name: ClassVar[str] = "s3d"
    skip: str = knob("", form=FORM, reader=listed)  # left out; the middle half if empty; published: middle layers
    masks: int = knob(4, 1, 64)  # a pass drafts as many tokens and one; published: by the rate of acceptance
    anchors: int = knob(32, 1, 4096)  # places of a text at which a step predicts
    decay: float = knob(0.8, 0, 1, open=True)  # weight of a token relative to the one before

    def head(self, model: PreTrainedModel) -> Masks:
        if keeps_states(model.config):
            raise Refused(
                f"s3d leaves out layers, and {type(model).__name__} keeps states of all its layers: use another drafter"
            )
        kinds = layer_types(model)
        made = Masks({"masks": self.masks, "skip": self.skip or middle(len(kinds))}, model)
        check_embeddings_given(model)
        self._passes = ForwardPass(model, kinds, window_of(model.config.get_text_config(decoder=True), kinds))
        self._layers, self._left_out = SkippableLayers(model, len(kinds)), made.view.reduction(len(kinds))
        self._layers.check(self._left_out)
        return made

    def initialise(self) -> None:
        """Begin with the mean embedding."""
        masks: Any = self.module
        with torch.no_grad():
            masks.mask_embeddings.copy_(masks.get_input_embeddings().weight.mean(0).expand_as(masks.mask_embeddings))

    def block_logits(self, batch: Batch, anchors: Tensor) -> Tensor:
        masks: Any = self.module
        (rows, blocks), length = anchors.shape, batch.ids.shape[1]
        extent = length + blocks * masks.block_size
        decoder, cache = self.model.base_model, TextCache(rows, extent)
        with torch.no_grad():
            decoder(input_ids=batch.ids, past_key_values=cache, use_cache=True)
        pending = token_embeddings(self.model, batch.ids.gather(1, anchors))
        embeds = torch.cat([pending[:, :, None], masks.mask_embeddings.to(pending).expand(rows, blocks, -1, -1)], 2)
        self._passes.attach(cache)  # type: ignore[arg-type]
        with self._layers.without(self._left_out):
            nodes = Blocks(anchors, masks.block_size, length)
            logits, _ = self._passes.forward_nodes(nodes, extent, Taps(), embeds.flatten(1, 2))
        return logits.unflatten(1, (blocks, -1))[:, :, -masks.drafts :]


class MaskReader:
    """Passes of the target over masks; it keeps nothing of rows.

    target: set when it is known.
    """

    target: Target

    def __init__(self, masks: Masks, int8: Int8Copies | None = None):
        self._masks = masks

    def start(self, rows: Sequence[Row], more: int) -> None:
        """Nothing to reserve: the target's cache has room for the drafter's width."""

    def end(self, row: Row) -> None:
        """Nothing to release."""

    def observe(self, rows: Sequence[Row], scores: Scores, accepted: Sequence[Accepted]) -> None:
        """Nothing to read: the target has committed all tokens but the pending one."""

    def tokens_read(self, row: Row, after: int) -> int | None:
        return len(row.tokens) - 1

    def filled(self, rows: Sequence[Row], depths: Sequence[int]) -> Tensor:
        """(rows, most of `depths`, V) logits at the first masks behind each row, so many as `depths` gives."""
        order = sorted(range(len(rows)), key=lambda i: rows[i].slot)
        trees = [self._masks.behind(rows[i].tokens[-1], depths[i] - 1) for i in order]
        logits = self.target.score(trees, self._masks.view, [rows[i].slot for i in order]).logits
        return logits[sorted(range(len(rows)), key=order.__getitem__)]


@dataclass
class S3d(BlockDrafter):
    card = Card(
        paper="arXiv 2405.20314 (2024)",
        idea="The model, without its middle layers, fills in trained masks: a pass of a part of it drafts several "
        "tokens.",
        family="self-drafting",
        needs=("training",),
        cannot=SEQ2SEQ,
        published="Phi-3: 1.4x to 2x over a quantised EAGLE, in less memory (one GPU).",
    )
    learner = Training
    kind = Masks
    reads = MaskReader
    model: Any = None  # a checkpoint's folder, or Masks
    depth: int = knob(16, 1, 64)  # drafted tokens, at most those that masks were trained for
    top_k: int = knob(1, 1, 256)  # tokens of a mask, 1 for a chain; published 1
    nodes: int = knob(24, 1, 1024)  # of a tree; published: the chain
    drawn: bool = knob(False)  # a chain drawn from the masks, for rules that verify such drafts; published False
    quantize = NONE
    formats = ()

    @staticmethod
    def rebuilt(record: dict[str, Any], model: PreTrainedModel) -> Masks:
        return Masks(record, model)

    @property
    def width(self) -> int:
        return max(super().width, self.depth + 1)

    def bind(self, target: Target) -> None:
        super().bind(target)
        check_whole(target)
        check_embeddings_given(target.model)
        target.check_view(self.head.view)
        self.reader.target = target

    def filled(self, rows: Sequence[Row], depths: Sequence[int]) -> Tensor:
        return self.reader.filled(rows, depths)
