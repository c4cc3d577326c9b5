"""Rows that share too little memory: each has the text that it has alone, all of them end, and memory is given back."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import truedraft
from arrivals import (
    END,
    LONGEST,
    MOST,
    added,
    check,
    check_logits,
    check_nothing_left,
    model,
    pieces_of,
    prompts,
)
from models import ragged
from nets import drafter
from truedraft import continuous, reading, registry, turns
from truedraft.caches import pages, pool
from truedraft.caches.pool import Pool
from truedraft.caches.prefixes import Prefixes
from truedraft.caches.rows import RowCache
from truedraft.continuous import ContinuousEngine
from truedraft.errors import NoRoom, Refused
from truedraft.targets import memory, pooling
from vocabularies import tokenized

ROWS, DRAFTS, UNIT = 7, 24, 4
LOOKUP, RECYCLING = "prompt-lookup:length=6", "token-recycling:nodes=8"
CPU = torch.device("cpu")


@contextmanager
def small_units() -> Iterator[None]:
    """Memory is granted by a few positions, and drafts have few, so that the rows of tiny models compete for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "UNIT", UNIT)
        for module in (pool, reading, continuous):
            patch.setattr(module, "SPARE", UNIT)
        patch.setattr(continuous, "DRAFTS", DRAFTS)
        yield


def least_bytes(fast: Any) -> int:
    """Bytes of keys and values in which one row of LONGEST tokens fits, and no more."""
    with fast.engine(max_rows=1, max_tokens=LONGEST) as engine:
        return int(engine._pool.limit)


def run(names: list[str], seed: str, kind: str = "decoder", runtime: str = "auto", prefix_bytes: int = 0) -> int:
    """Add, step and abort at random; returns how often requests were preempted."""
    rng = random.Random(seed)
    drafts = {name: _drafter(name, kind) for name in names}
    fast = tokenized(model(kind), draft=None, runtime=runtime)
    requests: list[Any] = []
    with small_units(), pieces_of(rng.randint(1, 16)):
        given = dict(max_rows=ROWS, max_tokens=LONGEST, prefix_bytes=prefix_bytes)
        with fast.engine(**given, kv_cache_memory_bytes=least_bytes(fast)) as engine:
            check_logits(engine)
            for _ in range(90):
                event, which, size = rng.randint(0, 9), rng.randrange(6), rng.randint(8, 14)
                if event < 4 and len(requests) < 24:
                    noise = None if event < 2 else size
                    one = added(engine, which, size, noise, drafts[names[len(requests) % len(names)]])
                    requests.append((one, which, size, noise))
                elif event < 9:
                    engine.step()
                elif requests:
                    engine.abort_request(rng.choice(requests)[0])
                check_memory(engine)
            while engine.has_unfinished_requests():
                engine.step()
                check_memory(engine)
            check_nothing_left(engine, drafts.values())
            assert engine.kv_cache_usage == 0 and not engine._pool._granted
            preemptions = engine.preemptions
    for request in requests:
        if request[0].error is not None:
            raise request[0].error
        check(*request, kind)
    return preemptions


def _drafter(name: str, kind: str = "decoder") -> Any:
    """A drafter by its name with knobs, or of the nets."""
    return registry.load("drafters", name) if ":" in name else drafter(name, model(kind))


def check_memory(engine: ContinuousEngine) -> None:
    """What rows occupy is granted, and with the stored prefixes no more than there is."""
    shared, inner = engine._pool, engine._piecewise
    prefixes = engine._prefixes.bytes if engine._prefixes else 0
    assert shared.used + prefixes <= shared.limit
    if inner is not None:
        lengths = engine._target.cache.lengths  # type: ignore[union-attr]
        for row, length in zip(inner.rows, lengths, strict=True):
            assert shared.has(row.request, length)
        for one in inner._reading:
            assert shared.has(one.request, len(one.prompt))


@pytest.mark.parametrize("prefix_bytes", [0, 4000], ids=["", "prefixes"])
@pytest.mark.parametrize("name", ["plain", LOOKUP, RECYCLING, "draft-model", "taps", "noise"])
def test_preempted_requests_have_their_text_alone(name: str, prefix_bytes: int) -> None:
    assert run([name], f"{name} {prefix_bytes}", prefix_bytes=prefix_bytes) > 0


