"""Mutants of rounded entries and of lossy views: planted faults, each of which a named net must detect."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

import test_fewer_experts as fewer
import test_ffn_skipllm as sparing
import test_lossy_views as lossy
import test_super_apriel as supernets
from faults import replaced, unchecked
from models import tiny
from test_view_rounded_entries import check_against_rounded
from test_views import COMPILED, deep, target_of
from truedraft import DraftTree
from truedraft.caches.rows import CacheCursor
from truedraft.caches.subset import SubsetCache
from truedraft.runtime import relu_routed, variants
from truedraft.runtime.compiled import CompiledPass
from truedraft.runtime.experts import FewerExperts
from truedraft.runtime.native import Op
from truedraft.runtime.padded import Padded
from truedraft.runtime.rounded_entries import RoundedEntries
from truedraft.runtime.sparing import SparingForward
from truedraft.runtime.variants import Variants
from truedraft.targets.drafting import ViewPasses
from truedraft.tree import Scores
from truedraft.views._base import Experts, Reduction

pytestmark = COMPILED


def rounded() -> None:
    assert check_against_rounded(tiny("llama", torch.float32, layers=2), 4, 5e-4) > 1e-3


def without_layers() -> None:
    lossy.test_text_without_layers_whatever_is_drafted("suffix+token-recycling", "auto")


def falling_depth() -> None:
    lossy.test_text_of_falling_depth("auto")


def window() -> None:
    lossy.test_text_over_a_window("auto")


def rows_end() -> None:
    lossy.test_rows_that_end_early_do_not_change_the_depth_of_others()


def decisions() -> None:
    sparing.check_against_decisions(target_of(deep("llama", torch.float32), "auto"), 1e-3)


def decisions_of_forward() -> None:
    sparing.check_against_decisions(target_of(deep("llama", torch.float32), "stock"), 1e-3)


def warm() -> None:
    sparing.test_a_text_under_it_is_that_of_its_decisions(7, "auto")


def _decided(change: Callable[[SparingForward], None]) -> Callable[[SparingForward, Tensor], None]:
    """Another `_decide`: the method's own, and then a change."""
    own = SparingForward._decide

    def decide(self: SparingForward, after: Tensor) -> None:
        own(self, after)
        change(self)

    return decide


def _dissimilar(self: SparingForward, after: Tensor) -> None:
    less = cosine_similarity(self._before, after, -1) < self._similarity
    self._skips = less if self._skips is None else self._skips | less


def _shared(self: SparingForward) -> None:
    assert self._skips is not None
    self._skips = self._skips.any(-1, keepdim=True).expand_as(self._skips)


def _spare(change: Callable[[Op], object]) -> Callable[..., Op]:
    """Another `_spare`: the method's own, and then a change of the operation."""
    own = Variants._spare

    def spare(self: Variants, reduction: Reduction, before: int) -> Op:
        op = own(self, reduction, before)
        change(op)
        return op

    return spare


def _others(self: CacheCursor, trees: Any, first: int) -> list[list[bool]]:
    return [[depth < 2 for depth in tree.shape.depth] for tree in trees]


def one_expert() -> None:
    fewer.test_the_logits_are_those_of_a_model_with_one_expert_per_token("qwen3_moe", "auto")


def one_expert_by_its_own_forward() -> None:
    fewer.test_the_logits_are_those_of_a_model_with_one_expert_per_token("qwen3_moe", "stock")


def strongest_experts() -> None:
    fewer.test_the_logits_are_those_of_the_strongest_experts(3, 0.0, False)


def windows_of_placements() -> None:
    supernets.test_nodes_of_placements_with_windows(("attention", "window"))


def by_the_whole_model(self: Any, view: Any, trees: list[DraftTree]) -> Scores:
    return self.runner.score(trees, self.taps)


def one_chunk_late(self: RoundedEntries, length: int) -> int:
    return max(length - self.recent - 128, 0) // 128 * 128


def first_experts(weights: Tensor, experts: Experts) -> Tensor:
    return weights * (torch.arange(weights.shape[-1]) < experts.most)


def by_place(self: Padded, extent: int, window: int) -> Tensor:
    return self.positions[:, :, None] - torch.arange(extent) < window


MUTANTS = {
    "entries of a view not rounded": (replaced(RoundedEntries, "pointed", lambda self, op, layer: op), rounded),
    "entries rounded a chunk late": (replaced(RoundedEntries, "_before", one_chunk_late), rounded),
    "entries of a cropped row kept": (replaced(RoundedEntries, "shorten", lambda *_: None), rounded),
    "rounded entries not moved with their row": (replaced(RoundedEntries, "release", lambda *_: None), rounded),
    "rounded entries not followed": (replaced(CompiledPass, "round_entries", lambda *_: None), rounded),
    "all experts of compiled passes": (replaced(variants, "fewer_in", lambda op, experts: op), one_expert),
    "all experts of the own forward": (
        replaced(FewerExperts, "given", lambda self, experts: nullcontext()),
        one_expert_by_its_own_forward,
    ),
    "any experts, not the strongest": (replaced(relu_routed, "chosen", first_experts), strongest_experts),
    "windows of mixers by place": (unchecked(replaced(Padded, "near", by_place)), windows_of_placements),
    "lossy passes by the whole model": (replaced(ViewPasses, "_score_lossy", by_the_whole_model), without_layers),
    "depth of a lossy view does not fall": (replaced(CacheCursor, "generated", lambda self: [0]), falling_depth),
    "what passes over a window wrote is lost": (replaced(SubsetCache, "return_nodes", lambda *_: None), window),
    "nodes skip where they are dissimilar": (replaced(SparingForward, "_decide", _dissimilar), decisions_of_forward),
    "what a node skips is skipped by others": (
        replaced(SparingForward, "_decide", _decided(_shared)),
        decisions_of_forward,
    ),
    "nodes skip whatever they are": (
        replaced(Variants, "_spare", _spare(lambda op: setattr(op, "scale", -1.0))),
        decisions,
    ),
    "feed-forwards added where they are skipped": (
        replaced(Variants, "_spare", _spare(lambda op: setattr(op, "src", op.dst))),
        decisions,
    ),
    "warm tokens skip": (replaced(CacheCursor, "warm", _others), warm),
    "prompts of rows not moved": (replaced(CacheCursor, "released", lambda *_: None), rows_end),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_net_detects_the_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, net = MUTANTS[name]
    net()
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError, KeyError)):
        net()
