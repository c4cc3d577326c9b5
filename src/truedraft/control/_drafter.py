"""State of the cost model for one drafter (acceptance, costs, trials), and the size of its drafts."""

from __future__ import annotations

import math
import weakref
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, islice, repeat, zip_longest

from truedraft.control._acceptance import DrafterAcceptance, RowAcceptance
from truedraft.control._draft_costs import HICCUP, DraftCosts
from truedraft.control._pass_costs import PassCosts
from truedraft.control._probing import Probing
from truedraft.control._trials import TrialBudget
from truedraft.drafters._base import Drafter
from truedraft.drafters._trees import path_probabilities, ranked
from truedraft.tree import DraftTree

CHEAP = 0.05  # of a plain pass: a level of a draft that costs less is not weighed beforehand
REPLANNED = 16  # passes for which a plan holds as long as nothing is drafted: only costs of passes drift
RESTED = 16  # passes at most for which nothing is decided, as long as trials may lose no time
IN_FULL = 24  # short drafts between two in full, which show whether longer ones have become better
ROOM = 8  # nodes drafted beyond 1.5 times those last verified
VAIN = 3  # drafts in a row in vain, until a pass is left out between two, then two, then four
COSTLY = 0.1  # of a plain pass: verifying a draft that costs less is not in vain, whatever is accepted
LONGEST = 16  # passes left out at most
NOTED = 0.02  # of a plain pass: drafts that cost less are made in every pass
SIZES = (0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 19, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)


@lru_cache(maxsize=512)
def sizes(longest: int) -> tuple[int, ...]:
    """Candidate sizes, up to `longest`."""
    return (*SIZES[: bisect_left(SIZES, longest)], longest)


