"""The causal loop: draft a tree for every row, score all in one pass, keep what the target would have said itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from truedraft.accept._verification import Verification
from truedraft.control._base import Control
from truedraft.drafters._base import Drafter
from truedraft.request import Request
from truedraft.stats import Emission, Pass, Stopwatch
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import Accepted, DraftTree, Row, Scores, Taps

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class Cohort:
    """The rows of one pass, in the order of their slots.

    first: the slot of the first.
    requests, drafters: whose they are and who drafts for them, each with the places of its rows among these.
    """

    rows: Sequence[Row]
    first: int
    requests: Sequence[tuple[Request, Sequence[int]]]
    drafters: Sequence[tuple[Drafter, Sequence[int]]]

    @classmethod
    def of(cls, rows: Sequence[Row], first: int = 0) -> Cohort:
        requests = _by([row.request for row in rows])
        return cls(list(rows), first, requests, _by([row.request.drafter for row in rows]))


class Engine:
    """Rows that run, a pass at a time, from their prompts to their ends. Requests come and go between passes.

    The target's cache is reserved by whoever makes the engine, for as many rows as ever run at once.

    rows: those that run, in the order of their slots.
    """

    def __init__(self, target: DecoderTarget, control: Control, watch: Stopwatch):
        self.target, self.control, self.watch = target, control, watch
        self.rows: list[Row] = []
        self._controls: dict[int, tuple[Drafter, Control]] = {}
        self._waiting: list[Request] = []
        self._cohort: Cohort | None = None  # of all rows, until one comes or goes
        self._ready = watch.timed("prefill", target.ready)
        self._prefill = watch.timed("prefill", target.prefill)
        self._score = watch.timed("target", target.score)
        self._decide = watch.timed("target", self._decided)
        self._propose = watch.timed("draft", self._proposed)
        self._begin = watch.timed("observe", _begun)
        self._observe = watch.timed("observe", _observed)
        self._calibrate = watch.timed("calibrate", self._opened)
        self._size = watch.timed("control", self._sized)
        self._prune = watch.timed("control", self._pruned)
        self._learn = watch.timed("control", self._learned)

    @property
    def running(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.rows or self._waiting)

    def admit(self, request: Request) -> None:
        """Rows that begin with the next step."""
        self._waiting.append(request)

    def step(self) -> list[Request]:
        """One pass, over the prompts of new rows or over drafts of all rows; the requests that it moved."""
        cohort, trees, scores = self._admitted() if self._waiting else self._drafted()
        before = [len(row.tokens) for row in cohort.rows]
        accepted = self._verified(cohort, trees, scores)
        self.target.commit([one.path for one in accepted], cohort.first)
        self._observe(cohort, trees, scores, accepted)
        if cohort is self._cohort:
            self._learn(cohort, trees, accepted)
        moved = _recorded(cohort, before, trees, accepted)
        self._retire(cohort, accepted)
        return moved

    def run(self, request: Request) -> Iterator[Pass]:
        """One request to its end, a pass at a time; `row.tokens` grows as it goes."""
        self.admit(request)
        try:
            while self.running:
                self.step()
                yield request.passes[-1]
        finally:
            self.close()

    def cancel(self, request: Request) -> None:
        """End the rows of a request where they are."""
        if request in self._waiting:
            self._waiting.remove(request)
        for slot in reversed(range(len(self.rows))):
            if self.rows[slot].request is request:
                self._leave(slot)

    def close(self) -> None:
        """End the rows that are left, wherever a step was cut short; once more, even if that was cut short itself."""
        self._waiting.clear()
        self._cohort = None
        left = list(self.rows)
        while self.rows:
            self._end(self.rows[-1])
            self.rows.pop()
        for row in left:  # one of them may have been there twice
            row.request = None  # type: ignore[assignment]

    def _admitted(self) -> tuple[Cohort, list[DraftTree], Scores]:
        """New rows, and their prompts' own pass; where they need none, they join the others' at once."""
        requests = list(self._waiting)
        new = Cohort.of([row for request in requests for row in request.rows], len(self.rows))
        known = {id(row.request.drafter) for row in self.rows}
        self._cohort = None
        self.rows += new.rows
        self._waiting.clear()
        self.target.taps = _taps(self.rows)
        for drafter, places in new.drafters:
            if id(drafter) not in known:
                self._calibrate(drafter, [new.rows[i] for i in places])
                drafter.open()
        self._begin(new)
        for drafter, places in new.drafters:
            self._control(drafter).start(_of(new.rows, places))
        prompts = [prompt for request in requests for prompt in request.prompts]
        if self._ready(prompts):
            return self._drafted()
        trees = [DraftTree.chain(row.tokens[-1] if row.tokens else 0) for row in new.rows]
        return new, trees, self._prefill(prompts)

    def _drafted(self) -> tuple[Cohort, list[DraftTree], Scores]:
        """Drafts of all rows, and the pass over them."""
        if self._cohort is None:
            self._cohort = Cohort.of(self.rows)
        cohort = self._cohort
        drafts = self._propose(cohort, self._size(cohort))
        kept = _unpicked(drafts, self._prune(cohort, drafts))
        trees = _each(cohort.requests, _probed, cohort.rows, kept)
        return cohort, trees, self._score(trees)

    def _proposed(self, cohort: Cohort, budget: Sequence[int]) -> list[DraftTree]:
        drafts = _each(cohort.drafters, lambda drafter, rows, most: drafter.propose(rows, most), cohort.rows, budget)
        return [_fitted(row, tree) for row, tree in zip(cohort.rows, drafts, strict=True)]

    def _verified(self, cohort: Cohort, trees: Sequence[DraftTree], scores: Scores) -> list[Accepted]:
        """How far each row's own rule goes along its tree."""
        accepted: list[Accepted | None] = [None] * len(trees)
        for request, places in cohort.requests:
            rows, drafts, own = _of(cohort.rows, places), _of(trees, places), scores.of(places)
            tokens = self._decide(request, rows, drafts, own)
            found = request.rule.verify(
                Verification(
                    rows, drafts, own, request.laws, request.stops, request.chance, request.history.pad, tokens
                )
            )
            request.chance.reached(max(row.step for row in rows))
            for place, one in zip(places, found, strict=True):
                accepted[place] = one
        return accepted  # type: ignore[return-value]

    def _decided(
        self, request: Request, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores
    ) -> Sequence[Sequence[int]] | None:
        """The rule's token at every node, where it decides them at once; here the host waits for the pass, as part
        of it."""
        rule, tokens = request.argmax, None
        if rule is not None:
            tokens = rule.decide_all_nodes(scores.logits, rows, trees, request.laws, request.chance)
        if tokens is None:
            self.target.wait()
        return tokens

    def _control(self, drafter: Drafter) -> Control:
        """That of a drafter's rows: each learns how often the drafts of its own are right."""
        if not self._controls:
            self._controls[id(drafter)] = drafter, self.control
        if id(drafter) not in self._controls:
            self._controls[id(drafter)] = drafter, self.control.another()
        return self._controls[id(drafter)][1]

    def _opened(self, drafter: Drafter, rows: Sequence[Row]) -> None:
        lockstep, steps = any(row.request.stops.lockstep for row in rows), max(row.room - row.step for row in rows)
        self._control(drafter).open(self.target, drafter, self.watch.seconds, lockstep, steps)

    def _sized(self, cohort: Cohort) -> list[int]:
        def sized(drafter: Drafter, rows: Sequence[Row]) -> list[int]:
            control = self._control(drafter)
            control.beside = len(cohort.rows) - len(rows)
            return control.budget(rows)

        return _each(cohort.drafters, sized, cohort.rows)

    def _pruned(self, cohort: Cohort, drafts: Sequence[DraftTree]) -> list[DraftTree]:
        return _each(cohort.drafters, lambda d, rows, trees: self._control(d).prune(rows, trees), cohort.rows, drafts)

    def _learned(self, cohort: Cohort, trees: Sequence[DraftTree], accepted: Sequence[Accepted]) -> None:
        nodes = sum(map(len, trees))
        for drafter, places in cohort.drafters:
            control, own = self._control(drafter), _of(trees, places)
            control.beside = nodes - sum(map(len, own))
            control.observe(_of(cohort.rows, places), own, _of(accepted, places))

    def _end(self, row: Row) -> None:
        row.request.drafter.end(row)
        self._control(row.request.drafter).end(row)

    def _leave(self, slot: int) -> None:
        """Free a slot; as in the cache, the last one in use takes its place.

        Wherever this is cut short, every row that was not ended is among `rows` still.
        """
        self._cohort, row = None, self.rows[slot]
        self._end(row)
        self.target.release(slot)
        self.rows[slot] = self.rows[-1]
        self.rows.pop()
        row.request = None  # type: ignore[assignment]  # or they would keep each other

    def _retire(self, cohort: Cohort, accepted: Sequence[Accepted]) -> None:
        """Rows that ended leave."""
        for place in reversed(range(len(accepted))):
            if accepted[place].ended:
                self._leave(cohort.first + place)
        for request, places in cohort.requests:
            if going := [cohort.rows[i].step for i in places if not accepted[i].ended]:
                request.chance.passed(min(going))