@pytest.mark.parametrize("kind", ["bloom", "qwen3_next", "lfm2"])
def test_preempted_requests_of_an_architecture(kind: str) -> None:
    """Keys that are counted by their index; states, which are computed again with the text."""
    assert run([LOOKUP, "noise", "plain"], kind, kind) > 0


@pytest.mark.parametrize(("kind", "runtime"), [("decoder", "stock"), ("encoder-decoder", "auto")])
def test_requests_that_cannot_be_read_again_wait_for_all_of_their_memory(kind: str, runtime: str) -> None:
    assert run([LOOKUP, "plain", RECYCLING], f"{kind} {runtime}", kind, runtime) == 0


def test_a_model_without_keys() -> None:
    fast = truedraft.accelerate(model("mamba2"), draft=None)
    with fast.engine(ROWS, LONGEST) as engine:
        requests = [(added(engine, i, 9, None, None), i) for i in range(5)]
        while engine.has_unfinished_requests():
            engine.step()
        assert engine.kv_cache_usage == 0
    for request, which in requests:
        check(request, which, 9, None, "mamba2")


def test_a_long_request_is_served_though_short_ones_keep_coming() -> None:
    fast = truedraft.accelerate(model(), draft=None)
    with small_units(), fast.engine(ROWS, LONGEST, kv_cache_memory_bytes=least_bytes(fast)) as engine:
        short = [(added(engine, i % 6, 14, None, None), i % 6) for i in range(5)]
        engine.step()
        ids = torch.tensor(prompts()[3])
        long = engine.add_request(ids, max_new_tokens=LONGEST - len(ids), do_sample=False, eos_token_id=[])
        steps = 0
        while not long.finished:
            if engine.room() > 0 or len(engine._waiting) < 3:
                which = len(short) % 6
                short.append((added(engine, which, 14, None, None), which))
            engine.step()
            steps += 1
            assert steps < 1000
        while engine.has_unfinished_requests():
            engine.step()
    alone = model().generate(ids[None], max_new_tokens=LONGEST - len(ids), do_sample=False, eos_token_id=None)
    assert long.tokens == alone[0, len(ids) :].tolist()
    for request, which in short:
        check(request, which, 14, None)


def test_a_preempted_request_may_be_aborted() -> None:
    fast = truedraft.accelerate(model(), draft=None)
    with small_units(), fast.engine(ROWS, LONGEST, kv_cache_memory_bytes=least_bytes(fast)) as engine:
        requests = [(added(engine, i, 14, i, None), i) for i in range(6)]
        inner: Any = engine._piecewise
        while not inner.preempted:
            engine.step()
        mine = next(one for one, _ in requests if one._request in inner.preempted)
        assert mine.finish_reason is None
        engine.abort_request(mine)
        assert mine.finish_reason == "abort" and mine._request not in inner.preempted
        while engine.has_unfinished_requests():
            engine.step()
    for request, which in requests:
        check(request, which, 14, which)


def test_a_drafter_that_fails_as_its_row_is_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = _drafter(RECYCLING)
    fast = truedraft.accelerate(model(), draft=None)
    with small_units(), fast.engine(ROWS, LONGEST, kv_cache_memory_bytes=least_bytes(fast)) as engine:
        requests = [(added(engine, i, 14, i, failing if i > 2 else None), i) for i in range(6)]

        def fail(row: Any) -> None:
            raise ZeroDivisionError("as planned")

        monkeypatch.setattr(failing, "end", fail)
        while engine.has_unfinished_requests():
            engine.step()
        assert engine.preemptions and not engine._pool._granted
    assert any(isinstance(request.error, ZeroDivisionError) for request, _ in requests)
    for request, which in requests[:3]:
        check(request, which, 14, which)


