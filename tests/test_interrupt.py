"""Ctrl-C and other exceptions during a call: the exception raised, the partial output, and no state left."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LogitsProcessor, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

import seq2seq_models
import truedraft
from arrivals import state_left
from drafters_for_tests import Noise
from models import ragged, sibling, tiny
from truedraft import Refused, accelerated, continuous, engine, reading
from truedraft.accept._verification import Verification
from truedraft.caches.prefixes import Prefixes
from truedraft.caches.rows import RowCache
from truedraft.call import prepared
from truedraft.control import cost
from truedraft.drafters import _base, _calibration, _compose
from truedraft.drafters.models import _model, _reader
from truedraft.engine_request import EngineRequest
from truedraft.loading import load
from truedraft.runtime import native
from truedraft.stats import Pass
from truedraft.stores import automaton, trigrams
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import Row

TOKENS = 8
GREEDY: dict[str, Any] = dict(max_new_tokens=TOKENS, do_sample=False, eos_token_id=[11, 12], pad_token_id=0)
IDS = torch.tensor([[5, 6, 7]])


class Recorder(BaseStreamer):
    def __init__(self, breaks: bool = False) -> None:
        self.got: list[list[int]] = []
        self.ended, self.breaks = 0, breaks

    def put(self, value: torch.Tensor) -> None:
        if self.breaks and len(self.got) == 3:
            raise RuntimeError("the reader has closed")
        self.got.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


class Raising(LogitsProcessor):
    """A processor that raises at its n-th call."""

    def __init__(self, error: BaseException, calls: int = 0):
        self.error, self.calls = error, calls

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls -= 1
        if self.calls < 0:
            raise self.error
        return scores


def raising_after(passes: int, error: BaseException | None = None) -> Callable[[Pass], None]:
    """An `on_pass` that raises after `passes` passes."""
    seen = []

    def interrupt(done: Pass) -> None:
        seen.append(done)
        if len(seen) == passes:
            raise error or KeyboardInterrupt

    return interrupt


def check_clean(fast: truedraft.Accelerated) -> None:
    if state_left(fast.drafter) or state_left(fast.control):
        gc.collect()  # frames that the exception references
    assert not state_left(fast.drafter) and not state_left(fast.control) and fast.target.cache is None


def check_partial(stopped: Any, fast: truedraft.Accelerated, expected: torch.Tensor, start: int) -> None:
    """The output is a prefix of the complete one, padded after each row's last token; the report agrees."""
    assert fast.report() is stopped.report and stopped.report.interrupted
    emitted = Counter[int]()
    for emission in (e for done in stopped.report.passes for e in done.emitted):
        emitted[emission.row] += len(emission.tokens)
    assert stopped.output.shape == (len(expected), start + max(emitted.values(), default=0))
    for b, (own, theirs) in enumerate(zip(stopped.output.tolist(), expected.tolist(), strict=True)):
        end = start + emitted[b]
        assert own[:end] == theirs[:end] and set(own[end:]) <= {0}


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("passes", [1, 3])
def test_ctrl_c_carries_the_partial_output(passes: int, sample: bool) -> None:
    fast, inputs = truedraft.accelerate(tiny(), control="fixed"), ragged(tiny(), 3)
    kwargs: dict[str, Any] = {**GREEDY, "do_sample": sample, "streamer": Recorder()}
    torch.manual_seed(1)
    expected = tiny().generate(**inputs, **{**kwargs, "streamer": None})
    torch.manual_seed(1)
    with pytest.raises(KeyboardInterrupt) as raised:
        fast.generate(**inputs, **kwargs, on_pass=raising_after(passes))
    assert type(raised.value) is KeyboardInterrupt  # a subclass does not end a script as Ctrl-C does
    check_partial(raised.value, fast, expected, inputs["input_ids"].shape[1])
    assert kwargs["streamer"].ended == 1 and "interrupted" in str(fast.report())
    check_clean(fast)
    torch.manual_seed(1)
    assert torch.equal(fast.generate(**inputs, **kwargs), expected)


