"""Requests admitted and aborted while others run: each has the text of plain decoding, and no state remains."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import TextStreamer

import truedraft
from arrivals import (
    COUNTED,
    DECODERS,
    END,
    LONGEST,
    OTHERS,
    ROWS,
    added,
    check,
    decoded_alone,
    model,
    prompts,
    run_events,
)
from models import COMPILED_ALONE, RECURRENT
from nets import COMPILED, REGISTERED, VIEWED, drafter
from truedraft import registry
from truedraft.errors import Refused
from truedraft.runtime import latency

KINDS = ["decoder", "encoder-decoder"]
RUNTIMES = ["auto", "stock"]
EVENTS_IN_ALL = 10_000
PREFIX_BYTES = 20_000  # of tiny models: some of the prefixes that these events leave
EVENTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(1, 14)), min_size=8, max_size=30)


@pytest.mark.covering(1)
@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize("name", DECODERS)
def test_requests_have_their_text_alone(name: str, pieces: bool) -> None:
    """Prompts are read whole, or in pieces and behind prefixes of earlier ones: in turn, and all by `make real`."""
    rng = random.Random(f"{name} {pieces}")
    events = [(rng.randint(0, 9), rng.randrange(6), rng.randint(1, 14)) for _ in range(18)]
    run_events([name], events, piece=rng.randint(1, 16) if pieces else None, prefix_bytes=PREFIX_BYTES * pieces)


@pytest.mark.parametrize("name", DECODERS)
def test_requests_of_encoder_decoders_have_their_text_alone(name: str) -> None:
    rng, runtime = random.Random(name), RUNTIMES[DECODERS.index(name) % 2]
    events = [(rng.randint(0, 9), rng.randrange(6), rng.randint(1, 14)) for _ in range(18)]
    run_events([name], events, "encoder-decoder", runtime if _runs(name, "encoder-decoder", runtime) else "auto")


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=EVENTS, piece=st.integers(1, 16))
def test_drafters_in_one_batch(events: list[tuple[int, int, int]], piece: int) -> None:
    drafts = ["auto", "plain", "draft-model", "token-recycling", "prompt-lookup", "taps"]
    run_events(drafts, events, piece=piece, prefix_bytes=PREFIX_BYTES)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=EVENTS, piece=st.integers(1, 16))
def test_drafters_in_one_batch_of_the_stock_runtime(events: list[tuple[int, int, int]], piece: int) -> None:
    run_events(["auto", "plain", "taps"], events, runtime="stock", piece=piece, prefix_bytes=PREFIX_BYTES)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=EVENTS)
def test_drafters_in_one_batch_of_encoder_decoders(events: list[tuple[int, int, int]]) -> None:
    run_events(["auto", "plain", "draft-model", "token-recycling", "iad"], events, "encoder-decoder")


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("architecture", "runtime"),
    [
        (architecture, runtime)
        for architecture in [*RECURRENT, *COUNTED, *OTHERS]
        for runtime in RUNTIMES
        if runtime == "auto" or architecture not in COMPILED_ALONE
    ],
)
def test_requests_of_an_architecture_have_their_text_alone(architecture: str, runtime: str) -> None:
    rng = random.Random(f"{architecture} {runtime}")
    events = [(rng.randint(0, 9), rng.randrange(6), rng.randint(1, 14)) for _ in range(14)]
    drafts = ["auto", "noise", "plain", "token-recycling", "sampler"]
    run_events(drafts, events, architecture, runtime, rng.randint(1, 16), rng.choice((0, PREFIX_BYTES)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_events(kind: str) -> None:
    count, rng = 0, random.Random(0)
    names = [name for name in [*REGISTERED, *DECODERS] if _serves(name, kind)]
    while count < EVENTS_IN_ALL:
        events = [(rng.randint(0, 9), rng.randrange(6), rng.randint(1, 14)) for _ in range(60)]
        runtime = rng.choice(RUNTIMES)
        drafts = rng.sample([n for n in names if _runs(n, kind, runtime)], 4)
        count += run_events(drafts, events, kind, runtime, rng.randint(1, 40), rng.choice((0, PREFIX_BYTES)))


def _runs(name: str, kind: str, runtime: str) -> bool:
    """Views of encoder-decoders need the compiled pass, as do views with weights of fewer bits."""
    viewed = name == "view" or name in VIEWED or registry.is_view(name.partition("<")[0])
    return not (runtime == "stock" and (name in COMPILED or (viewed and kind == "encoder-decoder")))


def _serves(name: str, kind: str) -> bool:
    try:
        drafter(name, model(kind)) if name != "auto" else None
    except pytest.skip.Exception:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_a_row_are_the_same_bits_in_any_batch(kind: str) -> None:
    """With the compiled pass a row's logits do not depend on the other rows."""
    seen: list[dict[int, torch.Tensor]] = []
    for shared in (False, True):
        with truedraft.accelerate(model(kind), draft=None).engine(max_rows=ROWS, max_tokens=LONGEST) as engine:
            mine = added(engine, 3, 12, None, "token-recycling")
            inner: Any = engine._engine
            logits, decide = {}, inner._decide

            def noted(request: Any, rows: Any, trees: Any, scores: Any, kept: Any = logits, true: Any = decide) -> Any:
                if rows[0].given is inner.rows[0].given:  # it keeps the first slot
                    kept[rows[0].step] = scores.logits[0, 0].clone()
                return true(request, rows, trees, scores)

            inner._decide = noted
            turn = 0
            while not mine.finished:
                if shared and turn in (0, 2):
                    added(engine, turn, 12, turn, "auto")
                engine.step()
                turn += 1
            seen.append(logits)
    both = seen[0].keys() & seen[1].keys()
    assert len(both) > 2 and all(torch.equal(seen[0][step], seen[1][step]) for step in both)


