"""A pass through the model's own forward in which every node has the bits of `model.generate`.

`model.generate` reads its own text a token at a time, and in bf16 the width of a forward changes its bits: torch's
attention takes other paths for several queries or with a mask, and its products add up their columns in blocks that
depend on the number of rows. Both are replaced here, for this thread and during a pass only:

- Attention is computed query by query, by the call that torch gets for a single token, over the keys that the node
  sees.
- A linear layer is computed for all nodes together by compiled code, which adds up the columns in the blocks that torch
  has for a single token. Which these are is measured for each shape of a layer (`orders.py`); where no order gives
  torch's bits, the layer is computed node by node.

Everything else in a decoder works on each token by itself. Prompts are read as `model.generate` reads them, each alone
and at once. Whether a whole model has the same bits is measured before the pass is used (`targets/generates.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from truedraft.caches.rows import RowCache
from truedraft.caches.seq2seq import Seq2SeqCache
from truedraft.runtime import native
from truedraft.runtime.forward import ForwardPass
from truedraft.runtime.linears import Product, compilable
from truedraft.runtime.orders import columns_alone
from truedraft.runtime.overrides import Override, overridden, own
from truedraft.runtime.weights import Copies, NotCompilable, Weight, linear_weight
from truedraft.tree import DraftTree, Prompt, Scores, Taps, joined
from truedraft.views._base import View

Heads = dict[tuple[int, int], tuple[int, bool]]

_own_attention = own(functional, "scaled_dot_product_attention")


class OtherBits(Exception):
    """Attention that is not computed as torch does for a single token."""


class SingleTokens:
    """Forwards of a model over single tokens, in which its attention is noted.

    noted: calls of torch's attention.
    heads: by number and size of the heads of queries, the number of those of keys, and whether torch is told so.
    """

    def __init__(self) -> None:
        self.noted, self.heads = 0, Heads()

    def noting(self) -> AbstractContextManager[None]:
        """A context for these forwards."""
        return overridden([(functional, "scaled_dot_product_attention", self._attention)])

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **given: Any) -> Tensor:
        if args or given.get("attn_mask") is not None or query.shape[2] != 1:
            raise OtherBits("attention of one token has a mask, or several queries")
        self.noted += 1
        self.heads[query.shape[1], query.shape[3]] = key.shape[1], bool(given.get("enable_gqa"))
        return _own_attention(query, key, value, **given)


class PromptsAlone(ForwardPass):
    """The model's own forward, with prompts as `model.generate` reads them: each alone and at once."""

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Prompt], taps: Taps) -> Scores:
        return joined([self._read([prompt], len(prompt), taps) for prompt in prompts])


