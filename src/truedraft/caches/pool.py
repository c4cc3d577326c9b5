"""The memory of keys and values that the rows of a cache and the stored prefixes share.

What is granted is counted, not allocated: slots take memory as rows write to them (`caches/pages.py`).
"""

from __future__ import annotations

from collections.abc import Hashable

from truedraft.caches.prefixes import Prefixes

UNIT = 32  # positions that are granted together: some pages of each head
SPARE = 256  # positions that must be left where a row begins beside others, so that these may grow


class Pool:
    """Grants positions to the owners of rows.

    Args:
        limit: bytes, of prefixes too.
        position_bytes: of the keys and values of a position.
        prefixes: stored ones, if any; they give way to rows.

    Attributes:
        used: bytes granted to rows. most: the most that these have been.
    """

    def __init__(self, limit: int, position_bytes: int, prefixes: Prefixes | None = None):
        self.limit, self.position_bytes = limit, position_bytes
        self.used = self.most = 0
        self._granted: dict[Hashable, int] = {}  # owner -> positions
        self._prefixes, self._most_prefixes = prefixes, prefixes.limit if prefixes else 0
        self._fit_prefixes()

    def bytes(self, positions: int) -> int:
        """Bytes of a row of so many positions."""
        return units(positions) * self.position_bytes

    def has(self, owner: Hashable, positions: int) -> bool:
        """Whether an owner has been granted so many positions."""
        return self._granted.get(owner, 0) >= positions

    def grant(self, owner: Hashable, positions: int, spare: int = 0) -> bool:
        """Grant an owner so many positions in all, if `spare` more are left then; whether that was possible."""
        lacking = units(positions) - self._granted.get(owner, 0)
        if lacking <= 0:
            return True
        if self.used + (lacking + spare) * self.position_bytes > self.limit:
            return False
        self._granted[owner] = units(positions)
        self.used += lacking * self.position_bytes
        self.most = max(self.most, self.used)
        self._fit_prefixes()
        return True

    def free(self, owner: Hashable) -> None:
        """Take back all that an owner was granted; no effect where it has nothing."""
        self.used -= self._granted.pop(owner, 0) * self.position_bytes
        self._fit_prefixes()

    def _fit_prefixes(self) -> None:
        if self._prefixes is not None:
            self._prefixes.resize(min(self._most_prefixes, self.limit - self.used))


def units(positions: int) -> int:
    """Positions, up to the next whole unit."""
    return -(-positions // UNIT) * UNIT
