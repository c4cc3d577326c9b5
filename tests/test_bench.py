"""Measurements: floors are bytes over bandwidth or operations over rate, whichever is larger."""

from __future__ import annotations

import pytest
import torch

from models import tiny
from truedraft.bench.roofline import Machine, measure_machine, measure_passes, roofline
from truedraft.targets.decoder import DecoderTarget


def test_the_floor_of_a_pass_by_hand() -> None:
    target = DecoderTarget(tiny("llama", torch.float32))
    h, inner, heads, head, vocabulary, layers = 32, 48, 4, 8, 61, 2
    block = h * heads * head * 2 + h * 2 * head * 2 + 3 * h * inner + 2 * h
    weights = layers * block + h + vocabulary * h  # the table of embeddings is looked up, not read through
    keys_and_values = 2 * layers * 10 * 2 * head
    reading = (weights + keys_and_values) * 4 / 1e9
    rows = roofline(target, Machine(1e9, 1e9), {1: 2 * reading, 4: 1.0}, context=10)
    assert rows[0].bound == "reading" and rows[0].floor == pytest.approx(reading)
    assert rows[0].attained == pytest.approx(0.5)
    operations = 4 * (2 * weights + 4 * layers * 10 * heads * head)
    assert rows[1].bound == "multiplying" and rows[1].floor == pytest.approx(operations / 1e9)


def test_targets_take_turns_and_leave_nothing_behind() -> None:
    targets = [DecoderTarget(tiny("llama", torch.float32), runtime) for runtime in ("auto", "stock")]
    times = measure_passes(targets, context=8, widths=(1, 3), rounds=2)
    assert [list(t) for t in times] == [[1, 3], [1, 3]] and all(s > 0 for t in times for s in t.values())
    assert all(target.cache is None for target in targets)


def test_a_machine_reads_and_multiplies() -> None:
    machine = measure_machine(tries=1)
    assert machine.bandwidth > 1e8 and machine.rate > 1e8
