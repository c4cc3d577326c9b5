"""Cost model: verify as much of all drafts as raises tokens per second, from measured costs and each row's own history.

Every pass maximises its goodput, expected tokens over the seconds that it takes (SmartSpec, arXiv 2406.14066), with
trees sized by measured costs (Sequoia's hardware-aware budget, arXiv 2402.12374, section 3.3):

    budget = argmax over nodes of (rows + sum of P(path of a node is accepted)) / seconds(rows + nodes)

over the nodes of all rows together, whichever drafter they are of. The parts: `_acceptance.py` (how often drafts of a
row are right), `_pass_costs.py` (seconds of a pass by its width), `_draft_costs.py` (seconds of drafting), `_trials.py`
(what drafts may lose), `_probing.py` (whether probes are read).

What is added to the papers: drafts are compared with what was emitted whether they were verified or not, so a row whose
drafts do not pay stops verifying them, keeps learning at no cost, and takes them up again as soon as its text begins to
repeat; costs follow the passes at hand; and what drafts may lose, expected to pay or not, is bounded by accounts of
seconds.
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
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import Accepted, DraftTree, Row

EXPLORING = 0.5  # how fast the costs follow a pass that was made to learn them


@dataclass
class Cost(Control):
    card = Card(
        paper="arXiv 2402.12374 (2024), section 3.3, extended",
        idea="Verify as much of each draft as raises expected tokens per second on this machine.",
        family="cost model",
    )
    memory: float = knob(0.9, 0, 1)  # weight that an observation keeps at each later one
    survival: float = knob(0.85, 0, 1)  # chance given to a later one, if those before it are right
    slack: float = knob(0.015, 0, 1)  # share of the time that drafts which are not verified, or are tried, may cost
    rate: float = knob(0.1, 0, 1)  # how fast the costs follow the passes at hand

    def __post_init__(self) -> None:
        self._costs = PassCosts()
        self._drafters: dict[int, DrafterState] = {}
        self._rows: dict[int, tuple[DrafterState, RowAcceptance]] = {}
        self._batch: list[Drafts] = []  # of the pass under way, by drafter
        self._aside = self._passed = 0.0  # seconds of observing and control, and of passes, at the latest booking
        self._before: float | None = None  # seconds of the target before the pass; None where nothing is learnt from it

    def open(self, target: DecoderTarget, drafter: Drafter, lockstep: bool, steps: int) -> None:
        if not self._rows:
            self._spent()
        if drafter.width:
            self._costs.measure(target, steps)
        self._drafters = {key: state for key, state in self._drafters.items() if state.drafter is not None}
        state = self._drafters.get(id(drafter))
        if state is None:
            state = self._drafters[id(drafter)] = DrafterState(drafter, self.memory, self.survival, self.slack)
        state.begin(drafter, lockstep, self._costs, self._drafting(state), self.times.target)

    def start(self, rows: Sequence[Row]) -> None:
        for row in rows:
            state = self._drafters[id(row.request.drafter)]
            state.admitted()
            self._rows[id(row)] = state, state.acceptance.begun(row)

    def budget(self, rows: Sequence[Row]) -> list[int]:
        batch: dict[int, Drafts] = {}
        for place, row in enumerate(rows):
            state, record = self._rows[id(row)]
            record.length = len(row.tokens)
            if (drafts := batch.get(id(state))) is None:
                drafts = batch[id(state)] = Drafts(state)
            drafts.rows.append(record)
            drafts.places.append(place)
        self._batch = list(batch.values())
        aside, passed = self._spent()
        plain, budget = self._costs.curve(len(rows)), [0] * len(rows)
        for drafts in self._batch:
            if (state := drafts.state).width:
                share = len(drafts.rows) / len(rows)
                state.settle(self._drafting(state), aside * share, passed * share, plain)
                size = state.budget(drafts.rows, self._costs, len(rows))
                for place in drafts.places:
                    budget[place] = size
        return budget

    def _spent(self) -> tuple[float, float]:
        """Seconds of observing and control, and of passes, since they were asked for before."""
        aside, passed = self.times.observe + self.times.control, self.times.target + self.times.prefill
        spent = aside - self._aside, passed - self._passed
        self._aside, self._passed = aside, passed
        return spent

    def _drafting(self, state: DrafterState) -> float:
        """Seconds that a drafter has drafted so far."""
        return self.drafting.get(id(state.drafter), 0.0)

    def prune(self, rows: Sequence[Row], trees: Sequence[DraftTree]) -> list[DraftTree]:
        for drafts in self._batch:
            drafts.offer(trees if len(self._batch) == 1 else [trees[place] for place in drafts.places])
        self._choose(len(rows))
        kept = list(trees)
        for drafts in self._batch:
            for place, tree in zip(drafts.places, drafts.trees, strict=True):
                kept[place] = tree
        learns = any(drafts.state.asked or not self._costs.known for drafts in self._batch if drafts.state.width)
        self._before = self.times.target if learns else None
        return kept

    def _choose(self, rows: int) -> None:
        """Cut the drafts to the sizes of the largest goodput.

        Sizes grow together, wherever one node more gives most tokens; of all that are come by, the best are taken.
        """
        curve, sizable = self._costs.curve, [drafts for drafts in self._batch if drafts.sizable]
        nodes, tokens = rows, float(rows)  # of the pass whatever is chosen, and what is expected of it
        if len(sizable) < len(self._batch):
            whole = [drafts for drafts in self._batch if not drafts.sizable]
            nodes += sum(drafts.tokens - len(drafts.rows) for drafts in whole)
            tokens += sum(drafts.whole_gain for drafts in whole) if sizable else 0.0
        chosen, best, grown = [0] * len(sizable), tokens / curve(nodes), nodes
        for drafts, before, size in merge(*(drafts.steps() for drafts in sizable), key=gain_per_node, reverse=True):
            drafts.size, grown = size, grown + len(drafts.rows) * (size - before)
            goodput = (tokens + sum([one.gains[one.size] for one in sizable])) / curve(grown)
            if goodput > best:
                best, chosen = goodput, [one.size for one in sizable]
        gains = [drafts.gains[size] for drafts, size in zip(sizable, chosen, strict=True)]
        nodes += sum([len(drafts.rows) * size for drafts, size in zip(sizable, chosen, strict=True)])
        for i, (drafts, size) in enumerate(zip(sizable, chosen, strict=True)):
            drafts.size, others = size, tokens + sum(gains[:i] + gains[i + 1 :])
            goodput = others / curve(nodes - len(drafts.rows) * size)
            drafts.cut(goodput, others, curve(nodes), curve(rows))
        for drafts in self._batch:
            if drafts.state.asked and drafts.state.probed:
                beside = sum(one.tokens for one in self._batch if one is not drafts)
                drafts.probe(self._costs, beside, self.times.target)

    def observe(self, rows: Sequence[Row], trees: Sequence[DraftTree], accepted: Sequence[Accepted]) -> None:
        if self._before is not None and (spent := self.times.target - self._before) > 0:
            self._learn(spent, len(rows))
        for drafts in self._batch:
            for row in drafts.rows:
                row.observe()
        self._batch = []

    def _learn(self, spent: float, rows: int) -> None:
        """From a pass that took `spent` seconds."""
        costs = self._costs
        if costs.target is None or costs.target.cold:
            return
        tokens, emitted = sum(drafts.tokens for drafts in self._batch), sum(drafts.emitted for drafts in self._batch)
        if costs.known:
            for drafts in self._batch:
                if drafts.state.asked:
                    drafts.learn(costs, spent, tokens, emitted)
        exploring = any(drafts.exploring for drafts in self._batch)
        costs.learn(tokens, spent, EXPLORING if exploring else self.rate, rows)

    def end(self, row: Row) -> None:
        if (found := self._rows.pop(id(row), None)) is not None:
            state, record = found
            if state.dear(self._costs):
                state.acceptance.ended(record.rates)
