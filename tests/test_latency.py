"""Latency profiles are measured within a share of each call's time, and kept on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import truedraft
from models import ragged, tiny
from truedraft.runtime import latency
from truedraft.runtime.curve import WIDTHS
from truedraft.runtime.latency import LatencyProfile
from truedraft.targets.decoder import DecoderTarget

WIDEST = WIDTHS[-1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "truedraft" / "curves"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring is complete after three rounds."""
    monkeypatch.setattr(latency, "ROUNDS", 3)


def _generates() -> None:
    """Generate in a new process, as far as profiles are concerned; the text is the model's own."""
    model, inputs = tiny(), ragged(tiny(), 1)
    settings = dict(max_new_tokens=12, do_sample=False)
    fast = truedraft.accelerate(model)
    assert torch.equal(fast.generate(**inputs, **settings), model.generate(**inputs, **settings))


def test_a_curve_is_measured_once_and_kept(folder: Path, quick: None) -> None:
    target = DecoderTarget(tiny("qwen2"))
    first = LatencyProfile(target).measure(100_000, None, WIDEST)
    assert first is not None and first.widths == WIDTHS and list(first.seconds) == sorted(first.seconds)
    (file,) = folder.iterdir()
    kept = json.loads(file.read_text())["times"]
    assert list(kept) == list(map(str, WIDTHS)) and {passes for _, passes in kept.values()} == {3}
    again = LatencyProfile(target)
    assert again.kept == first and again.complete and again.measure(100_000, again.kept, WIDEST) is again.kept


DAMAGED: list[Any] = [
    "{half", "", "[]", "3", "null", '"text"', "{}", "[" * 5000, b"\\xff\\xfe\\x00",
    {"times": "ab"}, {"times": [[1.0, 1]]}, {"times": None}, {"times": {"1": 1.0}}, {"times": {"1": [1.0, 1, 1]}},
    {"1": [1, 1]}, {"1": [-1.0, 1]}, {"1": [0.0, 1]}, {"1": [float("nan"), 1]}, {"1": [float("inf"), 1]},
    {"1": [True, 1]}, {"1": [[1.0], 1]}, {"1": [1.0, 0]}, {"1": [1.0, -1]}, {"1": [1.0, 2.0]}, {"1": [1.0, True]},
    {"1": [1.0, None]}, {"3": [1.0, 1]}, {"-1": [1.0, 1]}, {"one": [1.0, 1]}, {"128": [1.0, 1]},
]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: str(content)[:24])
def test_a_damaged_file_is_ignored_and_replaced(content: Any, folder: Path, quick: None) -> None:
    target = DecoderTarget(tiny("qwen2"))
    good = LatencyProfile(target).measure(100_000, None, WIDEST)
    (file,) = folder.iterdir()
    if isinstance(content, dict):
        content = json.dumps(content if "times" in content else {"times": {"2": [1.0, 1], **content}})
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    damaged = LatencyProfile(target)
    assert damaged.kept is None and not damaged.complete
    damaged.measure(100_000, None, WIDEST)
    assert good is not None and LatencyProfile(target).kept is not None


def test_a_damaged_file_breaks_no_call(folder: Path) -> None:
    file = latency._path(truedraft.accelerate(tiny()).target)
    assert file is not None
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"times": [1.0]}))
    _generates()


