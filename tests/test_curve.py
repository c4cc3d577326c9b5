"""The estimated cost of passes: for any passes it stays within the observed times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from truedraft.runtime.curve import HICCUP, WIDTHS, Curve, Knot, compiled

TIMES = st.floats(1e-7, 1e4) | st.sampled_from([0.0, -1.0, math.inf, math.nan, 1e-9, 1e6])
FACTORS = st.lists(st.floats(1e-4, 1e4) | st.just(1.0), min_size=1, max_size=8)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    widths = sorted(draw(st.sets(st.integers(1, 80), min_size=1, max_size=7)))
    return Curve(tuple(widths), tuple(sorted(draw(st.floats(1e-6, 1e3)) for _ in widths)))


@st.composite
def passes(draw: st.DrawFn) -> tuple[int, int, float, float]:
    """Rows, tokens, seconds and rate of a pass with or without drafts."""
    rows = draw(st.integers(1, 40))
    return rows, rows * draw(st.just(1) | st.integers(2, 65)), draw(TIMES), draw(st.sampled_from([0.1, 0.5, 1.0]))


def _holds(curve: Curve, observed: Sequence[float]) -> None:
    assert all(map(math.isfinite, curve.seconds)) and curve.seconds[0] > 0
    assert list(curve.seconds) == sorted(curve.seconds)
    slack = 1e-9  # of rounding
    assert min(observed) * (1 - slack) <= curve.seconds[0] and curve.seconds[-1] <= max(observed) * (1 + slack)
    assert all(curve(w) > 0 for w in (1, 3, 70, 5000))


@settings(deadline=None, max_examples=300)
@given(curves(), st.lists(passes(), max_size=60))
def test_curve_stays_within_the_observed_times(curve: Curve, seen: list[tuple[int, int, float, float]]) -> None:
    observed = list(curve.seconds)
    for rows, tokens, seconds, rate in seen:
        if math.isfinite(seconds) and seconds > 0:
            observed.append(seconds)
        curve = curve.learned(tokens, seconds, rate, plain=rows)
        _holds(curve, observed)


@settings(deadline=None, max_examples=12)
@given(curves(), st.integers(1, 9), st.integers(2, 12), FACTORS, FACTORS, st.sampled_from([0.1, 0.5]))
def test_repeated_passes_do_not_drift(
    curve: Curve, rows: int, wide: int, plain: list[float], drafted: list[float], rate: float
) -> None:
    """The same few passes, repeatedly."""
    observed = list(curve.seconds)
    for turn in range(1500):
        for tokens, times in ((rows, plain), (rows * wide, drafted)):
            seconds = times[turn % len(times)]
            observed.append(seconds)
            curve = curve.learned(tokens, seconds, rate, plain=rows)
    _holds(curve, observed)
    assert len(curve.knots) < 7 + 12


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", range(1, 10))
@pytest.mark.parametrize("factor", [0.5, 0.95, 1.0, 2.0])
def test_plain_passes_of_any_batch_update_their_cost(rows: int, factor: float) -> None:
    """Where the number of rows is no width of the curve, 13,500 of them once led to a division by zero."""
    curve = Curve(WIDTHS, (1.0, 1.1, 1.2, 1.4, 1.9, 3.0, 5.0))
    took = factor * curve(rows)
    for _ in range(14_000 if factor < 1 else 1000):
        curve = curve.learned(rows, took, 0.1, plain=rows)
    assert curve(rows) == pytest.approx(took)
    assert min(took, 1.0) * (1 - 1e-9) <= curve.seconds[0] and curve.seconds[-1] == pytest.approx(5.0)


@pytest.mark.parametrize("factor", [0.25, 3.0, 50.0])
@pytest.mark.parametrize("rows", [1, 3, 6])
def test_curve_follows_a_changed_machine(factor: float, rows: int) -> None:
    line = Curve(WIDTHS, (1.0, 1.1, 1.2, 1.4, 1.9, 3.0, 5.0))
    curve = line
    for turn in range(200):
        tokens = rows * (1 + turn % 5)
        curve = curve.learned(tokens, factor * line(tokens), 0.1, plain=rows)
    for tokens in (rows * k for k in range(1, 6)):
        assert curve(tokens) == pytest.approx(factor * line(tokens), rel=0.2)


@pytest.mark.parametrize("rows", [1, 3, 5, 7])
def test_expensive_drafted_passes_leave_plain_costs(rows: int) -> None:
    curve = Curve(WIDTHS, (1.0, 1.1, 1.2, 1.4, 1.9, 3.0, 5.0))
    before = curve(rows)
    for _ in range(300):
        curve = curve.learned(2 * rows, 20.0, 0.1, plain=rows)
    assert curve(rows) == pytest.approx(before, rel=0.01) and curve(2 * rows) == pytest.approx(20.0, rel=0.05)


def test_single_outlier_has_little_effect() -> None:
    line = Curve(WIDTHS, (1.0, 1.1, 1.2, 1.4, 1.9, 3.0, 5.0))
    curve = line
    for _ in range(50):
        curve = curve.learned(4, 1.2, 0.1, plain=1)
    assert curve.learned(4, 1e4, 0.1, plain=1)(4) <= 1.2 * (1 + 0.1 * HICCUP)


def test_wider_passes_extend_the_curve() -> None:
    curve = Curve(WIDTHS, (1.0, 1.1, 1.2, 1.4, 1.9, 3.0, 5.0))
    for _ in range(100):
        curve = curve.learned(300, 12.0, 0.1, plain=64).learned(64, 5.0, 0.1, plain=64)
    assert curve(300) == pytest.approx(12.0, rel=0.3) and curve(64) == pytest.approx(5.0)


def test_typical_curve_fits_the_known_points_and_is_updated() -> None:
    curve = Curve.typical(5, 0.3)
    assert curve(5) == pytest.approx(0.3)
    for _ in range(16):
        curve = curve.learned(16, 0.9, 0.1, plain=5)
    assert curve(16) == pytest.approx(0.9, rel=0.05) and curve(5) == pytest.approx(0.3)


def test_what_is_assumed_of_wider_passes_follows_the_first_that_is_seen() -> None:
    """They are as much longer as was assumed; measured times are left."""
    assumed = Curve.typical(1, 1.0)
    for factor in (0.45, 1.0, 1.2):
        curve = assumed
        for _ in range(40):
            curve = curve.learned(8, factor * assumed(8), 0.1, plain=1)
        assert curve(8) == pytest.approx(factor * assumed(8), rel=0.02) and curve(1) == assumed(1)
        for wider in (16, 32):
            assert curve(wider) / curve(8) == pytest.approx(assumed(wider) / assumed(8), rel=0.02)
    measured = Curve(WIDTHS, assumed.seconds)
    assert measured.learned(8, 1.1, 0.1, plain=1).seconds[4:] == measured.seconds[4:]


def test_a_first_pass_that_is_fast_is_believed_at_once_and_a_slow_one_is_not() -> None:
    assumed = Curve.typical(1, 1.0)
    assert assumed.learned(8, 1.1, 0.1, plain=1)(8) == pytest.approx(1.1, rel=1e-4)
    assert assumed.learned(8, 2 * assumed(8), 0.1, plain=1)(8) == pytest.approx(1.25 * assumed(8), rel=1e-4)


def _pooled(knots: Sequence[Knot]) -> list[float]:
    """The non-decreasing times nearest to the times of the knots: of knot i the largest over j <= i of the least over
    k >= i of the weighted mean of the knots j to k (Barlow et al., "Order Restrictions", 1972)."""

    def mean(j: int, k: int) -> float:
        return sum(one.seconds * one.passes for one in knots[j : k + 1]) / sum(one.passes for one in knots[j : k + 1])

    n = len(knots)
    return [max(min(mean(j, k) for k in range(i, n)) for j in range(i + 1)) for i in range(n)]


@settings(deadline=None, max_examples=200)
@given(curves(), st.lists(passes(), min_size=1, max_size=30))
def test_a_pass_is_learnt_the_same_in_python_and_compiled(
    curve: Curve, seen: list[tuple[int, int, float, float]]
) -> None:
    """Bit for bit; and the seconds are the isotonic means of the knots."""
    compiled, other = curve, curve
    for rows, tokens, seconds, rate in seen:
        compiled = compiled.learned(tokens, seconds, rate, plain=rows)
        with pytest.MonkeyPatch.context() as without:
            without.setattr("truedraft.runtime.curve.compiled", lambda: None)
            other = other.learned(tokens, seconds, rate, plain=rows)
        assert (compiled.widths, compiled.seconds, compiled.bounds) == (other.widths, other.seconds, other.bounds)
        assert compiled.knots == other.knots and all(type(knot) is Knot for knot in compiled.knots)
        assert compiled.seconds == pytest.approx(_pooled(compiled.knots), rel=1e-9)


@pytest.mark.parametrize("without", [False, True])
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(curves(), st.data())
def test_the_best_size_is_the_first_of_the_largest_goodput(
    monkeypatch: pytest.MonkeyPatch, without: bool, curve: Curve, data: st.DataObject
) -> None:
    if without:
        monkeypatch.setattr("truedraft.runtime.curve.compiled", lambda: None)
    sizes = (0, *sorted(data.draw(st.sets(st.integers(1, 100), max_size=8))))
    steps = [data.draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])) for _ in range(max(sizes))]
    gains = [0.0, *accumulate(steps)]  # exact, so that ties are ties
    rows, unit, aside = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([1, 4])), data.draw(st.floats(0, 1e-3))
    goodput = [(rows + gains[size]) / (curve(rows + unit * size) + aside) for size in sizes]
    assert curve.best_size(sizes, gains, unit, rows, float(rows), aside) == sizes[goodput.index(max(goodput))]


@pytest.mark.skipif(compiled() is None, reason="the compiled code was not built on this machine")
def test_the_compiled_curve_refuses_what_does_not_fit() -> None:
    native, knots = compiled(), (Knot(1, 1.0), Knot(2, 1.5))
    for widths, seconds in (((), ()), ((1, 2), (1.0,)), (tuple(range(300)), (1.0,) * 300), ([1, 2], (1.0, 1.5))):
        with pytest.raises(ValueError, match="as many seconds"):
            native.best_size(widths, seconds, (0, 1), [0.0, 1.0], 1, 1, 1.0, 0.0)
    for sizes, gains in (((0, 2), [0.0, 1.0]), ((2, 1), [0.0, 1.0, 2.0]), ((-1, 0), [0.0])):
        with pytest.raises(ValueError, match="sizes must ascend"):
            native.best_size((1, 2), (1.0, 1.5), sizes, gains, 1, 1, 1.0, 0.0)
    for wrong in (knots[:1], ((1, 1.0), (2,)), (1, 2)):
        with pytest.raises(ValueError, match="three numbers"):
            native.learned(Knot, wrong, (1, 2), (1.0, 1.5), 2, 1.0, 1, 0.9, 0.25, 1e-6, 0.5, 2.0)
    with pytest.raises(ValueError, match="three numbers"):
        native.learned(int, knots, (1, 2), (1.0, 1.5), 2, 1.0, 1, 0.9, 0.25, 1e-6, 0.5, 2.0)
