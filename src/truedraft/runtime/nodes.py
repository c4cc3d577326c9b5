"""The nodes of a compiled pass, and what each of them attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from truedraft.runtime._base import PROMPT
from truedraft.tree import DraftTree

TOGETHER = 16  # nodes of a row that share one reading of its keys, as MANY in pass.c


@dataclass
class Nodes:
    """The nodes of a pass, row after row: one entry per node but for `extra`, `extra_position` and `group_from`.

    place: where keys and values are written in the row's slot.
    base: node i attends to the first `base[i]` places of its slot and to `extra[extra_from[i]:extra_from[i + 1]]`,
        whose positions are in `extra_position`; they are written by this pass or were by an earlier one.
    whole: whether the node skips nothing by itself; empty where none does.
    """

    token: list[int] = field(default_factory=list)
    slot: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    place: list[int] = field(default_factory=list)
    base: list[int] = field(default_factory=list)
    extra_from: list[int] = field(default_factory=lambda: [0])
    extra: list[int] = field(default_factory=list)
    extra_position: list[int] = field(default_factory=list)
    group_from: list[int] = field(default_factory=lambda: [0])
    whole: list[bool] = field(default_factory=list)
    longest: int = 0

    def __len__(self) -> int:
        return len(self.slot)

    def add_tree(self, slot: int, length: int, tree: DraftTree, offset: int = 0, written: int = 0) -> None:
        """The nodes of a tree behind the `length` committed entries of a slot.

        offset: what positions exceed places by. written: how many of the first nodes earlier passes wrote.
        """
        shape, first, n = tree.shape, len(self), len(tree) - written
        above = shape.extra_from[written]
        before = len(self.extra) - above
        self.token += tree.tokens[written:]
        self.slot += [slot] * n
        root = length + offset
        self.position += [root + d for d in shape.depth[written:]]
        self.place += range(length + written, length + len(tree))
        self.base += [length + r for r in shape.run[written:]]
        self.extra += [length + e for e in shape.extra[above:]]
        self.extra_position += [root + d for d in shape.extra_depth[above:]]
        self.extra_from += [before + e for e in shape.extra_from[written + 1 :]]
        self._grouped(first, n, length + 1 + shape.height)

    def add_chain(self, slot: int, start: int, tokens: Sequence[int] | None, n: int) -> None:
        """`n` positions of a prompt, from `start` on."""
        first = len(self)
        self.token += tokens or []
        self.slot += [slot] * n
        self.position += range(start, start + n)
        self.place += range(start, start + n)
        self.base += range(start + 1, start + n + 1)
        self.extra_from += [len(self.extra)] * n
        self._grouped(first, n, start + n)

    def add_block(self, slot: int, end: int, n: int) -> None:
        """`n` positions behind `end` that attend to all before them and to each other; without token ids."""
        first = len(self)
        self.slot += [slot] * n
        self.position += range(end, end + n)
        self.place += range(end, end + n)
        self.base += [end + n] * n
        self.extra_from += [len(self.extra)] * n
        self._grouped(first, n, end + n)

    def add_node(self, slot: int, position: int, place: int, base: int, above: Sequence[int]) -> None:
        """A node of a level, which sees the first `base` places, those of the nodes `above` it, and itself; `group`
        follows when all of the slot's are added."""
        self.slot.append(slot)
        self.position.append(position)
        self.place.append(place)
        self.base.append(base)
        self.extra += (*above, place)
        self.extra_position += range(position - len(above), position + 1)
        self.extra_from.append(len(self.extra))

    def group(self, n: int) -> None:
        """The last `n` nodes are those of one slot."""
        first = len(self) - n
        starts, ends = self.extra_from[first:-1], self.extra_from[first + 1 :]
        longest = max(b + end - start for b, start, end in zip(self.base[first:], starts, ends, strict=True))
        self._grouped(first, n, longest)

    def add_whole(self, slot: int, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """A text in which every token attends to every other."""
        self.add_part(slot, tokens, range(len(tokens)), len(tokens))
        self.position[-len(tokens) :] = positions

    def add_part(self, slot: int, tokens: Sequence[int], places: Sequence[int], length: int) -> None:
        """Some positions of a text of a length, each attending to all of it: to what this pass writes at these places,
        and to what stands at the others."""
        first, n = len(self), len(tokens)
        self.token += tokens
        self.slot += [slot] * n
        self.position += places
        self.place += places
        self.base += [length] * n
        self.extra_from += [len(self.extra)] * n
        self._grouped(first, n, length)

    def _grouped(self, first: int, n: int, sees: int) -> None:
        self.group_from += [min(at + TOGETHER, first + n) for at in range(first, first + n, TOGETHER)]
        self.longest = max(self.longest, sees)


def prompts_in_parts(lengths: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Split prompts of these lengths into calls of at most PROMPT nodes: (prompt, start, end) each."""
    calls: list[list[tuple[int, int, int]]] = [[]]
    room = PROMPT
    for i, length in enumerate(lengths):
        at = 0
        while at < length:
            if room == 0:
                calls.append([])
                room = PROMPT
            take = min(room, length - at)
            calls[-1].append((i, at, at + take))
            at, room = at + take, room - take
    return calls