def test_log_probabilities_of_a_prompt_that_is_read_again() -> None:
    ids = torch.tensor(prompts()[2][:9])
    fast = truedraft.accelerate(model(), draft=None)
    given = dict(max_new_tokens=30, do_sample=False, prompt_logprobs=2, logprobs=2, eos_token_id=[])
    with fast.engine(1, LONGEST) as engine:
        alone = engine.add_request(ids, **given)
        while not alone.finished:
            engine.step()
    with small_units(), pieces_of(3), fast.engine(ROWS, LONGEST, kv_cache_memory_bytes=least_bytes(fast)) as engine:
        requests = [engine.add_request(ids, **given) for _ in range(6)]
        while engine.has_unfinished_requests():
            engine.step()
        assert engine.preemptions > 2
    for request in requests:
        assert request.tokens == alone.tokens
        assert request.prompt_logprobs == alone.prompt_logprobs and request.logprobs == alone.logprobs


def test_short_requests_run_where_one_long_one_would_fill_the_memory() -> None:
    fast = truedraft.accelerate(model(), draft=None)
    with fast.engine(max_rows=40, max_tokens=2000) as one:
        row = one._pool.bytes(2000 + continuous.DRAFTS)
    with fast.engine(max_rows=40, max_tokens=2000, kv_cache_memory_bytes=row) as engine:
        for i in range(40):
            added(engine, i % 6, 14, None, None)
        most = 0
        while engine.has_unfinished_requests():
            engine.step()
            most = max(most, len(engine._running))
        assert most >= 20