class DrafterState:
    """One drafter's state, kept across calls as long as the drafter exists.

    requested: whether it drafts for the current pass.
    alert: whether it drafts again before it has rested, where it finds something to draft (`Drafter.resumes`).
    padded: whether a pass is padded to its widest tree.
    """

    def __init__(self, drafter: Drafter, memory: float, survival: float, slack: float):
        self._drafter = weakref.ref(drafter)
        self.acceptance = DrafterAcceptance(memory, drafter.prior_confidence, survival)
        self.costs = DraftCosts(memory)
        self.trials = TrialBudget(slack, memory)
        self.probing = Probing()
        self.reach = drafter.width  # nodes to draft where drafts are cut afterwards
        self._form = DraftTree.chain(0, range(drafter.width))  # shape of a full draft, as far as one was observed
        self._formed = False
        self._planned, self._planned_for, self._age = (0, False), (0, 0), 0  # the last plan, its rows, passes since
        self._short = 0  # drafts since the last one in full
        self._vain, self._pause = 0, 0  # drafts in a row of which nothing was verified, passes to leave out

    @property
    def drafter(self) -> Drafter | None:
        """The drafter; None once it was deleted elsewhere."""
        return self._drafter()

    def begin(
        self, drafter: Drafter, lockstep: bool, padded: bool, passes: PassCosts, drafting: float, passed: float
    ) -> None:
        """A call begins, or its first rows in an engine; see `Control.open`.

        drafting, passed: seconds so far of its drafting, and of passes.
        """
        self.padded = padded
        self.width, self.autoregressive, self.lockstep = drafter.width, drafter.autoregressive, lockstep
        self.adaptive, self.overlapped = drafter.adaptive, drafter.overlapped
        self.probing.begin()
        if self.width:
            drafter.pass_cost = passes.per_node(1, 1)
            self.trials.begin(passes.curve(1))
        self.costs.levels = 0
        self.requested = self.alert = False
        self.drawn = self.probed = False  # whether its latest drafts were drawn, and had probes
        self._resumed = False  # whether it drafts again after a pause
        self._drafting, self._passed = drafting, passed
        self.lost = 0.0  # seconds of the latest pass beyond those that its drafts saved

    def admitted(self) -> None:
        """Rows were admitted: the next draft reads their prompts, and takes longer than those after it."""
        self._admitted = True
        self._planned_for = 0, 0
        self._vain = self._pause = 0

    def settle(self, drafting: float, aside: float, verifying: float, passed: float, plain: float) -> None:
        """Account for the latest pass.

        drafting: seconds of its drafting so far.
        aside, passed: its share of the seconds of observing and control, and of passes.
        verifying: of `aside`, what is due to drafts that were verified.
        plain: seconds of a pass without drafts.
        """
        drafted, self._drafting = drafting - self._drafting, drafting
        lost, self.lost = self.lost, 0.0
        if self.requested:
            usual = not (self._resumed or self._admitted)
            lost += verifying + self.costs.add(drafted, max(drafted + aside - verifying, 0.0), usual)
        self.trials.settle(lost, passed, plain)
        self._admitted = self._admitted and not self.requested

    def budget(self, rows: Sequence[RowAcceptance], passes: PassCosts, total: int, plain: float, checks: bool) -> int:
        """Nodes to draft below each root of its rows; 0 for no draft.

        total: rows in the pass. plain: its seconds without drafts. checks: whether it is made without drafts, to learn
            what that costs.
        """
        self._resumed = not self.requested
        if self.trials.exhausted(plain):
            self.requested, self._age = self.trials.permits(False, plain), REPLANNED
            return 0
        if self.requested or self._planned_for != (total, len(rows)) or self._age == REPLANNED:
            self._planned, self._planned_for, self._age = self._plan(rows, passes, total), (total, len(rows)), 0
        self._age += 1
        size, pays = self._planned
        if self._short >= IN_FULL and self.dear(passes):
            size = self.width
        if self._pause and any(row.resumes for row in rows):
            self._pause = 0
        permitted = self.trials.permits(pays, plain) and not self._pause
        self._pause = max(self._pause - 1, 0)
        self.requested = passes.measured and permitted and not checks
        if not self.requested:
            return 0
        self._short = self._short + 1 if size < self.width else 0
        return size

    def rests(self, passes: PassCosts) -> int:
        """Passes after this one for which it does not draft; it plans again after them."""
        if not self.width:
            return RESTED
        if passes.unlearnt:
            self.alert = False
            return passes.unlearnt
        if not passes.measured:
            return 0
        waits = 0 if self.requested else min(self.trials.pause(passes.plain), RESTED)
        rest, self.alert = max(waits, self._pause), not waits
        if not passes.known:
            rest = min(rest, passes.cold)
        self._pause = max(self._pause - rest, 0)
        self._age = REPLANNED if rest else self._age
        return rest

    def _plan(self, rows: Sequence[RowAcceptance], passes: PassCosts, total: int) -> tuple[int, bool]:
        """Nodes to draft per row, and whether they are expected to pay.

        Cheap drafts are made in full and cut afterwards, and so are those of adaptive drafters, which end them in time.
        Others that cost a model's passes, or must not be cut because they are drawn, are sized beforehand, by the shape
        of earlier full drafts.
        """
        if not self.drawn and (self.adaptive or not self.dear(passes)):
            return min(self.width, self.reach), self.trials.saving > 0
        longest = len(self._form) - 1
        gains = self.expected(rows, [self._form] * len(rows), longest)
        depth = list(accumulate(self._form.shape.depth, max))
        goodput = {
            k: (total + gains[k]) / (passes(total + len(rows) * k) + self.costs.of_levels(depth[k]))
            for k in sizes(longest)[1:] or (0,)
        }
        best = max(goodput, key=goodput.__getitem__)
        return self.width if best == longest else best, goodput[best] > total / passes(total)

    @property
    def drafting_seconds(self) -> float:
        """Seconds of drafting for a pass: those usual, or by the levels of the latest draft where these vary."""
        return self.costs.of_levels(self.costs.levels) if self.adaptive else self.costs.seconds

    def expect(self, saved: float, passes: PassCosts) -> None:
        """Update the expected saving by its drafts: this one is expected to save so many seconds of passes."""
        drafting = self.drafting_seconds
        self.trials.expect(saved - drafting, drafting, passes.plain)

    def verified(self, accepted: bool, spent: float, passes: PassCosts) -> None:
        """Take account of whether anything was accepted of the drafts that were verified, in `spent` seconds. If not,
        they count as in vain, unless that cost little, or earlier ones have saved more time than all have lost."""
        if not accepted and self.trials.owing and spent > COSTLY * passes.plain:
            self.in_vain(passes)
        else:
            self._vain = 0

    def in_vain(self, passes: PassCosts) -> None:
        """Its drafts save nothing in this pass. Where that was so for some time, a few passes are left out before the
        next draft, unless a draft costs hardly anything compared with a pass."""
        self._vain += 1
        noted = self.costs.seconds > NOTED * passes.plain
        self._pause = min(1 << (self._vain - VAIN), LONGEST) if noted and self._vain >= VAIN else 0

    def dear(self, passes: PassCosts) -> bool:
        """Whether a level of a draft costs so much that its size is decided beforehand."""
        return self.costs.of_level > 0 and self.costs.of_level > CHEAP * passes.curve(1)

    def expected(self, rows: Sequence[RowAcceptance], trees: Sequence[DraftTree], longest: int) -> list[float]:
        """Expected accepted nodes, all rows together, of the first 0, 1, ... `longest` nodes of each draft.

        The sum over nodes of the probability that their paths are accepted; for a chain of constant rate this is
        equation 1 of Leviathan et al. (arXiv 2211.17192) without the bonus.
        """
        paths = [path_probabilities(tree, row.rates.confidences(tree)) for row, tree in zip(rows, trees, strict=True)]
        nodes = islice(zip_longest(*paths, fillvalue=0.0), 1, longest + 1)
        each = (len(rows) * math.prod(node) if self.lockstep else sum(node) for node in nodes)
        return list(accumulate(each, initial=0.0))

    def reads_probes(self, more: float, passed: float) -> bool:
        """Whether the next pass reads probes, which add `more` seconds to it.

        passed: seconds of passes so far.
        """
        return self.probing.decide(more, self.trials.slack * (passed - self._passed))

    def made(self, trees: Sequence[DraftTree]) -> None:
        """Record the drafts that it proposed."""
        if self.autoregressive:
            self.costs.levels = max(tree.shape.height for tree in trees)
        self.drawn = any(tree.dist is not None for tree in trees)
        self.probed = any(tree.probes for tree in trees)
        largest = max(trees, key=len)
        if len(largest) > 1 and (not self._formed or len(largest) >= len(self._form)):
            tokens = (0,) * len(largest)  # those of a row must not outlive it here
            self._form = DraftTree(tokens, largest.parent, probes=largest.probes, confidence=largest.confidence)
            self._formed = True


