"""The cost model: verifies drafts that pay, stops others, and resumes when drafts become good."""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from truedraft.control._acceptance import AcceptanceRates, DrafterAcceptance, OpenDraft
from truedraft.control._draft_costs import DraftCosts
from truedraft.control._drafter import DrafterState
from truedraft.control._pass_costs import ENOUGH, PlainSteps
from truedraft.control._probing import Probing
from truedraft.control._trials import FAVOUR, TrialBudget
from truedraft.control.cost import Cost
from truedraft.drafters._trees import path_probabilities
from truedraft.drafters.lookup.prompt_lookup import PromptLookup
from truedraft.drafters.lookup.suffix import Suffix
from truedraft.runtime import latency
from truedraft.runtime.curve import Curve
from truedraft.stats import PassTimes
from truedraft.tree import DraftTree, Row


class StoredProfile:
    """A latency profile that was completed in an earlier process."""

    def __init__(self, kept: Curve):
        self.kept = kept

    def measure(self, steps: int, curve: Curve | None, most: int) -> Curve | None:
        return curve


STEEP = Curve((1, 2, 16), (1.0, 2.0, 2.2))  # any width beyond one costs double
FLAT = Curve((1, 16), (1.0, 1.0))


def opened(
    drafter: Any,
    kept: Any = STEEP,
    lockstep: bool = False,
    control: Cost | None = None,
    padded: bool = False,
    carried: int = 0,
) -> Cost:
    """A control with a simulated clock, for a target with a curve or a profile, and known costs without drafts."""
    control = control or Cost()
    control.times, control.drafting = PassTimes(), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latency, "of", lambda target: StoredProfile(kept) if isinstance(kept, Curve) else kept)
        control.open(SimpleNamespace(cold=False, padded=padded, carried=carried), drafter, 1, lockstep, 999)  # type: ignore[arg-type]
    for size in range(9):
        control._costs._batches[size] = steps = PlainSteps()
        steps.made = steps.learnt = ENOUGH
    return control


def spend(control: Cost, /, **seconds: float) -> None:
    """Advance the clock of some parts; drafting is that of the only drafter."""
    for part, spent in seconds.items():
        setattr(control.times, part, getattr(control.times, part) + spent)
    (state,) = control._drafters.values()
    control.drafting = {id(state.drafter): control.times.draft}


def state_of(control: Cost) -> DrafterState:
    (state,) = control._drafters.values()
    return state


DRAFTER = PromptLookup()


def row_of(drafter: Any = DRAFTER) -> Row:
    return Row(0, [1], 1, 9999, request=SimpleNamespace(drafter=drafter))  # type: ignore[arg-type]


@pytest.fixture
def control() -> Cost:
    return opened(DRAFTER)


def _pass(control: Cost, row: Row, draft: list[int], emitted: list[int]) -> int:
    """One pass in which the target emits `emitted`; returns the number of drafted nodes verified."""
    (most,) = control.budget([row])
    tree = DraftTree.chain(row.tokens[-1], draft[:most])
    verified = len(control.prune([row], [tree])[0]) - 1
    row.tokens += emitted
    control.observe([row], [tree], [])
    return verified


def test_wrong_drafts_are_not_verified(control: Cost) -> None:
    row = row_of()
    control.start([row])
    assert sum(_pass(control, row, [9] * 10, [2]) for _ in range(50)) == 0


def test_good_drafts_are_resumed_without_having_been_verified(control: Cost) -> None:
    row = row_of()
    control.start([row])
    for _ in range(20):
        _pass(control, row, [9] * 10, [2])
    sizes = [_pass(control, row, [2] * 10, [2]) for _ in range(30)]
    assert sizes[0] == 0 and sizes[-1] == 10


@pytest.mark.parametrize("found", [True, False])
def test_the_time_of_reading_the_prompt_is_not_counted_against_drafts(control: Cost, found: bool) -> None:
    """The first drafts index the prompt, whatever they find and whatever is verified."""
    row = row_of()
    control.start([row])
    control.budget([row])
    spend(control, draft=100.0)
    control.prune([row], [DraftTree.chain(1, [2] * 10 if found else [])])
    row.tokens += [2]
    control.observe([row], [], [])
    sizes = [_pass(control, row, [2] * 10, [2] * 11) for _ in range(4 if found else 5)]  # one to learn from
    assert sizes[-4] >= 8 and sizes[-3:] == [10] * 3
    assert state_of(control).trials.saving > 0


def test_drafts_that_cost_more_than_they_save_are_not_requested(control: Cost) -> None:
    control._costs.curve = FLAT
    row, requested = row_of(), []
    control.start([row])
    for _ in range(20):
        (budget,) = control.budget([row])
        requested.append(budget > 0)
        spend(control, draft=3.0 * (budget > 0), target=1.0)
        control.prune([row], [DraftTree.chain(row.tokens[-1], [2] if budget else [])])
        row.tokens += [2, 2] if budget else [2]
        control.observe([row], [], [])
    assert sum(requested) <= 4  # the first is not counted, the second not timed yet


def costly(control: Cost, row: Row, passes: int) -> tuple[int, int]:
    """Passes for which a draft of three times a pass's time, which is always wrong, is requested, and those for which
    the size of drafts is decided."""
    state, requested, decided = state_of(control), 0, 0
    budget = state.budget
    with pytest.MonkeyPatch.context() as patch:

        def counted(*given: Any) -> int:
            nonlocal decided
            decided += 1
            return budget(*given)

        patch.setattr(state, "budget", counted)
        for _ in range(passes):
            (size,) = control.budget([row])
            requested += size > 0
            spend(control, draft=3.0 * (size > 0), target=1.0)
            control.prune([row], [DraftTree.chain(row.tokens[-1], [9] if size else [])])
            row.tokens += [2]
            control.observe([row], [], [])
    return requested, decided