class TokenwisePass(PromptsAlone):
    """The model's own forward, with the bits of one token at a time.

    heads: see `SingleTokens`.
    copied: makes the copies in panels that products read.

    Raises:
        NotCompilable: there is no compiled code here, or the model has other matrices than those of plain linear layers
            and embeddings: some of them, as stacked experts, are multiplied with as many tokens as a pass brings them.
    """

    name = "transformers forward with the bits of single tokens"
    batch_invariant: ClassVar[bool] = True

    def __init__(self, heads: Heads, model: PreTrainedModel, layer_types: Sequence[str], copied: Copies):
        super().__init__(model, layer_types, None)
        if native.library() is None or not _of_linear_layers(model):
            raise NotCompilable("it has other matrices than those of linear layers")
        self.copied = copied
        self._layers: dict[nn.Linear, tuple[Weight, Product | None]] = {}
        self._threads = 0  # for which products were chosen: torch's own order may depend on their number
        self._overrides: list[Override] = []
        self._heads = heads
        self._mask: tuple[Tensor | None, list[list[int | Tensor]]] = None, []

    def attach(self, cache: RowCache | Seq2SeqCache | None) -> None:
        super().attach(cache)
        if cache is not None:
            self._refresh()

    def _refresh(self) -> None:
        """Rebuild the products: weights may have been replaced, and biases are copies."""
        self.copied.refresh()
        if self._threads != torch.get_num_threads():
            self._threads = torch.get_num_threads()
            self._layers.clear()
        self._overrides = [
            (m, "forward", partial(_linear, m, self._product(m))) for m in self.model.modules() if type(m) is nn.Linear
        ]
        self._overrides.append((functional, "scaled_dot_product_attention", self._attention))

    def score(self, trees: Sequence[DraftTree], taps: Taps, view: View | None = None) -> Scores:
        with overridden(self._overrides) if view is None else nullcontext():
            return super().score(trees, taps, view)

    def _product(self, layer: nn.Linear) -> Product | None:
        """The product of a layer with the bits of torch for one token; None where there is none."""
        try:
            weight = linear_weight(layer, layer.weight.dtype)
        except NotCompilable:
            return None
        if weight.scales is not None or weight.blocks is not None or not compilable(weight, layer.weight.dtype):
            return None
        panels = self.copied(weight)
        before, product = self._layers.get(layer, (None, None))
        if before is None or not _same(before, panels):
            product = _torch_like(layer, panels)
            self._layers[layer] = panels, product
        return product

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention of (rows, heads, n, size) queries to the keys that each sees, by a call of torch's for each."""
        shape = query.shape
        if attn_mask is not None and attn_mask.shape[2] < shape[2]:
            # of a single node; heads that share keys were packed as if they were queries of one head
            query = query.reshape(shape[0], -1, attn_mask.shape[2], shape[3])
        heads, grouped = self._heads[query.shape[1], query.shape[3]]
        repeated = key.shape[1] // heads
        key, value = key[:, ::repeated], value[:, ::repeated]  # (rows, heads of keys, positions, size)
        results = torch.empty_like(query[..., :1]).expand(*query.shape[:3], value.shape[3]).clone()
        for row, nodes in enumerate(self._seen(attn_mask, query, key)):
            for node, seen in enumerate(nodes):
                at = slice(seen) if isinstance(seen, int) else seen
                results[row : row + 1, :, node : node + 1] = _own_attention(
                    query[row : row + 1, :, node : node + 1], key[row : row + 1, :, at], value[row : row + 1, :, at],
                    scale=scale, enable_gqa=grouped,
                )  # fmt: skip
        return results.view(*shape[:3], -1)

    def _seen(self, mask: Tensor | None, query: Tensor, key: Tensor) -> list[list[int | Tensor]]:
        """By row and node the places of the keys that it sees, in order; their number where they are the first ones."""
        if mask is None:
            if query.shape[2] != 1:
                raise OtherBits("several nodes have no mask")
            return [[key.shape[2]]] * len(query)
        if self._mask[0] is not mask:  # the layers of a pass share their mask
            if mask.dtype != torch.bool or mask.shape[1] != 1:
                raise OtherBits("masks are not booleans for all heads alike")
            self._mask = mask, [[_places(node) for node in row] for row in mask[:, 0]]
        return self._mask[1]


def _places(seen: Tensor) -> int | Tensor:
    places = seen.nonzero()[:, 0]
    return len(places) if int(places[-1]) == len(places) - 1 else places


def _of_linear_layers(model: nn.Module) -> bool:
    """Whether all matrices of a model are those of plain linear layers and embeddings."""
    known = {id(m.weight) for m in model.modules() if type(m) is nn.Linear or isinstance(m, nn.Embedding)}
    return all(weight.ndim < 2 or id(weight) in known for weight in model.parameters())


def _linear(layer: nn.Linear, product: Product | None, x: Tensor) -> Tensor:
    """A layer's results for (..., in), each with the bits of a single token."""
    if product is not None and product.takes(x):
        return product(x)
    tokens = x.reshape(-1, 1, x.shape[-1])
    return torch.cat([nn.Linear.forward(layer, token[None]) for token in tokens]).view(*x.shape[:-1], -1)


def _torch_like(layer: nn.Linear, panels: Weight) -> Product | None:
    """The compiled product with torch's bits for single tokens, in the order of columns that has been measured."""
    columns = columns_alone(layer, panels)
    return None if columns is None else Product(native.library(), panels, layer.weight.dtype, columns)


def _same(one: Weight, other: Weight) -> bool:
    """Whether two weights are of the same memory; biases are copied into products."""
    biases = one.bias is other.bias if one.bias is None or other.bias is None else torch.equal(one.bias, other.bias)
    return one.values.data_ptr() == other.values.data_ptr() and biases
