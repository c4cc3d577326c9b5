"""Errors in a running engine end only the requests of the failing part; the others have the text of plain decoding."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import truedraft
from arrivals import LONGEST, ROWS, added, check, check_nothing_left, model, prompts
from models import tiny
from nets import drafter
from truedraft.accept.greedy import Greedy
from truedraft.continuous import ContinuousEngine
from truedraft.drafters._compose import Merge
from truedraft.engine_request import EngineRequest
from truedraft.errors import NoRoom, Refused
from truedraft.targets import memory

KINDS = ["decoder", "encoder-decoder"]
STEPS = 9


class Planned(Exception):
    """Raised on purpose."""


def failing(inner: Callable[..., Any], calls: int, error: type[BaseException] = Planned) -> Callable[..., Any]:
    """`inner`, which raises after the work of its call number `calls`, counted from 0."""
    made = []

    def call(*args: Any, **kwargs: Any) -> Any:
        made.append(None)
        result = inner(*args, **kwargs)
        if len(made) == calls + 1:
            raise error("as planned")
        return result

    return call


class Criterion(StoppingCriteria):
    def __init__(self, called: Callable[[], Any]):
        self.called = called

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.called()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Streamer(BaseStreamer):
    def __init__(self) -> None:
        self.got: list[int] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.got += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


def nothing(*_: Any) -> None: ...


def with_processor(fail: Callable[..., Any], kind: str) -> dict[str, Any]:
    return {"logits_processor": [fail(lambda ids, scores: scores)], "draft": "token-recycling"}


def with_criterion(fail: Callable[..., Any], kind: str) -> dict[str, Any]:
    return {"stopping_criteria": [Criterion(fail(nothing))], "draft": "token-recycling"}


def with_nan(fail: Callable[..., Any], kind: str) -> dict[str, Any]:
    """Scores that become NaN, which the engine refuses."""
    call = fail(nothing)

    def spoil(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        try:
            call()
        except Planned:
            return torch.full_like(scores, torch.nan)
        return scores

    return {"logits_processor": [spoil], "draft": "token-recycling"}


def with_streamer(hook: str) -> Callable[..., dict[str, Any]]:
    def given(fail: Callable[..., Any], kind: str) -> dict[str, Any]:
        streamer = Streamer()
        inner, calls = getattr(streamer, hook), []

        def put(value: torch.Tensor) -> None:  # the prompt is put while it is added, where any error is the caller's
            calls.append(None)
            failed(value) if len(calls) > 1 else inner(value)

        failed = fail(inner)
        setattr(streamer, hook, put if hook == "put" else failed)
        return {"streamer": streamer, "draft": "token-recycling"}

    return given


def with_drafter(hook: str) -> Callable[..., dict[str, Any]]:
    def given(fail: Callable[..., Any], kind: str) -> dict[str, Any]:
        own: Any = drafter("token-recycling", model(kind))
        setattr(own, hook, fail(getattr(own, hook)))
        return {"draft": own}

    return given


def with_rule(hook: str) -> Callable[..., dict[str, Any]]:
    def given(fail: Callable[..., Any], kind: str) -> dict[str, Any]:
        rule = Greedy()
        setattr(rule, hook, fail(getattr(rule, hook)))
        return {"rule": rule, "draft": "token-recycling"}

    return given


def foreign_root(fail: Callable[..., Any], kind: str) -> dict[str, Any]:
    """A draft that does not begin with the pending token."""
    own: Any = drafter("token-recycling", model(kind))
    call, propose = fail(nothing), own.propose

    def proposed(rows: Any, budget: Any) -> Any:
        try:
            call()
        except Planned:
            return [truedraft.DraftTree.chain(row.tokens[-1] + 1) for row in rows]
        return propose(rows, budget)

    own.propose = proposed
    return {"draft": own}


PLANS: dict[str, Callable[..., dict[str, Any]]] = {
    "processor": with_processor,
    "criterion": with_criterion,
    "NaN": with_nan,
    "streamer is fed": with_streamer("put"),
    "streamer is ended": with_streamer("end"),
    "draft of another root": foreign_root,
    **{f"drafter: {hook}": with_drafter(hook) for hook in ("open", "start", "propose", "observe", "end")},
    **{f"rule: {hook}": with_rule(hook) for hook in ("decide_all_nodes", "keys")},
}
ITS_OWN = {"NaN": Refused, "draft of another root": ValueError}  # errors of the engine itself


def finish(engine: ContinuousEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", PLANS)
def test_error_ends_only_the_request_of_its_part(plan: str, kind: str) -> None:
    """In every part of a request, at every call of it, between rows that were admitted before and after."""
    shared = drafter("suffix", model(kind))
    failed = 0
    with truedraft.accelerate(model(kind), control="fixed").engine(max_rows=ROWS, max_tokens=LONGEST) as engine:
        for calls in range(4 * STEPS):
            before = added(engine, 3, 14, None, shared)
            engine.step()
            given = PLANS[plan](lambda inner, calls=calls: failing(inner, calls), kind)
            victim = added(engine, 1, STEPS, None, **given)
            after = added(engine, 2, 12, 5, shared)
            finish(engine)
            check(before, 3, 14, None, kind)
            check(after, 2, 12, 5, kind)
            check(victim, 1, STEPS, None, kind)
            check_nothing_left(engine, [shared, *([given["draft"]] if not isinstance(given["draft"], str) else [])])
            if victim.finish_reason != "error":
                break
            failed += 1
            check_failed(victim, ITS_OWN.get(plan, Planned), given.get("streamer"))
        assert failed and victim.error is None, "the fault was never raised, or always"
        report = engine.report()
        assert report.totals.ended["error"] == failed and report.running == report.waiting == 0


def check_failed(request: EngineRequest, error: type[Exception], streamer: Any) -> None:
    assert isinstance(request.error, error) and request.finished
    with pytest.raises(error):
        request.result()
    report = request.report()
    assert report.tokens == len(request.tokens) and "ended by an error" in str(report)
    assert all(done.emitted for done in report.passes), "an incomplete pass was recorded"
    assert streamer is None or streamer.ended == 1


def test_failing_shared_drafter_ends_all_its_requests() -> None:
    shared: Any = drafter("token-recycling", model())
    with truedraft.accelerate(model(), control="fixed").engine(max_rows=3, max_tokens=LONGEST) as engine:
        other = added(engine, 0, 12, None, "suffix")
        both = [added(engine, which, 12, None, shared) for which in (1, 2)]
        engine.step()
        shared.propose = failing(shared.propose, 1)
        engine.step()
        assert set(map(id, engine.step())) == set(map(id, [other, *both]))
        assert [request.finish_reason for request in both] == ["error", "error"] and not other.finished
        finish(engine)
        check(other, 0, 12, None)
        for which, request in zip((1, 2), both, strict=True):
            check(request, which, 12, None)
        check_nothing_left(engine, [shared])


@pytest.mark.parametrize("part", ["target", "control", "commit"])
def test_error_of_target_or_control_closes_the_engine(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = truedraft.accelerate(model())
    engine = fast.engine(max_rows=2, max_tokens=LONGEST)
    requests = [added(engine, which, 12, None, "token-recycling") for which in (0, 1, 2)]
    engine.step()
    owner, hook = {
        "target": (type(engine._target.runner), "score"), "control": (engine._engine, "_budget"),
        "commit": (type(engine._target), "commit"),
    }[part]  # fmt: skip
    true = getattr(owner, hook)
    monkeypatch.setattr(owner, hook, failing(true, 0))
    with pytest.raises(Planned):
        finish(engine)
    monkeypatch.undo()
    assert [request.finish_reason for request in requests] == ["abort"] * 3
    for which, request in enumerate(requests):
        check(request, which, 12, None)
    with pytest.raises(Refused, match="closed"):
        engine.step()
    with fast.engine(max_rows=2, max_tokens=LONGEST) as engine:
        request = added(engine, 0, 12, None, "token-recycling")
        finish(engine)
        check(request, 0, 12, None)


@pytest.mark.parametrize("plan", ["processor", "criterion", "streamer is fed", "drafter: propose", "drafter: observe"])
def test_an_interruption_closes_the_engine(plan: str) -> None:
    fast = truedraft.accelerate(model(), control="fixed")
    for calls in range(3):
        engine = fast.engine(max_rows=2, max_tokens=LONGEST)
        given = PLANS[plan](lambda inner, calls=calls: failing(inner, calls, KeyboardInterrupt), "decoder")
        requests = [added(engine, 1, STEPS, None, **given), added(engine, 3, 14, None, "suffix")]
        with pytest.raises(KeyboardInterrupt):
            finish(engine)
        with pytest.raises(Refused, match="closed"):
            engine.step()
        for which, request in zip((1, 3), requests, strict=True):
            assert request.finish_reason == "abort" and request.report().interrupted
            check(request, which, STEPS if which == 1 else 14, None)
        assert not getattr(given["draft"], "_states", {}) and engine._target.cache is None


class Inside(Streamer):
    """A streamer that makes a call whenever it is fed, and records the refusal."""

    def __init__(self, does: Callable[[], Any]):
        super().__init__()
        self.does, self.refusals = does, list[str]()

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        with pytest.raises(Refused) as refused:
            self.does()
        self.refusals.append(str(refused.value))


def test_call_within_a_call_is_refused_and_the_outer_one_continues() -> None:
    fast = truedraft.accelerate(model())
    with fast.engine(max_rows=2, max_tokens=LONGEST) as engine:
        other = added(engine, 2, 9, None, "default")
        for does in (
            engine.step,
            engine.close,
            lambda: engine.abort_request(other),
            lambda: added(engine, 0, 3, None, "default"),
            lambda: fast.generate(torch.tensor([prompts()[0]]), max_new_tokens=3, do_sample=False),
        ):
            streamer = Inside(does)
            request = added(engine, 1, 9, None, "default", streamer=streamer)
            finish(engine)
            check(request, 1, 9, None)
            assert len(streamer.refusals) == 1 + len(request.tokens)
            assert all("a call inside a call" in refusal for refusal in streamer.refusals)
        check(other, 2, 9, None)


def test_threads_take_turns() -> None:
    """Each thread adds requests and steps until they are finished; every text is right."""
    shared = drafter("suffix", model())
    fast = truedraft.accelerate(model(), draft=shared)
    errors: list[BaseException] = []

    with fast.engine(max_rows=2, max_tokens=LONGEST) as engine:

        def work(number: int) -> None:
            try:
                for turn in range(3):
                    which, seed = (number + turn) % 6, None if turn else number
                    request = added(engine, which, 12, seed, "default" if turn else "token-recycling")
                    while not request.finished:
                        engine.step()
                    check(request, which, 12, seed)
                    out = fast.generate(torch.tensor([prompts()[which]]), max_new_tokens=3, do_sample=False)
                    assert out.shape[1] == len(prompts()[which]) + 3
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors and not any(thread.is_alive() for thread in threads)
        check_nothing_left(engine, [shared])


def test_changed_model_is_detected_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tiny.__wrapped__("llama", torch.float32)
    engine = truedraft.accelerate(changed).engine(max_rows=1, max_tokens=LONGEST)
    request = engine.add_request(torch.tensor(prompts()[3]), max_new_tokens=30, do_sample=False)
    engine.step()
    before, norm = list(request.tokens), changed.model.norm
    norm.variance_epsilon, kept = 0.5, norm.variance_epsilon
    engine._compared = (0.0, 0.0)  # long ago
    for _ in range(2):
        with pytest.raises(Refused, match="model was changed"):
            engine.step()
    assert request.tokens == before and not request.finished
    norm.variance_epsilon = kept
    finish(engine)
    expected = changed.generate(torch.tensor([prompts()[3]]), max_new_tokens=30, do_sample=False)
    assert request.tokens == expected[0, len(prompts()[3]) :].tolist()
    engine.close()


def test_checks_for_changes_take_a_small_fraction_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a simulated clock: a check takes 3 s, a step 10 s."""
    clock, compared = [0.0], []
    with truedraft.accelerate(model()).engine(max_rows=1, max_tokens=LONGEST) as engine:
        monkeypatch.setattr("truedraft.continuous.time.perf_counter", lambda: clock[0])

        class Slow(type(engine._target)):  # type: ignore[misc]
            @property
            def changed(self) -> bool:
                compared.append(clock[0])
                clock[0] += 3
                return False

        engine._target.__class__ = Slow
        added(engine, 0, 3, None, None)
        compared.clear()
        start = clock[0]
        for _ in range(200):
            engine.step()
            clock[0] += 10
        assert 10 <= len(compared) <= (clock[0] - start) * 0.02 / 3 + 1


