"""KV caches of rows of different lengths, against lists of the written entries."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from truedraft.caches import entries as entries_of_caches
from truedraft.caches.rows import CacheCursor, RowCache
from truedraft.caches.seq2seq import Seq2SeqCache

CPU = torch.device("cpu")
LAYERS, HEADS, SIZE = 3, 2, 5


def entries(rows: int, width: int, first: int) -> Tensor:
    """(rows, heads, width, size) keys with a different number at each position."""
    numbers = torch.arange(first, first + rows * width, dtype=torch.float32).view(rows, 1, width, 1)
    return numbers.expand(rows, HEADS, width, SIZE).clone()


class ReferenceCache:
    """The reference: rows as lists of committed numbers; layers differ by an offset, values by sign."""

    def __init__(self, cache: RowCache):
        self.cache, self.rows, self.count = cache, list[list[float]](), 1

    def write(self, first: int, last: int, width: int, skipped: frozenset[int] = frozenset()) -> Tensor:
        """A pass in which all layers but the skipped ones write; returns the written numbers, (rows, width)."""
        self.cache.cursor.begin(first, last, width, CPU)
        keys = entries(last - first, width, self.count)
        self.count += (last - first) * width
        for i, layer in enumerate(self.cache.layers):
            if i in skipped:
                continue
            seen, values = layer.update(keys + 1000 * i, -keys - 1000 * i)
            assert seen.shape == values.shape == (last - first, HEADS, self.cache.cursor.extent, SIZE)
            for row, (slot, line) in enumerate(zip(range(first, last), keys[:, 0, :, 0].tolist(), strict=True)):
                expected = self.rows[slot] + line
                assert seen[row, :, : len(expected), 0].tolist() == [[x + 1000 * i for x in expected]] * HEADS
                assert values[row, 1, : len(expected), 3].tolist() == [-x - 1000 * i for x in expected]
        return keys[:, 0, :, 0]

    def check(self) -> None:
        assert self.cache.lengths == [len(row) for row in self.rows]
        for i, layer in enumerate(self.cache.layers):
            for slot, row in enumerate(self.rows):
                assert layer.keys[slot, 0, : len(row), 0].tolist() == [x + 1000 * i for x in row]
                assert layer.values[slot, 1, : len(row), 2].tolist() == [-x - 1000 * i for x in row]


@pytest.mark.parametrize("seed", range(12))
def test_passes_commits_and_releases_match_lists(seed: int) -> None:
    rng = random.Random(seed)
    cache = RowCache(LAYERS, 5, 40)
    model = ReferenceCache(cache)
    for _ in range(12):
        if len(model.rows) < 5 and rng.random() < 0.5:  # a new row, its prompt's last token uncommitted
            slot, width = len(model.rows), rng.randint(1, 5)
            cache.lengths.append(0)
            model.rows.append([])
            written = model.write(slot, slot + 1, width)
            cache.lengths[slot] = width - 1
            model.rows[slot] = written[0, :-1].tolist()
        if model.rows:
            width = rng.randint(1, 4)
            written = model.write(0, len(model.rows), width)
            for slot in range(len(model.rows)):
                path = sorted(rng.sample(range(width), rng.randint(0, width)))
                cache.commit(slot, path)
                model.rows[slot] += written[slot, path].tolist()
            model.check()
        if (model.rows and rng.random() < 0.3) or any(len(row) > 30 for row in model.rows):
            slot = max(range(len(model.rows)), key=lambda i: len(model.rows[i]))
            cache.release(slot)
            model.rows[slot] = model.rows[-1]
            model.rows.pop()
            model.check()


@pytest.mark.parametrize("seed", range(12))
def test_rows_being_read_stay_whole_while_others_begin_and_end(seed: int) -> None:
    """Rows are read in pieces, activated in any order or discarded; the last token's entry is not committed then."""
    rng = random.Random(seed)
    cache = RowCache(LAYERS, 4, 60)
    model = ReferenceCache(cache)
    reading: dict[int, list[float]] = {}  # slot -> the numbers read
    for _ in range(60):
        action = rng.random()
        if action < 0.4 and len(model.rows) + len(reading) < 4:
            reading[cache.open()] = []
        elif action < 0.7 and reading:
            slot = rng.choice(list(reading))
            with cache.cursor.reaching(slot):
                cache.lengths[slot:] = [cache.cursor.reading[slot]]
                rows = model.rows + [[]] * (slot - len(model.rows)) + [reading[slot]]
                reference = ReferenceCache(cache)
                reference.rows, reference.count = rows, model.count
                reading[slot] = reading[slot] + reference.write(slot, slot + 1, rng.randint(1, 4))[0].tolist()
                model.count = reference.count
            cache.cursor.reading[slot] = len(reading[slot])
        elif action < 0.85 and (read := [slot for slot in reading if reading[slot]]):
            for slot in read:
                cache.cursor.reading[slot] -= 1  # all of these are complete; they are activated one by one
            while read:
                slot = read.pop(rng.randrange(len(read)))
                new, numbers = cache.activate(slot), reading.pop(slot)
                assert new == len(model.rows)
                if new in reading:
                    reading[slot] = reading.pop(new)
                    read = [slot if other == new else other for other in read]
                cache.commit(new, [0])
                model.rows.append(numbers)
                model.check()
        elif action < 0.9 and reading:
            slot = rng.choice(list(reading))
            cache.discard(slot)
            del reading[slot]
        elif model.rows:
            slot = rng.randrange(len(model.rows))
            cache.release(slot)
            model.rows[slot] = model.rows[-1]
            model.rows.pop()
        model.check()
        for slot, numbers in reading.items():
            for i, layer in enumerate(cache.layers if numbers else ()):
                assert layer.keys[slot, 0, : len(numbers), 0].tolist() == [x + 1000 * i for x in numbers]


