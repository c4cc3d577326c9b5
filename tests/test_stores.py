"""What drafters look things up in, held to brute force over the text itself."""

from __future__ import annotations

import ctypes
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from ctypes import byref, c_int32
from typing import Any

import pytest
import torch

from truedraft.drafters.lookup.token_recycling import template
from truedraft.runtime import native as runtime
from truedraft.stores import _native, trigrams
from truedraft.stores._cursor import SEPARATOR, Cursor, Place, Search, Sizes
from truedraft.stores._native import library
from truedraft.stores._pure import PythonAutomaton
from truedraft.stores.automaton import Automaton, CompiledAutomaton, automaton
from truedraft.stores.likeliest import largest, likeliest, likeliest_with_chances, two_largest
from truedraft.stores.ranks import Ranks
from truedraft.stores.successors import Successors
from truedraft.tree import DraftTree

FORMS: dict[str, Callable[[int], Automaton]] = {"pure": PythonAutomaton}
if (lib := library()) is not None:
    FORMS["native"] = lambda cap: CompiledAutomaton(lib, cap)


def texts() -> list[list[int]]:
    """Texts of few and of many tokens, with runs, with periods, with separators."""
    pick = random.Random(0)
    few = [[pick.randrange(k) for _ in range(200)] for k in (1, 2, 3, 40)]
    hub = [t for i in range(150) for t in (0, 1 + pick.randrange(1, 2 + i % 30), 31 + i % 3)]  # one token, many next
    period = [1, 2, 3, 1, 2, 4] * 30
    parted = [SEPARATOR if pick.random() < 0.05 else pick.randrange(4) for _ in range(300)]
    return [*few, hub, period, parted]


def spelt(tokens: Sequence[int]) -> str:
    """A character for each token, so that Python's own search of strings finds them."""
    return "".join(chr(token - SEPARATOR) for token in tokens)


def occurrences(text: Sequence[int], string: Sequence[int]) -> list[int]:
    """Indices of the last token of every occurrence."""
    characters, wanted = spelt(text), spelt(string)
    return [i + len(wanted) - 1 for i in range(len(characters)) if characters.startswith(wanted, i)]


def longest_occurring(text: Sequence[int], tokens: Sequence[int]) -> list[int]:
    characters, wanted = spelt(text), spelt(tokens)
    return next((list(tokens[i:]) for i in range(len(tokens)) if wanted[i:] in characters), [])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cap", [128, 6])
def test_cursor_of_a_text_equals_brute_force(form: str, cap: int) -> None:
    pick = random.Random(1)
    for text in texts():
        made, cursor = FORMS[form](cap), Cursor()
        at = 0
        while at < len(text):
            step = pick.randint(1, 9)
            made.read(cursor, text[at : at + step])
            at = min(at + step, len(text))
            before, suffix = text[: at - 1], longest_occurring(text[: at - 1], text[:at])
            assert len(made) == at - 1 and cursor.length == len(suffix)
            assert not suffix or made.first(cursor) == occurrences(before, suffix)[0]
            length = pick.randint(1, 8)
            place = cursor.copy()
            made.shorten(place, length)
            string = suffix[-length:]
            if not string:
                assert made.copy(place, 1, 5) == []
                continue
            ends = occurrences(before, string)
            expected = text[ends[0] + 1 : min(ends[0] + 6, at)]
            expected = expected[: expected.index(SEPARATOR)] if SEPARATOR in expected else expected
            if expected:
                assert made.copy(place.copy(), 1, 5) == expected
            if len(string) < cap - 1:
                latest = text[ends[-1] + 1 : min(ends[-1] + 2, at)]
                if latest[0] != SEPARATOR:
                    assert made.copy(place.copy(), 1, 1, latest=True) == latest
                assert made.suffixes(place)[0] == (len(string), len(ends))


@pytest.mark.parametrize("form", FORMS)
def test_grow_gives_the_most_frequent_continuations_first(form: str) -> None:
    pick = random.Random(2)
    for text in texts():
        made = FORMS[form](64)
        made.extend(text)
        for _ in range(40):
            start = pick.randrange(len(text) - 1)
            string = text[start : start + pick.randint(1, 4)]
            cursor = Cursor()
            made.follow(cursor, string)
            made.shorten(cursor, len(string))
            assert cursor.length == len(string)
            nodes, deep, rarest = pick.randint(1, 12), pick.randint(1, 4), pick.randint(1, 3)
            grown = made.grow(cursor, nodes, rarest, 8, deep)
            paths: list[tuple[int, ...]] = []
            for token, parent, count in zip(*grown, strict=True):
                paths.append((*(paths[parent] if parent >= 0 else ()), token))
                assert count == len(occurrences(text, [*string, *paths[-1]]))
            assert len(set(paths)) == len(paths) <= nodes
            ends = occurrences(text, string)
            seen = Counter(
                tuple(text[e + 1 : e + 1 + n])
                for n in range(1, deep + 1)
                for e in ends
                if e + n < len(text) and SEPARATOR not in text[e + 1 : e + 1 + n]
            )
            frequent = sorted((c for c in seen.values() if c >= rarest), reverse=True)
            if max(Counter(p[:-1] for p in seen).values(), default=0) <= 8:  # more than eight siblings are not kept
                assert grown.counts == frequent[:nodes]
            else:
                assert grown.counts == sorted(grown.counts, reverse=True) and grown.counts[0] == frequent[0]