def test_nothing_is_decided_while_nothing_may_be_drafted() -> None:
    """Trials cost half a percent of the time: one in 600 passes. In between the control decides once in 17 passes."""
    drafter = ExpensiveDrafter()
    control, row = opened(drafter, FLAT), row_of(drafter)
    control.start([row])
    costly(control, row, 100)
    requested, decided = costly(control, row, 1800)
    assert 2 <= requested <= 4 and 100 <= decided <= 130
    control.start([other := row_of(drafter)])
    assert control.budget([row, other]) == [0, 0] and len(control._batch) == 1, "another row ends the pause"


@pytest.mark.parametrize(
    ("cost", "least", "most", "early"),
    [(0.1, 0, 40, range(13)), (0.03, 0, 40, range(13)), (0.001, 200, 300, range(28, 41))],
    ids=["dear", "noted", "free"],
)
def test_drafts_in_vain_are_made_seldom_until_one_is_verified(cost: float, least: int, most: int, early: range) -> None:
    """Drafts that are empty for 300 passes: where each costs three hundredths of a pass or more, few are made, in the
    first 40 passes too, in which trials alone would allow all of them; and every further one is made once the text
    repeats. Those that cost nothing next to a pass are made in nearly every pass."""
    control, row = opened(DRAFTER, FLAT), row_of()
    control.start([row])
    made, first = [0, 0], 0
    for turn in range(400):
        repeats = turn >= 300
        (size,) = control.budget([row])
        made[repeats] += size > 0
        first += size > 0 and turn < 40
        spend(control, draft=cost * (size > 0))
        tree = DraftTree.chain(row.tokens[-1], [2] * size if repeats else [], [0.95] * size if repeats else None)
        (kept,) = control.prune([row], [tree])
        spend(control, target=1.0)
        row.tokens += [2] * len(kept)
        control.observe([row], [], [])
    assert least <= made[0] <= most and made[1] >= 50
    assert first in early


def test_drafts_in_vain_are_made_again_where_the_text_repeats() -> None:
    """A copying drafter whose drafts were not worth verifying drafts in the pass after four tokens have repeated, and
    not for shorter repeats, which are common."""
    drafter = Suffix()
    control, row = opened(drafter, FLAT), row_of(drafter)
    row.tokens += range(100, 160)
    drafter.start([row])
    control.start([row])
    drafted = []
    for token in [*range(200, 290), 101, 102, 103, *range(300, 308), 111, 112, 113, 114, *range(310, 316)]:
        (size,) = control.budget([row])
        drafted.append(size > 0)
        spend(control, draft=0.05 * (size > 0))
        control.prune([row], [DraftTree.chain(row.tokens[-1], (), ())])
        spend(control, target=1.0)
        row.tokens.append(token)
        control.observe([row], [], [])
    found = 90 + 3 + 8 + 4
    assert sum(drafted[60:found]) <= 4 and drafted[found] and not any(drafted[found - 3 : found])


def test_what_steps_cost_without_drafts_is_known_soon() -> None:
    """Drafts that never pay stop at once; then nothing rests before enough steps were learnt from."""
    drafter = ExpensiveDrafter()
    control, row = opened(drafter, FLAT), row_of(drafter)
    control._costs._batches.clear()
    control.start([row])
    for _ in range(20):
        (size,) = control.budget([row])
        spend(control, draft=3.0 * (size > 0))
        control.prune([row], [DraftTree.chain(row.tokens[-1], [9] if size else [])])
        spend(control, target=1.2)
        row.tokens += [2]
        control.observe([row], [], [])
    control.budget([row])
    assert control._costs.known and control._costs.plain == pytest.approx(1.2)


def test_a_check_of_steps_without_drafts_learns_from_its_last_ones_alone() -> None:
    """Drafts that pay a little pause for eight steps now and then, of which the last three are learnt from."""
    drafter = Suffix()
    control, row = opened(drafter, FLAT), row_of(drafter)
    control.start([row])
    steps, drafted, learnt, rests = control._costs._batches[0], [], [], []
    for _ in range(60):
        (size,) = control.budget([row])
        drafted.append(size > 0)
        before = steps.learnt
        spend(control, draft=0.01 * (size > 0))
        control.prune([row], [DraftTree.chain(row.tokens[-1], *([2], [0.05]) if size else ())])
        spend(control, target=1.0 if size else 1.3)
        row.tokens += [3]
        control.observe([row], [], [])
        learnt.append(steps.learnt - before)
        rests.append(control._resting)
    first = drafted.index(False)
    assert drafted[first : first + 9] == [False] * 8 + [True]
    assert learnt[first : first + 9] == [0] * 5 + [1] * 3 + [0]
    assert rests[first : first + 9] == [4, 3, 2, 1, 0, 0, 0, 0, 0]  # steps in which nothing is decided
    assert control._costs.plain == pytest.approx(1.3, rel=0.01)


@pytest.mark.parametrize("faster", [False, True])
def test_a_pass_costs_what_its_rows_have_stored(faster: bool) -> None:
    """Rows of 100 to 1,500 tokens, of which each costs a thousandth of a pass, on a machine that is slower than when
    the curve was measured, or faster; and one of 100,000, for which no more is assumed than for twice the longest."""
    plain, drafter, rng = 0.6 if faster else 1.7, ExpensiveDrafter(), random.Random(0)
    control = opened(drafter, Curve((1, 16), (1.0, 1.5)))
    control._costs._batches.clear()
    for _ in range(12):
        row = row_of(drafter)
        row.tokens += [2] * rng.randint(100, 1500)
        control.start([row])
        for _ in range(40):
            control.budget([row])
            control.prune([row], [DraftTree.chain(row.tokens[-1])])
            spend(control, target=plain + len(row.tokens) / 1000 + 5 * (rng.random() < 0.1))
            row.tokens += [2]
            control.observe([row], [], [])
        control.end(row)
    longest = max(control._costs._batch._passes.values)[0]
    for stored, read in ((100, 100), (900, 900), (100_000, 2 * longest)):
        control._costs.begin(1, stored, False)
        assert control._costs.plain == pytest.approx(plain + read / 1000, rel=0.03)


