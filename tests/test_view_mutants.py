"""Mutants of rounded entries and of lossy views: planted faults, each of which a named net must detect."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import test_fewer_experts as fewer
import test_lossy_views as lossy
import test_super_apriel as supernets
from faults import replaced, unchecked
from models import tiny
from test_view_rounded_entries import check_against_rounded
from test_views import COMPILED
from truedraft import DraftTree
from truedraft.caches.rows import CacheCursor
from truedraft.caches.subset import SubsetCache
from truedraft.runtime import compiled, relu_routed
from truedraft.runtime.compiled import CompiledPass
from truedraft.runtime.experts import FewerExperts
from truedraft.runtime.padded import Padded
from truedraft.runtime.rounded_entries import RoundedEntries
from truedraft.targets.drafting import ViewPasses
from truedraft.tree import Scores
from truedraft.views._base import Experts

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
    "all experts of compiled passes": (replaced(compiled, "fewer_in", lambda op, experts: op), one_expert),
    "all experts of the own forward": (
        replaced(FewerExperts, "given", lambda self, experts: nullcontext()),
        one_expert_by_its_own_forward,
    ),
    "any experts, not the strongest": (replaced(relu_routed, "chosen", first_experts), strongest_experts),
    "windows of mixers by place": (unchecked(replaced(Padded, "near", by_place)), windows_of_placements),
    "lossy passes by the whole model": (replaced(ViewPasses, "_score_lossy", by_the_whole_model), without_layers),
    "depth of a lossy view does not fall": (replaced(CacheCursor, "generated", lambda self: [0]), falling_depth),
    "what passes over a window wrote is lost": (replaced(SubsetCache, "return_nodes", lambda *_: None), window),
    "prompts of rows not moved": (replaced(CacheCursor, "released", lambda *_: None), rows_end),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_net_detects_the_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, net = MUTANTS[name]
    net()
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError, KeyError)):
        net()
