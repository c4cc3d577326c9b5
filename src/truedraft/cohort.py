"""The rows of one pass, grouped by request and by drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from truedraft.drafters._base import Drafter
from truedraft.request import Request
from truedraft.tree import Row

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class Cohort:
    """The rows of one pass, in the order of their slots.

    first: slot of the first row.
    requests, drafters: each request and each drafter of the rows, with the indices into `rows` of its own.
    """

    rows: Sequence[Row]
    first: int
    requests: Sequence[tuple[Request, Sequence[int]]]
    drafters: Sequence[tuple[Drafter, Sequence[int]]]

    @classmethod
    def of(cls, rows: Sequence[Row], first: int = 0) -> Cohort:
        requests = by_owner([row.request for row in rows])
        return cls(list(rows), first, requests, by_owner([row.request.drafter for row in rows]))

    def without_failed(self) -> Cohort:
        """The same rows, without failed requests in `requests` and `drafters`."""
        requests = [(request, places) for request, places in self.requests if not request.error]
        active = {place for _, places in requests for place in places}
        drafters = [(drafter, [i for i in places if i in active]) for drafter, places in self.drafters]
        return replace(self, requests=requests, drafters=[(drafter, own) for drafter, own in drafters if own])


def by_owner(owners: Sequence[K]) -> list[tuple[K, list[int]]]:
    """Each distinct object once, in the order of first occurrence, with the indices at which it occurs."""
    groups: dict[int, tuple[K, list[int]]] = {}
    for place, owner in enumerate(owners):
        groups.setdefault(id(owner), (owner, []))[1].append(place)
    return list(groups.values())


def select(values: Sequence[V], places: Sequence[int]) -> Sequence[V]:
    """The values at these indices; the sequence itself, uncopied, where these are all."""
    return values if len(places) == len(values) else [values[i] for i in places]


def for_each(
    groups: Sequence[tuple[K, Sequence[int]]], f: Callable[..., list[V]], *of_rows: Sequence[object]
) -> list[V]:
    """Call `f(owner, *values of its rows)` for every group; its results, in the order of the rows."""
    if len(groups) == 1:
        return f(groups[0][0], *of_rows)
    results: dict[int, V] = {}
    for owner, places in groups:
        results.update(zip(places, f(owner, *(select(values, places) for values in of_rows)), strict=True))
    return [results[i] for i in range(len(results))]
