"""Prompts read in pieces between passes, and reused prefixes: texts and bits are those of whole prompts, read anew."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import truedraft
from arrivals import END, LONGEST, added, check, check_logits, check_nothing_left, model, pieces_of, prompts
from models import ARCHITECTURES, V, tiny
from nets import drafter
from truedraft import reading
from truedraft.continuous import WHOLE, ContinuousEngine
from truedraft.errors import Refused
from truedraft.reading import PieceSize
from truedraft.runtime.forward import SPANS
from truedraft.runtime.graphs import GraphPass
from truedraft.targets.decoder import DecoderTarget

ENOUGH = 10_000_000  # bytes for all prefixes of a test
Bits = dict[tuple[int, int], torch.Tensor]  # (request, step) -> logits


def families(seed: int, vocabulary: int = V) -> list[list[int]]:
    """Twelve texts that begin with one of two texts, or are continued by each other."""
    rng = random.Random(seed)
    stems = [[rng.randrange(6, vocabulary) for _ in range(20)] for _ in range(2)]
    return [
        stems[i % 2][: rng.randint(3, 20)] + [rng.randrange(6, vocabulary) for _ in range(rng.randint(1, 9))]
        for i in range(12)
    ]


def bits(
    target: PreTrainedModel, rng: random.Random | None, piece: int | None, runtime: str = "auto", **settings: Any
) -> tuple[Bits, list[Any]]:
    """The logits of every token of twelve requests, and the requests: at random times in four rows with some of them
    aborted, or without `rng` one by one."""
    logits: Bits = {}
    fast = truedraft.accelerate(target, draft=None, runtime=runtime)
    requests: list[Any] = []
    with pieces_of(piece), fast.engine(max_rows=4 if rng else 1, max_tokens=LONGEST, **settings) as engine:
        inner: Any = engine._engine
        decide = inner._decide

        def noted(request: Any, rows: Any, trees: Any, scores: Any) -> Any:
            number = next(i for i, one in enumerate(requests) if one._request is request)
            logits[number, rows[0].step] = scores.logits[0, 0].clone()
            return decide(request, rows, trees, scores)

        inner._decide = noted
        for i, text in enumerate(families(0)):
            requests.append(
                engine.add_request(torch.tensor(text), max_new_tokens=6, do_sample=False, namespace="ab"[i % 3 == 0])
            )
            for _ in range(rng.randint(0, 16) if rng else 100):
                engine.step()
            if rng and rng.random() < 0.2:
                engine.abort_request(rng.choice(requests))
        while engine.has_unfinished_requests():
            engine.step()
        check_nothing_left(engine, [])
    return logits, requests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("piece", "architecture"), [(1, "llama"), (3, "mistral"), (16, "gemma2")])
def test_logits_are_the_same_bits_in_any_pieces_and_behind_reused_prefixes(
    dtype: torch.dtype, piece: int, architecture: str
) -> None:
    target = tiny(architecture, dtype)
    expected, alone = bits(target, None, None)
    assert len(expected) == 12 * 6 and not any(request.cached_tokens for request in alone)
    for shared in (False, True):
        found, requests = bits(target, random.Random(piece), piece, prefix_bytes=ENOUGH, share_prefixes=shared)
        assert all(torch.equal(found[key], expected[key]) for key in found) and len(found) > 40
        assert sum(request.cached_tokens for request in requests) > 40


def test_logits_of_the_stock_runtime_are_the_same_bits_behind_reused_prefixes() -> None:
    """Passes of one row: there a pass's own width changes no bits, and only whole spans of prompts are reused."""
    target = tiny("llama", torch.float32)
    expected, _ = bits(target, None, 16, "stock")
    found, requests = bits(target, None, 5, "stock", prefix_bytes=ENOUGH)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    reused = [request.cached_tokens for request in requests]
    assert sum(reused) > 20 and not any(n % 4 for n in reused)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_architecture_reads_pieces_by_its_own_forward(architecture: str) -> None:
    target = tiny(architecture, torch.float32)
    fast = truedraft.accelerate(target, draft=None, runtime="stock")
    texts = [torch.tensor([text]) for text in families(1)[:3]]
    with pieces_of(4), fast.engine(max_rows=2, max_tokens=LONGEST, prefix_bytes=ENOUGH) as engine:
        requests = [engine.add_request(text, max_new_tokens=8, do_sample=False) for text in texts]
        while engine.has_unfinished_requests():
            engine.step()
    for text, request in zip(texts, requests, strict=True):
        assert request.tokens == target.generate(text, max_new_tokens=8, do_sample=False)[0, text.shape[1] :].tolist()


