"""A pass through the model's own forward: padded to the widest tree, with a mask and positions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.caches.rows import RowCache
from truedraft.caches.seq2seq import Seq2SeqCache
from truedraft.errors import Refused
from truedraft.runtime._base import Runner
from truedraft.runtime.alibi import biased
from truedraft.runtime.embedding import embedded
from truedraft.runtime.experts import FewerExperts
from truedraft.runtime.linears import Linears
from truedraft.runtime.local import local
from truedraft.runtime.modules import inner_size
from truedraft.runtime.overrides import overridden
from truedraft.runtime.padded import Padded
from truedraft.runtime.parts import PartAttention
from truedraft.runtime.placements import windowed
from truedraft.runtime.positions import Positions, has_table, table_size
from truedraft.runtime.rotary import by_row, changes
from truedraft.runtime.selecting import SeenQueries, check_seen, fitted
from truedraft.runtime.skipping import SkippableLayers
from truedraft.runtime.tapping import LayerTaps, one_token
from truedraft.runtime.tempered import tempered
from truedraft.runtime.weights import Copies, NotCompilable
from truedraft.tree import DraftTree, Piece, Prompt, Scores, Taps, joined
from truedraft.views._base import Reduction, Rounded, View

WHOLE, PART = 4096, 2048  # most tokens of a prompt that is read in one call, and of each call for a longer one
ROOM = 1 << 30  # most bytes of activations and masks in such a call; fewer tokens where they need more
SPANS = {"cpu": 128, "cuda": 512}  # positions per call of prompts that are read in pieces

Output = tuple[Tensor, dict[int, Tensor]]  # logits (rows, width, V); tapped layers, (rows, width, H) each


class ForwardPass(Runner):
    """The forward of a `transformers` model, called as it is.

    window: positions that its sliding-window layers attend to, or those of a chunk in layers that attend within one;
        None where there are neither.
    """

    name = "transformers forward"

    def __init__(self, model: PreTrainedModel, layer_types: Sequence[str], window: int | None):
        self.model, self.layer_types, self.window = model, layer_types, window
        parameters = inspect.signature(model.forward).parameters
        self._cut_logits, self._takes_positions = "logits_to_keep" in parameters, "position_ids" in parameters
        self._positions = self._substituted()
        self._shares = "dummy" in layer_types
        self._windowed = windowed(model)
        self._by_place = [*biased(model), *local(model), *self._windowed]
        self._by_position = [*self._by_place, *tempered(model)]
        self._changing = [module for module in model.modules() if changes(module)]
        self._skippable: SkippableLayers | None = None
        self._experts: FewerExperts | None = None
        self._taps: LayerTaps | None = None
        self._queries_seen = False

    def _substituted(self) -> Positions | None:
        """What the model computes of indices in the cache, where its forward takes no positions."""
        return None if self._takes_positions or not has_table(self.model) else Positions.of(self.model)

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device  # type: ignore[return-value]

    @property
    def granularity(self) -> int:
        return SPANS.get(self.device.type, SPANS["cuda"])

    def attach(self, cache: RowCache | Seq2SeqCache | None) -> None:
        self.cache: RowCache | Seq2SeqCache = cache  # type: ignore[assignment]
        if cache is not None and self._positions is not None:
            limit = table_size(self.model.get_decoder())
            count = cache.cursor.capacity if limit is None else min(cache.cursor.capacity, limit)
            self._positions.refresh(count, self.device)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Prompt], taps: Taps) -> Scores:
        """Read the prompts of new rows; neighbours of equal length share a call."""
        return joined([self._read(list(group), length, taps) for length, group in groupby(prompts, len)])

    @torch.no_grad()
    def read_pieces(self, pieces: Sequence[Piece], taps: Taps) -> list[Scores]:
        """Read pieces of prompts, one after another, in calls of `granularity` positions, the last ones shorter."""
        return [self._read_piece(piece, taps) for piece in pieces]

    def _read_piece(self, piece: Piece, taps: Taps) -> Scores:
        step = self.granularity
        ends = [*range(piece.start, piece.end, step), piece.end]
        with self.cache.cursor.reaching(piece.slot):
            return self._read_spans([piece.prompt], list(pairwise(ends)), taps, piece.scored)

    def _read(self, batch: Sequence[Prompt], most: int, taps: Taps) -> Scores:
        """Read prompts of one length together, at most `most` positions of each at a time."""
        lengths, length = self.cache.cursor.lengths, len(batch[0])
        first = len(lengths)
        spans = [(start, min(start + most, length)) for start in range(0, length, most)]
        scores = self._read_spans(batch, spans, taps)
        lengths[first:] = [length - 1] * len(batch)  # the root is committed with its path
        return scores

    def _read_spans(
        self, batch: Sequence[Prompt], spans: Sequence[tuple[int, int]], taps: Taps, scored: bool = False
    ) -> Scores:
        """Read adjacent spans of prompts of one length, each in a call, behind the rows in use. The logits are those of
        the last position, or where they are to be scored, of all."""
        self.check_taps(taps)
        cursor = self.cache.cursor
        name, given = "input_ids", [p.ids for p in batch]
        if batch[0].embeds is not None:
            name, given = "inputs_embeds", [p.embeds for p in batch]
        inputs = torch.stack(given)  # type: ignore[arg-type]
        whole = self._shares and taps.hidden  # layers that read others' keys would compute the last position alone
        cut = {"logits_to_keep": 1} if self._cut_logits and not (whole or scored) else {}
        of_spans: list[Tensor] = []
        parts: dict[int, list[Tensor]] = {layer: [] for layer in taps.hidden}
        first = len(cursor.lengths)
        for start, end in spans:
            cursor.lengths[first:] = [start] * len(batch)
            cursor.begin(first, first + len(batch), end - start, self.device)
            positions = torch.arange(start, end, device=self.device).repeat(len(batch), 1)
            with by_row(self._changing, len(batch[0])):
                logits, states = self.forward({name: inputs[:, start:end], **cut}, None, positions, taps)
            for layer, read in parts.items():
                read.append(states[layer])
            of_spans = [*of_spans, logits] if scored else [logits[:, -1:]]
            if self.on_read is not None:
                self.on_read(positions.numel())
        hidden = {layer: list(torch.cat(read, 1) if read[1:] else read[0]) for layer, read in parts.items()}
        return Scores(torch.cat(of_spans, 1), hidden, [spans[-1][1] - spans[0][0] - 1] * len(batch))

    @torch.no_grad()
    def score(self, trees: Sequence[DraftTree], taps: Taps, view: View | None = None) -> Scores:
        """The logits at every node of one tree per slot in use, of the whole model or under a view.

        Raises:
            Refused: see `reduced`.
        """
        self.check_taps(taps)
        with self._under(view, trees):
            logits, states = self._scored(trees, taps)
        hidden = {
            layer: [row[: len(tree)] for row, tree in zip(states[layer], trees, strict=True)] for layer in taps.hidden
        }
        return Scores(logits, hidden, [0] * len(trees))

    @torch.no_grad()
    def extend(
        self, trees: Sequence[DraftTree], written: Sequence[int], last: Sequence[int], taps: Taps
    ) -> tuple[Tensor, dict[int, Tensor]]:
        self.check_taps(taps)
        cursor = self.cache.cursor
        first = [min(known, len(tree) - 1) for known, tree in zip(written, trees, strict=True)]
        width = max(len(tree) - begin for begin, tree in zip(first, trees, strict=True))
        nodes = Padded.of(trees, cursor.lengths, width, self.device, first=first).to(self.device)
        extent = max(length + len(tree) for length, tree in zip(cursor.lengths, trees, strict=True))
        cursor.placed(nodes.places, extent)
        logits, states = self.forward_nodes(nodes, extent, taps)
        ends = [len(tree) - begin for begin, tree in zip(first, trees, strict=True)]

        def at_last(rows: Tensor) -> Tensor:
            return torch.cat([row[end - count : end] for row, end, count in zip(rows, ends, last, strict=True)])

        return at_last(logits), {layer: at_last(states[layer]) for layer in taps.hidden}

    @torch.no_grad()
    def queries(self, trees: Sequence[DraftTree]) -> list[Tensor]:
        with SeenQueries() as seen:
            self._scored([tree.cut(1) for tree in trees], Taps())
        layers: Sequence[Any] = self.cache.layers
        found = zip(layers, seen.queries, strict=True)  # of one node: by head, or by those that share keys
        return [query.flatten(1, 2).unflatten(1, (layer.keys.shape[1], -1)) for layer, query in found]

    def check_taps(self, taps: Taps) -> None:
        """See `Runner.check_taps`. Layers are found by forwards over one token, the first time that any are tapped."""
        if taps.hidden and self._taps is None:
            self._taps = LayerTaps(self.model, self._one_token())
        for layer in taps.hidden:
            self._taps.number(layer)  # type: ignore[union-attr]

    def _one_token(self) -> dict[str, Any]:
        """Inputs of the model's forward over one token."""
        return {"input_ids": one_token(self.model)}

    def _scored(self, trees: Sequence[DraftTree], taps: Taps) -> Output:
        cursor = self.cache.cursor
        cursor.begin(0, len(trees), max(map(len, trees)), self.device)
        embeds = embedded(self.model, trees, cursor.width, self.device)
        if embeds is None and self._unmasked(trees):
            ids, positions = torch.tensor([[trees[0].tokens], [cursor.positions]], device=self.device)
            return self.forward({"input_ids": ids}, None, positions, taps)
        nodes = Padded.of(trees, cursor.lengths, cursor.width, self.device, cursor.offsets).to(self.device)
        return self.forward_nodes(nodes, cursor.extent, taps, embeds)

    def _unmasked(self, trees: Sequence[DraftTree]) -> bool:
        """Whether the pass is a single node that attends to its whole row."""
        cursor = self.cache.cursor
        whole = self.window is None or cursor.extent <= self.window or bool(cursor.offsets)
        return len(trees) == cursor.width == 1 and whole and not self._windowed

    def forward_nodes(self, nodes: Padded, extent: int, taps: Taps, embeds: Tensor | None = None) -> Output:
        """The output of the model's own forward for nodes that attend to the first `extent` positions of their rows.

        embeds: (rows, width, H) instead of the nodes' tokens.
        """
        inputs = {"input_ids": nodes.ids} if embeds is None else {"inputs_embeds": embeds}
        with self._placed(nodes, extent), by_row(self._changing):
            return self.forward(inputs, self.mask(nodes, extent), nodes.positions, taps)

    @contextmanager
    def _placed(self, nodes: Padded, extent: int) -> Iterator[None]:
        """A context in which what the model computes of indices in the cache is computed of positions."""
        own = nullcontext() if self._positions is None else self._positions.at(nodes, extent)
        with own, overridden(rule(nodes, extent) for rule in self._by_position):
            yield

    def reduced(self, view: View) -> Reduction:
        """What passes under a view leave out.

        Raises:
            Refused: this model cannot run under it.
        """
        reduction = view.reduction(len(self.layer_types))
        entries = reduction.entries
        if reduction.bits or isinstance(entries, Rounded):
            raise Refused(
                f"{type(self.model).__name__} cannot run under {view.name} by the {self.name}: weights or entries of "
                "fewer bits need the compiled pass"
            )
        if reduction.skips or reduction.output_head or reduction.neurons:
            if self._skippable is None:
                self._skippable = SkippableLayers(self.model, len(self.layer_types))
            self._skippable.check(reduction)
        if reduction.experts is not None:
            if self._experts is None:
                self._experts = FewerExperts(self.model)
            self._experts.check(reduction.experts)
        if entries is not None and entries.chunk and not self._queries_seen:
            check_seen(self.model, len(self.layer_types) - self.layer_types.count("dummy"))
            self._queries_seen = True
        by_place = self._by_place or {"chunked_attention", "indexed_attention"}.intersection(self.layer_types)
        return fitted(self.model, reduction, bool(by_place), self.window)

    @contextmanager
    def _under(self, view: View | None, trees: Sequence[DraftTree]) -> Iterator[None]:
        """A context in which `forward` scores trees under a view; None for the whole model."""
        with ExitStack() as lighter:
            reduction = None if view is None else self.reduced(view)
            if reduction is not None and self._skippable is not None:
                lighter.enter_context(self._skippable.without(reduction, self._warm(reduction, trees)))
            if reduction is not None and reduction.experts is not None and self._experts is not None:
                lighter.enter_context(self._experts.given(reduction.experts))
            yield

    def _warm(self, reduction: Reduction, trees: Sequence[DraftTree]) -> Tensor | None:
        """(rows, width) bool: the nodes that compute all feed-forwards; None where there are none."""
        warm, width = (
            self.cache.cursor.warm(trees, reduction.sparing.warm if reduction.sparing else 0),
            max(map(len, trees)),
        )
        padded = [[*row, *[row[-1]] * (width - len(row))] for row in warm]
        return torch.tensor(padded, device=self.device) if warm else None

    def forward(self, inputs: dict[str, Any], mask: Any, positions: Tensor, taps: Taps) -> Output:
        """The output of the model's own forward, over the cache at its cursor."""
        with self._recording(taps) as states:
            logits = self.call(inputs, mask, positions).logits
        return logits, states

    def call(self, inputs: dict[str, Any], mask: Any, positions: Tensor) -> Any:
        """The model's own output."""
        given = {"position_ids": positions} if self._takes_positions else {}
        return self.model(
            **inputs,
            **given,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
        )

    def _recording(self, taps: Taps) -> AbstractContextManager[dict[int, Tensor]]:
        """A context in which a forward records the tapped layers."""
        return self._taps.recording(taps.hidden) if self._taps is not None and taps.hidden else nullcontext({})

    def mask(self, nodes: Padded, extent: int) -> Any:
        """The model's attention mask of the nodes over the first `extent` positions, (rows, 1, width, extent)."""
        seen = nodes.seen(extent)
        if self.window is None:
            return self._attention_mask(seen)
        kind, reach = "sliding_attention", nodes.near
        if "chunked_attention" in self.layer_types:
            kind, reach = "chunked_attention", nodes.beside
        near = seen if extent <= self.window or self.cache.cursor.offsets else seen & reach(extent, self.window)
        if whole := {"full_attention", "indexed_attention"}.intersection(self.layer_types):
            return {**dict.fromkeys(whole, self._attention_mask(seen)), kind: self._attention_mask(near)}
        return self._attention_mask(near)

    def _attention_mask(self, seen: Tensor) -> Tensor:
        return attention_mask(self.model, seen[:, None])