def test_a_flat_curve_verifies_everything(control: Cost) -> None:
    control._costs.curve = FLAT
    row = row_of()
    control.start([row])
    assert _pass(control, row, [9] * 10, [2]) == 10


def test_a_wrong_curve_is_corrected_by_passes() -> None:
    """By the curve wider passes cost fifteen times as much; actual passes all cost the same."""
    control = opened(DRAFTER, Curve((1, 2, 16), (1.0, 15.0, 15.0)))
    row, sizes = row_of(), []
    control.start([row])
    for _ in range(1200):
        control.budget([row])
        sizes.append(len(control.prune([row], [DraftTree.chain(row.tokens[-1], [2] * 10)])[0]) - 1)
        spend(control, target=1.0)
        row.tokens += [2] * (1 + sizes[-1])
        control.observe([row], [], [])
    assert sizes[0] == 0 and sizes[-50:] == [10] * 50


def test_a_captured_pass_does_not_update_costs(control: Cost) -> None:
    row = row_of()
    control.start([row])
    _pass(control, row, [2] * 10, [2])
    before = control._costs.curve
    for cold in (True, False):
        control._costs.target.cold = cold  # type: ignore[union-attr,misc]
        control.budget([row])
        control.prune([row], [DraftTree.chain(2, [2] * 10)])
        spend(control, target=30.0)
        row.tokens += [2]
        control.observe([row], [], [])
        assert (control._costs.curve is before) == cold


def test_a_pass_updates_the_costs_of_its_kind() -> None:
    line = Curve((1, 2, 16), (1.0, 10.0, 20.0))
    assert line.learned(2, 5.0, 1.0, plain=1).seconds == (1.0, 5.0, 20.0)
    assert line.learned(1, 2.0, 1.0, plain=1).seconds == (2.0, 10.0, 20.0)
    assert line.learned(16, 2.0, 1.0, plain=1).seconds == pytest.approx((1.0, 2.0, 2.0), rel=1e-4)


def test_unverified_drafts_update_the_rates() -> None:
    """Tokens of a draft that was not verified are counted as they are emitted, for all depths."""
    rates, tree = AcceptanceRates(0.9, 0.15, 0.85), DraftTree.chain(1, [5] * 10)
    before = sum(path_probabilities(tree, rates.confidences(tree))[1:])
    assert not OpenDraft(tree).follow([5, 5, 5], rates)
    assert before < 1 and sum(path_probabilities(tree, rates.confidences(tree))[1:]) > 3


def test_a_draft_is_followed_along_a_branch_over_several_passes() -> None:
    rates = AcceptanceRates(0.9, 0.15, 0.85)
    draft = OpenDraft(DraftTree((1, 5, 6, 7), (-1, 0, 0, 2)))
    assert not draft.follow([6], rates)
    assert draft.follow([7], rates)
    assert rates.rate(1, 1) > 0.5 > 0.1 > rates.rate(1, 0)
    assert rates.rate(2, 0) > 0.9


def test_the_probability_of_a_node_is_that_of_its_path() -> None:
    rates = AcceptanceRates(0.9, 0.4, 0.5)
    tree = DraftTree((1, 5, 6, 7, 0), (-1, 0, 0, 2, 2), probes=frozenset({4}))
    assert path_probabilities(tree, rates.confidences(tree)) == pytest.approx([1, 0.4, 0.2, 0.1, 0])


def test_rates_weigh_recent_observations_most() -> None:
    rates = AcceptanceRates(0.5, 0.3, 0.85)
    for right in [False] * 10 + [True] * 3:
        rates.add(1, 0, right)
    assert rates.rate(1, 0) > 0.6


def test_the_curve_interpolates_linearly() -> None:
    line = Curve((1, 2, 4), (1.0, 2.0, 3.0))
    assert [line(w) for w in (1, 2, 3, 4, 6)] == [1.0, 2.0, 2.5, 3.0, 4.0]


class ExpensiveDrafter:
    """A drafter every level of which costs a pass of a model."""

    width, prior_confidence, autoregressive, adaptive, overlapped = 8, 0.7, True, False, False
    found = False

    def resumes(self, row: Row) -> bool:
        return self.found


class AdaptiveDrafter(ExpensiveDrafter):
    """One that ends its drafts itself."""

    adaptive = True


@pytest.mark.parametrize(("right", "most"), [(True, 1.0), (False, 0.15)])
def test_drafts_that_cost_passes_are_sized_before_they_are_made(right: bool, most: float) -> None:
    drafter = ExpensiveDrafter()
    control, row = opened(drafter, FLAT), row_of(drafter)
    control.start([row])
    drafted = 0
    for _ in range(200):
        (size,) = control.budget([row])
        spend(control, draft=0.3 * size)
        drafted += size
        tree = DraftTree.chain(row.tokens[-1], [2] * size)
        kept = control.prune([row], [tree])[0]
        spend(control, target=1.0)
        row.tokens += [2] * len(kept) if right else [3]
        control.observe([row], [tree], [])
    assert (drafted / 200 >= 4) if right else (drafted / 200 <= most)


class OverlappedDrafter(ExpensiveDrafter):
    """One that drafts while passes run."""

    overlapped = True


@pytest.mark.parametrize(("slowed", "least", "most"), [(1.0, 0.9, 1.0), (1.5, 0.0, 0.2)])
def test_what_drafting_adds_to_passes_is_counted_though_they_verify_nothing(
    slowed: float, least: float, most: float
) -> None:
    """In three passes of four no draft is ready; those are no measure of passes without drafts."""
    drafter = OverlappedDrafter()
    control, row = opened(drafter, FLAT), row_of(drafter)
    control.start([row])
    requested = 0
    for number in range(1000):
        (size,) = control.budget([row])
        requested += size > 0
        made = min(size, 1) if number % 4 == 0 else 0
        tree = DraftTree.chain(row.tokens[-1], [2] * made)
        kept = control.prune([row], [tree])[0]
        spend(control, target=slowed if size else 1.0)
        row.tokens += [2] * len(kept)
        control.observe([row], [tree], [])
        assert control._costs(1) == pytest.approx(1.0)
    assert least <= requested / 1000 <= most


