"""Prompts that are read at the same time and begin with the same tokens: these are read once, and no bit changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import truedraft
from arrivals import LONGEST, added, check, check_nothing_left, model, pieces_of
from models import tiny
from nets import drafter
from test_prefixes import common
from test_reading import ENOUGH, counted_pieces, families, far_sighted, prompt
from truedraft import reading
from truedraft.continuous import ContinuousEngine
from truedraft.engine_request import EngineRequest

LONG: dict[str, Any] = {"max_tokens": 1200, "prefix_bytes": ENOUGH}


def asked(engine: ContinuousEngine, ids: torch.Tensor, tokens: int = 3, **other: Any) -> EngineRequest:
    return engine.add_request(ids, max_new_tokens=tokens, do_sample=False, **other)


def finish(engine: ContinuousEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()
    check_nothing_left(engine, [])


def check_text(request: EngineRequest, ids: torch.Tensor) -> None:
    plain = far_sighted().generate(ids[None], max_new_tokens=request._row.room, do_sample=False)
    assert request.result() == plain[0, len(ids) :].tolist()


def test_eight_prompts_with_the_same_tokens_are_read_once() -> None:
    fast = truedraft.accelerate(far_sighted(), draft=None)
    with fast.engine(max_rows=8, **LONG) as engine:
        sizes, ids = counted_pieces(engine), prompt(500)
        requests = [asked(engine, ids) for _ in range(8)]
        finish(engine)
        assert sum(sizes) == 500 + 7, "the last token, whose logits are required, is read eight times"
        assert [request.cached_tokens for request in requests] == [0, *[499] * 7]
        assert engine.report().totals.cached_tokens == 7 * 499 == 7 * requests[1].report().cached_tokens
    for request in requests:
        check_text(request, ids)


@pytest.mark.parametrize("runtime", ["auto", "stock"])
@pytest.mark.parametrize("seed", range(4))
def test_each_prompt_loads_all_that_older_ones_have_in_common_with_it(seed: int, runtime: str) -> None:
    """Whatever is being read, has been read or waits when it arrives. The oracle compares lists of tokens."""
    rng, granularity, texts = random.Random(seed), 1 if runtime == "auto" else 4, families(seed)
    texts = rng.choices(texts, k=14)
    fast = truedraft.accelerate(tiny("llama", torch.float32), draft=None, runtime=runtime)
    with pieces_of(rng.randint(4, 9)), fast.engine(max_rows=5, max_tokens=LONGEST, prefix_bytes=ENOUGH) as engine:
        sizes, requests = counted_pieces(engine), []
        for text in texts:
            requests.append(asked(engine, torch.tensor(text), 1))
            for _ in range(rng.randint(0, 2)):
                engine.step()
        finish(engine)
    for i, (request, text) in enumerate(zip(requests, texts, strict=True)):
        most = max((common(text[:-1], older[:-1]) for older in texts[:i]), default=0)
        assert request.cached_tokens == most - most % granularity
    assert sum(sizes) == sum(len(text) - request.cached_tokens for text, request in zip(texts, requests, strict=True))


@pytest.mark.parametrize(("settings", "follows"), [({}, False), ({"share_prefixes": True}, True)])
def test_prompts_of_other_namespaces_are_followed_where_prefixes_are_shared(
    settings: dict[str, Any], follows: bool
) -> None:
    fast = truedraft.accelerate(far_sighted(), draft=None)
    with fast.engine(max_rows=3, **LONG, **settings) as engine:
        sizes, ids = counted_pieces(engine), prompt(200)
        requests = [asked(engine, ids, namespace=namespace) for namespace in "abb"]
        engine.step()
        assert [bool(request.tokens) for request in requests] == [True, not follows, False], "one call reads 512"
        finish(engine)
        assert [request.cached_tokens for request in requests] == ([0, 199, 199] if follows else [0, 0, 199])
        assert sum(sizes) == (202 if follows else 401)


def test_a_short_prompt_begins_once_a_long_older_one_has_been_read_so_far() -> None:
    """It waits no longer than it would have taken to read it, although others have less left than the long one."""
    fast = truedraft.accelerate(far_sighted(), draft=None)
    with pieces_of(16), fast.engine(max_rows=5, **LONG) as engine:
        sizes = counted_pieces(engine)
        oldest = asked(engine, prompt(1100, 5))
        long = asked(engine, prompt(1000))
        engine.step()
        short = asked(engine, torch.cat([prompt(1000)[:64], prompt(4, 1)]))
        others = [asked(engine, prompt(600, seed)) for seed in (6, 7)]
        while not short.tokens:
            engine.step()
        assert short.cached_tokens == 64 and not any(one.tokens for one in (oldest, long, *others))
        assert sum(sizes) <= 2 * (68 + 32), "the oldest has half of each piece"
        finish(engine)
    check_text(short, torch.cat([prompt(1000)[:64], prompt(4, 1)]))
    check_text(long, prompt(1000))


def test_prompts_follow_prompts_that_follow() -> None:
    texts = [prompt(300)]
    for seed, start in ((1, 100), (2, 250), (3, 200)):
        texts.append(torch.cat([texts[-1][:start], prompt(100, seed)]))
    fast = truedraft.accelerate(far_sighted(), draft=None)
    with pieces_of(32), fast.engine(max_rows=4, **LONG) as engine:
        requests = [asked(engine, text) for text in texts]
        finish(engine)
    assert [request.cached_tokens for request in requests] == [0, 100, 199, 200]
    for request, text in zip(requests, texts, strict=True):
        check_text(request, text)


def test_less_than_the_least_gain_is_not_waited_for() -> None:
    fast = truedraft.accelerate(far_sighted(), draft=None)
    for length, cached in ((reading.GAIN - 1, 0), (reading.GAIN, reading.GAIN)):
        with fast.engine(max_rows=2, **LONG) as engine:
            asked(engine, prompt(700))
            other = asked(engine, torch.cat([prompt(700)[:length], prompt(40, 1)]))
            finish(engine)
            assert other.cached_tokens == cached


@pytest.mark.parametrize("leaves", ["aborted", "failed"])
def test_prompts_go_on_where_the_one_that_they_follow_leaves(leaves: str) -> None:
    class Failing(truedraft.Drafter):
        width = 1

        def start(self, rows: Any) -> None:
            raise RuntimeError("no drafts")

        def propose(self, rows: Any, budget: Any) -> Any:
            raise AssertionError

    fast, ids = truedraft.accelerate(far_sighted(), draft=None), prompt(200)
    with pieces_of(40), fast.engine(max_rows=3, **LONG) as engine:
        sizes = counted_pieces(engine)
        first = asked(engine, ids, draft=Failing() if leaves == "failed" else None)
        others = [asked(engine, ids) for _ in range(2)]
        engine.step()
        engine.step()
        assert sum(sizes) == 80
        if leaves == "aborted":
            engine.abort_request(first)
        finish(engine)
        cached = [request.cached_tokens for request in others]
        if leaves == "aborted":
            assert cached == [80, 199] and sum(sizes) == 201
        else:
            assert first.finish_reason == "error" and cached == [0, 199] and sum(sizes) == 401
    for request in others:
        check_text(request, ids)


def test_prompts_wait_in_vain_where_nothing_can_be_stored() -> None:
    fast, ids = truedraft.accelerate(far_sighted(), draft=None), prompt(200)
    with pieces_of(40), fast.engine(max_rows=3, max_tokens=300, prefix_bytes=1) as engine:
        requests = [asked(engine, ids) for _ in range(3)]
        finish(engine)
    for request in requests:
        check_text(request, ids)
        assert request.cached_tokens == 0


@pytest.mark.parametrize("kind", ["hidden states", "embeddings"])
def test_prompts_that_are_computed_whole_follow_none(kind: str) -> None:
    """Prompts of token ids follow those whose hidden states are required, since these have the same bits."""
    fast, which = truedraft.accelerate(model(), draft=None), 5
    with pieces_of(6), fast.engine(max_rows=3, max_tokens=LONGEST, prefix_bytes=ENOUGH) as engine:
        ids = torch.tensor([families(0)[which]])
        other: dict[str, Any] = {"draft": drafter("taps", model())}
        if kind == "embeddings":
            other = {"inputs_embeds": model().get_input_embeddings()(ids).detach()}
        requests = [asked(engine, ids, 5, **given) for given in ({}, other, {})]
        finish(engine)
        assert [request.cached_tokens for request in requests] == [0, 0, ids.shape[1] - 1]
        assert requests[0].tokens == requests[1].tokens == requests[2].tokens


@pytest.mark.parametrize("seed", range(6))
def test_bursts_with_aborts_have_their_texts_alone(seed: int) -> None:
    rng = random.Random(seed)
    fast, requests = truedraft.accelerate(model(), draft=None), []
    shared, room = rng.random() < 0.3, rng.choice((ENOUGH, 5_000))
    engine = fast.engine(max_rows=6, max_tokens=LONGEST, prefix_bytes=room, share_prefixes=shared)
    with pieces_of(rng.randint(1, 12)), engine:
        for _ in range(30):
            which, steps, sampled = rng.choice((0, 0, 1, 5)), rng.randint(1, 12), rng.choice((None, 3))
            draft, namespace = rng.choice((None, "token-recycling")), rng.choice("aab")
            requests.append((added(engine, which, steps, sampled, draft, namespace=namespace), which, steps, sampled))
            for _ in range(rng.choice((0, 0, 1, 4))):
                engine.step()
            if rng.random() < 0.3:
                engine.abort_request(rng.choice(requests[-4:])[0])
        finish(engine)
    for one in requests:
        check(*one)
    assert sum(request.cached_tokens for request, *_ in requests) > 30