def test_ctrl_c_before_the_first_token_returns_the_prompt() -> None:
    fast = truedraft.accelerate(tiny(), draft=None)
    kwargs: dict[str, Any] = dict(return_dict_in_generate=True, output_scores=True, do_sample=False, max_new_tokens=4)
    with pytest.raises(KeyboardInterrupt) as raised:
        fast.generate(IDS, logits_processor=[Raising(KeyboardInterrupt())], **kwargs)
    assert torch.equal(raised.value.output.sequences, IDS) and raised.value.output.scores == ()


def test_ctrl_c_within_a_pass_removes_its_tokens() -> None:
    fast, inputs = truedraft.accelerate(tiny(), draft="prompt-lookup", control="fixed"), ragged(tiny(), 2)
    kwargs: dict[str, Any] = {**GREEDY, "return_dict_in_generate": True, "output_scores": True}
    expected = tiny().generate(**inputs, **kwargs)
    for calls in range(1, TOKENS - 1):
        with pytest.raises(KeyboardInterrupt) as raised:
            fast.generate(**inputs, **kwargs, logits_processor=[Raising(KeyboardInterrupt(), calls)])
        output = raised.value.output
        length = output.sequences.shape[1]
        assert torch.equal(output.sequences, expected.sequences[:, :length])
        assert len(output.scores) == length - inputs["input_ids"].shape[1] <= calls
        check_clean(fast)


def test_script_stops_at_ctrl_c() -> None:
    fast, done = truedraft.accelerate(tiny(), draft=None), []
    with pytest.raises(KeyboardInterrupt):
        for turn in range(3):
            fast.generate(IDS, max_new_tokens=4, do_sample=False, on_pass=raising_after(2) if turn == 1 else None)
            done.append(turn)
    assert done == [0]


def test_ctrl_c_in_a_chat_keeps_the_conversation() -> None:
    model, tokenizer = load("nano")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    chat = truedraft.Chat(truedraft.accelerate(model, tokenizer, draft=None), max_new_tokens=5, do_sample=False)
    with pytest.raises(KeyboardInterrupt):
        chat.send("one day", on_pass=raising_after(2))
    assert chat.messages == []
    assert chat.send("one day") and len(chat.messages) == 2


@pytest.mark.parametrize(
    "given",
    [
        {"on_pass": raising_after(3, RuntimeError("no more"))},
        {"streamer": Recorder(breaks=True)},
        {"logits_processor": [Raising(MemoryError(), 4)]},
        {"logits_processor": [Raising(GeneratorExit(), 4)]},
        {"stopping_criteria": [lambda ids, scores: 1 / (5 - ids.shape[1]) > 9]},
    ],
    ids=["on_pass", "streamer", "memory", "exit", "criterion"],
)
def test_other_exceptions_are_unchanged_and_leave_no_state(given: dict[str, Any]) -> None:
    fast = truedraft.accelerate(tiny(), draft="suffix+token-recycling", control="cost")
    expected = tiny().generate(IDS, **GREEDY)
    with pytest.raises((RuntimeError, MemoryError, GeneratorExit, ZeroDivisionError)):
        fast.generate(IDS, **GREEDY, **given)
    assert not fast.report().interrupted
    check_clean(fast)
    assert torch.equal(fast.generate(IDS, **GREEDY), expected)


def test_reader_of_a_streamer_does_not_block() -> None:
    fast = truedraft.accelerate(tiny(), draft=None)
    tokenizer: AutoTokenizer = load("nano")[1]
    for given, error in (({"on_pass": raising_after(2)}, KeyboardInterrupt), ({"num_beams": 3}, Refused)):
        streamer = TextIteratorStreamer(tokenizer, timeout=20)
        raised: list[BaseException] = []

        def call(given: Any = given, streamer: Any = streamer, raised: Any = raised) -> None:
            try:
                fast.generate(IDS, max_new_tokens=9, do_sample=False, streamer=streamer, **given)
            except BaseException as e:
                raised.append(e)

        thread = threading.Thread(target=call)
        thread.start()
        assert isinstance("".join(streamer), str)
        thread.join()
        assert [type(e) for e in raised] == [error]


@dataclass
class Counting(Noise):
    """Counts the calls of `end` by row."""

    def start(self, rows: Sequence[Row]) -> None:
        self.started, self.over = list(rows), Counter[Row]()

    def end(self, row: Row) -> None:
        self.over[row] += 1


