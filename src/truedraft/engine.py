"""The decode loop of speculative decoding: drafts of all rows are verified by one pass of the target per step.

A step (`Engine.step`), in order:

    admit    new rows begin; their prompts have a pass of their own (prefill), which is verified like any other
    budget   the control sets the number of nodes to draft for each row
    draft    each drafter proposes a tree for each of its rows, reduced to a chain where the target scores no branches;
             the control prunes; rules add their probes
    score    one pass of the target over all trees: logits at every node, and the tapped hidden states
    verify   the rule of each row accepts a path of its tree and chooses the token that follows; both are emitted
    commit   the KV of the accepted paths becomes permanent, that of the other nodes is dropped
    observe  drafters and control receive the pass, rejected nodes included
    retire   rows that ended leave

No method is named here: drafters, rules and controls are used through their contracts (`Drafter`, `Rule`, `Control`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from truedraft.accept._verification import Verification
from truedraft.chains import chained
from truedraft.cohort import Cohort, by_owner, for_each, select
from truedraft.control._base import Control
from truedraft.drafters._base import Drafter
from truedraft.request import Request
from truedraft.stats import Emission, Pass
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row, Scores, Taps


class Engine:
    """Decodes rows to their ends, one pass per `step`; requests are admitted and cancelled between steps.

    Errors: an exception from a part that belongs to requests (drafter, rule, processors, stopping criteria) is stored
    in `Request.error`; these requests leave with the current pass, the others are not affected. An exception from the
    target or the control, or an interruption, leaves a pass incomplete: call `close`.

    Args:
        target: the model; its cache must have been reserved for all rows that will run at once.
        control: sets the sizes of drafts; it changes speed, never text.

    Attributes:
        rows: the running rows; `rows[i].slot == i`.
        passes: number of passes so far, prefills included.
    """

    def __init__(self, target: Target, control: Control):
        self.target, self.control = target, control
        self.rows: list[Row] = []
        self.passes = 0
        self._waiting: list[Request] = []
        self._failed: list[Request] = []  # in the current step
        self._cohort: Cohort | None = None  # all rows; None once a row has entered or left
        # parts of a pass that `Stopwatch.attach` replaces by timed ones, as it does `_measure`, `_decide`, ...
        self._read, self._score = target.admit, target.score
        self._budget, self._prune, self._learn = control.budget, control.prune, control.observe
        self._draft: Callable[[Drafter, Sequence[Row], Sequence[int]], list[DraftTree]] = _drafts_of

    @property
    def running(self) -> bool:
        """Whether any row runs or waits to begin."""
        return bool(self.rows or self._waiting)

    def admit(self, request: Request) -> None:
        """Add a request; its rows begin with the next step."""
        self._waiting.append(request)

    def step(self) -> list[Request]:
        """Make one pass: over the prompts of new rows if there are any, else over drafts of all rows.

        Returns:
            The requests that took part in the pass, or that failed.

        Raises:
            BaseException: from the target or the control, or an interruption.
        """
        self._failed = []
        new = self._admitted() if self._waiting else []
        if not self.rows:
            return self._failed
        cohort, trees, scores = self._prompted(new) if new else self._drafted()
        self.passes += 1
        before = [len(row.tokens) for row in cohort.rows]
        accepted = self._verified(cohort, trees, scores)
        self._commit(cohort, accepted)
        active = cohort.without_failed() if self._failed else cohort
        self._observe(active, trees, scores, accepted)
        if cohort is self._cohort:
            self._learn(cohort.rows, trees, accepted)
        advanced = _recorded(active, before, trees, accepted)
        self._retire(cohort, accepted)
        return advanced + [request for request in self._failed if request not in advanced]

    def run(self, request: Request) -> Iterator[Pass]:
        """Decode one request to its end; yields each pass, after `row.tokens` has grown by it.

        Raises:
            Exception: the request's `error`.
        """
        self.admit(request)
        try:
            while self.running:
                self.step()
                request.check()
                yield request.passes[-1]
        finally:
            self.close()

    def cancel(self, request: Request) -> None:
        """End the rows of a request after the tokens that they have emitted."""
        if request in self._waiting:
            self._waiting.remove(request)
        for slot in reversed(range(len(self.rows))):
            if self.rows[slot].request is request:
                self._leave(slot)

    def close(self) -> None:
        """End all rows. Valid after an incomplete step, and again after an interrupted call of `close` itself."""
        self._waiting.clear()
        self._cohort = None
        rows = list(self.rows)
        while self.rows:
            self._end(self.rows[-1])
            self.rows.pop()
        for row in rows:  # after an interrupted `_leave` one of them may be in `self.rows` twice
            row.request = None  # type: ignore[assignment]

    def _admitted(self) -> list[Request]:
        """Begin the rows of waiting requests; returns the requests that did not fail."""
        requests, first = list(self._waiting), len(self.rows)
        open_drafters = {id(row.request.drafter) for row in self.rows}
        self._cohort = None
        self.rows += [row for request in requests for row in request.rows]
        self._waiting.clear()
        self.target.taps = taps_of(self.rows)
        for drafter, places in by_owner([row.request.drafter for row in self.rows[first:]]):
            rows = select(self.rows[first:], places)
            if id(drafter) not in open_drafters:
                self._measure(drafter, rows)
                self._guarded(rows, drafter.open)
        self._begin(requests)
        for place in reversed(range(first, len(self.rows))):
            if self.rows[place].request.error:
                self._end(self.rows[place])
                self.rows.pop(place).request = None  # type: ignore[assignment]
        for slot, row in enumerate(self.rows[first:], first):
            row.slot = slot
        self.control.start(self.rows[first:])
        return [request for request in requests if not request.error]

    def _begin(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if not request.error:
                self._guarded(request.rows, request.drafter.start, request.rows)

    def _prompted(self, requests: Sequence[Request]) -> tuple[Cohort, list[DraftTree], Scores]:
        """The prefill of new rows: their trees are roots alone. If the target needs none, the pass is over drafts."""
        prompts = [prompt for request in requests for prompt in request.prompts]
        if (scores := self._read(prompts)) is None:
            return self._drafted()
        first = len(self.rows) - len(prompts)
        new = Cohort.of(self.rows[first:], first)
        return new, [DraftTree.chain(row.tokens[-1] if row.tokens else 0) for row in new.rows], scores

    def _drafted(self) -> tuple[Cohort, list[DraftTree], Scores]:
        """Draft trees of all rows, and the scores of the pass over them."""
        if self._cohort is None:
            self._cohort = Cohort.of(self.rows)
        cohort = self._cohort
        drafts = self._propose(cohort, self._budget(cohort.rows))
        try:
            return cohort, *self._scored(cohort, drafts)
        except Exception as error:
            if not self._malformed(cohort, drafts, error):
                raise
            return cohort, *self._scored(cohort, [DraftTree.chain(row.tokens[-1]) for row in cohort.rows])

    def _scored(self, cohort: Cohort, drafts: list[DraftTree]) -> tuple[list[DraftTree], Scores]:
        """Drafts as they are verified, and the pass over them."""
        kept = _unpicked(drafts, self._prune(cohort.rows, drafts))
        trees = for_each(cohort.requests, self._probed, cohort.rows, kept)
        return trees, self._score(trees)

    def _malformed(self, cohort: Cohort, drafts: Sequence[DraftTree], raised: Exception) -> bool:
        """Fail the requests whose drafts break the contract of `DraftTree`; whether there were any."""
        before = len(self._failed)
        for row, tree in zip(cohort.rows, drafts, strict=True):
            try:
                tree.check()
                if not all(0 <= token < self.target.vocabulary for token in tree.tokens):
                    raise ValueError(f"a draft has tokens outside the vocabulary of {self.target.vocabulary}")
                if any(vector.shape != (self.target.embedding_width,) for vector in tree.embeds.values()):
                    raise raised
            except Exception as error:
                self._fail([row], error)
        return len(self._failed) > before

    def _propose(self, cohort: Cohort, budget: Sequence[int]) -> list[DraftTree]:
        def drafted(drafter: Drafter, rows: Sequence[Row], nodes: Sequence[int]) -> list[DraftTree]:
            try:
                drafts = self._draft(drafter, rows, nodes)
                most = 1 + drafter.width if max(map(len, drafts)) > 1 else 1
                fitted = [_fitted(row, tree, most) for row, tree in zip(rows, drafts, strict=True)]
                return fitted if self.target.branching else [chained(tree) for tree in fitted]
            except Exception as error:
                self._fail(rows, error)
                return [DraftTree.chain(row.tokens[-1]) for row in rows]

        return for_each(cohort.drafters, drafted, cohort.rows, budget)

    def _probed(self, request: Request, rows: Sequence[Row], trees: list[DraftTree]) -> list[DraftTree]:
        """Drafts with the probes of the request's rule, and padding for rows that have ended."""
        try:
            padded = _padded(request, rows, trees)
            return padded if request.probing is None else request.probing.add_probes(padded)
        except Exception as error:
            self._fail(rows, error)
            return trees

    def _verified(self, cohort: Cohort, trees: Sequence[DraftTree], scores: Scores) -> list[Accepted]:
        """The accepted path and next token of each row, by its request's rule."""
        accepted: list[Accepted | None] = [None] * len(trees)
        for request, places in cohort.requests:
            verified = self._verified_of(request, select(cohort.rows, places), select(trees, places), scores.of(places))
            for place, one in zip(places, verified, strict=True):
                accepted[place] = one
        return accepted  # type: ignore[return-value]

    def _verified_of(
        self, request: Request, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores
    ) -> list[Accepted]:
        """The same for the rows of one request. If it fails, its rows are reset to before the pass, and leave."""
        before = [(len(row.tokens), row.end) for row in rows]
        try:
            if not request.error:
                tokens = self._decide(request, rows, trees, scores)
                pad = request.history.pad
                accepted = request.rule.verify(
                    Verification(rows, trees, scores, request.laws, request.stops, request.chance, pad, tokens)
                )
                request.chance.reached(max(row.step for row in rows))
                return accepted
        except Exception as error:
            self._fail(rows, error)
        for row, (length, end) in zip(rows, before, strict=True):
            del row.tokens[length:]
            row.end = end
        return [Accepted((0,), -1, True)] * len(rows)

    def _commit(self, cohort: Cohort, accepted: Sequence[Accepted]) -> None:
        self.target.commit([one.path for one in accepted], cohort.first)

    def _observe(
        self, cohort: Cohort, trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        """Give drafters the pass and what was accepted of it."""
        for drafter, places in cohort.drafters:
            rows = select(cohort.rows, places)
            own = select(trees, places), scores.of(places), select(accepted, places)
            self._guarded(rows, drafter.observe, rows, *own)

    def _guarded(self, rows: Sequence[Row], hook: Callable[..., None], *args: object) -> None:
        """Call a hook of a part that belongs to these rows; if it raises, their requests fail."""
        try:
            hook(*args)
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
        """The rule's token at every node if it decides all nodes at once, else None.

        In either case the host waits here for the device, so that the time of the pass includes the wait.
        """
        rule, tokens = request.argmax, None
        if rule is not None:
            tokens = rule.decide_all_nodes(scores, rows, trees, request.laws, request.chance)
        if tokens is None:
            self.target.wait()
        return tokens

    def _measure(self, drafter: Drafter, rows: Sequence[Row]) -> None:
        lockstep, steps = any(row.request.stops.lockstep for row in rows), max(row.room - row.step for row in rows)
        self.control.open(self.target, drafter, len(rows), lockstep, steps)

    def _end(self, row: Row) -> None:
        self._guarded([row], row.request.drafter.end, row)
        self.control.end(row)

    def _leave(self, slot: int) -> None:
        """End the row in a slot and free the slot; the row of the last slot moves into it, as in the cache.

        If this is interrupted at any point, every row that was not ended is still in `rows`.
        """
        self._cohort, row = None, self.rows[slot]
        self._end(row)
        self.target.release(slot)
        self.rows[slot] = self.rows[-1]
        self.rows[slot].slot = slot
        self.rows.pop()
        row.request = None  # type: ignore[assignment]  # breaks the reference cycle

    def _retire(self, cohort: Cohort, accepted: Sequence[Accepted]) -> None:
        """Remove rows that ended or failed."""
        for place in reversed(range(len(accepted))):
            if accepted[place].ended or cohort.rows[place].request.error:
                self._leave(cohort.first + place)
        for request, places in cohort.requests:
            if steps := [cohort.rows[i].step for i in places if not accepted[i].ended]:
                request.chance.passed(min(steps))


def taps_of(rows: Sequence[Row]) -> Taps:
    """The taps of all drafters and rules of these rows."""
    taps = Taps()
    for request in {id(row.request): row.request for row in rows}.values():
        taps = taps | request.drafter.needs | request.rule.needs
    return taps


def _drafts_of(drafter: Drafter, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
    return drafter.propose(rows, budget)


def _fitted(row: Row, tree: DraftTree, most: int) -> DraftTree:
    """A drafter's tree, cut to its `most` first nodes, and to the depth that the row can still emit."""
    if tree.tokens[0] != row.tokens[-1]:
        raise ValueError(f"a draft must begin with the pending token {row.tokens[-1]}, got {tree.tokens[0]}")
    if tree.embeds:
        tree.check_embeds()
    return tree if len(tree.tokens) == 1 else tree.cut(most).shallow(row.room - row.step - 1)


def _padded(request: Request, rows: Sequence[Row], trees: list[DraftTree]) -> list[DraftTree]:
    """Trees in which rows that ended, and are kept in lockstep, draft padding to the depth of the deepest tree."""
    if not request.stops.pads or not any(row.ended for row in rows):
        return trees
    pad, depth = request.history.pad, max(tree.shape.height for tree in trees)
    return [
        DraftTree.chain(row.tokens[-1], [pad] * depth) if row.ended else tree
        for row, tree in zip(rows, trees, strict=True)
    ]


def _unpicked(drafts: Sequence[DraftTree], pruned: Sequence[DraftTree]) -> list[DraftTree]:
    """Pruned drafts, except drawn ones, which stay whole: selecting among drawn tokens would change their law."""
    return [draft if draft.dist is not None else kept for draft, kept in zip(drafts, pruned, strict=True)]


def _recorded(
    cohort: Cohort, before: Sequence[int], trees: Sequence[DraftTree], accepted: Sequence[Accepted]
) -> list[Request]:
    """Append the pass to `passes` of every request that took part in it; returns these requests."""
    for request, places in cohort.requests:
        emitted = []
        for i in places:
            row, tree = cohort.rows[i], trees[i]
            if tokens := tuple(row.tokens[before[i] : row.end]):  # empty for an ended row in lockstep
                drafted = min(len(accepted[i].path) - 1, len(tokens))
                emitted.append(Emission(row.index, tokens, drafted, tree.drafted))
        request.passes.append(Pass(max(len(trees[i]) for i in places), tuple(emitted)))
    return [request for request, _ in cohort.requests]