def attention_mask(model: PreTrainedModel, seen: Tensor) -> Tensor:
    """A mask of the form that the model's attention expects; seen: (rows, 1, queries, keys) bool."""
    if model.config.get_text_config(decoder=True)._attn_implementation != "eager":
        return seen
    zeros = torch.zeros(seen.shape, dtype=model.dtype, device=seen.device)
    return zeros.masked_fill_(~seen, torch.finfo(model.dtype).min)


def bytes_of_position(config: Any, dtype: torch.dtype, length: int, cut_logits: bool = True) -> int:
    """Bytes that the model's own forward has for a position at once, about, in a text of that length: activations, and
    its line of a mask, as the model and as torch makes it; without `cut_logits` the logits too."""
    numbers: int = 8 * config.hidden_size + 4 * inner_size(config)
    if not cut_logits:
        numbers += 2 * config.vocab_size
    if config._attn_implementation == "eager":
        numbers += 3 * getattr(config, "num_attention_heads", 0) * length
    return numbers * dtype.itemsize + length * (1 + dtype.itemsize)


def positions_together(length: int, of_position: int) -> int:
    """Positions of a prompt of a length that are read in one call, where each takes so many bytes."""
    fit = ROOM // of_position
    return length if length <= min(fit, WHOLE) else max(min(fit, PART), 1)