@pytest.mark.parametrize(("right", "most"), [(True, 1.0), (False, 0.15)])
def test_adaptive_drafters_end_their_drafts_themselves(right: bool, most: float) -> None:
    """Every second draft ends after one level, which is no reason to stop drafting; wrong drafts are one."""
    drafter = AdaptiveDrafter()
    control, row = opened(drafter, FLAT), row_of(drafter)
    control.start([row])
    requested = 0
    for number in range(200):
        (size,) = control.budget([row])
        assert size in (0, drafter.width)
        requested += size > 0
        made = min(size, 1 if number % 2 else drafter.width)
        spend(control, draft=0.3 * made)
        tree = DraftTree.chain(row.tokens[-1], [2] * made)
        kept = control.prune([row], [tree])[0]
        spend(control, target=1.0)
        row.tokens += [2] * len(kept) if right else [3]
        control.observe([row], [tree], [])
    assert (requested >= 190) if right else (requested / 200 <= most)


def test_drawn_drafts_are_sized_beforehand_and_never_cut(control: Cost) -> None:
    row = row_of()
    control.start([row])
    law, sizes = torch.full((12,), 1 / 12), []
    for _ in range(200):
        (size,) = control.budget([row])
        tree = DraftTree((row.tokens[-1], *[9] * size), tuple(range(-1, size)), (law,) * (size + 1), draws="one")
        assert control.prune([row], [tree])[0] is tree
        sizes.append(size)
        row.tokens += [2]
        spend(control, target=STEEP(1 + size))
        control.observe([row], [tree], [])
    assert sizes[0] == 10 and sizes.count(0) > 180


@pytest.mark.parametrize(("tokens", "most", "least"), [(2.0, 1.0, 0.9), (1.0, 0.2, 0.01)])
def test_probes_are_read_where_they_pay_and_tried_within_the_allowance(
    tokens: float, most: float, least: float
) -> None:
    """Probes cost a tenth of a pass; passes with them emit two tokens, or one as those without."""
    probing, spent, read = Probing(), 0.0, 0
    for _ in range(2000):
        on = probing.decide(0.1, 0.015 * spent)
        read += on
        spent += 1.1 if on else 1.0
        probing.observe(tokens if on else 1.0, 1.1 if on else 1.0)
    assert least <= read / 2000 <= most


def test_probes_are_tried_again_in_later_calls() -> None:
    """Each call has its own allowance for trials."""
    probing, tried = Probing(), []
    for _ in range(5):
        probing.begin()
        spent, read = 0.0, 0
        for _ in range(300):
            read += (on := probing.decide(0.1, 0.015 * spent))
            spent += 1.1 if on else 1.0
            probing.observe(1.0, 1.1 if on else 1.0)
        tried.append(read)
    assert min(tried) > 0


def test_costs_stay_nonnegative_if_the_clock_steps_back() -> None:
    drafter = ExpensiveDrafter()
    control, row = opened(drafter), row_of(drafter)
    control.start([row])
    for step in [0.1, -5.0, -5.0, 0.1, -0.2] * 4:
        (most,) = control.budget([row])
        spend(control, draft=step)
        control.prune([row], [DraftTree.chain(row.tokens[-1], [2] * most)])
        spend(control, target=1.0)
        row.tokens += [2]
        control.observe([row], [], [])
        assert state_of(control).costs.of_level >= 0


@pytest.mark.parametrize(("besides", "each"), [(3.0, 0.5), (0.0, 2.0), (4.0, 0.0)])
def test_the_cost_of_a_draft_is_separated_from_that_of_its_levels(besides: float, each: float) -> None:
    costs = DraftCosts(memory=0.9)
    for levels in [1, 7, 2, 5, 3] * 12:
        costs.levels = levels
        costs.add(besides + each * levels, 0.0, True)
    for levels in (1, 4, 7):
        assert costs.of_levels(levels) == pytest.approx(besides + each * levels, rel=0.1)
    assert costs.of_levels(0) == 0


def test_drafts_of_one_size_cost_as_much_besides_their_levels_as_for_one() -> None:
    costs = DraftCosts(memory=0.9)
    for _ in range(50):
        costs.levels = 3
        costs.add(8.0, 0.0, True)
    assert costs.of_levels(3) == pytest.approx(8.0, rel=0.02)
    assert costs.of_draft == pytest.approx(costs.of_level, rel=0.05)


@pytest.mark.parametrize("later", [0.0, 1.0])
def test_short_drafts_do_not_hide_that_longer_ones_are_right(later: float) -> None:
    """The first tokens are right; those after them are wrong at first, and from then on always or never right: after
    some time drafts are long, or they stay short."""
    drafter = ExpensiveDrafter()
    control, row = opened(drafter, Curve((1, 512), (1.0, 1.5))), row_of(drafter)
    control.start([row])
    sizes = []
    for step in range(300):
        (most,) = control.budget([row])
        spend(control, draft=0.1 + 0.05 * most)
        draft = list(range(2, 2 + most))
        control.prune([row], [DraftTree.chain(row.tokens[-1], draft)])
        right = min(most, 1) if step < 40 or not later else most
        spend(control, target=1.0)
        row.tokens += [*draft[:right], 1]
        control.observe([row], [], [])
        sizes.append(most)
    assert sum(sizes[20:40]) / 20 < 3
    assert (sum(sizes[-50:]) / 50 > 5) if later else (sum(sizes[-50:]) / 50 < 3)