@dataclass(eq=False, slots=True)
class Drafts:
    """The drafts of one drafter's rows in the current pass.

    Drafts are cut to a size: the number of nodes of all rows, those of the most probable paths; or, where a pass is
    padded to its widest tree or rows advance in lockstep, the number of nodes of each row.

    rows, places: its rows, and their indices in the batch.
    trees: first as drafted, without probes; after `cut` and `probe` as they are verified.
    gains: expected accepted nodes by size, from 0 on; of size 0 alone where drafts must not be cut.
    exploring: whether they are verified though that is not expected to pay.
    """

    state: DrafterState
    rows: list[RowAcceptance]
    places: list[int]
    trees: Sequence[DraftTree] = ()
    gains: list[float] = field(default_factory=lambda: [0.0])
    exploring: bool = False
    _expected: Sequence[float] = (0.0,)  # gains before correction
    _promised: float = 0.0  # those of the nodes that are verified
    _ranked: Sequence[int] | None = None  # the row of each node, by probability; None where rows have the same size
    _whole: Sequence[DraftTree] = ()  # as drafted, with their probes

    @property
    def tokens(self) -> int:
        """Tokens of its rows in the pass, padding included."""
        if not self.state.requested:
            return len(self.rows)
        lengths = [len(tree) for tree in self.trees]
        return len(lengths) * max(lengths) if self.state.padded else sum(lengths)

    @property
    def empty(self) -> bool:
        """Whether nothing was drafted, though drafts were requested."""
        return all(len(tree) == 1 for tree in self.trees)

    @property
    def unit(self) -> int:
        """Nodes in the pass that a size has more than the one before it."""
        return len(self.rows) if self._ranked is None else 1

    @property
    def emitted(self) -> int:
        """Tokens that the pass emitted for its rows."""
        return sum([len(row.row.tokens) - row.length for row in self.rows])

    @property
    def whole_gain(self) -> float:
        """Expected accepted nodes of drafts that must not be cut."""
        longest = max(tree.drafted for tree in self.trees)
        return self.state.expected(self.rows, self.trees, longest)[-1] if longest else 0.0

    def rests(self, passes: PassCosts) -> int:
        """Passes after this one for which nothing is drafted, and no earlier draft is compared with the text."""
        return 0 if any(row.drafts for row in self.rows) else self.state.rests(passes)

    def offer(self, trees: Sequence[DraftTree]) -> None:
        """Set the drafts proposed for its rows."""
        self.trees = self._whole = trees
        if not self.state.requested:
            return
        self.state.made(trees)
        for row, tree in zip(self.rows, trees, strict=True):
            row.drafted(tree)
        if self.state.probed:
            self.trees = trees = [tree.bare() for tree in trees]
        longest = max(tree.drafted for tree in trees)
        if longest and not self.state.drawn:
            if self.state.padded or self.state.lockstep:
                self._expected = self.state.expected(self.rows, trees, longest)
            else:
                self._expected, self._ranked = self._by_probability(trees)
            correction = self.state.acceptance.correction
            self.gains = [correction * gain for gain in self._expected]

    def _by_probability(self, trees: Sequence[DraftTree]) -> tuple[list[float], list[int]]:
        """Expected accepted nodes of the 0, 1, ... most probable of all drafts, and the row of each of these nodes."""
        return ranked([(tree, row.rates.confidences(tree)) for row, tree in zip(self.rows, trees, strict=True)])

    def steps(self, place: int) -> Iterator[tuple[Drafts, int, int, int]]:
        """Pairs of consecutive candidate sizes, each as (self, place, size, next size)."""
        nodes = sizes(len(self.gains) - 1)
        return zip(repeat(self), repeat(place), nodes, nodes[1:], strict=False)

    def best_size(self, nodes: int, tokens: float, passes: PassCosts) -> int:
        """Nodes to verify, of the largest goodput; see `Cost._grown`.

        nodes, tokens: nodes and expected tokens of the pass without these drafts.
        """
        candidates, width = sizes(len(self.gains) - 1), nodes + passes.carried  # see `PassCosts.__call__`
        aside = passes.aside + passes.verifying
        size = passes.curve.best_size(candidates, self.gains, self.unit, width, tokens, aside)
        pays = (tokens + self.gains[size]) / passes(nodes + self.unit * size) > tokens / passes(nodes)
        return size if pays else 0

    def cut(self, size: int, tokens: float, nodes: int, passes: PassCosts) -> None:
        """Cut the drafts to the chosen size, and update the expected saving of this drafter.

        tokens, nodes: expected tokens of the pass without these drafts, and its nodes.
        """
        self.state.expect(-self._loss(size, tokens, nodes, passes), passes)
        self.exploring, trials = False, self.state.trials
        if size == 0 and self.gains[-1] > len(self.rows):
            size = max(
                k for k in sizes(len(self.gains) - 1) if not k or trials.affords(self._loss(k, tokens, nodes, passes))
            )
            self.exploring = size > 0
        if not size:
            self.state.in_vain(passes)
        each = self._of_rows(size)
        self.state.reach = max(each) + max(each) // 2 + ROOM
        self._promised = self._expected[size]
        self.trees = [tree.cut(1 + own) for tree, own in zip(self.trees, each, strict=True)]

    def _of_rows(self, size: int) -> list[int]:
        """The nodes of each row in drafts of a size."""
        if self._ranked is None:
            return [size] * len(self.rows)
        own = [0] * len(self.rows)
        for i in self._ranked[:size]:
            own[i] += 1
        return own

    def _loss(self, size: int, tokens: float, nodes: int, passes: PassCosts) -> float:
        """Seconds that verifying `size` nodes of each draft is expected to lose; see `cut`."""
        without = passes(nodes)
        return passes(nodes + self.unit * size) - without * (tokens + self.gains[size]) / tokens

    def probe(self, passes: PassCosts, others: int, passed: float) -> None:
        """Restore the probes where they pay.

        others: tokens of other rows in the pass. passed: seconds of passes so far.
        """
        self.state.reach = self.state.width
        bare, least = self.trees, self.tokens
        self.trees = [tree.drafting(kept.drafted) for tree, kept in zip(self._whole, bare, strict=True)]
        more = passes(others + self.tokens) - passes(others + least)
        if not self.state.reads_probes(more, passed):
            self.trees = bare

    def learn(self, passes: PassCosts, spent: float, own: tuple[int, int], all_rows: tuple[int, int]) -> None:
        """Update by the step, which took `spent` seconds without drafting.

        own, all_rows: tokens in the pass and tokens emitted, of these rows and of all.
        """
        state, rows, (tokens, emitted), (width, given) = self.state, len(self.rows), own, all_rows
        cost = passes(width)
        if tokens > rows:
            state.verified(emitted > rows, cost - passes(width - tokens + rows), passes)
        if self._promised:
            state.acceptance.verified(self._promised, emitted, rows)
        if state.probed:
            state.probing.observe(emitted / rows, cost)
        # time to emit as many tokens without these drafts, and earlier ones
        if tokens > rows or passes.carried or state.overlapped:
            without = given / (given - emitted + rows) * passes.without_carry(width - tokens + rows)
            state.lost = min(spent, HICCUP * cost) - without


def gain_per_node(step: tuple[Drafts, int, int, int]) -> float:
    """Expected tokens per added node between two candidate sizes."""
    drafts, _, before, size = step
    return (drafts.gains[size] - drafts.gains[before]) / (drafts.unit * (size - before))