def test_every_row_is_ended_exactly_once() -> None:
    counting, inputs = Counting(), ragged(tiny(), 3)
    fast = truedraft.accelerate(tiny(), draft=counting, control="fixed")
    for error in (None, KeyboardInterrupt(), RuntimeError()):
        with pytest.raises(type(error)) if error else nullcontext():
            fast.generate(**inputs, **GREEDY, on_pass=raising_after(4, error) if error else None)
        assert counting.over == Counter(dict.fromkeys(counting.started, 1)) and len(counting.over) == 3


def methods(cls: type) -> list[Callable[..., Any]]:
    return [f for f in vars(cls).values() if inspect.isfunction(f)]


# The functions in which rows begin and end, in every part with state of rows.
WATCHED: list[Callable[..., Any]] = [
    engine.Engine.admit, engine.Engine.step, engine.Engine._admitted, engine.Engine._prompted, engine.Engine._drafted,
    engine.Engine._verified, engine.Engine._verified_of, engine.Engine.close, engine.Engine._end, engine.Engine._leave,
    engine.Engine._retire, engine.Engine._begin, engine.Engine._observe, engine.Engine._guarded,
    continuous.ContinuousEngine.step, continuous.ContinuousEngine.abort_request, continuous.ContinuousEngine.close,
    continuous.ContinuousEngine._close, continuous.ContinuousEngine._admit, continuous.ContinuousEngine._after_pass,
    continuous.ContinuousEngine._finish, *methods(reading.PiecewiseEngine), *methods(Prefixes), *methods(RowCache),
    DecoderTarget.read_pieces, accelerated.Accelerated._decode, prepared.request_of,
    Verification.walked, Verification.emitted, Verification._emit_row,
    _base.PerRow.start, _base.PerRow.end, _base.PerRow.observe,
    _calibration.Calibration.end, _calibration.Calibration._history,
    _compose.Many.start, _compose.Many.end, _compose.Many.observe, cost.Cost.start, cost.Cost.end, cost.Cost.observe,
    _model.ModelDrafter.start, _model.ModelDrafter.end, _reader.Reader.start, _reader.Reader.end, _reader.Reader.admit,
    _reader.Reader._release, _reader.Reader.keep,
]  # fmt: skip


def interrupting(spot: tuple[CodeType, int], nth: int, times: Counter[Any]) -> Callable[[CodeType, int], None]:
    """Ctrl-C when a line is reached for the nth time; `times` counts every line."""

    def interrupt(code: CodeType, line: int) -> None:
        times[code, line] += 1
        if (code, line) == spot and times[spot] == nth:
            sys.settrace(None)
            raise KeyboardInterrupt

    return interrupt


@contextmanager
def traced(seen: Callable[[CodeType, int], None]) -> Iterator[None]:
    """Call `seen` at every line of the watched functions, nested ones included; it may raise."""
    codes = {code for function in WATCHED for code in _codes(getattr(function, "__wrapped__", function).__code__)}

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            seen(frame.f_code, frame.f_lineno)
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, _: local if frame.f_code in codes else None)
    try:
        yield
    finally:
        sys.settrace(before)


def _codes(code: CodeType) -> list[CodeType]:
    return [code, *(inner for part in code.co_consts if isinstance(part, CodeType) for inner in _codes(part))]


def check_every_line(make: Callable[[], truedraft.Accelerated], inputs: dict[str, Any]) -> int:
    """Raise Ctrl-C once at each line, at its first or last execution; returns the number of lines."""
    fast = make()
    expected = fast.model.generate(**inputs, **GREEDY)
    reached = Counter[tuple[CodeType, int]]()
    with traced(lambda code, line: reached.update([(code, line)])):
        assert torch.equal(fast.generate(**inputs, **GREEDY), expected)
    spots = [(at, (1, count)[i % 2]) for i, (at, count) in enumerate(reached.items())]
    start = expected.shape[1] if fast.model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    interrupted = 0
    for spot, nth in spots:
        fast.forget()
        try:
            with traced(interrupting(spot, nth, Counter())):
                fast.generate(**inputs, **GREEDY)
        except KeyboardInterrupt as raised:
            interrupted += 1
            if hasattr(raised, "output") and not fast.model.config.is_encoder_decoder:
                check_partial(raised, fast, expected, start)
        check_clean(fast)
        assert torch.equal(fast.generate(**inputs, **GREEDY), expected), spot
        check_clean(fast)
    return interrupted