TIMES = st.floats(1e-6, 10.0) | st.sampled_from([0.0, -1e-3, 1e-9, 1e5, math.nan, math.inf])


@st.composite
def turns(draw: st.DrawFn) -> tuple[list[int], list[int], float, list[float]]:
    """Drafted and accepted tokens of each row in a pass, and its seconds and those of the other parts."""
    drafted = draw(st.lists(st.integers(0, 10), min_size=7, max_size=7))
    right = [draw(st.integers(0, most)) for most in drafted]
    return drafted, right, draw(TIMES), [draw(TIMES) for _ in ("draft", "observe", "control")]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(1e-5, 1.0), min_size=3, max_size=3).map(sorted),
    st.booleans(), st.booleans(), st.lists(st.tuples(st.integers(1, 7), turns()), max_size=40),
)  # fmt: skip
def test_budgets_and_costs_stay_in_bounds_for_any_times(
    measured: list[float], lockstep: bool, autoregressive: bool, passes: list[tuple[int, tuple]]
) -> None:
    drafter, observed = PromptLookup(), list(measured)
    drafter.autoregressive = autoregressive
    control = opened(drafter, Curve((1, 4, 32), tuple(measured)), lockstep)
    rows, state, seconds = [row_of(drafter) for _ in range(7)], state_of(control), vars(control.times)
    control.start(rows)
    for count, (drafted, right, spent, others) in passes:
        playing = rows[:count]
        budget = control.budget(playing)
        assert all(0 <= most <= drafter.width for most in budget)
        trees = [
            DraftTree.chain(row.tokens[-1], [2] * min(n, most))
            for row, n, most in zip(playing, drafted, budget, strict=False)
        ]
        for part, more in zip(("draft", "observe", "control"), others, strict=True):
            seconds[part] = _plus(seconds[part], more)
        spend(control)
        kept = control.prune(playing, trees)
        assert all(len(cut) <= len(tree) for cut, tree in zip(kept, trees, strict=True))
        before, seconds["target"] = seconds["target"], _plus(seconds["target"], spent)
        observed += [t for t in (spent, seconds["target"] - before) if 0 < t < math.inf]
        for row, tree, n in zip(playing, kept, right, strict=False):
            row.tokens += [2] * min(n, len(tree) - 1) + [3]
        control.observe(playing, kept, [])
        times = control._costs.curve.seconds
        assert min(observed) * (1 - 1e-9) <= times[0] and times[-1] <= max(observed) * (1 + 1e-9)
        assert list(times) == sorted(times) and math.isfinite(state.trials._left + state.trials._earned)


def _plus(before: float, spent: float) -> float:
    """A clock that may stop or step back; it ignores values that are not finite."""
    return before + spent if math.isfinite(spent) else before


def test_what_drafts_lose_stays_within_the_slack(control: Cost) -> None:
    """Wrong drafts: all of their time counts, observing passes and the control itself included."""
    row, passes = row_of(), 2000
    control.start([row])
    lost = 0.0
    for turn in range(passes):
        (most,) = control.budget([row])
        tree = DraftTree.chain(row.tokens[-1], [9] * most)
        spend(control, **dict.fromkeys(("draft", "observe", "control"), 0.03 * (most > 0)))
        lost += 0.09 * (most > 0) * (turn > 0)
        spent = STEEP(len(control.prune([row], [tree])[0]))
        spend(control, target=spent)
        lost += spent - 1.0
        row.tokens += [2]
        control.observe([row], [tree], [])
    assert 0.5 * control.slack * passes < lost < (control.slack + 0.002) * passes + 1


def test_readings_of_prompts_stay_within_the_slack() -> None:
    """In each call the first draft reads the prompt, in as many passes as the call has; no draft is right."""
    control, lost, calls, passes = Cost(), 0.0, 60, 50
    for _ in range(calls):
        opened(DRAFTER, control=control)
        row, reading = row_of(), float(passes)
        control.start([row])
        for _ in range(passes):
            (most,) = control.budget([row])
            spent = reading + 0.5 if most else 0.0
            reading = 0.0 if most else reading
            spend(control, draft=spent)
            tree = DraftTree.chain(row.tokens[-1], [9] * most)
            spent += STEEP(len(control.prune([row], [tree])[0])) - 1.0
            spend(control, target=1.0)
            row.tokens += [2]
            control.observe([row], [tree], [])
            lost += spent
        control.end(row)
    assert passes < lost < control.slack * calls * passes + 3 * passes


def test_until_costs_are_known_only_confident_drafts_are_verified() -> None:
    """A long copy is verified at once; a guess, for which typical costs would pay, is not."""
    for confidence, verified in ((0.95, True), (0.3, False)):
        fresh = SimpleNamespace(
            kept=None, initial=lambda: Curve.typical(1, 1e-3), measure=lambda steps, curve, most: curve
        )  # fmt: skip
        control, row = opened(DRAFTER, fresh), row_of()
        control.start([row])
        sizes = []
        for _ in range(3):
            (most,) = control.budget([row])
            tree = DraftTree.chain(row.tokens[-1], [7] * most, [confidence] * most)
            sizes.append(len(control.prune([row], [tree])[0]) - 1)
            spend(control, target=1.0)
            row.tokens += [2]
            control.observe([row], [], [])
        assert sizes[:2] == [0, 0] and (sizes[2] > 4) is verified and bool(sizes[2]) is verified


@pytest.mark.parametrize("drafted", [0, 1], ids=["nothing", "guesses"])
def test_what_drafts_lose_before_any_pays_is_made_up_before_trials(drafted: int) -> None:
    """Drafts of a tenth of a pass, empty or never right: they end after some tries, and take the slack from then on."""
    control, lost, passes = opened(DRAFTER, FLAT), [], 600
    row = row_of()
    control.start([row])
    for _ in range(passes):
        (most,) = control.budget([row])
        lost.append(0.1 if most else 0.0)
        spend(control, draft=lost[-1])
        control.prune([row], [DraftTree.chain(row.tokens[-1], [9] * min(most, drafted))])
        spend(control, target=1.0)
        row.tokens += [2]
        control.observe([row], [], [])
    assert sum(lost[:300]) < 300 * control.slack + 3.0
    assert sum(lost[300:]) < 300 * control.slack + 0.5, "what was lost first is not lost again"
    assert sum(lost[-100:]) > 0, "it is tried again"