def with_memory(monkeypatch: pytest.MonkeyPatch, free: list[float]) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: free[0])


def test_source_without_memory_is_refused_or_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, free = "encoder-decoder", [1e12]
    with_memory(monkeypatch, free)
    with truedraft.accelerate(model(kind)).engine(max_rows=2, max_tokens=LONGEST) as engine:
        running = added(engine, 1, 14, None, None)
        engine.step()
        free[0] = 1000
        with pytest.raises(NoRoom, match=r"2 rows x 31 positions needs .* 1,000 are free: shorten the source"):
            added(engine, 2, 12, None, None)
        shorter = added(engine, 0, 4, 3, None)  # than the stored one: no more memory is needed
        free[0] = 1e12
        longer, queued = added(engine, 2, 12, None, None), added(engine, 4, 12, None, None)
        free[0] = 1000
        while not shorter.finished:
            engine.step()
        for _ in range(3):
            assert engine.step() == [running]
        free[0] = 1e12
        assert engine.step() == [running, longer], "it begins once there is memory"
        engine.abort_request(longer)
        last = added(engine, 2, 12, None, None)
        free[0] = 1000
        finish(engine)
        assert last.finish_reason == "length", "it uses the memory of the aborted one"
        free[0] = 1e12
        never = added(engine, 2, 12, None, None)
        free[0] = 1000
        assert engine.step() == [never] and engine.step() == []
        assert isinstance(never.error, NoRoom) and never.finish_reason == "error" and never.tokens == []
        free[0] = 1e12
        for request, *given in ((running, 1, 14, None), (shorter, 0, 4, 3), (queued, 4, 12, None), (last, 2, 12, None)):
            check(request, *given, kind)  # type: ignore[arg-type]
        check_nothing_left(engine, [])


