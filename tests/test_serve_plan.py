"""The memory plan of a server against what it then holds, and the command that prints it."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("fastapi")

import truedraft
from truedraft.cli import main
from truedraft.errors import Refused
from truedraft.loading import load
from truedraft.serve.config import ServeConfig
from truedraft.serve.plan import check_fits, planned


def test_weights_and_cache_are_those_that_are_allocated() -> None:
    config = ServeConfig(model="nano", max_rows=3, max_model_len=200, prefix_bytes=1000, record="r", train="t")
    found = planned(config)
    parts = {part.name: part.bytes for part in found.parts}
    model, tokenizer = load("nano")
    assert parts["weights"] == sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    with truedraft.accelerate(model, tokenizer).engine(3, 200, prefix_bytes=1000) as engine:
        assert parts["KV cache"] == engine.report().kv_limit == 3 * found.row + 1000
    assert parts["training"] == parts["weights"] and found.rows == {200: 3}


def test_a_long_context_is_shared() -> None:
    """Not all rows can be long at once: the KV cache is what is left of the share of memory."""
    config = ServeConfig(
        model="nano", stretched="0.5B", max_rows=64, max_model_len=20_000, kv_cache_memory_bytes=8 << 30
    )
    found = planned(config)
    kv = next(part for part in found.parts if part.name == "KV cache")
    assert kv.bytes == 8 << 30 < 64 * found.row and found.rows[20_000] == (8 << 30) // found.row > 0
    assert found.rows[4096] == (8 << 30) // (found.row // (20_000 + 256) * (4096 + 256)) > found.rows[20_000]
    small = dataclasses.replace(config, kv_cache_memory_bytes=found.row - 1)
    with pytest.raises(Refused, match=r"kv_cache_memory_bytes=.*raise it, or lower max_model_len"):
        check_fits(planned(small), small)


def test_drafters_with_weights_are_counted_and_what_does_not_fit_is_refused() -> None:
    config = ServeConfig(model="nano", stretched="0.5B", allow_draft=("eagle3",), max_model_len=10_000_000)
    plan = planned(config)
    parts = plan.parts
    assert {part.name for part in parts} >= {"head weights", "head KV cache", "weights", "KV cache", "work space"}
    assert next(part for part in parts if part.name == "weights").bytes > 1 << 30
    with pytest.raises(Refused, match=r"max_model_len=10000000.*lower max_model_len"):
        check_fits(plan, config)


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "nano", "--check"]) == 0
    out = capsys.readouterr().out
    assert "KV cache" in out and "together" in out
    for wrong in (["--port", "70000"], ["--draft", "nothing"], ["--reference", "x"], ["--config", "/nowhere"], []):
        assert main(["serve", *(["nano"] if wrong else []), *wrong, "--check"]) == 2