def test_requests_wait_for_a_slot() -> None:
    fast = truedraft.accelerate(model())
    with fast.engine(max_rows=1, max_tokens=LONGEST) as engine:
        first, second = (added(engine, i, 6, None, "default") for i in (0, 1))
        assert engine.room() == -1
        assert engine.step() == [first] and second.tokens == [] and repr(second) == "<EngineRequest waiting: 0 tokens>"
        while not first.finished:
            engine.step()
        while not second.finished:
            assert engine.step() == [second]
        assert engine.step() == []
    check(first, 0, 6, None)
    check(second, 1, 6, None)


def test_generate_may_be_called_between_steps() -> None:
    fast = truedraft.accelerate(model())
    with fast.engine(max_rows=2, max_tokens=LONGEST) as engine:
        request = added(engine, 2, 14, 9, "default")
        while not request.finished:
            engine.step()
            out = fast.generate(
                torch.tensor([prompts()[4]]), max_new_tokens=7, do_sample=False, eos_token_id=END, pad_token_id=0
            )
            assert out[0, len(prompts()[4]) :].tolist() == decoded_alone(prompts()[4], 7, None)
    check(request, 2, 14, 9)


@pytest.mark.parametrize("kind", KINDS)
def test_costs_are_measured_while_others_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of a second drafter are measured when its first rows begin, with a temporary cache."""
    monkeypatch.setattr(latency, "_path", lambda target: None)
    monkeypatch.setattr(latency, "SHARE", 1e3)
    monkeypatch.setattr(latency, "ROUNDS", 2)
    with truedraft.accelerate(model(kind)).engine(max_rows=2, max_tokens=LONGEST) as engine:
        first = added(engine, 3, 14, 4, "default")
        engine.step()
        engine.step()
        second = added(engine, 2, 9, None, "token-recycling")
        while engine.has_unfinished_requests():
            engine.step()
    check(first, 3, 14, 4, kind)
    check(second, 2, 9, None, kind)


def test_unsupported_requests_are_refused_and_do_not_affect_others() -> None:
    fast = truedraft.accelerate(model())
    ids = torch.tensor([prompts()[0]])
    with fast.engine(max_rows=2, max_tokens=LONGEST) as engine:
        request = added(engine, 1, 10, None, "default")
        engine.step()
        for wrong, match in (
            ({"max_new_tokens": 99}, "max_tokens=48"),
            ({"num_beams": 3}, "beam"),
            ({"seed": -1}, "seed=-1"),
            ({"draft": "nonsense"}, "nonsense"),
            ({"rule": "block"}, "block"),
            ({"return_dict_in_generate": True}, "return_dict_in_generate"),
            ({"references": [[1, 2]], "draft": None}, "references were given, and plain does not use any"),
            ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens selects a drafter"),
            ({"assistant_model": model()}, "assistant_model selects a drafter"),
            ({"draft": "token-recycling:nodes=400", "max_new_tokens": 40}, "drafts of 400 nodes .* max_tokens=189"),
        ):
            with pytest.raises(Refused, match=match):
                engine.add_request(ids, **{"max_new_tokens": 4, "do_sample": False, **wrong})  # type: ignore[arg-type]
        with pytest.raises(Refused, match="2 rows"):
            engine.add_request(ids.repeat(2, 1), max_new_tokens=4)
        while not request.finished:
            engine.step()
        check(request, 1, 10, None)
        report = request.report()
        assert report.tokens == len(request.tokens) and report.seconds["all"] > 0
        assert "tokens/s" in str(report) and "prefill" not in str(report), "passes are shared by all requests"
    with pytest.raises(Refused, match="closed"):
        engine.step()
    for sizes in ((0, 10), (2, 1), (True, 10), (2.0, 10)):
        with pytest.raises(Refused, match="max_"):
            fast.engine(max_rows=sizes[0], max_tokens=sizes[1])  # type: ignore[arg-type]


def test_close_aborts_unfinished_requests() -> None:
    fast = truedraft.accelerate(model())
    with fast.engine(max_rows=1, max_tokens=LONGEST) as engine:
        running, waiting = (added(engine, i, 14, None, "default") for i in (0, 1))
        engine.step()
    assert running.finish_reason == waiting.finish_reason == "abort"
    assert running.tokens == decoded_alone(prompts()[0], 14, None)[: len(running.tokens)] and waiting.tokens == []


def test_streamers_are_fed_and_ended(capsys: pytest.CaptureFixture[str]) -> None:
    class Plain:
        def decode(self, ids: Any, **_: Any) -> str:
            return "".join(f"{int(i)} " for i in ids)

    fast = truedraft.accelerate(model())
    with fast.engine(max_rows=1, max_tokens=LONGEST) as engine:
        streamer = TextStreamer(Plain(), skip_prompt=True)  # type: ignore[arg-type]
        request = engine.add_request(
            torch.tensor(prompts()[0]), max_new_tokens=6, do_sample=False, streamer=streamer, eos_token_id=END
        )
        while not request.finished:
            engine.step()
    assert (
        [int(word) for word in capsys.readouterr().out.split()]
        == request.tokens
        == decoded_alone(prompts()[0], 6, None)
    )