def test_drafting_begins_after_the_first_passes_were_timed() -> None:
    fresh = SimpleNamespace(kept=None, initial=lambda: Curve.typical(1, 1e-3), measure=lambda steps, curve, most: curve)
    control, row = opened(DRAFTER, fresh), row_of()
    control.start([row])
    sizes = []
    for spent in [5.0, 1.0] + [2.0] * 8:  # the very first waits for memory
        (most,) = control.budget([row])
        sizes.append(len(control.prune([row], [DraftTree.chain(row.tokens[-1], [2] * most)])[0]) - 1)
        spend(control, target=spent)
        row.tokens += [2] * (1 + sizes[-1])
        control.observe([row], [], [])
    assert sizes[:3] == [0, 0, 0] and sizes[4] > 0 and sizes[-1] == 10, "one draft is right before any is verified"
    assert control._costs.curve(1) == pytest.approx(1.0)


def mixed(drafters: dict[Any, int], kept: Curve, padded: bool = False) -> tuple[Cost, dict[Any, list[Row]]]:
    """A control under which rows of several drafters run, and these rows."""
    control = Cost()
    for drafter in drafters:
        opened(drafter, kept, control=control, padded=padded)
    rows = {drafter: [row_of(drafter) for _ in range(count)] for drafter, count in drafters.items()}
    control.start([row for own in rows.values() for row in own])
    return control, rows


class CheapDrafter:
    """A drafter that the control sees only by its attributes."""

    width, prior_confidence, autoregressive, adaptive, overlapped = 12, 0.15, False, False, False


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.floats(0.05, 0.95), st.integers(1, 12)), min_size=2, max_size=3),
    st.lists(st.floats(0.5, 4.0), min_size=4, max_size=4).map(sorted),
)
def test_sizes_of_all_drafters_are_those_of_the_best_pass(
    groups: list[tuple[int, float, int]], seconds: list[float]
) -> None:
    """In passes that are padded to the widest tree, against exhaustive search over all combinations of sizes."""
    curve = Curve((1, 4, 16, 64), tuple(seconds))
    drafters = {CheapDrafter(): group for group in groups}
    control, rows = mixed({drafter: count for drafter, (count, _, _) in drafters.items()}, curve, padded=True)
    batch = [row for own in rows.values() for row in own]
    assert control.budget(batch) == [CheapDrafter.width] * len(batch)
    trees = [
        DraftTree.chain(1, [2] * nodes, [right] * nodes)
        for drafter, (_, right, nodes) in drafters.items()
        for _ in rows[drafter]
    ]
    kept = iter(control.prune(batch, trees))
    sizes = [{len(next(kept)) - 1 for _ in own} for own in rows.values()]
    assert all(len(size) == 1 for size in sizes), "rows of one drafter have one size"

    def goodput(chosen: Sequence[int]) -> float:
        gains = [n * sum(p ** (i + 1) for i in range(size)) for (n, p, _), size in zip(groups, chosen, strict=True)]
        nodes = sum(n * (1 + size) for (n, _, _), size in zip(groups, chosen, strict=True))
        return (len(batch) + sum(gains)) / curve(nodes)

    best = max(map(goodput, itertools.product(*(range(nodes + 1) for _, _, nodes in groups))))
    chosen = [size.pop() for size in sizes]
    assert goodput(chosen) >= 0.95 * best  # sizes grow in steps, and changes by which goodput hardly rises are not made
    nodes = len(batch) + sum(n * size for (n, _, _), size in zip(groups, chosen, strict=True))
    for i, drafter in enumerate(drafters):  # what one saves: as many tokens, by passes without its drafts
        without = goodput([0 if i == j else size for j, size in enumerate(chosen)])
        if (saved := goodput(chosen) * curve(nodes) / without - curve(nodes)) > 1e-9:
            before = 0.9 * FAVOUR * curve(1) + 0.1 * saved
            assert control._drafters[id(drafter)].trials.saving == pytest.approx(max(before, saved / 2))


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.lists(st.floats(0.05, 0.95), min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(0, 3),
    st.lists(st.floats(0.5, 4.0), min_size=4, max_size=4).map(sorted),
)
def test_every_row_has_as_many_nodes_as_the_best_pass(
    confidence: list[list[float]], alone: int, seconds: list[float]
) -> None:
    """Where no padding is computed, rows of one drafter have sizes of their own: against exhaustive search."""
    curve, first = Curve((1, 4, 16, 64), tuple(seconds)), min(alone, len(confidence) - 1)
    counts = [len(confidence) - first, first] if first else [len(confidence)]
    control, rows = mixed({CheapDrafter(): count for count in counts}, curve)
    batch = [row for own in rows.values() for row in own]
    control.budget(batch)
    kept = control.prune(batch, [DraftTree.chain(1, [2] * len(own), own) for own in confidence])
    paths = [list(itertools.accumulate(own, operator.mul)) for own in confidence]

    def goodput(chosen: Sequence[int]) -> float:
        gain = sum(sum(own[:size]) for own, size in zip(paths, chosen, strict=True))
        return (len(batch) + gain) / curve(len(batch) + sum(chosen))

    best = max(map(goodput, itertools.product(*(range(len(own) + 1) for own in paths))))
    assert goodput([len(tree) - 1 for tree in kept]) >= 0.95 * best  # sizes are tried in steps