def test_cache_that_does_not_fit_is_refused_and_leaves_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, free = truedraft.accelerate(model()), [1e12]
    with_memory(monkeypatch, free)
    with fast.engine(max_rows=1, max_tokens=LONGEST) as engine:
        request = added(engine, 0, 12, None, "default")
        engine.step()
        free[0] = 10_000  # enough for the checks of a host
        with pytest.raises(NoRoom, match="a row of 48 tokens"):
            fast.engine(max_rows=64, max_tokens=LONGEST)
        finish(engine)
        check(request, 0, 12, None)


def test_engine_report_sums_its_requests() -> None:
    with truedraft.accelerate(model(), control="fixed").engine(max_rows=2, max_tokens=LONGEST) as engine:
        requests = [added(engine, which, 5 + 3 * which, None, "token-recycling") for which in range(4)]
        passes = 0
        while any(request.finish_reason is None for request in requests[:3]):
            passes += bool(engine.step())
            report, emitted = engine.report(), sum(len(request.tokens) for request in requests)
            assert report.totals.passes == passes and report.totals.tokens == emitted
            assert report.totals.row_passes == sum(request.report().row_passes for request in requests)
            assert report.waiting + report.running + sum(report.totals.ended.values()) == 4
        engine.abort_request(requests[3])
        text, figures = " ".join(str(engine.report()).split()), engine.report().as_dict()
        assert "1 ended by 'abort'" in text and "tokens/s" in text and "0 waiting, 0 running" in text
        assert figures["tokens"] == sum(len(request.tokens) for request in requests)
        assert figures["ended"]["abort"] == 1 and figures["seconds"]["all"] >= figures["seconds"]["target"] > 0
        assert requests[3].report().interrupted and "aborted" in str(requests[3].report())
    assert engine.report().as_dict() == figures, "it is available after close"


