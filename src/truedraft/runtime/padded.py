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
        ancestors: (rows, width, width) bool: [b, i, j] where j is i or an ancestor of i.
        buffer: (bytes,) the memory of all of these.
    """

    def __init__(self, rows: int, width: int, device: torch.device | str = "cpu", pinned: bool = False):
        n = rows * width
        integers = 8 * (3 * n + rows)
        self.buffer = torch.zeros(integers + n * width, dtype=torch.uint8, device=device, pin_memory=pinned)
        self.integers = self.buffer[:integers].view(torch.int64)
        self.ids, self.positions, self.places = self.integers[: 3 * n].view(3, rows, width)
        self.lengths = self.integers[3 * n :]
        self.ancestors = self.buffer[integers:].view(torch.bool).view(rows, width, width)

    @classmethod
    def of(
        cls, trees: Sequence[DraftTree], lengths: Sequence[int], width: int, device: torch.device,
        offsets: Sequence[int] = (),
    ) -> Padded:  # fmt: skip
        """Trees behind `lengths` committed entries, in host memory, pinned where the device is a GPU.

        offsets: what positions exceed places by, if anything, by row.
        """
        made = cls(len(trees), width, pinned=device.type == "cuda")
        ids: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        for b, (n, offset, tree) in enumerate(zip(lengths, offsets or [0] * len(trees), trees, strict=True)):
            nodes, over = len(tree), width - len(tree)
            depth = tree.shape.depth
            ids += (*tree.tokens, *tree.tokens[-1:] * over)
            positions += (n + offset + d for d in depth + depth[-1:] * over)
            places += (*range(n, n + nodes), *(n + nodes - 1,) * over)
            made.ancestors[b, :nodes, :nodes] = tree.shape.mask
            made.ancestors[b, nodes:] = made.ancestors[b, nodes - 1]
        made.integers.copy_(torch.tensor([*ids, *positions, *places, *lengths], device="cpu"))
        return made

    def to(self, device: torch.device) -> Padded:
        """The same on a device."""
        if device == self.buffer.device:
            return self
        rows, width = self.ids.shape
        moved = Padded(rows, width, device)
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
        return self.ancestors.gather(2, nearest) & (offset < self.ids.shape[1])[:, None]

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
        return torch.where(offset < 0, place, self.positions.gather(1, self._node(offset)))

    def _offset(self, extent: int) -> Tensor:
        """Each index minus the first that the pass writes; (rows, extent)."""
        return torch.arange(extent, device=self.lengths.device) - self.lengths[:, None]

    def _node(self, offset: Tensor) -> Tensor:
        return offset.clamp(0, self.ids.shape[1] - 1)