def _by(owners: Sequence[K]) -> list[tuple[K, list[int]]]:
    """Who there is, each with its places."""
    found: dict[int, tuple[K, list[int]]] = {}
    for place, owner in enumerate(owners):
        found.setdefault(id(owner), (owner, []))[1].append(place)
    return list(found.values())


def _of(values: Sequence[V], places: Sequence[int]) -> Sequence[V]:
    return values if len(places) == len(values) else [values[i] for i in places]


def _each(groups: Sequence[tuple[K, Sequence[int]]], f: Callable[..., list[V]], *of_rows: Sequence[object]) -> list[V]:
    """What `f` makes of every group's part, in the order of the rows."""
    if len(groups) == 1:
        return f(groups[0][0], *of_rows)
    made: dict[int, V] = {}
    for owner, places in groups:
        made.update(zip(places, f(owner, *(_of(values, places) for values in of_rows)), strict=True))
    return [made[i] for i in range(len(made))]


def _taps(rows: Sequence[Row]) -> Taps:
    """What drafters and rules ask to see."""
    taps = Taps()
    for request in {id(row.request): row.request for row in rows}.values():
        taps = taps | request.drafter.needs | request.rule.needs
    return taps


def _begun(cohort: Cohort) -> None:
    for drafter, places in cohort.drafters:
        drafter.start(_of(cohort.rows, places))