def test_request_that_fails_before_a_pass_is_counted_without_one() -> None:
    with truedraft.accelerate(model()).engine(max_rows=1, max_tokens=LONGEST) as engine:
        request = added(engine, 0, 5, None, **with_drafter("start")(lambda inner: failing(inner, 0), "decoder"))
        assert engine.step() == [request] and engine.step() == []
        assert engine.report().totals.passes == 0 and engine.report().as_dict()["ended"] == {"error": 1}


def test_request_of_another_engine_is_refused() -> None:
    fast = truedraft.accelerate(model())
    with fast.engine(max_rows=1, max_tokens=LONGEST) as engine, fast.engine(max_rows=1, max_tokens=LONGEST) as other:
        request = added(engine, 0, 9, None, "default")
        with pytest.raises(Refused, match="another engine"):
            other.abort_request(request)
        finish(engine)
        check(request, 0, 9, None)


def test_result_requires_a_finished_request() -> None:
    with truedraft.accelerate(model()).engine(max_rows=1, max_tokens=LONGEST) as engine:
        request = added(engine, 0, 5, None, "default")
        with pytest.raises(Refused, match="not finished"):
            request.result()
        finish(engine)
        assert request.result() == request.tokens


def test_stored_error_does_not_reference_the_pass() -> None:
    """The scores of a pass may be hundreds of megabytes: a stored error must not reference them."""
    with truedraft.accelerate(model()).engine(max_rows=1, max_tokens=LONGEST) as engine:
        request = added(engine, 0, 5, None, None, logits_processor=[failing(lambda ids, scores: scores, 2)])
        finish(engine)
        trace: Any = request.error.__traceback__  # type: ignore[union-attr]
        depth = 0
        while trace is not None:
            frame: Any = trace.tb_frame
            while frame is not None:
                depth += 1
                assert not any(type(value).__name__ == "Scores" for value in frame.f_locals.values())
                frame = frame.f_back
            trace = trace.tb_next
        assert depth > 5