@pytest.mark.parametrize("home", ["missing", "none", "file", "folder", "unwritable"])
def test_an_unwritable_home_breaks_no_call(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(latency, "SHARE", 1e4)  # so that there is something to keep
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = latency._path(truedraft.accelerate(tiny()).target)
    assert file is not None and tmp_path in file.parents
    if home == "none":

        def lost() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", lost)
    elif home == "file":
        (tmp_path / "home").write_text("a file in the place of a folder")
    elif home == "folder":
        file.mkdir(parents=True)
    elif home == "unwritable":
        file.parent.mkdir(parents=True)
        monkeypatch.setattr(os, "open", _refused)
    _generates()


def _refused(*_: Any) -> int:
    raise PermissionError("no")


class Clock:
    """A simulated clock: a pass of the target over w tokens takes w / 4 + 3 / 4 seconds."""

    def __init__(self, target: DecoderTarget, patch: pytest.MonkeyPatch):
        self.now, self.passes = 0.0, 0
        for name in ("score", "prefill"):
            patch.setattr(target, name, self.ticks(getattr(target, name)))
        patch.setattr(latency.time, "perf_counter", lambda: self.now)

    def ticks(self, f: Any) -> Any:
        def timed(given: Any) -> Any:
            self.now, self.passes = self.now + len(given[0]) / 4 + 0.75, self.passes + 1
            return f(given)

        return timed


def test_measuring_is_limited_to_a_share_of_the_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = DecoderTarget(tiny("qwen2"))
    clock = Clock(target, monkeypatch)
    fresh = LatencyProfile(target)
    assert fresh.measure(8, None, WIDEST) is None and clock.passes == 0
    curve, widest, due = None, 0, 8
    for steps in (64, 200, 600, 1000, 4000, 16000):
        begun, due = clock.now, due + steps
        curve = fresh.measure(steps, curve, WIDEST)
        unforeseen = 64 / 4 + 0.75 - latency.TYPICAL[-1]  # of the first pass of the largest width
        assert clock.now - begun <= latency.SHARE * due * 1.05 + 1 + unforeseen
        due = due if clock.now == begun else 0
        widest = max(widest, *(knot.width for knot in curve.knots)) if curve else 0
    assert curve is not None and widest == 64 and fresh.complete
    for width in WIDTHS:
        assert curve(width) == pytest.approx(width / 4 + 0.75)


def test_only_widths_that_a_call_may_need_are_measured(folder: Path, quick: None) -> None:
    """Up to the first that is as wide as its widest pass, until a call needs wider ones."""
    target = DecoderTarget(tiny("qwen2"))
    fresh = LatencyProfile(target)
    for most, widest in ((6, 8), (8, 8), (9, 16), (1000, 64)):
        fresh.measure(100_000, None, most)
        (file,) = folder.iterdir()
        kept = {int(width): passes for width, (_, passes) in json.loads(file.read_text())["times"].items()}
        assert fresh.complete and kept == {width: 3 for width in WIDTHS if width <= widest}


def test_storing_the_times_counts_as_measuring(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk leaves less time for passes; measuring takes its share in all, and passes half of that."""
    target = DecoderTarget(tiny("qwen2"))
    clock, stored = Clock(target, monkeypatch), []

    def slow(path: Path, text: str) -> None:
        clock.now += 6.0
        stored.append(clock.now)

    monkeypatch.setattr(latency, "write_whole", slow)
    monkeypatch.setattr(latency, "ROUNDS", 8)  # many measurements, so that the last one weighs little
    fresh, calls = LatencyProfile(target), 0
    while not fresh.complete:
        fresh.measure(128, None, WIDEST)
        calls += 1
    assert len(stored) > 5
    assert clock.now == pytest.approx(latency.SHARE * 128 * calls, rel=0.1)
    assert (6 + 1) * len(stored) < 0.6 * clock.now, "opening reads a token, in a second"


def test_processes_continue_the_measurements_of_earlier_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each makes one call, whose share is too small for a pass over 64 tokens."""
    target, kept = DecoderTarget(tiny("qwen2")), []
    Clock(target, monkeypatch)
    for _ in range(60):
        fresh = LatencyProfile(target)
        fresh.measure(2400, fresh.kept, WIDEST)
        (file,) = folder.glob("*")
        kept.append([passes for _, passes in json.loads(file.read_text())["times"].values()])
    sums = [sum(passes) for passes in kept]
    assert sums == sorted(sums) and sums[0] < sums[-1] and kept[-1] == [latency.ROUNDS] * 6 + [latency.ENOUGH]
    assert not fresh.complete and fresh.kept is not None and fresh.kept(32) == pytest.approx(32 / 4 + 0.75)


def test_an_outlier_is_corrected_by_later_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it is the only one of its width, and so slow that another one would not fit in a call's share."""
    target = DecoderTarget(tiny("qwen2"))
    clock = Clock(target, monkeypatch)
    score, slow = target.score, [True]

    def waiting(trees: Any) -> Any:
        if len(trees[0]) == 8 and slow:
            slow.pop()
            clock.now += 400.0
        return score(trees)

    monkeypatch.setattr(target, "score", waiting)
    fresh, curve = LatencyProfile(target), None
    for call in range(40):
        curve = fresh.measure(400, curve, WIDEST)
        if not slow and call < 3:
            assert curve is not None and curve(8) <= max(curve(16), 8 / 4 + 0.75)
    assert not slow and curve is not None
    for width in (1, 2, 4, 8, 16):
        assert curve(width) == pytest.approx(width / 4 + 0.75)


def test_the_shares_of_short_calls_accumulate(folder: Path, quick: None) -> None:
    fresh, curve = LatencyProfile(DecoderTarget(tiny("qwen2"))), None
    assert [fresh.measure(20, None, WIDEST) is None for _ in range(3)] == [True] * 3
    for _ in range(3000):
        curve = fresh.measure(40, curve, WIDEST)
        if fresh.complete:
            break
    assert curve is not None and fresh.complete


def test_measuring_changes_neither_torch_nor_the_target(folder: Path, quick: None) -> None:
    target = DecoderTarget(tiny("qwen2"))
    state = torch.get_rng_state()
    assert LatencyProfile(target).measure(100_000, None, WIDEST) is not None
    assert target.cache is None and torch.equal(torch.get_rng_state(), state)


def test_a_scratch_cache_that_does_not_fit_breaks_no_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = DecoderTarget(tiny("qwen2"))

    def full(rows: int, capacity: int) -> None:
        raise truedraft.errors.NoRoom("full")

    monkeypatch.setattr(target, "reserve", full)
    assert LatencyProfile(target).measure(100_000, None, WIDEST) is None and target.cache is None
