"""Passes of models with recurrent or convolutional state: over chains, from the snapshots of their rows' states."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.caches.states import STATE_LAYERS, StateCache
from truedraft.errors import Refused
from truedraft.runtime.forward import ForwardPass, LinearsPass, Output, PromptPass
from truedraft.runtime.padded import Padded
from truedraft.tree import DraftTree, Piece, Prompt, Scores, Taps
from truedraft.views._base import Reduction, View

# Most committed tokens of a row that a pass over drafts reads again. A pass over so many takes little longer than one
# over a single token, and without a bound each pass whose draft is not accepted whole would be longer than the last.
CARRY = 16


class ChainPass(ForwardPass):
    """See `ForwardPass` and `caches/states.py`. A pass reads the carry of each row, and its chain behind it.

    Rows are padded behind their chains: states are causal, so only those at the end of the pass depend on padding, and
    these are not kept for such rows. A carry of more than CARRY tokens is read by a call of its own. So is every carry
    where no row drafts and the inputs differ in length, so that plain decoding soon has none.
    """

    cache: StateCache

    def __init__(self, model: PreTrainedModel, layer_types: Sequence[str], window: int | None):
        super().__init__(model, layer_types, window)
        parameters = inspect.signature(model.forward).parameters
        self._attends = not STATE_LAYERS.issuperset(layer_types)
        self._cache_argument = "past_key_values" if "past_key_values" in parameters else "cache_params"

    def _read(self, batch: Sequence[Prompt], most: int, taps: Taps) -> Scores:
        first = len(self.cache.lengths)
        scores = super()._read(batch, most, taps)
        for slot, prompt in enumerate(batch, first):
            self.cache.began(slot, prompt)
        return scores

    def _read_piece(self, piece: Piece, taps: Taps) -> Scores:
        scores = super()._read_piece(piece, taps)
        if piece.last:
            self.cache.began(piece.slot, piece.prompt)
        return scores

    @torch.no_grad()
    def score(self, trees: Sequence[DraftTree], taps: Taps, view: View | None = None) -> Scores:
        if view is not None:
            self.reduced(view)
        self.check_taps(taps)
        self._read_carries([len(tree) for tree in trees])
        carries = [self.cache.carry(slot) for slot in range(len(trees))]
        chains = [[*carry, *tree.tokens] for carry, tree in zip(carries, trees, strict=True)]
        with self.cache.at_snapshots([tree.tokens for tree in trees]):
            logits, states = self._pass(0, chains, taps, max(map(len, chains)) - min(map(len, carries)))
        missing = max(map(len, chains)) - logits.shape[1]
        logits = _behind(logits, [len(carry) - missing for carry in carries], max(map(len, trees)))
        hidden = {
            layer: [row[len(carry) : len(chain)] for row, carry, chain in zip(rows, carries, chains, strict=True)]
            for layer, rows in states.items()
        }
        return Scores(logits, hidden, [0] * len(trees))

    def reduced(self, view: View) -> Reduction:
        raise Refused(
            f"{type(self.model).__name__} cannot run under {view.name}: it keeps states of all its layers, "
            "which a pass without some of them would change"
        )

    def _read_carries(self, widths: Sequence[int]) -> None:
        """Read carries by calls of their own, those of adjacent rows of one length together.

        widths: nodes of each row's tree.
        """
        carries = [self.cache.carry(slot) for slot in range(len(widths))]
        uneven = max(widths) == 1 and len(set(map(len, carries))) > 1
        for count, slots in groupby(range(len(carries)), lambda slot: len(carries[slot])):
            if count > (0 if uneven else CARRY):
                rows = list(slots)
                with self.cache.at_snapshots([()] * len(widths)):
                    self._pass(rows[0], [carries[slot] for slot in rows], Taps(), 1)

    def _pass(self, first: int, chains: Sequence[Sequence[int]], taps: Taps, last: int) -> Output:
        """A call over chains behind the rows of adjacent slots, the first of which is `first`.

        last: how many of the last positions need logits; models that cannot leave out the others compute all.
        """
        cursor = self.cache.cursor
        slots = slice(first, first + len(chains))
        cursor.begin(slots.start, slots.stop, max(map(len, chains)), self.device)
        trees = [DraftTree.chain(chain[0], chain[1:]) for chain in chains]
        nodes = Padded.of(trees, cursor.lengths[slots], cursor.width, self.device).to(self.device)
        cut = {"logits_to_keep": last} if self._cut_logits else {}
        return self.forward({"input_ids": nodes.ids, **cut}, self.mask(nodes, cursor.extent), nodes.positions, taps)

    def mask(self, nodes: Padded, extent: int) -> Any:
        if not self._attends:
            return None
        mask = super().mask(nodes, extent)
        if not isinstance(mask, dict):
            return mask
        kinds = {"hybrid": mask["full_attention"], "hybrid_sliding": mask["sliding_attention"]}
        return {"conv": None, "linear_attention": None, **kinds, **mask}

    def call(self, inputs: dict[str, Any], mask: Any, positions: Tensor) -> Any:
        with self.cache.passing():
            return self.model(
                **inputs,
                **{self._cache_argument: self.cache},
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                return_dict=True,
            )


def _behind(logits: Tensor, starts: Sequence[int], width: int) -> Tensor:
    """`width` positions of each row of (rows, n, V), from its own start on; its last is repeated where it has fewer."""
    if len(set(starts)) == 1:
        return logits[:, starts[0] : starts[0] + width]
    at = torch.tensor(starts, device=logits.device)[:, None] + torch.arange(width, device=logits.device)
    rows = torch.arange(len(starts), device=logits.device)[:, None]
    return logits[rows, at.clamp_max(logits.shape[1] - 1)]


class LinearsChainPass(LinearsPass, ChainPass):
    """The same with the model's linear layers computed by compiled code."""


class ChainPromptPass(PromptPass, ChainPass):
    """The model's own forward for long prompts; see `PromptPass`."""