@pytest.mark.parametrize("name", ["view", "draft-model"])
def test_generate_between_steps_takes_no_drafter_from_the_engine(name: str) -> None:
    """Its drafter is bound to another target meanwhile."""
    fast = truedraft.accelerate(model(), draft=drafter(name, model()), control="fixed")
    ids = torch.tensor([prompts()[1]])
    with fast.engine(max_rows=2, max_tokens=LONGEST) as engine:
        request = added(engine, 0, 12, None, "default")
        while not request.finished:
            engine.step()
            fast.generate(ids, max_new_tokens=4, do_sample=False)
        check(request, 0, 12, None)
        assert request.finish_reason in ("stop", "length")


def test_a_part_of_a_composition_is_bound_again_after_a_call_elsewhere() -> None:
    shared = drafter("view", model())
    alone = truedraft.accelerate(model(), draft=shared, control="fixed")
    merged = truedraft.accelerate(model(), draft=Merge([shared, drafter("token-recycling", model())]), control="fixed")
    ids = torch.tensor([prompts()[1]])
    expected = model().generate(ids, max_new_tokens=8, do_sample=False)
    for fast in (merged, alone, merged):
        assert torch.equal(fast.generate(ids, max_new_tokens=8, do_sample=False), expected)


def test_a_processor_that_raises_on_drafts_ends_no_other_request() -> None:
    """Requests that share a draft model; drafts go through the processors of each."""

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        if len(ids) > len(prompts()[1]) + 3:  # drafted before it is emitted
            raise Planned
        return list(range(model().config.vocab_size))

    shared = drafter("draft-model", model())
    with truedraft.accelerate(model(), control="fixed").engine(max_rows=3, max_tokens=LONGEST) as engine:
        first = added(engine, 0, 12, None, shared)
        victim = added(engine, 1, 12, None, shared, prefix_allowed_tokens_fn=allowed)
        finish(engine)
        check(first, 0, 12, None)
        assert first.finish_reason in ("stop", "length")
        assert victim.finish_reason == "error" and isinstance(victim.error, Planned)


@pytest.mark.parametrize("control", ["fixed", "cost"])
@pytest.mark.parametrize(
    "broken",
    [
        lambda root: truedraft.DraftTree((root, 5), (-1, 0), confidence=(1.0,)),
        lambda root: truedraft.DraftTree((root, 5, 6), (-1, 2, 0), confidence=(1.0, 0.9, 0.9)),
        lambda root: truedraft.DraftTree.chain(root, [10**6], [0.9]),
        lambda root: truedraft.DraftTree((root, 5), (-1, 0), probes=frozenset([1]), embeds={1: torch.zeros(3)}),
    ],
    ids=["confidence of another length", "a parent behind its child", "outside the vocabulary", "a narrow embedding"],
)
def test_a_malformed_draft_ends_its_request_alone(broken: Any, control: str) -> None:
    own: Any = drafter("token-recycling", model())
    own.propose = lambda rows, budget: [broken(row.tokens[-1]) for row in rows]
    with truedraft.accelerate(model(), control=control).engine(max_rows=3, max_tokens=LONGEST) as engine:
        first = added(engine, 0, 12, None, "token-recycling")
        victim = added(engine, 1, 12, None, own)
        finish(engine)
        check(first, 0, 12, None)
        check(victim, 1, 12, None)
        assert first.finish_reason in ("stop", "length"), "the engine was not closed"
        assert victim.finish_reason == "error" or control == "cost"  # which may ask for no drafts


