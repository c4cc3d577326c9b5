"""The memory plan of a server against what it then holds, and the command that prints it."""

from __future__ import annotations

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
    parts = {part.name: part.bytes for part in planned(config)}
    model, tokenizer = load("nano")
    assert parts["weights"] == sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    with truedraft.accelerate(model, tokenizer).engine(3, 200) as engine:
        layers = engine._target.cache.layers  # type: ignore[attr-defined]
        held = sum(kept.numel() * kept.element_size() for layer in layers for kept in (layer.keys, layer.values))
    assert parts["KV cache"] == held
    assert parts["prefixes"] == 1000 and parts["training"] == parts["weights"]


def test_drafters_with_weights_are_counted_and_what_does_not_fit_is_refused() -> None:
    config = ServeConfig(model="nano", stretched="0.5B", allow_draft=("eagle3",), max_rows=4096)
    parts = planned(config)
    assert {part.name for part in parts} >= {"head weights", "head KV cache", "weights", "KV cache", "work space"}
    assert next(part for part in parts if part.name == "weights").bytes > 1 << 30
    with pytest.raises(Refused, match=r"max_rows=4096.*lower max_rows"):
        check_fits(parts, config)


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "nano", "--check"]) == 0
    out = capsys.readouterr().out
    assert "KV cache" in out and "together" in out
    for wrong in (["--port", "70000"], ["--draft", "nothing"], ["--reference", "x"], ["--config", "/nowhere"], []):
        assert main(["serve", *(["nano"] if wrong else []), *wrong, "--check"]) == 2
