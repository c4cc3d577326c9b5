"""A traced drafter gets exactly the calls that it gets otherwise; and Ctrl-C ends audits and benchmarks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import seq2seq_models
import truedraft
from interrupts import interrupted
from models import ragged, tiny
from truedraft import DraftTree
from truedraft.audit import laws
from truedraft.audit.tokens import Audit, Mode, Run, audit
from truedraft.audit.tracer import Tracer
from truedraft.bench import compare as comparing
from truedraft.cli import main
from truedraft.delegate import Delegate
from truedraft.drafters._base import Drafter, PerRow
from truedraft.drafters._compose import name_of
from truedraft.tree import Row

from drafters_for_tests import Noise  # isort: skip


class RecordingDrafter(Noise):
    """Records its calls; its attributes differ from those of other drafters."""

    takes_references = True
    prior_confidence = 0.83
    autoregressive = True

    def __init__(self) -> None:
        super().__init__(vocabulary=20)
        self.calls: list[Any] = []

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        self.calls.append(("propose", [list(r.tokens) for r in rows], list(budget), self.pass_cost is None))
        return super().propose(rows, budget)

    def forget(self) -> None:
        self.calls.append("forget")


def _recorded(name: str) -> Callable[..., Any]:
    def call(self: RecordingDrafter, *given: Any) -> Any:
        self.calls.append((name, [_plain(one) for one in given]))
        return getattr(Noise, name)(self, *given)

    return call


for _name in ("bind", "read", "open", "start", "observe", "end", "memories"):
    setattr(RecordingDrafter, _name, _recorded(_name))


def _plain(given: Any) -> Any:
    """An argument in a form that can be compared."""
    if isinstance(given, Row):
        return given.index, list(given.tokens), given.room, tuple(given.references), given.source, given.namespace
    if isinstance(given, list | tuple):
        return [_plain(one) for one in given]
    if isinstance(given, DraftTree):
        return given.tokens, given.parent
    return given if isinstance(given, str | int | float) else type(given).__name__


def calls_of(model: Any, inputs: dict[str, Any], traced: bool, **given: Any) -> list[Any]:
    drafter = RecordingDrafter()
    fast = truedraft.accelerate(model, draft=drafter, control="fixed")
    if traced:
        fast.drafter = Tracer(drafter)  # type: ignore[assignment]
    fast.generate(**inputs, max_new_tokens=8, do_sample=False, **given)
    fast.forget()
    assert fast.report().drafter == "test-tracer"
    return drafter.calls


def test_a_traced_drafter_of_a_decoder_gets_the_same_calls() -> None:
    model = tiny("llama", torch.float32)
    inputs = ragged(model, 3)
    calls = calls_of(model, inputs, True, references=[[5, 6, 7]])
    assert calls == calls_of(model, inputs, False, references=[[5, 6, 7]])
    assert any(call[0] == "propose" and any(call[2]) for call in calls)


def test_a_traced_drafter_of_an_encoder_decoder_gets_the_same_calls() -> None:
    model, tokenizer = seq2seq_models.model(), seq2seq_models.tokenizer()
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]])}
    calls = calls_of(model, inputs, True)
    assert calls == calls_of(model, inputs, False)
    (start,) = [call for call in calls if call[0] == "start"]
    assert start[1][0][0][3], "the source is a document to draft from"
    assert len(tokenizer) > 0


def test_attributes_of_a_tracer_are_those_of_the_drafter() -> None:
    drafter = RecordingDrafter()
    tracer: Any = Tracer(drafter)
    for name in (n for n in dir(Drafter) if not n.startswith("_") and n not in ("open", "observe")):
        assert getattr(tracer, name) == getattr(drafter, name), name
    tracer.pass_cost = pass_cost = object()
    assert drafter.pass_cost is pass_cost and tracer.pass_cost is pass_cost
    assert isinstance(tracer, RecordingDrafter) and name_of(tracer) == name_of(drafter)


def test_a_delegate_keeps_its_own_attributes_and_delegates_the_rest() -> None:
    class Wrapper(Delegate):
        volume: int

        def forget(self) -> None:
            self.volume = 11

    drafter = RecordingDrafter()
    wrapper: Any = Wrapper(drafter)
    wrapper.forget()
    wrapper.seed = 5
    assert wrapper.volume == 11 and not hasattr(drafter, "volume") and drafter.seed == 5 and drafter.calls == []
    assert not isinstance(wrapper, PerRow)
    with pytest.raises(AttributeError, match="nothing"):
        wrapper.nothing  # noqa: B018


class Digits:
    pad_token_id, truncation_side = 0, "left"

    def __call__(self, text: str | list[str], **_: Any) -> Any:
        lines = [[int(t) for t in line.split()] for line in ([text] if isinstance(text, str) else text)]
        return {"input_ids": torch.tensor(lines), "attention_mask": torch.ones(len(lines), len(lines[0])).long()}


def stopped(patch: pytest.MonkeyPatch, fast: Any, after: int) -> None:
    """Make `generate` raise KeyboardInterrupt after `after` calls."""
    generate, calls = fast.generate, []

    def cut(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) <= after:
            return generate(*args, **kwargs)
        raise KeyboardInterrupt

    patch.setattr(fast, "generate", cut)


def test_an_interrupted_audit_stops_and_keeps_what_was_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", torch.float32)
    fast = truedraft.accelerate(model, draft="prompt-lookup")
    drafter = fast.drafter
    stopped(monkeypatch, fast, 2)
    with pytest.raises(KeyboardInterrupt) as stop:
        audit(
            model, Digits(), {"lookup": fast}, ["3 1 4", "5 9 2", "6 5 3"], tokens=6, batches=[1], modes=[Mode(False)]
        )
    found = stop.value.finished  # type: ignore[attr-defined]
    assert found.interrupted and found.exact and found.tokens == 12 and found.as_dict()["interrupted"]
    assert fast.drafter is drafter


def test_the_command_prints_what_was_finished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from truedraft.accelerated import Accelerated

    calls, generate = [], Accelerated.generate

    def cut(self: Accelerated, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(Accelerated, "generate", cut)
    words = ["--max-new-tokens", "4", "--prompt", "one day", "--prompt", "tom", "--batch", "1", "--draft", "llma"]
    assert main(["audit", "nano", *words]) == 130
    out = capsys.readouterr().out
    assert "interrupted" in out and "8 tokens with model.generate" in out and "0 bugs" in out


@pytest.mark.parametrize("shape", ["text", "json"])
@pytest.mark.parametrize("after", [0, 2, 5])
def test_a_signal_prints_the_table_of_what_was_compared(
    after: int, shape: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real Ctrl-C, after so many texts: of the model alone, of the engine, and in between."""
    counted = list[int]()
    true = Audit.count

    def count(self: Audit, drafter: str, run: Any, tokens: Any) -> None:
        true(self, drafter, run, tokens)
        counted.extend(tokens)

    monkeypatch.setattr(Audit, "count", count)
    words = ["--max-new-tokens", "8", "--draft", "llma", "--batch", "1", "--batch", "2"]
    begun, show = list[str](), Run.show
    monkeypatch.setattr(Run, "show", lambda self, _, number, way: (begun.append(way), show(self, _, number, way)))
    ready = lambda: begun and len(counted) >= after  # noqa: E731
    assert interrupted(["audit", "nano", *words, *(["--json"] if shape == "json" else [])], ready) == 130
    out = capsys.readouterr().out
    if shape == "json":
        found = json.loads(out)
        assert found["interrupted"] and sum(one["texts"] for one in found["compared"]) == len(counted) < found["texts"]
        assert found["tokens"] == sum(counted)
        return
    assert re.search(rf"interrupted: {len(counted)} of \d+ texts were compared, and the rest was not", out)
    assert out.rstrip().endswith("exact, in what was compared")
    assert after == 0 or re.search(r"plain +\d+ +\d+ +0 +0 +0", out)