@pytest.mark.parametrize("form", FORMS)
def test_best_is_the_tree_of_the_suffix_with_the_most_expected_tokens(form: str) -> None:
    """Against the trees of all suffixes, each grown by itself."""
    pick, other = random.Random(5), 0
    for text in texts():
        made = FORMS[form](64)
        made.extend(text)
        for _ in range(60):
            start = pick.randrange(len(text) - 1)
            cursor = Cursor()
            made.follow(cursor, text[start : start + pick.randint(1, 12)])
            sizes = Sizes(
                pick.choice([0, 1, 5, 40, 400]), pick.choice([0.0, 0.5, 1.0, 3.7]), pick.choice([0.0, 2.0, 8.0]),
                pick.choice([0.0, 0.1, 0.5, 1.0]), pick.randint(1, 8), pick.choice([2, 16, 64]),
            )  # fmt: skip
            least = pick.choice([0.0, 0.0, 1.5])
            trees: list[tuple[float, int, int, Any]] = []  # in order of length
            for length, count in made.suffixes(cursor):
                here, most = cursor.copy(), sizes.alpha * length + sizes.offset
                made.shorten(here, length)
                nodes, rarest = min(int(most), sizes.nodes), math.ceil(sizes.rare * count)
                grown = made.grow(here, nodes, rarest, sizes.wide, sizes.deep - length)
                trees.append((sum(grown.counts) / count, length, count, grown))
            expected = max(trees, key=lambda tree: tree[0], default=(0.0, 0, 0, None))
            best = made.best(cursor, sizes, least)
            if expected[0] <= least:
                assert best is None
                continue
            assert best is not None
            assert (best.expected, best.length, best.occurrences, best.grown) == expected
            assert cursor.length == best.length
            other += best.length < trees[0][1]
    assert other > 20, "a shorter suffix is often the best"


@pytest.mark.parametrize("form", FORMS)
def test_cursor_stays_valid_while_the_text_grows(form: str) -> None:
    pick = random.Random(3)
    made, text, followed, cursor = FORMS[form](64), [], [], Cursor()
    for _ in range(120):
        new = [pick.randrange(3) for _ in range(pick.randint(1, 6))]
        made.extend(new)
        text += new
        tokens = [pick.randrange(3) for _ in range(pick.randint(1, 4))]
        before = followed[-cursor.length :] if cursor.length else []
        made.follow(cursor, tokens)
        followed += tokens
        assert cursor.length <= len(before) + len(tokens)
        string = followed[len(followed) - cursor.length :]
        assert occurrences(text, string) if string else True
        assert (cursor.length, len(occurrences(text, string))) == made.suffixes(cursor)[0] if string else True
        place = cursor.copy()
        made.follow(place, [99])
        assert place.length == 0


def test_compiled_automaton_is_used_where_it_was_built() -> None:
    assert isinstance(automaton(), CompiledAutomaton) == (library() is not None)


