"""Cost model: verify as much of all drafts as raises tokens per second, from measured costs and each row's own history.

Every pass maximises its goodput, expected tokens per second (SmartSpec, arXiv 2406.14066), with
trees sized by measured costs (Sequoia's hardware-aware budget, arXiv 2402.12374, section 3.3):

    budget = argmax over nodes of (rows + sum of P(path of a node is accepted)) / seconds(rows + nodes)

over the nodes of all rows and drafters together. The parts: `_acceptance.py` (acceptance rates of a row's drafts),
`_pass_costs.py` (seconds of a pass by its width), `_draft_costs.py` (seconds of drafting), `_trials.py` (time that
drafts may lose), `_probing.py` (whether probes are read).

Added to the papers: drafts are compared with the emitted tokens whether they were verified or not, so a row whose
drafts do not pay stops verifying them, keeps learning at no cost, and resumes as soon as its text begins to repeat;
costs are updated by every pass, those of steps without drafts by such steps, which are made now and then; and the time
that drafts may lose is bounded by accounts of seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import merge

from truedraft.card import Card, knob
from truedraft.control._acceptance import RowAcceptance
from truedraft.control._base import Control
from truedraft.control._drafter import DrafterState, Drafts, gain_per_node
from truedraft.control._pass_costs import PassCosts
from truedraft.drafters._base import Drafter
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row

EXPLORING = 0.5  # learning rate of the costs for a pass that explores them
WORTHWHILE = 1.005  # factor by which a further change of sizes raises goodput at least
STAY = (-1, 0, 0.0)  # the size of no drafter changes, by no nodes and no expected tokens


@dataclass
class Cost(Control):
    card = Card(
        paper="arXiv 2402.12374 (2024), section 3.3, extended",
        idea="Verify as much of each draft as raises expected tokens per second on this machine.",
        family="cost model",
    )
    memory: float = knob(0.9, 0, 1)  # weight that an observation keeps at each later one
    survival: float = knob(0.85, 0, 1)  # prior acceptance rate of a later token, if those before it are accepted
    slack: float = knob(0.005, 0, 1)  # share of the time that trial drafts, and drafts not verified, may cost
    rate: float = knob(0.1, 0, 1)  # learning rate of the costs of passes

    def __post_init__(self) -> None:
        self._costs = PassCosts()
        self._drafters: dict[int, DrafterState] = {}
        self._rows: dict[int, tuple[DrafterState, RowAcceptance]] = {}
        self._batch: list[Drafts] = []  # of the current pass, by drafter
        self._requested: list[Drafts] = []  # those of the current pass that were requested
        self._clock = (0.0,) * 4  # seconds so far, see `_spent`
        self._before = 0.0  # seconds of the target before the pass
        self._entered = True  # whether a row has entered or left since the last step that was decided
        self._same = False  # whether the last step was decided too, and for the same rows
        self._verified = False  # whether any drafts of the last step were verified
        self._resting = 0  # passes for which nothing is drafted, and nothing is to be learnt

    def open(self, target: Target, drafter: Drafter, rows: int, lockstep: bool, steps: int) -> None:
        if not self._rows:
            self._spent()
        self._changed()
        if drafter.width:
            self._costs.measure(target, steps, rows * (1 + drafter.width))
        self._drafters = {key: state for key, state in self._drafters.items() if state.drafter is not None}
        state = self._drafters.get(id(drafter))
        if state is None:
            state = self._drafters[id(drafter)] = DrafterState(drafter, self.memory, self.survival, self.slack)
        drafting = self.drafting.get(id(drafter), 0.0)
        state.begin(drafter, lockstep, target.padded, self._costs, drafting, self.times.target)

    def _changed(self) -> None:
        """A row enters or leaves."""
        self._same, self._resting, self._entered = False, 0, True

    def start(self, rows: Sequence[Row]) -> None:
        self._changed()
        for row in rows:
            state = self._drafters[id(row.request.drafter)]
            state.admitted()
            self._rows[id(row)] = state, state.acceptance.begun(row)

    def budget(self, rows: Sequence[Row]) -> list[int]:
        if self._resting and not self._resumes(rows):
            self._resting, self._same = self._resting - 1, False
            self._costs.rest()
            return [0] * len(rows)
        aside, passed = self._spent()
        verifying = self._costs.verifying if self._verified else 0.0
        batch: dict[int, Drafts] = {}
        stored = 0
        for place, row in enumerate(rows):
            state, record = self._rows[id(row)]
            record.length = len(row.tokens)
            stored += record.length
            if (drafts := batch.get(id(state))) is None:
                batch[id(state)] = Drafts(state, [record], [place])
            else:
                drafts.rows.append(record)
                drafts.places.append(place)
        self._batch = list(batch.values())
        self._costs.begin(len(rows), stored, self._entered)
        self._entered = False
        plain, budget = self._costs.plain, [0] * len(rows)
        checks = self._costs.checks(sum([max(drafts.state.trials.saving, 0.0) for drafts in self._batch]))
        for drafts in self._batch:
            if (state := drafts.state).width:
                drafter, own = rows[drafts.places[0]].request.drafter, len(drafts.places)
                cost = drafter.pass_cost = self._costs.per_node(len(rows), own)
                share = own / len(rows)
                drafting = self.drafting.get(id(drafter), 0.0)
                state.settle(drafting, aside * share, verifying * share, passed * share, plain)
                size = state.budget(drafts.rows, self._costs, len(rows), cost.plain, checks)
                for place in drafts.places:
                    budget[place] = size
        return budget

    def _resumes(self, rows: Sequence[Row]) -> bool:
        """Whether a row has come to something to draft, where drafts rest because the latest ones were in vain."""
        return any(state.alert and record.resumes for state, record in [self._rows[id(row)] for row in rows])

    def _spent(self) -> tuple[float, float]:
        """Seconds of the last steps that count against drafts, beside those of drafting, and seconds of passes.

        The former are those outside of the pass beyond what a step without drafts takes, where one step was made of the
        same rows; else those of observing and control.
        """
        times = self.times
        before, prefill = self._clock, times.prefill
        now = self._clock = times.observe + times.control, times.outside, times.target + prefill, prefill
        aside, outside, passed, read = now[0] - before[0], now[1] - before[1], now[2] - before[2], now[3] - before[3]
        if self._same and outside > 0 and not read:
            if self._requested:
                self._costs.learn_drafted(outside, self._verified)
                aside = outside - self._costs.outside
            else:
                self._costs.learn_outside(outside)
        self._same = True
        return aside, passed

    def prune(self, rows: Sequence[Row], trees: Sequence[DraftTree]) -> list[DraftTree]:
        self._requested = [drafts for drafts in self._batch if drafts.state.requested]
        self._before, self._verified = self.times.target, False
        kept = list(trees)
        if self._requested:
            for drafts in self._requested:
                drafts.offer(trees if len(self._batch) == 1 else [trees[place] for place in drafts.places])
            self._choose(self._requested, len(rows))
            for drafts in self._requested:
                for place, tree in zip(drafts.places, drafts.trees, strict=True):
                    kept[place] = tree
            self._verified = sum(map(len, kept)) > len(rows)
        return kept

    def _choose(self, drafted: Sequence[Drafts], rows: int) -> None:
        """Cut drafts to the sizes of the largest goodput, and keep the probes that pay."""
        nodes, tokens = rows, float(rows)  # in the pass whatever is chosen, and the expected tokens
        for drafts in drafted:
            if drafts.empty:
                drafts.state.expect(0.0, self._costs)
                drafts.state.in_vain(self._costs)
        sizable = [drafts for drafts in drafted if len(drafts.gains) > 1]
        if len(sizable) < len(drafted):
            whole = [drafts for drafts in drafted if drafts not in sizable]
            nodes += sum([drafts.tokens - len(drafts.rows) for drafts in whole])
            tokens += sum([drafts.whole_gain for drafts in whole]) if sizable else 0.0
        if sizable:
            if len(sizable) == 1:
                sizes = [sizable[0].best_size(nodes, tokens, self._costs)]
            else:
                sizes = self._exchanged(sizable, self._grown(sizable, nodes, tokens), nodes, tokens)
            self._cut(sizable, sizes, nodes, tokens)
        for drafts in drafted:
            if drafts.state.probed:
                beside = sum([one.tokens for one in self._batch if one is not drafts])
                drafts.probe(self._costs, beside, self.times.target)

    def _grown(self, sizable: Sequence[Drafts], nodes: int, tokens: float) -> list[int]:
        """Nodes of each draft to verify, by drafter, of the largest goodput: expected tokens over seconds of the pass.

        Greedily: the size grows whose next step adds the most tokens per node, and each resulting pass is evaluated.
        A step over a jump of the cost curve may come before one that still fits; see `_exchanged`.

        nodes, tokens: nodes and expected tokens of the pass without these drafts.
        """
        costs, sizes = self._costs, [0] * len(sizable)
        best, chosen = tokens / costs(nodes), list(sizes)
        steps = [drafts.steps(i) for i, drafts in enumerate(sizable)]
        for drafts, i, before, size in merge(*steps, key=gain_per_node, reverse=True):
            sizes[i], gains = size, drafts.gains
            nodes += drafts.unit * (size - before)
            tokens += gains[size] - gains[before]
            goodput = tokens / costs(nodes)
            if goodput > best:
                best, chosen = goodput, list(sizes)
        return chosen

    def _exchanged(self, sizable: Sequence[Drafts], sizes: list[int], nodes: int, tokens: float) -> list[int]:
        """Better sizes, by one node more of a drafter, one less of another, or both, as long as these raise goodput.

        nodes, tokens: nodes and expected tokens of the pass without these drafts.
        """
        costs = self._costs
        while True:
            up, down = [STAY], [STAY]
            width, total = nodes, tokens
            for i, (drafts, size) in enumerate(zip(sizable, sizes, strict=True)):
                unit, gains = drafts.unit, drafts.gains
                width, total = width + unit * size, total + gains[size]
                if size + 1 < len(gains):
                    up.append((i, unit, gains[size + 1] - gains[size]))
                if size:
                    down.append((i, -unit, gains[size - 1] - gains[size]))
            goodput, larger, smaller = max(
                [
                    ((total + more + less) / costs(width + wider + narrower), i, j)
                    for i, wider, more in up
                    for j, narrower, less in down
                    if i != j
                ]
            )
            if goodput < WORTHWHILE * total / costs(width):
                return sizes
            sizes = [size + (i == larger) - (i == smaller) for i, size in enumerate(sizes)]

    def _cut(self, sizable: Sequence[Drafts], sizes: Sequence[int], nodes: int, tokens: float) -> None:
        """Cut drafts to their sizes; each drafter's saving is relative to the pass without its drafts."""
        gains = [drafts.gains[size] for drafts, size in zip(sizable, sizes, strict=True)]
        nodes += sum([drafts.unit * size for drafts, size in zip(sizable, sizes, strict=True)])
        for i, drafts in enumerate(sizable):
            without = tokens + sum(gains[:i]) + sum(gains[i + 1 :])
            drafts.cut(sizes[i], without, nodes - drafts.unit * sizes[i], self._costs)

    def observe(self, rows: Sequence[Row], trees: Sequence[DraftTree], accepted: Sequence[Accepted]) -> None:
        if not self._batch:
            return
        if (spent := self.times.target - self._before) > 0:
            self._learn(spent, len(rows))
        self._costs.step(bool(self._requested))
        for drafts in self._batch:
            for row in drafts.rows:
                row.observe()
        self._resting = min([drafts.rests(self._costs) for drafts in self._batch])
        self._batch = []

    def _learn(self, spent: float, rows: int) -> None:
        """Update costs and acceptance by a pass of `spent` seconds."""
        costs, tokens, exploring, overlapped = self._costs, rows, False, False
        if costs.target is None or costs.target.cold:
            return
        if self._requested:
            passed = [(drafts.tokens, drafts.emitted) for drafts in self._batch]
            tokens = sum([own for own, _ in passed])
            whole = tokens, sum([emitted for _, emitted in passed])
            for drafts, own in zip(self._batch, passed, strict=True):
                if costs.measured and drafts.state.requested:
                    drafts.learn(costs, spent + costs.outside, own, whole)
                exploring |= drafts.exploring
                overlapped |= drafts.state.overlapped and drafts.state.requested
        if tokens > rows or not overlapped:  # else it is no step without drafts, though it verified none
            costs.learn(tokens, spent, EXPLORING if exploring else self.rate)

    def end(self, row: Row) -> None:
        self._changed()
        if (found := self._rows.pop(id(row), None)) is not None:
            state, record = found
            if state.dear(self._costs):
                state.acceptance.ended(record.rates)
