"""The everyday part of a product has every value, or every pair of values, of its parameters."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import _uncovered

AXES = {"name": "abcdefg", "rule": ("greedy", "seeded"), "rows": (1, 3), "processors": ("none", "penalties", "own")}


def items(together: int, absent: Any = None) -> list[Any]:
    """An item for each point of the product; those with `absent` are skipped on this machine."""

    def marks(values: tuple[Any, ...]) -> list[Any]:
        skipped = [pytest.mark.skipif(True, reason="").mark] if absent in values else []
        return [*skipped, pytest.mark.covering(together).mark]

    def item(values: tuple[Any, ...]) -> Any:
        own = marks(values)
        return SimpleNamespace(
            nodeid=f"tests/test_it.py::test_it[{'-'.join(map(str, values))}]",
            iter_markers=lambda: iter(own),
            get_closest_marker=lambda name: next((mark for mark in own if mark.name == name), None),
            callspec=SimpleNamespace(params=dict(zip(AXES, values, strict=True))),
        )

    return [item(values) for values in product(*AXES.values())]


def covered(kept: list[Any], together: int) -> set[Any]:
    return {found for item in kept for found in combinations(item.callspec.params.items(), together)}


@pytest.mark.parametrize(("together", "most"), [(1, 10), (2, 36)])
def test_all_values_occur_together_in_a_few_of_the_cases(together: int, most: int) -> None:
    every = items(together)
    beyond = [*_uncovered(every)]
    kept = [item for item in every if item not in beyond]
    assert covered(kept, together) == covered(every, together)
    assert len(kept) <= most < len(every) == 84
    assert [item.nodeid for item in _uncovered(every[::-1])] == [item.nodeid for item in beyond]


def test_a_value_is_not_covered_by_a_case_that_is_skipped_here() -> None:
    every = items(1, absent=3)
    run = [item for item in every if item.callspec.params["rows"] == 1]
    beyond = [*_uncovered(every)]
    assert covered([item for item in run if item not in beyond], 1) == covered(run, 1)
    assert all(item.callspec.params["rows"] == 1 for item in beyond)
