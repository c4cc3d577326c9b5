"""Keys and values of texts that were read before, by prefix: one radix tree per namespace (as in Zheng et al., 2024,
"SGLang: Efficient Execution of Structured Language Model Programs").

An edge owns copies of the keys and values of its tokens, so the cache's slots are free for other rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from truedraft.caches.rows import RowCache


def agreeing(one: Tensor, other: Tensor) -> int:
    """Length of the longest common prefix of two sequences of token ids, (n,) and (m,)."""
    n = min(len(one), len(other))
    different = (one[:n] != other[:n]).nonzero()
    return int(different[0]) if len(different) else n


class Edge:
    """Consecutive tokens of stored texts.

    tokens: (n,) int64; empty for a root.
    entries: keys and values of all layers, (heads, n, head size) each.
    children: edges that follow, by their first token.
    """

    def __init__(self, tokens: Tensor, entries: list[Tensor], parent: Edge | None):
        self.tokens, self.entries, self.parent = tokens, entries, parent
        self.children: dict[int, Edge] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def bytes(self) -> int:
        return sum(kept.numel() * kept.element_size() for kept in (self.tokens, *self.entries))

    def split(self, n: int) -> Edge:
        """Make a parent of the first `n` tokens, with copies of their entries, and keep copies of the others."""
        head = Edge(self.tokens[:n].clone(), [], self.parent)
        for i, whole in enumerate(self.entries):
            head.entries.append(whole[:, :n].clone())
            self.entries[i] = whole[:, n:].clone()
        self.tokens = self.tokens[n:].clone()
        head.attach()
        self.parent = head
        self.attach()
        return head

    def attach(self) -> None:
        """Become a child of the parent."""
        assert self.parent is not None
        self.parent.children[int(self.tokens[0])] = self


class Prefixes:
    """Stored prefixes of the rows of a cache.

    Texts of one namespace are not found in another, unless `shared`. Where `limit` is reached, edges without children
    are dropped, the least recently used first; what does not fit even then is not stored.

    Args:
        cache: rows are stored from its slots and loaded into them.
        limit: most bytes of keys, values and token ids.
        shared: whether all namespaces are one.
        granularity: prefixes are stored and loaded in multiples of this many positions.

    Attributes:
        bytes: held now.
    """

    def __init__(self, cache: RowCache, limit: int, shared: bool = False, granularity: int = 1):
        self.limit, self.bytes = limit, 0
        self._cache, self.shared, self._granularity = cache, shared, granularity
        self._roots: dict[str, Edge] = {}
        self._recent: OrderedDict[Edge, str] = OrderedDict()  # edge -> namespace; children are older than parents

    def store(self, namespace: str, ids: Sequence[int], slot: int) -> None:
        """Copy what is not stored yet of the committed positions of a slot, whose first tokens are `ids`."""
        count = min(len(ids), self._cache.cursor.committed(slot))
        tokens = torch.tensor(ids[: count - count % self._granularity], dtype=torch.long, device="cpu")
        namespace = "" if self.shared else namespace
        root = self._roots.get(namespace, Edge(tokens[:0], [], None))
        found = self._found(root, tokens)
        path, start = [edge for edge, _ in found], sum(n for _, n in found)
        if start < len(tokens) and found and found[-1][1] < len(path[-1]):
            path[-1] = path[-1].split(found[-1][1])
            self._recent[path[-1]] = namespace
        self._use(path)
        end = start + self._room(len(tokens) - start, path)
        if end > start:
            self._roots[namespace] = root  # it may be new, or was dropped with its last child
            parent = path[-1] if path else root
            edge = Edge(tokens[start:end].clone(), self._cache.copied(slot, start, end), parent)
            edge.attach()
            self.bytes += edge.bytes
            self._recent[edge] = namespace
            self._use([*path, edge])

    def load(self, namespace: str, ids: Sequence[int], slot: int) -> int:
        """Copy the longest stored prefix of `ids` to the front of a slot whose prompt is being read, where that is more
        than the slot holds.

        Returns:
            How many of the tokens the slot holds then. At most `len(ids) - 1` are copied, because the pass computes the
            logits of the last token.
        """
        held, root = self._cache.cursor.reading[slot], self._roots.get("" if self.shared else namespace)
        if root is None:
            return held
        found = self._found(root, torch.tensor(ids[:-1], dtype=torch.long, device="cpu"))
        self._use([edge for edge, _ in found])
        length = sum(n for _, n in found)
        length -= length % self._granularity
        if length <= held:
            return held
        start = 0
        for edge, n in found:
            n = max(min(n, length - start), 0)
            self._cache.paste(slot, start, [kept[:, :n] for kept in edge.entries])
            start += n
        self._cache.cursor.reading[slot] = length
        return length

    def use(self, namespace: str, ids: Sequence[int]) -> None:
        """Mark what is stored of a prompt as the most recently used."""
        if (root := self._roots.get("" if self.shared else namespace)) is not None:
            tokens = torch.tensor(ids, dtype=torch.long, device="cpu")
            self._use([edge for edge, _ in self._found(root, tokens)])

    def resize(self, limit: int) -> None:
        """Set the most bytes; what was used least recently is dropped where there are more."""
        self.limit = limit
        while self.bytes > limit:
            self._drop(next(iter(self._recent)))

    def clear(self) -> None:
        """Drop everything."""
        self._roots.clear()
        self._recent.clear()
        self.bytes = 0

    def _found(self, root: Edge, tokens: Tensor) -> list[tuple[Edge, int]]:
        """The edges that begin the tokens, from the root on, and how many tokens of each agree; all but of the last."""
        found: list[tuple[Edge, int]] = []
        at, edge = 0, root
        while at < len(tokens) and (below := edge.children.get(int(tokens[at]))) is not None:
            edge = below
            found.append((edge, agreeing(edge.tokens, tokens[at:])))
            at += found[-1][1]
            if found[-1][1] < len(edge):
                break
        return found

    def _use(self, path: Sequence[Edge]) -> None:
        """Mark edges as the most recently used, parents after their children."""
        for edge in reversed(path):
            self._recent.move_to_end(edge)

    def _room(self, count: int, path: Sequence[Edge]) -> int:
        """Drop what was used least recently, but for a path, until there is room for tokens; for how many there is."""
        each = self._cache.bytes_per_position + torch.long.itemsize
        while self.bytes + count * each > self.limit and self._recent:
            edge = next(iter(self._recent))
            if edge in path:
                break
            self._drop(edge)
        return max(min(count, (self.limit - self.bytes) // each), 0)

    def _drop(self, edge: Edge) -> None:
        """Drop an edge without children."""
        namespace, parent = self._recent.pop(edge), edge.parent
        assert parent is not None and not edge.children
        del parent.children[int(edge.tokens[0])]
        self.bytes -= edge.bytes
        if parent.parent is None and not parent.children:
            del self._roots[namespace]
