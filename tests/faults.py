"""Planted faults, which both the nets (`test_mutants.py`) and the audit (`test_audit.py`) must detect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from truedraft.accept._verification import first_children
from truedraft.caches.rows import CacheCursor, RowCache
from truedraft.chance import StreamNoise
from truedraft.sampling import History
from truedraft.stopping import Stops
from truedraft.stores.ranks import Ranks
from truedraft.tree import DraftTree, Row

Fault = Callable[[pytest.MonkeyPatch], None]


def replaced(owner: Any, name: str, new: Any) -> Fault:
    return lambda patch: patch.setattr(owner, name, new)


def unchecked(fault: Fault) -> Fault:
    """The fault without the check of `accelerate`, which would detect it and fall back to the model's forward."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        fault(patch)
        patch.setattr("truedraft.targets.hosting.check_exact", lambda target: None)

    return plant


def _keep_first_nodes(self: RowCache, slot: int, path: Sequence[int]) -> None:
    self.lengths[slot] += len(path)


def _keep_rejected(self: RowCache, slot: int, path: Sequence[int]) -> None:
    self.lengths[slot] += len(path) + (self.cursor.width > len(path) > 1)


def _any_child(self: DraftTree, node: int, token: int) -> int | None:
    return next(iter(self.shape.children[node]), None)


def _first_children(self: Ranks, trees: Sequence[DraftTree]) -> list[Any]:
    paths = [first_children(tree) for tree in trees]
    return [(path, tokens[path[-1]]) for path, tokens in zip(paths, self, strict=True)]


def accepted_unverified(patch: pytest.MonkeyPatch) -> None:
    """Every draft is accepted, as far as first children go."""
    patch.setattr(DraftTree, "child", _any_child)
    patch.setattr(Ranks, "paths", _first_children)


def _length_limit_only(self: Stops, rows: Sequence[Row]) -> None:
    for row in rows:
        row.end = len(row.tokens) if row.step == self.steps else None


def emitting_one_by_one(patch: pytest.MonkeyPatch, ending: Callable[[Stops, Sequence[Row]], None]) -> None:
    """Rows end by `ending`, which is called after each token."""

    def emit(self: Stops, row: Row, tokens: Sequence[int]) -> int:
        before = len(row.tokens)
        for token in tokens:
            row.tokens.append(token)
            ending(self, [row])
            if row.ended:
                break
        return len(row.tokens) - before

    patch.setattr(Stops, "__call__", ending)
    patch.setattr(Stops, "emit", emit)


def eos_ignored(patch: pytest.MonkeyPatch) -> None:
    emitting_one_by_one(patch, _length_limit_only)


def _every_other_token(self: History, rows: Sequence[Row]) -> None:
    for row in rows:
        if row.step % 2 == 0:
            self.ids[row.index, self.length : self.length + row.step] = torch.tensor(row.tokens[row.prompt :])


def _per_draw(self: StreamNoise, law: Tensor, rows: Sequence[Row]) -> list[int]:
    return (law / torch.empty_like(law).exponential_(1)).argmax(-1).tolist()


def noise_per_draw(patch: pytest.MonkeyPatch) -> None:
    """New noise for every draw, instead of one noise per step."""
    patch.setattr(StreamNoise, "pick", _per_draw)
    patch.setattr(StreamNoise, "reached", lambda self, step: None)


def _scratch_committed(self: RowCache, slot: int, path: Sequence[int], skipped: frozenset[int]) -> None:
    self.lengths[slot] += len(path)


@contextmanager
def _one_position_early(self: CacheCursor) -> Iterator[None]:
    committed = list(self.lengths)
    self.lengths[:] = [max(n - 1, 0) for n in committed]
    try:
        yield
    finally:
        self.lengths[:] = committed


SCRATCH_LEFT = replaced(RowCache, "rewind", lambda self: None)
SCRATCH_COMMITTED = replaced(RowCache, "advance", _scratch_committed)
COMMITTED_OVERWRITTEN = replaced(CacheCursor, "behind_scratch", _one_position_early)
FIRST_NODES_KEPT = replaced(RowCache, "commit", _keep_first_nodes)
REJECTED_KEPT = replaced(RowCache, "commit", _keep_rejected)
ACCEPTED_UNVERIFIED: Fault = accepted_unverified
EOS_IGNORED: Fault = eos_ignored
STALE_HISTORY = replaced(History, "_catch_up", _every_other_token)