def test_nothing_is_forgotten_while_requests_run() -> None:
    fast = truedraft.accelerate(model(), control="fixed")
    with fast.engine(max_rows=2, max_tokens=LONGEST) as engine:
        request = added(engine, 0, 12, None, "default")
        engine.step()
        with pytest.raises(Refused, match="finish or abort"):
            fast.forget()
        finish(engine)
        check(request, 0, 12, None)
        fast.forget()


def test_a_call_inside_a_call_does_not_wait_for_another_thread() -> None:
    """One thread steps an engine and waits for its drafter, which a call in the other thread uses, and adds to it."""
    shared = drafter("suffix", model())
    fast = truedraft.accelerate(model(), draft=shared, control="fixed")
    ids, found, stepping = torch.tensor([prompts()[1]]), [], []
    with fast.engine(max_rows=3, max_tokens=LONGEST) as engine:
        request = added(engine, 0, 12, None, "default")

        def inside(_: Any) -> None:
            if not stepping:
                stepping.append(threading.Thread(target=finish, args=(engine,)))
                stepping[0].start()
                time.sleep(0.2)  # until it has the engine, and waits for the drafter
                with pytest.raises(Refused) as refusal:
                    added(engine, 2, 4, None, None)
                found.append(str(refusal.value))

        fast.generate(ids, max_new_tokens=8, do_sample=False, on_pass=inside)
        stepping[0].join(20)
        assert not stepping[0].is_alive() and "another thread" in found[0]
        check(request, 0, 12, None)


def test_prompts_of_ids_and_of_embeddings_begin_together() -> None:
    embed = model().get_input_embeddings()
    with truedraft.accelerate(model(), control="fixed").engine(max_rows=3, max_tokens=LONGEST) as engine:
        requests = [added(engine, 0, 8, None, None)]
        vectors = embed(torch.tensor([prompts()[1]])).detach()
        settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 5, "pad_token_id": 0}
        given = engine.add_request(None, inputs_embeds=vectors, draft=None, **settings)
        requests.append(added(engine, 2, 8, None, None))
        finish(engine)
        for which, request in zip((0, 2), requests, strict=True):
            check(request, which, 8, None)
        assert given.tokens == model().generate(inputs_embeds=vectors, **settings)[0].tolist()


def test_a_draft_model_without_memory_for_a_new_row_keeps_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: Any = drafter("draft-model", model())
    with truedraft.accelerate(model(), control="fixed").engine(max_rows=3, max_tokens=LONGEST) as engine:
        first = added(engine, 0, 14, None, shared)
        engine.step()
        engine.step()
        free = [False]

        def checked(*sizes: int) -> None:
            if not free[0]:
                raise NoRoom("as planned")

        monkeypatch.setattr(shared._reader.target, "check_capacity", checked)
        second = added(engine, 1, 14, None, shared)
        third = added(engine, 2, 14, None, shared)
        engine.step()
        free[0] = True
        finish(engine)
        check(first, 0, 14, None)
        assert first.finish_reason in ("stop", "length")
        assert "error" in (second.finish_reason, third.finish_reason), "the reader never had to grow"


def test_rows_are_not_drafted_for_where_memory_was_free_only_when_they_began(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: Any = drafter("draft-model", model())
    fast = truedraft.accelerate(model(), draft=shared, control="fixed")
    monkeypatch.setattr(shared._reader.target, "reserve", failing(nothing, 0, NoRoom))
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(
        fast.generate(ids, max_new_tokens=8, do_sample=False), model().generate(ids, max_new_tokens=8, do_sample=False)
    )
    assert not any(emitted.offered for one in fast.report().passes for emitted in one.emitted)