@pytest.mark.parametrize("where", ["load", "accelerate"])
def test_a_signal_before_anything_was_compared(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"truedraft.{'cli.audit.load' if where == 'load' else 'accelerate'}", stop)
    assert main(["audit", "nano"]) == 130
    emitted = capsys.readouterr()
    assert emitted.err == "interrupted before anything was compared\n" and not emitted.out


def test_an_interrupted_test_of_laws_keeps_those_before_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    true, done = laws._tested, list[int]()

    def tested(fast: Any, prompts: Any, values: Any, texts: int, *more: Any) -> Any:
        done.append(1)
        if len(done) == 3:
            raise KeyboardInterrupt
        return true(fast, prompts, values, 40, *more)

    monkeypatch.setattr(laws, "_tested", tested)
    few = ["--draft", "prompt-lookup", "--draft", "draft-model:model=nano-draft", "--prompt", "tom", "--batch", "1"]
    assert main(["audit", "nano", "--laws", *few, "--max-new-tokens", "2"]) == 130
    out = " ".join(capsys.readouterr().out.split())
    assert "interrupted: all 9 texts were compared, and 2 laws were tested; the other laws were not" in out
    assert len(re.findall(r"holds +[\d.]", out)) == 2


def test_an_interrupted_audit_of_a_diffusion_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from truedraft.canvas.accelerated import AcceleratedCanvas

    calls, generate = list[int](), AcceleratedCanvas.generate

    def cut(self: AcceleratedCanvas, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(AcceleratedCanvas, "generate", cut)
    words = ["--max-new-tokens", "3", "--prompt", "one day", "--prompt", "tom", "--batch", "1", "--json"]
    assert main(["audit", "nano-diffusion", *words]) == 130
    found = json.loads(capsys.readouterr().out)
    assert [(one["drafter"], one["texts"]) for one in found["compared"]] == [("plain", 2), ("auto", 1)]
    assert found["interrupted"] and found["texts"] == 8


def test_a_benchmark_prints_the_workloads_that_were_finished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done, true = [], comparing.compare

    def cut(sides: Any, workload: Any, *args: Any) -> Any:
        if done:
            raise KeyboardInterrupt
        done.append(workload.name)
        return true(sides, workload, *args)

    monkeypatch.setattr(comparing, "compare", cut)
    words = ["--limit", "1", "--rounds", "1", "--max-new-tokens", "4", "--draft", "llma", "--no-baselines"]
    assert main(["bench", "nano", *words]) == 130
    emitted = capsys.readouterr()
    assert done[0] in emitted.out and "edit" not in emitted.out and "interrupted" in emitted.err