def test_dummy_rows_of_captured_passes_leave_rows_being_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows run in slots of which a captured pass reads four; the fourth is being read."""
    monkeypatch.setattr(DecoderTarget, "_runner", lambda self, _: (GraphPass(self._stock(), lambda run: run), None))
    fast = truedraft.accelerate(model(), draft=None)
    with pieces_of(4), fast.engine(max_rows=4, max_tokens=LONGEST) as engine:
        check_logits(engine)
        requests = [(added(engine, i, 14, None, None), i, 14, None) for i in (0, 1, 2)]
        while not all(request.tokens for request, *_ in requests):
            engine.step()
        requests.append((added(engine, 5, 8, None, None), 5, 8, None))
        while engine.has_unfinished_requests():
            engine.step()
    for request in requests:
        assert request[0].result(), "raises what the check of logits raised"
        check(*request)


def counted_pieces(engine: ContinuousEngine) -> list[int]:
    """The positions of each piece that the engine reads, as it reads them."""
    sizes: list[int] = []
    inner: Any = engine._engine
    read = inner._read_pieces

    def noted(pieces: Any, taps: Any) -> Any:
        sizes.append(sum(map(len, pieces)))
        return read(pieces, taps)

    inner._read_pieces = noted
    return sizes


@cache
def far_sighted() -> PreTrainedModel:
    """A tiny model for prompts of any length."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES["llama"], "max_position_embeddings", 2048)
        return tiny.__wrapped__("llama", torch.float32)  # type: ignore[attr-defined, no-any-return]


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(6, V, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("length", [1, 17, 700])
def test_a_running_row_waits_for_one_piece_at_most(length: int) -> None:
    fast = truedraft.accelerate(far_sighted(), draft=None)
    with fast.engine(max_rows=3, max_tokens=1000, piece_seconds=1e-9) as engine:
        sizes = counted_pieces(engine)
        running = engine.add_request(prompt(5), max_new_tokens=400, do_sample=False)
        while not running.tokens:
            engine.step()
        late = [engine.add_request(prompt(length, i), max_new_tokens=4, do_sample=False) for i in (1, 2)]
        while not all(request.finished for request in late):
            tokens, read = len(running.tokens), len(sizes)
            for _ in range(2):
                engine.step()
            assert len(running.tokens) > tokens and len(sizes) <= read + 1
        assert sum(sizes) == 5 + 2 * length and max(sizes) <= reading.LEAST


def test_where_nothing_runs_a_piece_is_as_large_as_a_call() -> None:
    fast = truedraft.accelerate(far_sighted(), draft=None)
    with fast.engine(max_rows=1, max_tokens=1200, piece_seconds=1e-9) as engine:
        sizes = counted_pieces(engine)
        request = engine.add_request(prompt(1100), max_new_tokens=1, do_sample=False)
        assert engine.step() == engine.step() == [] and engine.report().reading == 1 and not request.tokens
        assert engine.step() == [request] and sizes == [512, 512, 76]


def test_a_short_prompt_begins_soon_and_a_long_one_is_not_starved() -> None:
    fast = truedraft.accelerate(far_sighted(), draft=None)
    with pieces_of(16), fast.engine(max_rows=3, max_tokens=1000) as engine:
        long = engine.add_request(prompt(640), max_new_tokens=2, do_sample=False)
        engine.step()
        short = engine.add_request(prompt(24, 1), max_new_tokens=2, do_sample=False)
        for _ in range(3):
            engine.step()
        assert short.tokens and not long.tokens, "a short prompt has half of each piece"
        steps = 0
        while not long.tokens:
            if engine.room() > 0:
                engine.add_request(prompt(24, steps), max_new_tokens=2, do_sample=False)
            engine.step()
            steps += 1
        assert steps < 2 * 640 / 8, "the oldest prompt has the other half, whatever else arrives"


def test_size_of_pieces_follows_their_time() -> None:
    size = PieceSize(0.1)
    assert size.positions == reading.LEAST
    for _ in range(8):
        size.learn(size.positions, size.positions * 0.001)
    assert size.positions == 100
    size.learn(3, 0.05)
    assert size.positions == 100, "a short piece has other costs per position"
    size.learn(100, 0.4)
    assert size.positions == 25
    size.learn(512, 0.512)
    assert size.positions == 100
    size.learn(100, 60.0)
    assert size.positions == reading.LEAST


def reused(first: Any, second: Any, **settings: Any) -> int:
    """Tokens of a prompt that a request reuses of one with the same prompt; `first` and `second`: their arguments."""
    fast = truedraft.accelerate(model(), draft=None)
    with pieces_of(8), fast.engine(max_rows=2, max_tokens=LONGEST, **settings) as engine:
        requests = [added(engine, 5, 4, None, None, **first)]
        while engine.has_unfinished_requests():
            engine.step()
        requests.append(added(engine, 5, 4, None, None, **second))
        while engine.has_unfinished_requests():
            engine.step()
        for request in requests:
            check(request, 5, 4, None)
        assert requests[0].cached_tokens == 0
        assert engine.report().totals.cached_tokens == requests[1].cached_tokens == requests[1].report().cached_tokens
        assert (engine.report().prefix_bytes > 0) == ("prefix_bytes" in settings)
        return requests[1].cached_tokens


def test_prefixes_are_reused_within_a_namespace_alone() -> None:
    whole, a, b = len(prompts()[5]) - 1, {"namespace": "a"}, {"namespace": "b"}
    assert reused(a, a, prefix_bytes=ENOUGH) == whole
    assert reused(a, b, prefix_bytes=ENOUGH) == reused(a, {}, prefix_bytes=ENOUGH) == 0
    assert reused(a, b, prefix_bytes=ENOUGH, share_prefixes=True) == whole
    assert reused(a, a) == 0


@pytest.mark.parametrize("runtime", ["auto", "stock"])
def test_tokens_of_outputs_and_of_half_read_prompts_are_reused(runtime: str) -> None:
    """By the model's own forward whole spans of 4 positions of prompts alone, which have the same bits again."""
    fast = truedraft.accelerate(model(), draft=None, runtime=runtime)
    with pieces_of(7), fast.engine(max_rows=2, max_tokens=LONGEST, prefix_bytes=ENOUGH) as engine:
        first = added(engine, 0, 9, None, None)
        while not first.finished:
            engine.step()
        longer = torch.tensor([*prompts()[0], *first.tokens, 7])
        second = engine.add_request(longer, max_new_tokens=3, do_sample=False, eos_token_id=END, pad_token_id=0)
        while not second.finished:
            engine.step()
        if runtime == "auto":
            assert second.cached_tokens == len(longer) - 2, "all but the last emitted token, which had no pass, and 7"
        else:
            assert second.cached_tokens == len(prompts()[0]) // 4 * 4
        aborted = added(engine, 4, 9, None, None)
        engine.step()
        engine.abort_request(aborted)
        again = added(engine, 4, 9, None, None)
        while not again.finished:
            engine.step()
        assert again.cached_tokens == (7 if runtime == "auto" else 4)
        check(again, 4, 9, None)


@pytest.mark.parametrize("kind", ["hidden states", "embeddings"])
def test_prompts_that_are_computed_whole(kind: str) -> None:
    fast = truedraft.accelerate(model(), draft=None)
    given: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    if kind == "hidden states":
        given["draft"] = drafter("taps", model())
    with pieces_of(6), fast.engine(max_rows=1, max_tokens=LONGEST, prefix_bytes=ENOUGH) as engine:
        requests = []
        for _ in range(2):
            ids = torch.tensor([prompts()[5]])
            if kind == "embeddings":
                given["inputs_embeds"] = model().get_input_embeddings()(ids).detach()
            requests.append(engine.add_request(ids, **given))
            while engine.has_unfinished_requests():
                engine.step()
    assert requests[0].tokens == requests[1].tokens and not requests[1].cached_tokens
    assert WHOLE in requests[0].report().notes


def test_encoder_decoders_read_whole_and_reuse_nothing() -> None:
    fast = truedraft.accelerate(model("encoder-decoder"), draft=None)
    with fast.engine(max_rows=1, max_tokens=LONGEST, prefix_bytes=ENOUGH) as engine:
        for _ in range(2):
            request = added(engine, 3, 6, None, None)
            while not request.finished:
                engine.step()
            check(request, 3, 6, None, "encoder-decoder")
            assert request.cached_tokens == 0


def test_sizes_that_are_refused() -> None:
    fast = truedraft.accelerate(model(), draft=None)
    for wrong in ({"piece_seconds": 0}, {"piece_seconds": "1"}, {"prefix_bytes": -1}, {"prefix_bytes": 1.5}):
        with pytest.raises(Refused, match=next(iter(wrong))):
            fast.engine(max_rows=1, max_tokens=LONGEST, **wrong)


@pytest.fixture(autouse=True)
def spans() -> Iterator[None]:
    before = dict(SPANS)
    yield
    assert before == SPANS