class PromptPass(ForwardPass):
    """The model's own forward for the prompts of a target whose other passes are compiled.

    Each prompt is read alone, so that its keys, values and logits do not depend on other rows; in one call, or in parts
    where it is longer than WHOLE tokens or its activations would need more than ROOM bytes, which depends only on its
    length and the model's sizes.
    """

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Prompt], taps: Taps) -> Scores:
        scores = joined([self._read([prompt], self._most(len(prompt)), taps) for prompt in prompts])
        hidden = {layer: [state.float() for state in states] for layer, states in scores.hidden.items()}
        return Scores(scores.logits.float(), hidden, scores.context)  # as compiled passes return them

    def _most(self, length: int) -> int:
        """Positions of a prompt of this length that are read in one call."""
        config = self.model.config.get_text_config(decoder=True)
        return positions_together(length, bytes_of_position(config, self.model.dtype, length, self._cut_logits))

    def call(self, inputs: dict[str, Any], mask: Any, positions: Tensor) -> Any:
        with PartAttention():
            return super().call(inputs, mask, positions)


class LinearsPass(ForwardPass):
    """The model's own forward with its linear layers computed by compiled code.

    copied: makes the copies that are read instead of the weights; None where these are read in place.

    Raises:
        NotCompilable: there is no compiled code here, or it supports none of the layers.
    """

    name = "transformers forward with compiled linear layers"

    def __init__(
        self, model: PreTrainedModel, layer_types: Sequence[str], window: int | None, copied: Copies | None = None
    ):
        super().__init__(model, layer_types, window)
        self.copied, self._linears = copied, Linears(model, copied)
        if not self._linears:
            raise NotCompilable("there are no linear layers for compiled code")

    def attach(self, cache: RowCache | Seq2SeqCache | None) -> None:
        super().attach(cache)
        if cache is not None:
            self._linears.refresh()

    def call(self, inputs: dict[str, Any], mask: Any, positions: Tensor) -> Any:
        with self._linears.compiled():
            return super().call(inputs, mask, positions)