@pytest.mark.parametrize(("padded", "tokens"), [(True, 22), (False, 12)])
def test_a_pass_costs_the_nodes_that_it_computes(padded: bool, tokens: int) -> None:
    """Drafts of ten nodes and of none: padding counts where it is computed."""
    control, rows = mixed({CheapDrafter(): 2}, FLAT, padded)
    (batch,) = rows.values()
    control.budget(batch)
    kept = control.prune(batch, [DraftTree.chain(1, [2] * 10), DraftTree.chain(1)])
    assert [len(tree) for tree in kept] == [11, 1]
    (drafts,) = control._batch
    assert drafts.tokens == tokens


def test_tokens_that_are_read_again_are_charged_to_the_drafts_that_left_them() -> None:
    control, row = opened(DRAFTER, carried=8), row_of()
    control.start([row])
    (most,) = control.budget([row])
    assert most > 0 and control._costs(1) - control._costs.without_carry(1) == STEEP(9) - STEEP(1) > 0
    control.prune([row], [DraftTree.chain(1)])
    spend(control, target=STEEP(9))
    row.tokens += [2]
    control.observe([row], [], [])
    assert state_of(control).lost == pytest.approx(STEEP(9) - STEEP(1))


def test_a_pass_without_drafts_is_made_to_learn_what_it_costs(control: Cost) -> None:
    """By a stored curve it costs three times as much as it does, so that drafts would pay; later it does."""
    control._costs.curve = Curve((1, 16), (3.0, 3.3))
    control._costs._batches.clear()
    row, sizes = row_of(), []
    control.start([row])
    for turn in range(500):
        (most,) = control.budget([row])
        tree = DraftTree.chain(row.tokens[-1], [2, *[9] * 9][:most])
        sizes.append(len(control.prune([row], [tree])[0]) - 1)
        spend(control, target=(1.0 if turn < 200 else 2.5) if sizes[-1] == 0 else 3.0)
        row.tokens += [2] * min(1 + sizes[-1], 2)
        control.observe([row], [], [])
    assert sum(size > 0 for size in sizes[:200]) < 30 and sum(size > 0 for size in sizes[-100:]) > 80


def test_the_first_step_of_rows_does_not_count_as_what_a_step_costs() -> None:
    """Many short calls, in which the first step takes twice as long, and every draft loses a fifth of a plain step."""
    control = opened(DRAFTER, Curve((1, 16), (1.0, 2.2)))
    control._costs._batches.clear()
    sizes: list[list[int]] = []
    for _ in range(20):
        row, first = row_of(), True
        sizes.append([])
        control.start([row])
        while len(row.tokens) < 60:
            (most,) = control.budget([row])
            tree = DraftTree.chain(row.tokens[-1], [2, 9][:most])
            drafted = len(control.prune([row], [tree])[0]) - 1
            sizes[-1].append(drafted)
            spend(control, target=(2.2 if drafted else 1.0) * (2 if first else 1))
            row.tokens += [2] * min(1 + drafted, 2)
            control.observe([row], [], [])
            first = False
        control.end(row)
    assert sum(size > 0 for call in sizes[-5:] for size in call) < 30
    assert control._costs.plain == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("outside", [0.0, 0.5])
@pytest.mark.parametrize("verified, pays", [(2.5, False), (1.7, True)])
def test_steps_right_after_drafts_do_not_count_as_what_a_step_costs(
    verified: float, pays: bool, outside: float
) -> None:
    """They take up to 1.4 of a plain one, beside which two tokens in 2.5 would seem to pay; in passes or outside."""
    control = opened(DRAFTER, Curve((1, 16), (1.0, verified)))
    control._costs._batches.clear()
    row, sizes, warm = row_of(), [], 9
    control.start([row])
    for _ in range(1500):
        (most,) = control.budget([row])
        tree = DraftTree.chain(row.tokens[-1], [2, 9][:most])
        sizes.append(len(control.prune([row], [tree])[0]) - 1)
        warm = 0 if sizes[-1] else warm + 1
        more = 0 if sizes[-1] else max(0.5 - 0.1 * warm, 0)
        whole = (verified if sizes[-1] else 1) + more
        spend(control, target=whole - outside - (more if outside else 0), all=whole)
        row.tokens += [2] * min(1 + sizes[-1], 2)
        control.observe([row], [], [])
    first, last = (sum(size > 0 for size in some) for some in (sizes[:250], sizes[-1000:]))
    assert first > 220 and last > 900 if pays else first < 100 and last < 50
    assert control._costs.plain == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("outside", [0.0, 0.3])
def test_what_verifying_takes_outside_of_passes_has_to_be_saved_too(outside: float) -> None:
    """A pass over a draft is no slower than one without, of which the times of passes show nothing; for every fourth
    draft nothing is found. One that is right in a fifth of the cases pays where verifying takes no time besides."""
    control = opened(DRAFTER, FLAT)
    row, sizes, confidence = row_of(), [], 0.9
    control.start([row])
    for turn in range(61):
        confidence = 0.9 if turn < 60 else 0.2
        (most,) = control.budget([row])
        found = (most > 0 and turn % 4 > 0) or turn == 60
        tree = DraftTree.chain(row.tokens[-1], [2] * found, [confidence] * found)
        sizes.append(len(control.prune([row], [tree])[0]) - 1)
        spend(control, target=1.0, observe=0.1 + outside * sizes[-1], all=1.1 + outside * sizes[-1])
        row.tokens += [2] * (1 + sizes[-1])
        control.observe([row], [], [])
    assert control._costs(2) - control._costs(1) == pytest.approx(outside)
    assert control._costs.per_node(1, 1).node == 0
    assert sum(sizes[:60]) > 30 and sizes[60] == (outside == 0)


