"""The trees of a pass as padded tensors, all in one buffer, so that one copy moves them to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from truedraft.tree import DraftTree


class Padded:
    """Nodes of a pass, padded to one width with copies of each row's last node, which have no effect.

    Attributes:
        ids, positions, places: (rows, width) int64: token ids, positions, and the index in its row where a node's KV
            is written.
        lengths: (rows,) int64 committed entries.
        written: (rows, span) int64: positions of the entries behind these, of all nodes of each row's tree.
        ancestors: (rows, width, span) bool: [b, i, j] where node j of the tree is node i of the pass or an ancestor.
        buffer: (bytes,) the memory of all of these.
    """

    def __init__(
        self, rows: int, width: int, device: torch.device | str = "cpu", pinned: bool = False, span: int = 0
    ):  # fmt: skip
        n, self.span = rows * width, span or width
        integers = 8 * (3 * n + rows + rows * self.span)
        self.buffer = torch.zeros(integers + n * self.span, dtype=torch.uint8, device=device, pin_memory=pinned)
        self.integers = self.buffer[:integers].view(torch.int64)
        self.ids, self.positions, self.places = self.integers[: 3 * n].view(3, rows, width)
        self.lengths, written = self.integers[3 * n :].split((rows, rows * self.span))
        self.written = written.view(rows, self.span)
        self.ancestors = self.buffer[integers:].view(torch.bool).view(rows, width, self.span)

    @classmethod
    def of(
        cls, trees: Sequence[DraftTree], lengths: Sequence[int], width: int, device: torch.device,
        offsets: Sequence[int] = (), first: Sequence[int] = (),
    ) -> Padded:  # fmt: skip
        """Trees behind `lengths` committed entries, in host memory, pinned where the device is a GPU.

        offsets: what positions exceed places by, if anything, by row.
        first: by row, the first node that is in the pass; earlier passes wrote those before it.
        """
        zeros = [0] * len(trees)
        span = max(map(len, trees)) if first else width
        made = cls(len(trees), width, pinned=device.type == "cuda", span=span)
        ids: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        written: list[int] = []
        each = zip(lengths, offsets or zeros, first or zeros, trees, strict=True)
        for b, (n, offset, begin, tree) in enumerate(each):
            nodes, over = len(tree) - begin, width + begin - len(tree)
            depth = [n + offset + d for d in tree.shape.depth]
            ids += (*tree.tokens[begin:], *tree.tokens[-1:] * over)
            positions += depth[begin:] + depth[-1:] * over
            places += (*range(n + begin, n + len(tree)), *(n + len(tree) - 1,) * over)
            written += depth + depth[-1:] * (span - len(tree))
            made.ancestors[b, :nodes, : len(tree)] = tree.shape.mask[begin:]
            made.ancestors[b, nodes:] = made.ancestors[b, nodes - 1]
        made.integers.copy_(torch.tensor([*ids, *positions, *places, *lengths, *written], device="cpu"))
        return made

    def to(self, device: torch.device) -> Padded:
        """The same on a device."""
        if device == self.buffer.device:
            return self
        rows, width = self.ids.shape
        moved = Padded(rows, width, device, span=self.span)
        moved.load(self)
        return moved

    def load(self, other: Padded) -> None:
        """Copy the contents of another of the same shape; from pinned memory, without waiting for the device."""
        self.buffer.copy_(other.buffer, non_blocking=True)

    def seen(self, extent: int) -> Tensor:
        """What each node attends to: all committed positions and its ancestors; (rows, width, extent) bool."""
        offset = self._offset(extent)
        # negative offsets are committed positions, visible to all nodes as the root is
        nearest = self._node(offset)[:, None].expand(-1, self.ids.shape[1], -1)
        return self.ancestors.gather(2, nearest) & (offset < self.span)[:, None]

    def near(self, extent: int, window: int) -> Tensor:
        """The indices less than `window` positions behind each node; (rows, width, extent) bool."""
        return self.positions[:, :, None] - self.placed(extent)[:, None] < window

    def beside(self, extent: int, window: int) -> Tensor:
        """The indices in the chunk of `window` positions that each node is in; (rows, width, extent) bool."""
        return self.positions[:, :, None] // window == self.placed(extent)[:, None] // window

    def placed(self, extent: int) -> Tensor:
        """The position of the entry at each of the first `extent` indices of a row; (rows, extent)."""
        offset = self._offset(extent)
        place = torch.arange(extent, device=offset.device)
        return torch.where(offset < 0, place, self.written.gather(1, self._node(offset)))

    def _offset(self, extent: int) -> Tensor:
        """Each index minus that of the root; (rows, extent)."""
        return torch.arange(extent, device=self.lengths.device) - self.lengths[:, None]

    def _node(self, offset: Tensor) -> Tensor:
        return offset.clamp(0, self.span - 1)