def test_slots_that_take_all_of_their_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: there are as many as fit."""
    monkeypatch.setattr(pages, "available", lambda: False)
    fast = truedraft.accelerate(model(), draft=None)
    with fast.engine(1, LONGEST) as engine:
        row = engine._pool.limit
    with fast.engine(ROWS, LONGEST, kv_cache_memory_bytes=3 * row - 1) as engine:
        assert engine.max_rows == engine._target.reserved[0] == 2
        requests = [(added(engine, i, 9, None, None), i) for i in range(5)]
        while engine.has_unfinished_requests():
            engine.step()
    for request, which in requests:
        check(request, which, 9, None)


def test_memory_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = truedraft.accelerate(model(), draft=None)
    row = least_bytes(fast)
    with pytest.raises(NoRoom, match=rf"48 tokens.* needs {row:,} bytes.*kv_cache_memory_bytes={row - 1:,}: lower"):
        fast.engine(ROWS, LONGEST, kv_cache_memory_bytes=row - 1)
    with pytest.raises(NoRoom, match=r"kv_cache_memory_bytes=1,152,.*: memory_utilization=0\.8 leaves"):
        fast.engine(ROWS, LONGEST, kv_cache_memory_bytes=1 << 60)
    for wrong in ({"kv_cache_memory_bytes": 0}, {"kv_cache_memory_bytes": 1.5}, {"memory_utilization": 0},
                  {"memory_utilization": 1.1}, {"memory_utilization": True}):  # fmt: skip
        with pytest.raises(Refused, match=next(iter(wrong))):
            fast.engine(ROWS, LONGEST, **wrong)  # type: ignore[arg-type]
    one = fast.engine(ROWS, LONGEST, kv_cache_memory_bytes=row)
    with one as engine, pytest.raises(Refused, match="max_tokens=48"):
        engine.add_request(torch.tensor([prompts()[0]]), max_new_tokens=48)
    total, free = psutil.virtual_memory().total, 3 * row
    monkeypatch.setattr(memory, "free_memory", lambda device: round(0.25 * total) + free)
    with fast.engine(ROWS, LONGEST, memory_utilization=0.75) as engine:
        assert engine._pool.limit == pytest.approx(free, abs=2)
    monkeypatch.setattr(memory, "free_memory", lambda device: round(0.25 * total) + row - 9)
    with pytest.raises(NoRoom, match=r"memory_utilization=0\.75 leaves [\d,]+: lower max_tokens"):
        fast.engine(ROWS, LONGEST, memory_utilization=0.75)


def test_the_limit_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"memory.max": "1000000\n", "memory.current": "700000\n", "memory.stat": "anon 5\ninactive_file 1000\n"}
    for name, text in kept.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "CONTAINER", tmp_path)
    assert memory.free_memory(CPU) == 301_000
    assert memory.spare_memory(CPU, 0.9) == 201_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_memory(CPU) > 301_000


def test_prefixes_give_way_to_rows() -> None:
    cache = RowCache(1, 2, 64)
    cache.layers[0].allocate(1, 4, torch.float32, CPU)
    prefixes = Prefixes(cache, 10_000)
    each = cache.bytes_per_position
    shared = Pool(128 * each, each, prefixes)
    cache.lengths.extend([40, 0])
    prefixes.store("", [*range(40)], 0)
    assert prefixes.bytes == 40 * (each + 8)
    assert shared.grant("one", 64) and prefixes.bytes == 40 * (each + 8)
    assert not shared.grant("two", 65) and prefixes.bytes > 0, "nothing is dropped for what cannot be"
    assert shared.grant("two", 33) and prefixes.bytes == 0 and prefixes.limit == 0
    shared.free("two")
    assert prefixes.limit == 64 * each and shared.used == 64 * each and shared.most == 128 * each
    assert not shared.grant("two", 64, spare=1) and shared.grant("two", 64, spare=0)


def resident(cache: RowCache) -> int:
    """Bytes of memory of the mappings that the keys and values of a cache are in."""
    held = [(kept.data_ptr(), kept.data_ptr() + kept.nbytes) for layer in cache.layers for kept in layer.kept]
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(number, 16) for number in mapping.groups())
            ours = any(first < end and start < last for first, last in held)
        elif ours and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.mark.skipif(not pages.available(), reason="memory is taken at once on this system")
def test_slots_take_memory_as_rows_grow_and_give_it_back() -> None:
    layers, capacity = 4, 1 << 16
    cache = RowCache(layers, 8, capacity)
    for layer in cache.layers:
        layer.allocate(2, 64, torch.float32, CPU)
    of_slot, before = cache.bytes_per_position * capacity, resident(cache)
    assert before < of_slot / 8, "room alone takes no memory"

    def write(slot: int, length: int, value: float) -> None:
        for layer in cache.layers:
            layer.keys[slot, :, :length] = layer.values[slot, :, :length] = value
        cache.lengths[slot] = length

    cache.lengths.extend([0, 0, 0])
    for slot, length in enumerate((capacity, capacity // 4, capacity // 2)):
        write(slot, length, slot + 1.0)
    held = resident(cache) - before
    assert 1.74 * of_slot < held < 1.76 * of_slot
    cache.release(0)  # the last one moves here
    assert 0.74 * of_slot < resident(cache) - before < 0.76 * of_slot
    for layer in cache.layers:
        for kept in layer.kept:
            assert (kept[0, :, : capacity // 2] == 3).all() and (kept[1, :, : capacity // 4] == 2).all()
            assert (kept[2] == 0).all() and kept[0, :, capacity // 2 :].isfinite().all()
    cache.release(1)
    cache.release(0)
    assert resident(cache) - before < of_slot / 100
    slot = cache.open()
    for layer in cache.layers:
        layer.keys[slot, :, : capacity // 2] = 1.0
    cache.discard(slot)
    assert resident(cache) - before < of_slot / 100


@pytest.mark.skipif(not pages.available(), reason="memory is taken at once on this system")
@pytest.mark.parametrize("sizes", [(3, 2, 2900, 5), (2, 1, 3000, 17), (5, 3, 1024, 8)])
def test_nothing_that_is_kept_is_given_back(sizes: tuple[int, ...]) -> None:
    """Of sizes that are no multiples of a page too."""
    slots, heads, capacity, size = sizes
    own = pages.Pages(sizes, torch.float32)
    own.tensor[:] = torch.arange(own.tensor.numel()).view(sizes) + 1
    before, rng = own.tensor.clone(), random.Random(0)
    row = heads * capacity * size
    for _ in range(50):
        first = rng.randrange(slots * row)
        last = rng.randint(first, slots * row)
        own.tensor[:] = before
        own.give_back(first, last)
        flat, was = own.tensor.flatten(), before.flatten()
        assert torch.equal(flat[:first], was[:first]) and torch.equal(flat[last:], was[last:])
        assert ((flat[first:last] == 0) | (flat[first:last] == was[first:last])).all()
    own.tensor[:] = before
    own.give_back(0, slots * row)
    assert (own.tensor == 0).all()


def test_too_little_address_space() -> None:
    with pytest.raises(NoRoom, match="no address space for"):
        pages.Pages((1 << 30, 1 << 30), torch.float32)


def test_lack_names_what_to_change() -> None:
    assert "--max-model-len" in pooling.lack(100, 1000, 999, None, 0.8)


@contextmanager
def little_memory(fast: Any, rows: float, drafts: int) -> Iterator[list[int]]:
    """Free memory for so many rows of a call; the bytes that each pass left granted."""
    used: list[int] = []
    step, most = turns.TurnsEngine.step, prompts_in_a_batch()["input_ids"].shape[1] + MOST
    with small_units(), pytest.MonkeyPatch.context() as patch:
        row = pool.units(most + drafts) * fast.target.position_bytes

        def counted(engine: turns.TurnsEngine) -> Any:
            advanced = step(engine)
            used.append(engine._pool.used)
            assert engine._pool.used <= rows * row and engine.target.cache is not None
            return advanced

        patch.setattr(turns, "UTILIZATION", 1.0)
        patch.setattr(turns.TurnsEngine, "step", counted)
        patch.setattr(memory, "free_memory", lambda device: int(rows * row))
        yield used
        assert not used or used[-1] == 0, "all of it is given back"


def prompts_in_a_batch() -> dict[str, torch.Tensor]:
    return dict(ragged(model(), 6, seed=2))


@pytest.mark.parametrize(("draft", "rows"), [(None, 1.0), (LOOKUP, 2.4), (RECYCLING, 3.7)])
@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True, "seed": 5, "top_k": 20}])
def test_rows_of_a_call_run_in_turns(
    draft: str | None, rows: float, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**prompts_in_a_batch(), "max_new_tokens": MOST, "pad_token_id": 0, "eos_token_id": END, **settings}
    fast = truedraft.accelerate(model(), draft=draft)
    expected = truedraft.accelerate(model(), draft=None).generate(**given)
    if not settings["do_sample"]:
        assert torch.equal(model().generate(**given), expected)
    assert torch.equal(fast.generate(**given), expected)
    preempted, passes = [], []
    own = reading.PiecewiseEngine._preempt
    monkeypatch.setattr(reading.PiecewiseEngine, "_preempt", lambda *given: (preempted.append(given), own(*given))[1])
    with little_memory(fast, rows, fast.drafter.width) as used:
        assert torch.equal(fast.generate(**given, on_pass=passes.append), expected)
    assert used and (rows == 1.0 or preempted), "memory was lacking"
    assert "in turns" in str(fast.report()) and passes == fast.report().passes
    emitted = [0] * len(expected)
    for each in (each for one in passes for each in one.emitted):
        emitted[each.row] += len(each.tokens)
    new = [[*row, END].index(END) for row in expected[:, given["input_ids"].shape[1] :].tolist()]
    assert emitted == [min(count + 1, MOST) for count in new]


def test_rows_that_cannot_run_in_turns_are_refused() -> None:
    given = {**prompts_in_a_batch(), "max_new_tokens": MOST, "pad_token_id": 0}
    fast = truedraft.accelerate(model(), draft=None)
    with little_memory(fast, 0.9, 0), pytest.raises(NoRoom, match="the KV cache of 1 rows"):
        fast.generate(**given)
    with little_memory(fast, 2.5, 0):
        with pytest.raises(NoRoom, match="the KV cache of 6 rows"):  # torch's own stream of noise
            fast.generate(**given, do_sample=True)
        with pytest.raises(NoRoom, match="the KV cache of 6 rows"):  # they advance together
            fast.generate(**given, return_dict_in_generate=True, output_scores=True)


def test_a_call_in_turns_that_fails_or_is_interrupted_leaves_nothing() -> None:
    given = {**prompts_in_a_batch(), "max_new_tokens": MOST, "pad_token_id": 0}
    fast = truedraft.accelerate(model(), draft=LOOKUP)
    expected = fast.generate(**given)
    for raised in (ValueError, KeyboardInterrupt):

        def fails(done: Any, raised: Any = raised) -> None:
            raise raised("here")

        with little_memory(fast, 2.4, fast.drafter.width) as used:
            with pytest.raises(raised):
                fast.generate(**given, on_pass=fails)
            used.clear()
        assert fast.target.cache is None and torch.equal(fast.generate(**given), expected)