@pytest.mark.parametrize(("saved", "costs", "stops"), [(False, 0.3, True), (True, 0.3, False), (False, 0.0, False)])
def test_verified_drafts_of_which_nothing_is_accepted_are_in_vain(saved: bool, costs: float, stops: bool) -> None:
    """They promise much and hold nothing: fewer and fewer are made, unless earlier ones have saved time, or the pass
    over them costs nothing."""
    control = opened(DRAFTER, Curve((1, 2, 16), (1.0, 1.0 + costs, 1.0 + costs)))
    row, drafts = row_of(), 0
    control.start([row])
    for turn in range(100):
        (size,) = control.budget([row])
        drafts += size > 0
        spend(control, draft=0.03 * (size > 0))
        tree = DraftTree.chain(row.tokens[-1], [2][:size], [0.9][:size])
        verified = len(control.prune([row], [tree])[0]) - 1
        spend(control, target=1.0 + costs * verified)
        row.tokens += [2] * (1 + verified * (saved and turn < 60))
        control.observe([row], [], [])
    assert drafts < 20 if stops else drafts > 85


def test_the_luck_of_one_draft_does_not_raise_the_expectations_of_others() -> None:
    acceptance = DrafterAcceptance(0.9, 0.3, 0.8)
    acceptance.verified(2.0, 9, 1)
    assert acceptance.correction == 1.0
    for _ in range(9):
        acceptance.verified(2.0, 1, 1)
    assert acceptance.correction < 0.6


@pytest.mark.parametrize(("drafting", "drafts"), [(0.9, 1), (0.5, 4), (0.02, 31)])
def test_the_more_a_draft_costs_the_fewer_show_that_none_pays(drafting: float, drafts: int) -> None:
    trials, made = TrialBudget(0.005, 0.9), 0
    trials.begin(1.0)
    while trials.saving > 0:
        trials.expect(-drafting, drafting, 1.0)
        made += 1
    assert made == drafts


def test_steps_rest_before_it_is_known_what_they_cost() -> None:
    """Those that nothing would be learnt from; and a row that has come to something to draft ends the pause."""
    drafter = ExpensiveDrafter()
    control, row = opened(drafter, FLAT), row_of(drafter)
    control._costs._batches.clear()
    control.start([row])
    kinds = []
    for turn in range(40):
        drafter.found = turn == 30
        (size,) = control.budget([row])
        kinds.append("draft" if size else "step" if control._batch else "rest")
        spend(control, draft=0.1 * (size > 0))
        control.prune([row], [DraftTree.chain(row.tokens[-1])])
        spend(control, target=1.2)
        row.tokens += [2]
        control.observe([row], [], [])
    assert kinds[:3] == ["step"] * 3 and kinds.count("step") == 6 and kinds[30] == "draft" == kinds[24]
    assert kinds[16:24] == ["rest"] * 5 + ["step"] * 3  # the longest pause before the costs are known


def test_one_drafter_stops_while_another_goes_on() -> None:
    """Wrong drafts of one drafter cost half a pass each; those of the other, in the same passes, are right."""
    good, bad = CheapDrafter(), CheapDrafter()
    control, rows = mixed({good: 2, bad: 1}, Curve((1, 64), (1.0, 1.5)))
    (other,) = rows[bad]
    requested, verified = {good: 0, bad: 0}, {good: 0, bad: 0}
    drafting = {id(good): 0.0, id(bad): 0.0}
    for _ in range(300):
        batch = [rows[good][0], other, rows[good][1]]
        budget = control.budget(batch)
        trees = [
            DraftTree.chain(row.tokens[-1], ([9] if row is other else [2]) * most)
            for row, most in zip(batch, budget, strict=True)
        ]
        for drafter, most in ((good, budget[0]), (bad, budget[1])):
            requested[drafter] += most > 0
            drafting[id(drafter)] += (0.001 if drafter is good else 0.5) * (most > 0)
        control.drafting, control.times.draft = drafting, sum(drafting.values())
        kept = control.prune(batch, trees)
        control.times.target += 1.0 + 0.5 * (sum(map(len, kept)) - 1) / 63
        for row, tree in zip(batch, kept, strict=True):
            verified[bad if row is other else good] += len(tree) - 1
            row.tokens += [2] * (1 if row is other else len(tree))
        control.observe(batch, kept, [])
    assert requested[good] > 290 and verified[good] > 290 * 2 * 8
    assert requested[bad] < 30 and verified[bad] < 60


def test_the_time_of_one_drafter_is_not_counted_against_another() -> None:
    """Long drafts, all right, that cost a tenth of a pass, beside cheap drafts of one token."""
    long, short = CheapDrafter(), CheapDrafter()
    control, rows = mixed({long: 1, short: 1}, Curve((1, 64), (1.0, 1.05)))
    batch, requested = [rows[long][0], rows[short][0]], [0, 0]
    for _ in range(300):
        budget = control.budget(batch)
        trees = [
            DraftTree.chain(row.tokens[-1], [2] * min(most, nodes))
            for row, most, nodes in zip(batch, budget, (12, 1), strict=True)
        ]
        requested = [n + (most > 0) for n, most in zip(requested, budget, strict=True)]
        for drafter, seconds, most in ((long, 0.1, budget[0]), (short, 0.001, budget[1])):
            spent = seconds * (most > 0)
            control.times.draft += spent
            control.drafting = {**control.drafting, id(drafter): control.drafting.get(id(drafter), 0.0) + spent}
        kept = control.prune(batch, trees)
        control.times.target += 1.0 + 0.05 * (sum(map(len, kept)) - 1) / 63
        for row, tree in zip(batch, kept, strict=True):
            row.tokens += [2] * len(tree)
        control.observe(batch, kept, [])
    assert min(requested) > 290


def test_the_state_of_a_deleted_drafter_is_deleted() -> None:
    kept, gone = CheapDrafter(), CheapDrafter()
    control, rows = mixed({kept: 1, gone: 1}, FLAT)
    for own in rows.values():
        control.end(own[0])
    record = control._drafters[id(kept)]
    own[0].request = None  # type: ignore[assignment]
    rows.clear()
    del gone, own
    opened(kept, FLAT, control=control)
    assert list(control._drafters.values()) == [record]
