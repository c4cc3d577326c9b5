"""Calls from several threads, and under global settings of torch."""

from __future__ import annotations

import copy
import random
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

import truedraft
from models import ragged, tiny
from test_seq2seq import tiny as seq2seq
from truedraft import Refused
from truedraft.runtime import linears
from truedraft.runtime.overrides import Dispatcher, overridden

GREEDY: dict[str, Any] = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work` with the index of each of `count` threads; the first error is raised here."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@cache
def calls_of(model: Any, count: int = 8) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Arguments of calls that differ in batch, length and seed, and the outputs of `model.generate` for them."""
    calls = []
    for number in range(count):
        given: dict[str, Any] = {**ragged(model, 1 + number % 3, seed=number), **GREEDY}
        calls.append((given, model.generate(**given)))
    return calls


def hammered(fasts: list[Any], calls: list[tuple[dict[str, Any], torch.Tensor]], threads: int, each: int) -> None:
    """Many calls from each thread, in an order of its own, every text compared."""

    def work(number: int) -> None:
        order = random.Random(number)
        for _ in range(each):
            given, expected = order.choice(calls)
            assert torch.equal(fasts[number % len(fasts)].generate(**given), expected)

    in_threads(threads, work)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tiny("llama", torch.float32),
    "bloom": lambda: tiny("bloom", torch.float32),
    "falcon_alibi": lambda: tiny("falcon_alibi", torch.float32),
    "mpt": lambda: tiny("mpt", torch.float32),
    "gpt_neo": lambda: tiny("gpt_neo", torch.float32),
    "bart": lambda: seq2seq("bart"),
    "t5": lambda: seq2seq("t5"),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("runtime", ["auto", "stock"])
@pytest.mark.parametrize("name", MODELS)
def test_threads_can_share_an_accelerated_model(name: str, runtime: str) -> None:
    model = MODELS[name]()
    hammered([truedraft.accelerate(model, runtime=runtime)], calls_of(model), 4, 6)


@pytest.mark.slow  # 16,000 calls a model
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_many_calls_from_threads_repeatedly(name: str) -> None:
    model = MODELS[name]()
    calls = calls_of(model, 24)
    for _ in range(20):
        hammered([truedraft.accelerate(model)], calls, 4, 200)


def owners_of(model: Any) -> list[Any]:
    """The modules of a model, and the Python modules that define them."""
    return [*model.modules(), *{sys.modules[type(module).__module__] for module in model.modules()}]


@pytest.mark.covering(1)
@pytest.mark.parametrize("runtime", ["auto", "stock"])
@pytest.mark.parametrize("name", MODELS)
def test_accelerated_models_of_one_model_in_threads_with_the_plain_one(
    name: str, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "SMALLEST", 0)
    model, calls = copy.deepcopy(MODELS[name]()), calls_of(MODELS[name]())
    hammered([*(truedraft.accelerate(model, runtime=runtime) for _ in range(2)), model], calls, 6, 4)
    assert not any(isinstance(part, Dispatcher) for owner in owners_of(model) for part in vars(owner).values())


def test_drafter_and_control_shared_by_two_models() -> None:
    first, second = tiny("llama", torch.float32), tiny("qwen2", torch.float32)
    drafter, control = (truedraft.registry.load(*names) for names in (("drafters", "suffix"), ("control", "cost")))
    fasts = [truedraft.accelerate(model, draft=drafter, control=control) for model in (first, second)]
    calls = [calls_of(model, 3) for model in (first, second)]

    def work(number: int) -> None:
        for given, expected in calls[number % 2]:
            assert torch.equal(fasts[number % 2].generate(**given), expected)

    in_threads(4, work)


def test_memory_calls_concurrent_with_generate(tmp_path: Any) -> None:
    model = tiny("llama", torch.float32)
    fast, calls = truedraft.accelerate(model, draft="suffix"), calls_of(model)

    def work(number: int) -> None:
        for given, expected in calls[number::2]:
            if number < 2:
                assert torch.equal(fast.generate(**given), expected)
            else:
                fast.save_memory(tmp_path / f"{number}")
                fast.load_memory(tmp_path / f"{number}")
                fast.forget()

    in_threads(4, work)


def test_nested_call_is_refused_and_the_outer_one_continues() -> None:
    model = tiny("llama", torch.float32)
    fast, refusals = truedraft.accelerate(model), list[str]()

    class Inner(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            with pytest.raises(Refused) as refused:
                fast.generate(torch.tensor([[1, 2]]), **GREEDY)
            refusals.append(str(refused.value))

        def end(self) -> None: ...

    given = ragged(model, 1)
    assert torch.equal(fast.generate(**given, **GREEDY, streamer=Inner()), model.generate(**given, **GREEDY))
    assert refusals and "a call inside a call" in refusals[0]


def test_failed_call_releases_its_lock() -> None:
    model = tiny("llama", torch.float32)
    fast, given = truedraft.accelerate(model), ragged(model, 2)

    def failing(*_: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fast.generate(**given, **GREEDY, logits_processor=[failing])
    hammered([fast], calls_of(model, 2), 2, 1)


def test_overrides_nest_and_are_undone_in_any_order() -> None:
    layer = torch.nn.Linear(2, 2)
    own, x = layer(torch.ones(1, 2)), torch.ones(1, 2)
    inside, outside = threading.Event(), threading.Event()

    def other(number: int) -> None:
        if number == 0:
            with overridden([(layer, "forward", lambda _: "mine")]):
                inside.set()
                assert outside.wait(10)
                assert layer(x) == "mine"
        else:
            assert inside.wait(10)
            with overridden([(layer, "forward", lambda _: "other")]):
                assert layer(x) == "other"
                with overridden([(layer, "forward", lambda _: "inner")]):
                    assert layer(x) == "inner"
                assert layer(x) == "other"
            assert torch.equal(layer(x), own)
            outside.set()

    in_threads(2, other)
    assert "forward" not in vars(layer)
    layer.forward = lambda _: "the user's"  # type: ignore[method-assign]
    with overridden([(layer, "forward", lambda _: "ours")]):
        assert layer(x) == "the user's"
    assert layer(x) == "the user's"


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("runtime", ["auto", "stock"])
def test_calls_in_inference_mode(name: str, runtime: str) -> None:
    model = MODELS[name]()
    given, expected = calls_of(model, 3)[2]
    longer = {**given, "max_new_tokens": 30}
    with torch.inference_mode():
        fast = truedraft.accelerate(model, runtime=runtime)
        inference = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        assert torch.equal(fast.generate(**inference), expected)
    assert torch.equal(fast.generate(**longer), model.generate(**longer))
    with torch.inference_mode():
        assert torch.equal(fast.generate(**inference), expected)
    assert torch.equal(fast.generate(**inference), expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("runtime", ["auto", "stock"])
def test_calls_with_another_default_device(name: str, runtime: str) -> None:
    model, (given, expected) = copy.deepcopy(MODELS[name]()), calls_of(MODELS[name](), 3)[1]
    sampled = {**given, "do_sample": True}
    torch.manual_seed(4)
    drawn = model.generate(**sampled)
    try:
        torch.set_default_device("meta")
        fast = truedraft.accelerate(model, runtime=runtime)
        assert torch.equal(fast.generate(**given), expected)
        torch.manual_seed(4)
        assert torch.equal(fast.generate(**sampled), drawn)
    finally:
        torch.set_default_device(None)
    assert torch.equal(fast.generate(**given), expected)


@pytest.mark.parametrize("name", ["llama", "bloom"])
@pytest.mark.parametrize("shape", [(1, 5, 16), (1, 5, 33), (1, 5, 64), (2, 3, 0)])
def test_embeddings_of_another_width_are_refused(name: str, shape: tuple[int, ...]) -> None:
    model = MODELS[name]()
    fast = truedraft.accelerate(model)
    with pytest.raises(Refused, match=f"inputs_embeds is {shape[-1]} wide, .* 32"):
        fast.generate(inputs_embeds=torch.randn(shape), max_new_tokens=3, do_sample=False, pad_token_id=0)
    fitting = {"inputs_embeds": torch.randn(1, 5, 32), **GREEDY}
    assert torch.equal(fast.generate(**fitting), model.generate(**fitting))
