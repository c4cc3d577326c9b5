"""The compiled pass of a mask-filling drafter (`drafters/heads/gad.py`), over new tokens and masks of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from truedraft.caches.seq2seq import Seq2SeqCache
from truedraft.runtime.fingerprint import fingerprint
from truedraft.runtime.nodes import Nodes
from truedraft.runtime.program import Program
from truedraft.runtime.seq2seq import CrossAttentionPass
from truedraft.runtime.weights import Copies, NotCompilable


class CompiledFillerPass(CrossAttentionPass):
    """Fills masks after the tokens of rows, whose keys and values it caches.

    filler: layers with rotary self-attention, cross-attention to a source and a feed-forward
        (`_nn.CrossAttentionLayer`), between `norm_in` and `norm_out`; with `config`, `turns`, embeddings and head as a
        model has them.

    Raises:
        NotCompilable: there is no compiled pass here, or it does not support the filler's sizes or dtype.
    """

    def _compiled(self, copied: Copies | None) -> Program:
        filler: Any = self.model
        if filler.dtype not in (torch.float32, torch.bfloat16) or filler.mask_embeddings.device.type != "cpu":
            raise NotCompilable("it is not fp32 or bf16 on the CPU")
        self._made_of = self._fingerprint()
        p = Program(filler.dtype == torch.bfloat16, ["full_attention"] * len(filler.layers))
        compile_filler(p, filler)
        return p

    def _fingerprint(self) -> list[list[object]]:
        model: Any = self.model
        return [fingerprint(part) for part in (model, model.get_input_embeddings(), model.get_output_embeddings())]

    def begin(self, rows: int, capacity: int) -> None:
        """Reserve a cache for `rows` rows of `capacity` positions each; `read_source` then sets their sources."""
        if self._fingerprint() != self._made_of:
            self._compile()
        self.seq2seq_cache = Seq2SeqCache(len(self.program.layer_types), rows, capacity)
        self.attach(self.seq2seq_cache.rows)

    def fill(self, texts: Sequence[tuple[int, int]], x: Tensor, masks: int) -> Tensor:
        """(rows, masks, V) logits of the masks after each row's text.

        texts: by slot, the number of tokens in the cache, and of all tokens.
        x: (nodes, size) embeddings of the new tokens of each row, followed by its masks.
        """
        nodes, gather = Nodes(), list[int]()
        for slot, (read, end) in enumerate(texts):
            nodes.add_chain(slot, read, None, end - read)
            gather += range(len(nodes), len(nodes) + masks)
            nodes.add_block(slot, end, masks)
        logits, _ = self(nodes, gather, x)
        return logits.unflatten(0, (len(texts), masks))


def compile_filler(p: Program, filler: Any) -> None:
    size, count = filler.config.hidden_size, filler.config.num_attention_heads
    heads = SimpleNamespace(num_attention_heads=count, sliding_window=None)
    attention = SimpleNamespace(head_dim=size // count, scaling=(size // count) ** -0.5)
    p.rotary = filler.turns
    p.buffers(filler, 4 * size, size, size)
    p.embed(filler.get_input_embeddings())
    for i, layer in enumerate(filler.layers):
        p.layer_norm("x", "h", layer.norm_own)
        for k, dst in enumerate(("q", "k", "v")):
            p.linear("h", dst, layer.own, (k * size, (k + 1) * size), wait=dst == "v")
        p.attend(i, attention, heads)
        p.linear("a", "x", layer.own_out, add=True)
        p.layer_norm("x", "h", layer.norm_source)
        p.linear("h", "q", layer.cross_query)
        p.cross(attention, heads, *(partial(_part, layer.source, k, size) for k in range(2)))
        p.linear("a", "x", layer.source_out, add=True)
        p.layer_norm("x", "h", layer.norm_inner)
        p.activated("h", layer.up, "gelu")
        p.linear("g", "x", layer.down, add=True)
        p.outputs.append(len(p.ops) - 1)
    p.end(filler, lambda src, dst: p.layer_norm(src, dst, filler.norm_out))


def _part(layer: Any, k: int, size: int, x: Tensor) -> Tensor:
    """The k-th output of a fused linear layer, `size` wide."""
    return linear(x, layer.weight[k * size : (k + 1) * size], layer.bias[k * size : (k + 1) * size])