def test_ctrl_c_at_every_line_with_lookup_drafters() -> None:
    interrupted = check_every_line(
        lambda: truedraft.accelerate(tiny(dtype=torch.float32), draft="suffix+token-recycling"), ragged(tiny(), 2)
    )
    assert interrupted > 43


def test_ctrl_c_at_every_line_with_a_draft_model() -> None:
    model = tiny(dtype=torch.float32)
    interrupted = check_every_line(
        lambda: truedraft.accelerate(model, draft=sibling(model), control="fixed"), ragged(model, 2)
    )
    assert interrupted > 90


def run(running: continuous.ContinuousEngine, streamers: list[Recorder]) -> list[EngineRequest]:
    """Run three requests and abort the second; returns those that were added."""
    requests: list[EngineRequest] = []
    with suppress(KeyboardInterrupt), running:
        for length in (5, 3, 4):
            ids = ragged(tiny(), 3)["input_ids"][2, -length:]
            untraced = sys.gettrace()
            sys.settrace(None)  # an interrupted add_request returns no request to check
            requests.append(running.add_request(ids, **GREEDY, streamer=streamers[len(requests)]))
            sys.settrace(untraced)
            running.step()
        running.abort_request(requests[1])
        while running.has_unfinished_requests():
            running.step()
    return requests


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_ctrl_c_at_every_line_of_a_running_engine(first: int) -> None:
    """Every request and its streamer have ended, with a prefix of the text; no state is left in any part. The everyday
    suite has every third line."""
    fast = truedraft.accelerate(tiny(dtype=torch.float32), draft="suffix+token-recycling", control="fixed")
    make, reached = partial(fast.engine, 2, 32, prefix_bytes=10**6), Counter[tuple[CodeType, int]]()
    with traced(lambda code, line: reached.update([(code, line)])):
        expected = [request.tokens for request in run(make(), [Recorder() for _ in range(3)])]
    assert len(expected) == 3 and len(expected[0]) == TOKENS
    interrupted = 0
    for spot, nth in [(at, (1, count)[i % 2]) for i, (at, count) in enumerate(reached.items())][first::3]:
        fast.forget()
        running, streamers = make(), [Recorder() for _ in range(3)]
        times = Counter[tuple[CodeType, int]]()
        with traced(interrupting(spot, nth, times)):
            requests = run(running, streamers)
        interrupted += times[spot] >= nth
        running.close()
        for request, streamer, text in zip(requests, streamers, expected, strict=False):
            assert request.finished and streamer.ended >= 1, spot
            assert request.tokens == text[: len(request.tokens)], spot
            assert request.report().tokens == len(request.tokens), spot
        assert running._target.cache is None and not state_left(fast.drafter), spot
    assert interrupted > 110


def test_ctrl_c_with_an_encoder_decoder() -> None:
    model = seq2seq_models.model()
    fast = truedraft.accelerate(model)
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 1]])
    kwargs: dict[str, Any] = dict(max_new_tokens=12, do_sample=False, num_beams=1)
    expected = model.generate(ids, **kwargs)
    with pytest.raises(KeyboardInterrupt) as raised:
        fast.generate(ids, **kwargs, on_pass=raising_after(2))
    length = raised.value.output.shape[1]
    assert length > 1 and torch.equal(raised.value.output, expected[:, :length])
    check_clean(fast)
    assert torch.equal(fast.generate(ids, **kwargs), expected)


@pytest.mark.skipif(not native.library(), reason="no compiled code here")
@pytest.mark.parametrize("kind", [automaton.CompiledAutomaton, trigrams.CompiledTrigrams])
def test_ctrl_c_before_a_store_is_initialised(kind: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", pytest.PytestUnraisableExceptionWarning)
        kind.__new__(kind).__del__()