def test_cursor_positions_of_passes() -> None:
    cursor = CacheCursor(4, 20)
    assert (cursor.first, cursor.last, cursor.width, cursor.extent, cursor.level) == (0, 0, 0, 0, True)
    cursor.lengths += [3, 3, 5]
    cursor.begin(0, 2, 4, CPU)
    assert (cursor.first, cursor.last, cursor.width, cursor.extent, cursor.level) == (0, 2, 4, 7, True)
    cursor.begin(1, 3, 2, CPU)
    assert (cursor.first, cursor.last, cursor.width, cursor.extent, cursor.level) == (1, 3, 2, 7, False)
    assert cursor.place.tolist() == [[3, 4], [5, 6]] and cursor.row.tolist() == [[0], [1]]
    cursor.placed(torch.tensor([[6, 7, 8], [1, 2, 3]]), 16)
    assert (cursor.first, cursor.last, cursor.width, cursor.extent, cursor.level) == (0, 2, 3, 16, False)
    assert cursor.place.tolist() == [[6, 7, 8], [1, 2, 3]] and cursor.row.tolist() == [[0], [1]]


def test_a_layer_as_transformers_sees_it() -> None:
    cache = RowCache(2, 3, 20)
    layer = cache.layers[1]
    assert not layer.is_initialized and not layer.is_sliding and not layer.is_compileable and not layer.is_croppable
    cache.clear()
    layer.allocate(HEADS, SIZE, torch.bfloat16, CPU)
    assert layer.is_initialized and layer.get_max_length() == 20
    for kept in (layer.keys, layer.values):
        assert kept.shape == (3, HEADS, 20, SIZE) and kept.dtype == torch.bfloat16 and not kept.any()
    assert layer.get_seq_length() == 0 and layer.get_mask_sizes(5) == (0, 0)
    cache.lengths.extend([4, 6, 2])
    cache.cursor.begin(1, 3, 3, CPU)
    assert layer.get_seq_length() == 6 and layer.get_mask_sizes(1) == (9, 0)
    layer.keys.fill_(torch.nan)
    layer.values.fill_(torch.nan)
    cache.clear()
    assert cache.lengths == [] and not layer.keys.any() and not layer.values.any()


@pytest.mark.parametrize("moved", ["compiled", "torch"])
@pytest.mark.parametrize("path", [[], [0], [0, 1, 2], [0, 2], [1], [2], [0, 1, 3], [0, 3], [1, 2, 3]])
def test_a_commit_keeps_a_path(path: list[int], moved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if moved == "torch":
        monkeypatch.setattr(entries_of_caches, "compiled", lambda: None)
    cache = RowCache(1, 2, 12)
    cache.lengths.extend([2, 5])
    cache.cursor.begin(0, 2, 4, CPU)
    keys = entries(2, 4, 1)
    cache.layers[0].update(keys, -keys)
    before = cache.layers[0].keys.clone()
    cache.commit(1, path)
    assert cache.lengths == [2, 5 + len(path)]
    assert torch.equal(cache.layers[0].keys[0], before[0]), "the other row is unchanged"
    assert cache.layers[0].keys[1, 0, 5 : 5 + len(path), 0].tolist() == [5.0 + node for node in path]
    assert cache.layers[0].values[1, 1, 5 : 5 + len(path), 0].tolist() == [-5.0 - node for node in path]


def states(rows: int, length: int, first: int) -> Tensor:
    return torch.arange(first, first + rows * length, dtype=torch.float32).view(rows, length, 1).repeat(1, 1, 6)


def test_sources_stay_with_their_rows() -> None:
    cache = Seq2SeqCache(2, 3, 10)
    assert cache.cursor is cache.rows.cursor and cache.lengths is cache.rows.lengths and len(cache.sources) == 2
    source = cache.sources[1]
    assert source.get_seq_length() == 0
    masks = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1]])
    cache.begin(states(2, 4, 1), masks[:2])
    assert cache.counts == [4, 2] and cache.is_updated == {0: False, 1: False}
    for layer in cache.sources:
        cache.cursor.first, cache.cursor.last = 0, 2
        keys, values = layer.update(entries(2, 4, 1), -entries(2, 4, 1))
        assert keys[1, 0, :, 0].tolist() == [5, 6, 7, 8] and values[0, 1, :, 2].tolist() == [-1, -2, -3, -4]
    cache.lengths.extend([3, 1])
    cache.begin(states(1, 4, 50), masks[2:])
    for layer in cache.sources:
        cache.cursor.first, cache.cursor.last = 2, 3
        layer.update(entries(1, 4, 70), -entries(1, 4, 70))
    cache.lengths.append(2)
    assert cache.counts == [4, 2, 3]
    assert cache.states[:, 0, 0].tolist() == [1, 5, 50] and cache.source_mask.tolist() == masks.tolist()
    assert source.get_seq_length() == source.get_max_length() == 4 and source.get_mask_sizes(7) == (4, 0)
    assert source.data_pointers == tuple(kept.data_ptr() for kept in source._all)
    cache.cursor.first, cache.cursor.last = 0, 3
    cache.show()
    assert source.keys[:, 0, 0, 0].tolist() == [1, 5, 70] and source.values[:, 0, 0, 0].tolist() == [-1, -5, -70]
    cache.rows.cursor.begin(0, 3, 2, CPU)
    for layer in cache.rows.layers:
        layer.update(entries(3, 2, 1), entries(3, 2, 1))
    cache.commit(1, [0, 1])
    assert cache.lengths == [3, 3, 2]
    cache.release(0)
    assert cache.lengths == [2, 3] and cache.counts == [3, 2]
    assert cache.states[:2, 0, 0].tolist() == [50, 5] and cache.source_mask[:2].tolist() == masks[[2, 1]].tolist()
    cache.cursor.first, cache.cursor.last = 0, 2
    cache.show()
    for layer in cache.sources:
        assert layer.keys[:, 0, 0, 0].tolist() == [70, 5] and layer.values[:, 1, 3, 1].tolist() == [-73, -8]
    cache.release(1)
    assert cache.lengths == [2] and cache.counts == [3] and cache.states[0, 0, 0] == 50