@pytest.mark.parametrize("loader", [_native.library, runtime.library])
def test_library_of_other_sources_is_not_used(loader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own library lacks the symbols."""
    monkeypatch.delenv("TRUEDRAFT_NATIVE", raising=False)
    if loader.__wrapped__() is None:
        pytest.skip("it was not compiled")
    stale = ctypes.PyDLL(None)
    monkeypatch.setattr(ctypes, "PyDLL", lambda path: stale)
    monkeypatch.setattr(ctypes, "CDLL", lambda path, *mode: stale)
    assert loader.__wrapped__() is None


def test_module_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRUEDRAFT_NATIVE", raising=False)
    monkeypatch.setattr(_native, "import_module", lambda name: random)
    assert _native.trees.__wrapped__() is None


def edited(source: Sequence[int], pick: random.Random) -> list[int]:
    """A source with tokens replaced, inserted and deleted, parts left out and parts repeated."""
    out: list[int] = []
    at = 0
    while at < len(source):
        change = pick.random()
        if change < 0.04:
            out.append(pick.randrange(60))
        elif change < 0.08:
            at = min(at + 1, len(source) - 1)
        elif change < 0.1:
            at = min(at + pick.randrange(90), len(source) - 1)
        elif change < 0.12:
            at = max(at - pick.randrange(30), 0)
        out.append(source[at] if pick.random() > 0.03 else pick.randrange(60))
        at += 1
    return [token for token in out if token >= 0]


def nearest(source: Sequence[int], at: int, last: Sequence[int], reach: int) -> tuple[float, int, int]:
    """By definition: the best score of a match of the last tokens near a place, with the place after it, its length."""
    found = (0.0, -1, 0)
    for end in range(max(at - reach, 1), min(at + reach, len(source)) + 1):
        matches = [n for n in range(1, len(last) + 1) if n <= end and source[end - n : end] == last[-n:]]
        if matches:
            score = 2 * max(matches) - math.log2(1 + abs(end - at))
            found = max(found, (score, -end, max(matches)))  # of equal ones the first
    return found[0], -found[1], found[2]


@pytest.mark.parametrize("own", [True, False], ids=["own text", "document"])
@pytest.mark.parametrize("vocabulary", [4, 60])
def test_places_in_an_input_are_alike_in_both_forms_and_by_definition(own: bool, vocabulary: int) -> None:
    pick = random.Random(vocabulary)
    moved = lost = 0
    for _ in range(80):
        search = Search(pick.randint(1, 3), pick.randint(3, 6), 8, pick.randrange(70), pick.randrange(6), 0.5)
        source = [pick.randrange(vocabulary) for _ in range(pick.randint(5, 150))]
        if not own:
            source[pick.randrange(len(source))] = SEPARATOR
        output = edited(source, pick)
        found = []
        for make in FORMS.values():
            text, cursor, place, row = make(128), Cursor(), Place(-1), []
            if own:
                row += source
                text.read(cursor, source)
            else:
                text.extend(source)
            steps, lengths = [], random.Random(1)
            at = 0
            while at < len(output):
                new = output[at : at + lengths.choice([1, 1, 1, 2, 9])]
                (text.read if own else text.follow)(cursor, new)
                row += new
                before = (place.at, place.run, place.wrong)
                text.locate(cursor, place, len(source), row[-len(new) - 7 :], len(new), search)
                steps.append((place.at, place.run, place.wrong))
                if len(new) == 1 and before[0] >= 0 and source[before[0] : before[0] + 1] != new:
                    score, end, length = nearest(source, before[0], row[-8:], search.reach)
                    if score > 0.5:
                        assert steps[-1] == (end, length, 0)
                        moved += 1
                lost += place.at < 0
                at += len(new)
            found.append(steps)
        assert all(steps == found[0] for steps in found)
    assert moved > 20 and lost > 20, (moved, lost)


@pytest.mark.skipif(library() is None, reason="the structures were not compiled")
def test_invalid_arguments_are_harmless() -> None:
    """Counts below zero and beyond all arrays, cursors of other texts, tokens without a line."""
    made = automaton()
    made.extend([pick % 5 for pick in range(300)])
    for state, length in ((10**6, 5), (-3, 5), (7, 10**6), (7, -5), (2**31 - 1, 2**31 - 1)):
        cursor = Cursor(state, length, 1, 1)
        for use in (
            lambda: made.grow(cursor.copy(), 10**6, deep=10**6),
            lambda: made.copy(cursor.copy(), 1, 10**9),
            lambda: made.best(cursor.copy(), Sizes(10**6, 1e300, -1e300, 1e300, 100, 10**6)),
            lambda: made.best(cursor.copy(), Sizes(-5, math.nan, 1.0, math.nan, -1, -1), math.nan),
            lambda: made.suffixes(cursor),
            lambda: made.first(cursor),
            lambda: made.follow(cursor.copy(), [1, 2]),
            lambda: made.shorten(cursor.copy(), 3),
            lambda: made.locate(cursor, Place(10**12), 10**12, [1, 2], 10**6, Search(-5, -5, -5, 2**40, -5, math.nan)),
            lambda: made.locate(cursor, Place(-9), -9, [], 3, Search(1, 1, 10**6, -1, 2**40, 0.5)),
        ):
            use()
    assert made.grow(Cursor(), -5) == ([], [], []) and made.copy(Cursor(), 1, -5) == []
    raw = [c_int32() for _ in range(3)]
    assert lib is not None and lib.truedraft_grow(byref(made._a), byref(Cursor()), -1, 1, 8, 9, *map(byref, raw)) == 0
    assert likeliest(torch.randn(2, 9), 0) == likeliest(torch.randn(2, 9), -4) == [[], []]
    table = Successors(4)
    with pytest.raises(ValueError, match="2 tokens, and scores of 3"):
        table.learn([1, 2], torch.randn(3, 9))
    table.learn([-7], torch.randn(1, 9))
    assert table.of(-7) == [] and not any(map(table.of, range(9)))
    for rows in (2**40, 2**62):
        with pytest.raises(MemoryError):
            trigrams.CompiledTrigrams(rows)
    flat = trigrams.CompiledTrigrams(64)
    flat.weigh([1, 2, 3, 1, 2, 3], 0.0, 3.0)
    assert flat.search(1, 2, 9, 3, 32.0, 0.0, 5).shares[:1] == [0.0]
    flat._table.clock = 2**31 - 2
    flat.weigh(list(range(50)), 1.0, 3.0)
    assert flat.search(47, 48, 9, 3, 32.0, 8.0, 5).tokens == [49]
    if (native := _native.trees()) is not None:
        tokens, *_ = native.union([((1, 2, 3), (-1, 0, 0), (1.0, math.nan, 0.5), frozenset())], 5, [math.nan])
        assert sorted(tokens) == [1, 2, 3]


def test_likeliest_equals_topk() -> None:
    scores = torch.randn(7, 300)
    scores[2, 5] = scores[2, 6] = torch.nan
    expected = [row.nan_to_num(-torch.inf).topk(8).indices.tolist() for row in scores]
    found = likeliest(scores, 8)
    assert found == expected == likeliest(scores.double(), 8)
    assert likeliest(scores[3:, :2], 5) == scores[3:, :2].topk(2).indices.tolist()
    scores[1, 1:] = -torch.inf
    assert likeliest(scores[1:2], 3) == likeliest(scores[1:2].double(), 3) == [[0]]


@pytest.mark.parametrize("width", [3, 90, 300, 5000, 40_000])
@pytest.mark.parametrize("count", [1, 8, 20])
def test_chances_are_those_of_a_softmax(width: int, count: int) -> None:
    """In double precision; 20 are more than compiled code returns. Steps of the scores are far above its error."""
    torch.manual_seed(0)
    scores = torch.stack([torch.randperm(width).float() * 40 / width - 20 for _ in range(9)])
    scores[1] += 300
    scores[2, : width // 2] = -torch.inf
    scores[3, width - 1] = scores[5, 0] = torch.nan
    scores[4] = -torch.inf
    scores[6, 0] = 200
    laws = scores.double().softmax(-1).nan_to_num(0.0)
    tokens, chances = likeliest_with_chances(scores, count)
    for law, some, likely in zip(laws, tokens, chances, strict=True):
        best, at = law.topk(min(count, width))
        above = best > 1e-38
        assert some[: int(above.sum())] == at[above].tolist() and len(some) <= int((best > 0).sum())
        assert likely[: int(above.sum())] == pytest.approx(best[above].tolist(), rel=2e-6)
    assert tokens[3] == tokens[4] == tokens[5] == [] and chances[6][0] == 1
    strided = torch.stack([scores, scores + 1], 1)[:, 0]
    assert likeliest_with_chances(strided, count) == (tokens, chances)
    assert likeliest_with_chances(scores[:, :2], 0) == ([[]] * 9, [[]] * 9)


@pytest.mark.parametrize("width", [3, 90, 300, 5000, 40_000])
def test_likeliest_prefers_the_first_of_equal_scores(width: int) -> None:
    torch.manual_seed(0)
    scores = torch.randn(9, width).mul(20).round()
    count = min(8, width)
    assert likeliest(scores, 8) == scores.sort(dim=-1, descending=True, stable=True).indices[:, :count].tolist()


@pytest.mark.parametrize("native", ["", "0"], ids=["compiled", "python"])
def test_successors_are_those_last_observed_and_fill_a_template(native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEDRAFT_NATIVE", native)
    for cached in (_native.library, _native.trees):
        cached.cache_clear()
    torch.manual_seed(0)
    pick, last, table = random.Random(0), {}, Successors(3)
    for _ in range(200):
        tokens = [pick.randrange(40) for _ in range(pick.randrange(1, 6))]
        scores = torch.randn(len(tokens), 40)
        scores[0, pick.randrange(40) :] = -torch.inf
        table.learn(tokens, scores)
        for token, row in zip(tokens, scores, strict=True):
            if best := [i for i in row.topk(3).indices.tolist() if row[i] > -torch.inf]:
                last[token] = best
    assert {token: table.of(token) for token in range(50) if table.of(token)} == last
    shape = template(40, 4, 5)
    for budget in (0, 7, 40):
        tokens, parents, confidence = table.tree(9, budget, shape)
        tree = DraftTree(tokens, parents, confidence=confidence)
        tree.check()
        paths = {(0,): [9]}  # of ranks, as far as there are successors
        for i, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True), 1):
            above = paths.get((parent,))
            if above and rank < len(last.get(above[-1], ())):
                paths[i,] = [*above, last[above[-1]][rank]]
        assert [[tokens[n] for n in tree.path(i)] for i in range(len(tree))] == list(paths.values())[: 1 + budget]
    assert table.tree(10**6, 9, shape) == ((10**6,), (-1,), (1.0,))
    for cached in (_native.library, _native.trees):
        cached.cache_clear()


@pytest.mark.skipif(library() is None, reason="the structures were not compiled")
def test_compiled_search_equals_that_in_python() -> None:
    pick = random.Random(4)
    mine, theirs = trigrams.CompiledTrigrams(4096), trigrams.PythonTrigrams(4096)
    for text in texts():
        text = [max(token, 0) for token in text]
        for table in (mine, theirs):
            table.weigh(text, 0.5, 3.0)
        for _ in range(5):
            at = pick.randrange(len(text) - 1)
            found = [t.search(text[at], text[at + 1], 60, 4, 32.0, 8.0, 24) for t in (mine, theirs)]
            assert found[0].tokens == found[1].tokens and found[0].parents == found[1].parents
            assert found[0].shares == pytest.approx(found[1].shares)
            assert found[0].tokens


@pytest.mark.parametrize("form", ["CompiledTrigrams", "PythonTrigrams"])
def test_trigrams_keep_a_bounded_number_of_rows(form: str) -> None:
    if form == "CompiledTrigrams" and library() is None:
        pytest.skip("the structures were not compiled")
    table = getattr(trigrams, form)(64)
    text = list(range(5000))
    table.weigh(text, 1.0, 3.0)
    table.weigh(text[:3], 1.0, 3.0)
    other = table.copy()
    other.weigh([7, 8, 9], 1.0, 3.0)
    assert other.search(0, 1, 5, 1, 32.0, 8.0, 4) == table.search(0, 1, 5, 1, 32.0, 8.0, 4) != ([], [], [])
    assert other.search(7, 8, 5, 1, 32.0, 8.0, 4).tokens == [9] and not table.search(7, 8, 5, 1, 32.0, 8.0, 4).tokens
    kept = [i for i in range(4998) if table.search(i, i + 1, 5, 1, 32.0, 8.0, 4).tokens]
    assert 0 < len(kept) <= 64 and max(kept) == 4997


@pytest.mark.parametrize("shape", [(1, 5), (3, 700), (2, 3, 64), (2, 4, 1000)])
def test_largest_is_the_first_maximum_and_minus_one_for_nan(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for _ in range(20):
        scores = torch.randn(*shape).mul(2).round()  # with ties
        assert largest(scores) == scores.argmax(-1).tolist()
        wide = torch.nn.functional.pad(scores, (0, 9), value=99.0)[..., : shape[-1]]
        assert largest(wide) == scores.argmax(-1).tolist()
    scores[(0,) * (scores.dim() - 1)] = -torch.inf
    assert largest(scores) == scores.argmax(-1).tolist()
    at = int(torch.randint(shape[-1], ()))
    scores[(0,) * (scores.dim() - 1) + (at,)] = torch.nan
    expected = scores.nan_to_num(0).argmax(-1)
    expected[(0,) * expected.dim()] = -1
    assert largest(scores) == expected.tolist() and largest(scores.double()) == expected.tolist()
    if scores.dim() == 3:
        ranks = Ranks(scores)
        assert [[line[node] for node in range(len(line))] for line in ranks] == expected.tolist()


@pytest.mark.parametrize("shape", [(4, 2), (3, 700), (2, 3, 64), (2, 4, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_largest_of_some_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for _ in range(10):
        scores = torch.randn(*shape, dtype=dtype).mul(2).round()  # with ties
        scores[(0,) * (scores.dim() - 1)][1:] = -torch.inf
        places = torch.randint(scores[..., 0].numel(), (5,)).tolist() + [0]
        wide = torch.nn.functional.pad(scores, (0, 9), value=99.0)[..., : shape[-1]]
        expected = scores.flatten(0, -2)[places].topk(2).values
        assert torch.equal(two_largest(scores, places), expected) and torch.equal(two_largest(wide, places), expected)
