"""Stored prefixes against lists of the stored texts: entries that are a function of the tokens so far, and bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from truedraft.caches.prefixes import Edge, Prefixes
from truedraft.caches.rows import RowCache

CPU = torch.device("cpu")
LAYERS, HEADS, SIZE, SLOTS, CAPACITY = 2, 2, 3, 3, 40
PER_TOKEN = LAYERS * 2 * HEADS * SIZE * 4 + 8
Text = list[int]


def new_cache() -> RowCache:
    cache = RowCache(LAYERS, SLOTS, CAPACITY)
    for layer in cache.layers:
        layer.allocate(HEADS, SIZE, torch.float32, CPU)
    return cache


def entry(text: Text, layer: int) -> float:
    """The number that keys of a layer have at the last position of a text; values have its negative."""
    return float(hash((*text, layer)) % 1_000_003)


def write(cache: RowCache, slot: int, text: Text, first: int = 0) -> None:
    """The entries of a text in a slot from a position on, as passes write them; what lies behind is junk."""
    for i, layer in enumerate(cache.layers):
        layer.keys[slot, :, len(text) :] = layer.values[slot, :, len(text) :] = -7.5
        for at in range(first, len(text)):
            number = entry(text[: at + 1], i)
            layer.keys[slot, :, at], layer.values[slot, :, at] = number, -number


def check(cache: RowCache, slot: int, text: Text) -> None:
    for i, layer in enumerate(cache.layers):
        expected = [entry(text[: at + 1], i) for at in range(len(text))]
        for head in range(HEADS):
            for column in range(SIZE):
                assert layer.keys[slot, head, : len(text), column].tolist() == expected
                assert layer.values[slot, head, : len(text), column].tolist() == [-x for x in expected]


def random_text(rng: random.Random) -> Text:
    """Texts of two tokens have long common prefixes."""
    return [rng.choice((1, 1, 1, 2)) for _ in range(rng.randint(1, 16))]


def common(one: Text, other: Text) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def edges(prefixes: Prefixes) -> Iterator[Edge]:
    left = list(prefixes._roots.values())
    while left:
        edge = left.pop()
        left += edge.children.values()
        if edge.parent is not None:
            yield edge


def check_memory(prefixes: Prefixes) -> None:
    """`bytes` are those of the storage that is alive, and within the limit; every edge is among the recent ones."""
    every = list(edges(prefixes))
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for e in every for t in (e.tokens, *e.entries)
    }
    assert sum(storages.values()) == prefixes.bytes <= prefixes.limit
    assert set(every) == set(prefixes._recent)
    order = list(prefixes._recent)
    for edge in every:
        assert edge.parent in prefixes._roots.values() or order.index(edge) < order.index(edge.parent)


def store(cache: RowCache, prefixes: Prefixes, namespace: str, text: Text, running: bool) -> None:
    """Store a text from a row that runs, or whose prompt is being read."""
    slot = cache.open()
    cache.cursor.reading[slot] = len(text)
    if running:
        slot = cache.activate(slot)
    write(cache, slot, text)
    prefixes.store(namespace, [*text, 3, 3], slot)  # tokens without entries are not stored
    cache.release(slot) if running else cache.discard(slot)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("granularity", [1, 3])
def test_the_longest_stored_prefix_is_loaded(seed: int, granularity: int) -> None:
    rng, cache = random.Random(seed), new_cache()
    shared = seed == 7
    prefixes = Prefixes(cache, 10**6, shared, granularity)
    stored: dict[str, list[Text]] = {"a": [], "b": []}
    for _ in range(60):
        namespace, text = rng.choice("ab"), random_text(rng)
        if rng.random() < 0.5:
            store(cache, prefixes, namespace, text, rng.random() < 0.5)
            stored[namespace].append(text[: len(text) - len(text) % granularity])
        else:
            known = stored["a"] + stored["b"] if shared else stored[namespace]
            most = max((common(text[:-1], other) for other in known), default=0)
            slot = cache.open()
            write(cache, slot, [9] * CAPACITY)
            assert prefixes.load(namespace, text, slot) == cache.cursor.reading[slot] == most - most % granularity
            check(cache, slot, text[: cache.cursor.reading[slot]])
            cache.discard(slot)
        check_memory(prefixes)
    prefixes.clear()
    assert prefixes.bytes == 0 and not list(edges(prefixes))


@pytest.mark.parametrize("seed", range(4))
def test_bytes_are_bounded_and_entries_right_where_some_were_dropped(seed: int) -> None:
    rng, cache = random.Random(seed), new_cache()
    prefixes = Prefixes(cache, rng.randint(1, 40) * PER_TOKEN + 5)
    for _ in range(120):
        namespace, text = rng.choice("abc"), random_text(rng)
        store(cache, prefixes, namespace, text, rng.random() < 0.5)
        check_memory(prefixes)
        slot = cache.open()
        check(cache, slot, text[: prefixes.load(namespace, text, slot)])
        cache.discard(slot)
        assert all(root.children for root in prefixes._roots.values()), "a namespace without texts is dropped"


def test_the_least_recently_used_leaf_is_dropped_first() -> None:
    cache = new_cache()
    prefixes = Prefixes(cache, 12 * PER_TOKEN)

    def loaded(text: Text) -> int:
        slot = cache.open()
        length = prefixes.load("", [*text, 0], slot)
        cache.discard(slot)
        return length

    store(cache, prefixes, "", [1, 1, 1, 1, 2, 2], True)
    store(cache, prefixes, "", [1, 1, 1, 1, 3, 3], True)
    store(cache, prefixes, "", [4, 4, 4, 4], True)
    assert prefixes.bytes == 12 * PER_TOKEN, "the common tokens are stored once"
    assert loaded([1, 1, 1, 1, 2, 2]) == 6
    store(cache, prefixes, "", [5, 5], True)
    assert prefixes.bytes == 12 * PER_TOKEN and loaded([4, 4, 4, 4]) == 4
    assert loaded([1, 1, 1, 1, 3, 3]) == 4, "its last two tokens were used least recently"
    store(cache, prefixes, "", [6] * 20, True)
    assert loaded([6] * 20) == 12 and prefixes.bytes == 12 * PER_TOKEN, "as much of a long text as there is room for"


def test_what_a_slot_holds_is_kept_where_less_is_stored() -> None:
    cache, text = new_cache(), [1, 2, 3, 4, 5, 6]
    prefixes = Prefixes(cache, 10**6)
    slot = cache.open()
    write(cache, slot, text[:3])
    cache.cursor.reading[slot] = 3
    assert prefixes.load("", text, slot) == cache.cursor.reading[slot] == 3, "nothing is stored"
    store(cache, prefixes, "", text[:2], False)
    assert prefixes.load("", text, slot) == cache.cursor.reading[slot] == 3
    store(cache, prefixes, "", text[:5], False)
    write(cache, slot, text[:3])
    assert prefixes.load("", text, slot) == cache.cursor.reading[slot] == 5
    check(cache, slot, text[:5])


def test_nothing_is_stored_without_room() -> None:
    cache = new_cache()
    prefixes = Prefixes(cache, PER_TOKEN - 1)
    store(cache, prefixes, "", [1, 2], True)
    assert prefixes.bytes == 0 and not list(edges(prefixes)) and not prefixes._roots