def test_indices_are_on_the_device_of_the_cache() -> None:
    """For any default device of torch."""
    nowhere = torch.device("meta")
    with nowhere:
        cache = RowCache(1, 2, 12)
        cache.layers[0].allocate(HEADS, SIZE, torch.float32, CPU)
        assert cache.layers[0].keys.device == cache.layers[0].values.device == CPU
        cache.lengths.extend([2, 5])
        cache.cursor.begin(0, 2, 3, CPU)
        assert cache.cursor.place.device == cache.cursor.row.device == CPU
        keys = torch.arange(6.0, device=CPU).view(2, 1, 3, 1).expand(2, HEADS, 3, SIZE)
        cache.layers[0].update(keys, keys)
        cache.commit(1, [0, 2])
    assert cache.lengths == [2, 7] and cache.layers[0].keys[1, 0, 5:7, 0].tolist() == [3, 5]


@pytest.mark.parametrize("seed", range(6))
def test_scratch_follows_the_committed_positions(seed: int) -> None:
    """Passes under a view that skips layer 1; the view's next pass reads the scratch, which is then dropped."""
    rng = random.Random(seed)
    cache, skipped = RowCache(LAYERS, 3, 60), frozenset({1})
    model = ReferenceCache(cache)
    for slot, length in enumerate((4, 1, 7)):
        cache.lengths.append(0)
        model.rows.append([])
        model.rows[slot] = model.write(slot, slot + 1, length)[0].tolist()
        cache.lengths[slot] = length
    model.check()
    committed = [list(row) for row in model.rows]
    for _ in range(5):
        for _ in range(3):
            width = rng.randint(1, 4)
            paths = [sorted(rng.sample(range(width), rng.randint(0, width))) for _ in range(3)]
            with cache.cursor.behind_scratch():
                assert cache.lengths == [len(row) for row in model.rows]
                written = model.write(0, 3, width, skipped)
            assert cache.lengths == [len(row) for row in committed]
            for slot, path in enumerate(paths):
                cache.advance(slot, path, skipped)
                model.rows[slot] = model.rows[slot] + written[slot, path].tolist()
        assert cache.cursor.scratch == [len(a) - len(b) for a, b in zip(model.rows, committed, strict=True)]
        cache.rewind()
        assert cache.cursor.scratch == []
        model.rows = [list(row) for row in committed]
        model.check()


def test_scratch_does_not_outlive_commits_and_rows() -> None:
    for ends in (lambda c: c.commit(0, []), lambda c: c.release(1), lambda c: c.clear()):
        cache = RowCache(1, 2, 12)
        cache.layers[0].allocate(HEADS, SIZE, torch.float32, CPU)
        cache.lengths.extend([2, 5])
        cache.advance(0, [0, 1], frozenset())
        assert cache.cursor.scratch == [2, 0] and cache.lengths == [2, 5]
        ends(cache)
        assert cache.cursor.scratch == []


def test_committed_lengths_come_back_from_a_pass_that_fails() -> None:
    cursor = CacheCursor(2, 20)
    cursor.lengths += [3, 5]
    cursor.scratch = [1, 2]
    with pytest.raises(ZeroDivisionError), cursor.behind_scratch():
        assert cursor.lengths == [4, 7]
        raise ZeroDivisionError
    assert cursor.lengths == [3, 5] and cursor.scratch == [1, 2]