def _observed(cohort: Cohort, trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]) -> None:
    """Show drafters the pass as it was."""
    for drafter, places in cohort.drafters:
        drafter.observe(_of(cohort.rows, places), _of(trees, places), scores.of(places), _of(accepted, places))


def _fitted(row: Row, tree: DraftTree) -> DraftTree:
    """A drafter's tree without the nodes that could not be emitted any more."""
    if tree.tokens[0] != row.tokens[-1]:
        raise ValueError(f"a draft must begin with the pending token {row.tokens[-1]}, got {tree.tokens[0]}")
    tree.check_embeds()
    return tree.cut(1 + row.request.drafter.width).shallow(row.room - row.step - 1)


def _probed(request: Request, rows: Sequence[Row], trees: list[DraftTree]) -> list[DraftTree]:
    """Drafts with what the rule reads besides."""
    padded = _padded(request, rows, trees)
    return padded if request.probing is None else request.probing.add_probes(padded)


def _padded(request: Request, rows: Sequence[Row], trees: list[DraftTree]) -> list[DraftTree]:
    """Rows that ended and wait for the others say padding, as deep as the others may get."""
    if not request.stops.pads or not any(row.ended for row in rows):
        return trees
    pad, depth = request.history.pad, max(max(tree.shape.depth) for tree in trees)
    return [
        DraftTree.chain(row.tokens[-1], [pad] * depth) if row.ended else tree
        for row, tree in zip(rows, trees, strict=True)
    ]


def _unpicked(drafts: Sequence[DraftTree], pruned: Sequence[DraftTree]) -> list[DraftTree]:
    """Drafts that were drawn stay whole: a choice among them after the draw would change the law of what is said."""
    return [draft if draft.dist is not None else kept for draft, kept in zip(drafts, pruned, strict=True)]


def _recorded(
    cohort: Cohort, before: Sequence[int], trees: Sequence[DraftTree], accepted: Sequence[Accepted]
) -> list[Request]:
    """Add the pass to every request that took part in it; these requests."""
    for request, places in cohort.requests:
        emitted = []
        for i in places:
            row, tree = cohort.rows[i], trees[i]
            if tokens := tuple(row.tokens[before[i] : row.end]):  # a row that waits for the others emits nothing
                drafted = min(len(accepted[i].path) - 1, len(tokens))
                emitted.append(Emission(row.index, tokens, drafted, tree.drafted))
        request.passes.append(Pass(max(len(trees[i]) for i in places), tuple(emitted)))
    return [request for request, _ in cohort.requests]
