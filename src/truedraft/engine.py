"""The causal loop: draft a tree for every row, score all in one pass, keep what the target would have said itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from truedraft.accept._verification import Verification
from truedraft.cohort import Cohort, by_owner, for_each, select
from truedraft.control._base import Control
from truedraft.drafters._base import Drafter
from truedraft.request import Request
from truedraft.stats import Emission, Pass
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row, Scores, Taps


class Engine:
    """Rows that run, a pass at a time, from their prompts to their ends. Requests come and go between passes.

    The target's cache is reserved by whoever makes the engine, for as many rows as ever run at once.

    What a part raises that requests brought along (their drafter, rule, processors or stopping criteria) is kept as
    `Request.error`: these requests leave with the pass under way, and others are not touched. What the target or the
    control raises, or an interruption, leaves a pass half made: the engine is to be closed.

    rows: those that run, in the order of their slots.
    passes: made so far.
    """

    def __init__(self, target: Target, control: Control):
        self.target, self.control = target, control
        self.rows: list[Row] = []
        self.passes = 0
        self._waiting: list[Request] = []
        self._failed: list[Request] = []  # in the step under way
        self._cohort: Cohort | None = None  # of all rows, until one comes or goes
        # parts of a pass that are timed from outside, as `_measure`, `_decide`, `_begin` and `_observe` are
        self._read, self._score = target.admit, target.score
        self._budget, self._prune, self._learn = control.budget, control.prune, control.observe
        self._draft: Callable[[Drafter, Sequence[Row], Sequence[int]], list[DraftTree]] = _drafts_of

    @property
    def running(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.rows or self._waiting)

    def admit(self, request: Request) -> None:
        """Rows that begin with the next step."""
        self._waiting.append(request)

    def step(self) -> list[Request]:
        """One pass, over the prompts of new rows or over drafts of all rows; the requests that it moved or ended."""
        self._failed = []
        new = self._admitted() if self._waiting else []
        if not self.rows:
            return self._failed
        cohort, trees, scores = self._prompted(new) if new else self._drafted()
        self.passes += 1
        before = [len(row.tokens) for row in cohort.rows]
        accepted = self._verified(cohort, trees, scores)
        self.target.commit([one.path for one in accepted], cohort.first)
        going = cohort.without_failed() if self._failed else cohort
        self._observe(going, trees, scores, accepted)
        if cohort is self._cohort:
            self._learn(cohort.rows, trees, accepted)
        moved = _recorded(going, before, trees, accepted)
        self._retire(cohort, accepted)
        return moved + [request for request in self._failed if request not in moved]

    def run(self, request: Request) -> Iterator[Pass]:
        """One request to its end, a pass at a time; `row.tokens` grows as it goes. Raises what ends it early."""
        self.admit(request)
        try:
            while self.running:
                self.step()
                request.check()
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

    def _admitted(self) -> list[Request]:
        """New rows begin; the requests of those that did."""
        requests, first = list(self._waiting), len(self.rows)
        known = {id(row.request.drafter) for row in self.rows}
        self._cohort = None
        self.rows += [row for request in requests for row in request.rows]
        self._waiting.clear()
        self.target.taps = _taps(self.rows)
        for drafter, places in by_owner([row.request.drafter for row in self.rows[first:]]):
            rows = select(self.rows[first:], places)
            if id(drafter) not in known:
                self._measure(drafter, rows)
                self._guarded(rows, drafter.open)
        self._begin(requests)
        for place in reversed(range(first, len(self.rows))):
            if self.rows[place].request.error:
                self._end(self.rows[place])
                del self.rows[place]
        for slot, row in enumerate(self.rows[first:], first):
            row.slot = slot
        self.control.start(self.rows[first:])
        return [request for request in requests if not request.error]

    def _begin(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if not request.error:
                self._guarded(request.rows, request.drafter.start, request.rows)

    def _prompted(self, requests: Sequence[Request]) -> tuple[Cohort, list[DraftTree], Scores]:
        """The prompts' own pass of new rows; where they need none, they join the others' at once."""
        prompts = [prompt for request in requests for prompt in request.prompts]
        if (scores := self._read(prompts)) is None:
            return self._drafted()
        first = len(self.rows) - len(prompts)
        new = Cohort.of(self.rows[first:], first)
        return new, [DraftTree.chain(row.tokens[-1] if row.tokens else 0) for row in new.rows], scores

    def _drafted(self) -> tuple[Cohort, list[DraftTree], Scores]:
        """Drafts of all rows, and the pass over them."""
        if self._cohort is None:
            self._cohort = Cohort.of(self.rows)
        cohort = self._cohort
        drafts = self._propose(cohort, self._budget(cohort.rows))
        kept = _unpicked(drafts, self._prune(cohort.rows, drafts))
        trees = for_each(cohort.requests, self._probed, cohort.rows, kept)
        return cohort, trees, self._score(trees)

    def _propose(self, cohort: Cohort, budget: Sequence[int]) -> list[DraftTree]:
        def drafted(drafter: Drafter, rows: Sequence[Row], most: Sequence[int]) -> list[DraftTree]:
            try:
                drafts, nodes = self._draft(drafter, rows, most), 1 + drafter.width
                return [_fitted(row, tree, nodes) for row, tree in zip(rows, drafts, strict=True)]
            except Exception as error:
                self._fail(rows, error)
                return [DraftTree.chain(row.tokens[-1]) for row in rows]

        return for_each(cohort.drafters, drafted, cohort.rows, budget)

    def _probed(self, request: Request, rows: Sequence[Row], trees: list[DraftTree]) -> list[DraftTree]:
        """Drafts with what the rule reads besides."""
        try:
            padded = _padded(request, rows, trees)
            return padded if request.probing is None else request.probing.add_probes(padded)
        except Exception as error:
            self._fail(rows, error)
            return trees

    def _verified(self, cohort: Cohort, trees: Sequence[DraftTree], scores: Scores) -> list[Accepted]:
        """How far each row's own rule goes along its tree."""
        accepted: list[Accepted | None] = [None] * len(trees)
        for request, places in cohort.requests:
            found = self._walked(request, select(cohort.rows, places), select(trees, places), scores.of(places))
            for place, one in zip(places, found, strict=True):
                accepted[place] = one
        return accepted  # type: ignore[return-value]

    def _walked(
        self, request: Request, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores
    ) -> list[Accepted]:
        """The same of one request; where it fails, its rows emit nothing and leave."""
        texts = [(len(row.tokens), row.end) for row in rows]
        try:
            if not request.error:
                tokens = self._decide(request, rows, trees, scores)
                pad = request.history.pad
                found = request.rule.verify(
                    Verification(rows, trees, scores, request.laws, request.stops, request.chance, pad, tokens)
                )
                request.chance.reached(max(row.step for row in rows))
                return found
        except Exception as error:
            self._fail(rows, error)
        for row, (length, end) in zip(rows, texts, strict=True):
            del row.tokens[length:]
            row.end = end
        return [Accepted((0,), -1, True)] * len(rows)

    def _observe(
        self, cohort: Cohort, trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        """Show drafters the pass as it was."""
        for drafter, places in cohort.drafters:
            rows = select(cohort.rows, places)
            seen = select(trees, places), scores.of(places), select(accepted, places)
            self._guarded(rows, drafter.observe, rows, *seen)

    def _guarded(self, rows: Sequence[Row], hook: Callable[..., None], *given: object) -> None:
        """A hook of a part that rows brought along; where it fails, their requests do."""
        try:
            hook(*given)
        except Exception as error:
            self._fail(rows, error)

    def _fail(self, rows: Sequence[Row], error: Exception) -> None:
        for request in {id(row.request): row.request for row in rows}.values():
            if not request.error:
                request.error = error
                self._failed.append(request)

    def _decide(
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

    def _measure(self, drafter: Drafter, rows: Sequence[Row]) -> None:
        lockstep, steps = any(row.request.stops.lockstep for row in rows), max(row.room - row.step for row in rows)
        self.control.open(self.target, drafter, lockstep, steps)

    def _end(self, row: Row) -> None:
        self._guarded([row], row.request.drafter.end, row)
        self.control.end(row)

    def _leave(self, slot: int) -> None:
        """Free a slot; as in the cache, the last one in use takes its place.

        Wherever this is cut short, every row that was not ended is among `rows` still.
        """
        self._cohort, row = None, self.rows[slot]
        self._end(row)
        self.target.release(slot)
        self.rows[slot] = self.rows[-1]
        self.rows[slot].slot = slot
        self.rows.pop()
        row.request = None  # type: ignore[assignment]  # or they would keep each other

    def _retire(self, cohort: Cohort, accepted: Sequence[Accepted]) -> None:
        """Rows that ended or failed leave."""
        for place in reversed(range(len(accepted))):
            if accepted[place].ended or cohort.rows[place].request.error:
                self._leave(cohort.first + place)
        for request, places in cohort.requests:
            if going := [cohort.rows[i].step for i in places if not accepted[i].ended]:
                request.chance.passed(min(going))


def _taps(rows: Sequence[Row]) -> Taps:
    """What drafters and rules ask to see."""
    taps = Taps()
    for request in {id(row.request): row.request for row in rows}.values():
        taps = taps | request.drafter.needs | request.rule.needs
    return taps


def _drafts_of(drafter: Drafter, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
    return drafter.propose(rows, budget)


def _fitted(row: Row, tree: DraftTree, nodes: int) -> DraftTree:
    """The first nodes of a drafter's tree, without those that could not be emitted any more."""
    if tree.tokens[0] != row.tokens[-1]:
        raise ValueError(f"a draft must begin with the pending token {row.tokens[-1]}, got {tree.tokens[0]}")
    tree.check_embeds()
    return tree.cut(nodes).shallow(row.room - row.step - 1)


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
