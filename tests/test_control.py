"""The cost model: verifies what pays, stops what does not, and comes back when drafts turn good."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from truedraft.control._probing import Probing
from truedraft.control.cost import Cost, Odds, Shadow
from truedraft.drafters.prompt_lookup import PromptLookup
from truedraft.runtime import calibration
from truedraft.runtime.curve import Curve
from truedraft.tree import DraftTree, Row


class Known:
    """A calibration that ended in an earlier process."""

    def __init__(self, kept: Curve):
        self.kept = kept

    def go_on(self, steps: int, known: Curve | None) -> Curve | None:
        return known


STEEP = Curve((1, 2, 16), (1.0, 2.0, 2.2))  # any width beyond one costs double
FLAT = Curve((1, 16), (1.0, 1.0))


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Cost:
    monkeypatch.setattr(calibration, "of", lambda target: Known(STEEP))
    made = Cost()
    seconds = {"draft": 0.0, "control": 0.0, "prefill": 0.0, "target": 1.0}
    made.open(SimpleNamespace(cold=False), PromptLookup(), seconds, False, 999)  # type: ignore[arg-type]
    return made


def _pass(control: Cost, row: Row, draft: list[int], said: list[int]) -> int:
    """One pass in which the target says `said`; returns how many drafted nodes were verified."""
    (most,) = control.budget([row])
    tree = DraftTree.chain(row.tokens[-1], draft[:most])
    verified = len(control.prune([row], [tree])[0]) - 1
    row.tokens += said
    control.observe([row], [tree], [])
    return verified


def test_hopeless_drafts_are_not_verified(control: Cost) -> None:
    row = Row(0, [1], 1, 999)
    control.start([row])
    assert sum(_pass(control, row, [9] * 10, [2]) for _ in range(50)) == 0


def test_good_drafts_are_taken_up_without_having_been_verified(control: Cost) -> None:
    row = Row(0, [1], 1, 999)
    control.start([row])
    for _ in range(20):
        _pass(control, row, [9] * 10, [2])
    sizes = [_pass(control, row, [2] * 10, [2]) for _ in range(30)]
    assert sizes[0] == 0 and sizes[-1] == 10


@pytest.mark.parametrize("found", [True, False])
def test_reading_the_prompt_is_not_held_against_drafts(control: Cost, found: bool) -> None:
    """The first drafts index the prompt: that is spent, whatever they find and whatever is verified."""
    row = Row(0, [1], 1, 999)
    control.start([row])
    control.budget([row])
    control._seconds["draft"] += 100.0  # type: ignore[index]
    control.prune([row], [DraftTree.chain(1, [2] * 10 if found else [])])
    row.tokens += [2]
    control.observe([row], [], [])
    sizes = [_pass(control, row, [2] * 10, [2] * 11) for _ in range(4 if found else 5)]  # one to learn from
    assert sizes[-4] >= 8 and sizes[-3:] == [10] * 3
    assert control._worth > 0


def test_drafts_that_cost_more_than_they_save_are_not_asked_for(control: Cost) -> None:
    control._curve = FLAT
    row, asked = Row(0, [1], 1, 999), []
    control.start([row])
    for _ in range(20):
        (budget,) = control.budget([row])
        asked.append(budget > 0)
        control._seconds["draft"] += 3.0 * (budget > 0)  # type: ignore[index]
        control._seconds["target"] += 1.0  # type: ignore[index]
        control.prune([row], [DraftTree.chain(row.tokens[-1], [2] if budget else [])])
        row.tokens += [2, 2] if budget else [2]
        control.observe([row], [], [])
    assert sum(asked) <= 4  # the first is not counted, the second not timed yet


def test_a_flat_curve_verifies_everything(control: Cost) -> None:
    control._curve = FLAT
    row = Row(0, [1], 1, 999)
    control.start([row])
    assert _pass(control, row, [9] * 10, [2]) == 10


def test_a_curve_measured_at_a_bad_moment_is_found_out() -> None:
    """Costs say that any width costs fifteen times as much; passes say that all cost the same."""
    control, seconds = Cost(), {"draft": 0.0, "control": 0.0, "prefill": 0.0, "target": 0.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "of", lambda target: Known(Curve((1, 2, 16), (1.0, 15.0, 15.0))))
        control.open(SimpleNamespace(cold=False), PromptLookup(), seconds, False, 999)  # type: ignore[arg-type]
    row, sizes = Row(0, [1], 1, 9999), []
    control.start([row])
    for _ in range(400):
        control.budget([row])
        sizes.append(len(control.prune([row], [DraftTree.chain(row.tokens[-1], [2] * 10)])[0]) - 1)
        seconds["target"] += 1.0
        row.tokens += [2] * (1 + sizes[-1])
        control.observe([row], [], [])
    assert sizes[0] == 0 and sizes[-50:] == [10] * 50


def test_a_pass_that_was_captured_first_teaches_nothing(control: Cost) -> None:
    row = Row(0, [1], 1, 999)
    control.start([row])
    _pass(control, row, [2] * 10, [2])
    before = control._curve
    for cold in (True, False):
        control._target.cold = cold  # type: ignore[union-attr,misc]
        control.budget([row])
        control.prune([row], [DraftTree.chain(2, [2] * 10)])
        control._seconds["target"] += 30.0  # type: ignore[index]
        row.tokens += [2]
        control.observe([row], [], [])
        assert (control._curve is before) == cold


def test_a_curve_learns_the_kind_of_pass_that_it_saw() -> None:
    line = Curve((1, 2, 16), (1.0, 10.0, 20.0))
    assert line.learned(2, 5.0, 1.0, plain=1).seconds == (1.0, 5.0, 20.0)
    assert line.learned(1, 2.0, 1.0, plain=1).seconds == (2.0, 10.0, 20.0)
    assert line.learned(16, 2.0, 1.0, plain=1).seconds == pytest.approx((1.0, 2.0, 2.0), rel=1e-4)


def test_the_first_right_draft_opens_the_way() -> None:
    """Tokens of a draft that was not verified count as they come, for all depths."""
    odds, tree = Odds(0.9, 0.15, 0.85), DraftTree.chain(1, [5] * 10)
    before = sum(odds.values(tree)[1:])
    assert not Shadow(tree).follow([5, 5, 5], odds)
    assert before < 1 and sum(odds.values(tree)[1:]) > 3


def test_a_shadow_follows_a_branch_over_several_passes() -> None:
    odds = Odds(0.9, 0.15, 0.85)
    shadow = Shadow(DraftTree((1, 5, 6, 7), (-1, 0, 0, 2)))
    assert not shadow.follow([6], odds)
    assert shadow.follow([7], odds)
    assert odds.chance(1, 1) > 0.5 > 0.1 > odds.chance(1, 0)
    assert odds.chance(2, 0) > 0.9


def test_the_worth_of_a_node_is_that_of_its_path() -> None:
    odds = Odds(0.9, 0.4, 0.5)
    tree = DraftTree((1, 5, 6, 7, 0), (-1, 0, 0, 2, 2), probes=frozenset({4}))
    assert odds.values(tree) == pytest.approx([1, 0.4, 0.2, 0.1, 0])


def test_odds_weigh_the_recent_past() -> None:
    odds = Odds(0.5, 0.3, 0.85)
    for right in [False] * 10 + [True] * 3:
        odds.add(1, 0, right)
    assert odds.chance(1, 0) > 0.6


def test_the_curve_draws_straight_lines() -> None:
    line = Curve((1, 2, 4), (1.0, 2.0, 3.0))
    assert [line(w) for w in (1, 2, 3, 4, 6)] == [1.0, 2.0, 2.5, 3.0, 4.0]


class Dear:
    """A drafter whose every token costs as much as a plain pass would."""

    width, hope, autoregressive = 8, 0.7, True


@pytest.mark.parametrize(("right", "most"), [(True, 1.0), (False, 0.15)])
def test_drafts_that_cost_passes_are_sized_before_they_are_made(
    right: bool, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "of", lambda target: Known(FLAT))
    control, row = Cost(), Row(0, [1], 1, 9999)
    seconds = {"draft": 0.0, "control": 0.0, "prefill": 0.0, "target": 1.0}
    control.open(SimpleNamespace(cold=False), Dear(), seconds, False, 999)  # type: ignore[arg-type]
    control.start([row])
    drafted = 0
    for _ in range(200):
        (size,) = control.budget([row])
        seconds["draft"] += 0.3 * size
        drafted += size
        tree = DraftTree.chain(row.tokens[-1], [2] * size)
        kept = control.prune([row], [tree])[0]
        seconds["target"] += 1.0
        row.tokens += [2] * len(kept) if right else [3]
        control.observe([row], [tree], [])
    assert (drafted / 200 >= 4) if right else (drafted / 200 <= most)


def test_drawn_drafts_are_sized_beforehand_and_never_cut(control: Cost) -> None:
    row = Row(0, [1], 1, 999)
    control.start([row])
    law, seconds, sizes = torch.full((12,), 1 / 12), control._seconds, []
    for _ in range(200):
        (size,) = control.budget([row])
        tree = DraftTree((row.tokens[-1], *[9] * size), tuple(range(-1, size)), (law,) * (size + 1), draws="one")
        assert control.prune([row], [tree])[0] is tree
        sizes.append(size)
        row.tokens += [2]
        seconds["target"] += STEEP(1 + size)  # type: ignore[index]
        control.observe([row], [tree], [])
    assert sizes[0] == 10 and sizes.count(0) > 180


@pytest.mark.parametrize(("tokens", "most", "least"), [(2.0, 1.0, 0.9), (1.0, 0.2, 0.01)])
def test_probes_are_read_where_they_pay_and_tried_where_they_may(tokens: float, most: float, least: float) -> None:
    """Probes cost a tenth of a pass; passes with them give two tokens, or one as those without."""
    probing, spent, read = Probing(), 0.0, 0
    for _ in range(2000):
        on = probing.decide(0.1, 0.015 * spent)
        read += on
        spent += 1.1 if on else 1.0
        probing.saw(tokens if on else 1.0, 1.1 if on else 1.0)
    assert least <= read / 2000 <= most


def test_probes_are_tried_again_in_later_calls() -> None:
    """What tries cost in earlier calls is not held against a call that has its own allowance."""
    probing, tried = Probing(), []
    for _ in range(5):
        probing.begin()
        spent, read = 0.0, 0
        for _ in range(300):
            read += (on := probing.decide(0.1, 0.015 * spent))
            spent += 1.1 if on else 1.0
            probing.saw(1.0, 1.1 if on else 1.0)
        tried.append(read)
    assert min(tried) > 0


def test_a_clock_that_steps_back_while_drafting_makes_no_draft_free(control: Cost) -> None:
    control._drafter.autoregressive, row = True, Row(0, [1], 1, 9999)  # type: ignore[union-attr]
    control.start([row])
    for step in [0.1, -5.0, -5.0, 0.1, -0.2] * 4:
        (most,) = control.budget([row])
        control._seconds["draft"] += step  # type: ignore[index]
        control.prune([row], [DraftTree.chain(row.tokens[-1], [2] * most)])
        control._seconds["target"] += 1.0  # type: ignore[index]
        row.tokens += [2]
        control.observe([row], [], [])
        assert control._level() >= 0


TIMES = st.floats(1e-6, 10.0) | st.sampled_from([0.0, -1e-3, 1e-9, 1e5, math.nan, math.inf])


@st.composite
def turns(draw: st.DrawFn) -> tuple[list[int], list[int], float, list[float]]:
    """Drafted and accepted tokens of each row in a pass, and what it and the work beside it took."""
    drafted = draw(st.lists(st.integers(0, 10), min_size=7, max_size=7))
    right = [draw(st.integers(0, most)) for most in drafted]
    return drafted, right, draw(TIMES), [draw(TIMES) for _ in ("draft", "observe", "control")]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(1e-5, 1.0), min_size=3, max_size=3).map(sorted),
    st.booleans(), st.booleans(), st.lists(st.tuples(st.integers(1, 7), turns()), max_size=40),
)  # fmt: skip
def test_whatever_passes_take_budgets_and_costs_stay_in_bounds(
    measured: list[float], lockstep: bool, autoregressive: bool, passes: list[tuple[int, tuple]]
) -> None:
    control, drafter = Cost(), SimpleNamespace(width=10, hope=0.15, autoregressive=autoregressive, pass_cost=None)
    seconds = {"draft": 0.0, "observe": 0.0, "control": 0.0, "prefill": 0.0, "target": 0.0}
    observed = list(measured)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "of", lambda target: Known(Curve((1, 4, 32), tuple(measured))))
        control.open(SimpleNamespace(cold=False), drafter, seconds, lockstep, 99)  # type: ignore[arg-type]
    rows = [Row(i, [1], 1, 9999) for i in range(7)]
    control.start(rows)
    for count, (drafted, right, took, beside) in passes:
        playing = rows[:count]
        budget = control.budget(playing)
        assert all(0 <= most <= drafter.width for most in budget)
        trees = [
            DraftTree.chain(row.tokens[-1], [2] * min(n, most))
            for row, n, most in zip(playing, drafted, budget, strict=False)
        ]
        for part, spent in zip(("draft", "observe", "control"), beside, strict=True):
            seconds[part] = _plus(seconds[part], spent)
        kept = control.prune(playing, trees)
        assert all(len(cut) <= len(tree) for cut, tree in zip(kept, trees, strict=True))
        before, seconds["target"] = seconds["target"], _plus(seconds["target"], took)
        observed += [t for t in (took, seconds["target"] - before) if 0 < t < math.inf]
        for row, tree, n in zip(playing, kept, right, strict=False):
            row.tokens += [2] * min(n, len(tree) - 1) + [3]
        control.observe(playing, kept, [])
        times = control._curve.seconds
        assert min(observed) * (1 - 1e-9) <= times[0] and times[-1] <= max(observed) * (1 + 1e-9)
        assert list(times) == sorted(times) and math.isfinite(control._trials + control._earned)


def _plus(before: float, spent: float) -> float:
    """A clock that may stand still or step back; what is no number it cannot show."""
    return before + spent if math.isfinite(spent) else before


def test_what_drafts_lose_stays_within_the_slack(control: Cost) -> None:
    """Hopeless drafts: everything that they take counts, learning from passes and the control itself included."""
    row, seconds, passes = Row(0, [1], 1, 9999), control._seconds, 2000
    control.start([row])
    lost = 0.0
    for turn in range(passes):
        (most,) = control.budget([row])
        tree = DraftTree.chain(row.tokens[-1], [9] * most)
        for part in ("draft", "observe", "control"):
            seconds[part] = seconds.get(part, 0.0) + 0.03 * (most > 0)  # type: ignore[index]
        lost += 0.09 * (most > 0) * (turn > 0)
        took = STEEP(len(control.prune([row], [tree])[0]))
        seconds["target"] += took  # type: ignore[index]
        lost += took - 1.0
        row.tokens += [2]
        control.observe([row], [tree], [])
    assert 0.005 * passes < lost < (control.slack + 0.002) * passes + 1


def test_nothing_is_drafted_before_passes_were_seen_and_soon_after(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = SimpleNamespace(kept=None, guess=lambda: Curve.typical(1, 1e-3), go_on=lambda steps, known: known)
    monkeypatch.setattr(calibration, "of", lambda target: fresh)
    control, row = Cost(), Row(0, [1], 1, 999)
    seconds = {"draft": 0.0, "control": 0.0, "prefill": 0.0, "target": 0.0}
    control.open(SimpleNamespace(cold=False), PromptLookup(), seconds, False, 99)  # type: ignore[arg-type]
    control.start([row])
    sizes = []
    for took in [5.0, 1.0] + [2.0] * 8:  # the very first waits for memory
        (most,) = control.budget([row])
        sizes.append(len(control.prune([row], [DraftTree.chain(row.tokens[-1], [2] * most)])[0]) - 1)
        seconds["target"] += took
        row.tokens += [2] * (1 + sizes[-1])
        control.observe([row], [], [])
    assert sizes[:2] == [0, 0] and sizes[2] > 0 and sizes[-1] == 10
    assert control._curve(1) == pytest.approx(1.0)
