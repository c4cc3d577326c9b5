"""Prompts that are read in pieces, between the passes of rows that run: no row waits for a whole prompt.

A step is a piece of prompts or a pass over the drafts of all rows; while there are both, they alternate. The prompts
that a piece completes are verified at once: their rows emit their first token and run from then on.

Where prefixes are kept, a prompt waits while an older one that begins with the same tokens is being read, and loads
these tokens once the older one has been read so far, or has left. A prompt whose log-probabilities are asked for loads
none: it is read whole, in pieces whose logits fit in SCORED bytes.

Rows share the memory of a pool (`caches/pool.py`). Where a row can grow no further, the request that was admitted last
gives its memory back: it is *preempted*. Once there is room, before any new request begins, it is read again, its text
so far as its prompt; since a node's numbers have the same bits in whatever pass they are computed, its text goes on as
it would have. The request that was admitted first is never preempted while it can be helped, so all of them end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from truedraft.caches.pool import SPARE, Pool
from truedraft.caches.prefixes import Prefixes, agreeing
from truedraft.control._base import Control
from truedraft.engine import Engine, taps_of
from truedraft.request import Request
from truedraft.runtime._base import PROMPT
from truedraft.targets._base import Target
from truedraft.tree import Piece, Prompt, Row, Scores, Taps

LEAST = 16  # positions of a piece
GAIN = 32  # positions of an older prompt for which a prompt waits at least
GROWTH = 2.0  # most that a piece may be larger than the largest that was measured
SCORED = 1 << 26  # bytes of the logits of a piece, where those of all its positions are computed


@dataclass(eq=False)
class Reading:
    """A request of one row whose prompt is being read; the row has its slot already.

    slot: of the cache.
    taps: what its drafter and rule require of the prompt.
    end: positions read so far.
    logits: (1, 1, V) of the last token, once that is read.
    hidden: by tapped layer, the states of the pieces.
    leaders: older prompts -> positions that it can load of each, the oldest first; nothing is read while there are any.
    """

    request: Request
    slot: int
    taps: Taps
    end: int = 0
    logits: Tensor | None = None
    hidden: dict[int, list[Tensor]] = field(default_factory=dict)
    leaders: dict[Reading, int] = field(default_factory=dict)

    @property
    def row(self) -> Row:
        return self.request.rows[0]

    @property
    def prompt(self) -> Prompt:
        return self.request.prompts[0]

    @property
    def left(self) -> int:
        return len(self.prompt) - self.end

    @property
    def scored(self) -> bool:
        """Whether the log-probabilities of the prompt are asked for, and not known already."""
        return self.request.prompt_scores is not None and not self.request.passes

    @property
    def leader(self) -> Reading | None:
        """The prompt that it waits for: the oldest."""
        return next(iter(self.leaders), None)

    def add(self, piece: Piece, scores: Scores) -> None:
        """Add a piece that was read."""
        self.end = piece.end
        if (scores_of := self.request.prompt_scores) is not None and self.scored:
            scores_of.add(scores.logits[0])
        for layer in self.taps.hidden:
            self.hidden.setdefault(layer, []).append(scores.hidden[layer][0])
        if piece.last:
            self.logits = scores.logits[:, -1:].clone() if piece.scored else scores.logits

    def states(self, layer: int) -> Tensor:
        """(prompt, H) states of a layer; empty where it is not tapped."""
        return torch.cat(self.hidden[layer]) if layer in self.hidden else torch.empty(0)


def reuses(request: Request) -> bool:
    """Whether a request may load the keys and values of a prefix: what else it requires of the prompt would be missing,
    its hidden states and log-probabilities."""
    return request.prompts[0].ids is not None and not (taps_of(request.rows).hidden or request.prompt_scores)


def preemptible(target: Target, request: Request) -> bool:
    """Whether a request may give its memory back and be read again later, with the same text: its nodes have the same
    bits as those of a prompt, and its prompt is tokens alone."""
    same = target.batch_invariant and target.granularity == 1 and target.view is None
    return same and all(prompt.ids is not None and prompt.states is None for prompt in request.prompts)


class PieceSize:
    """The positions of a piece that take a given time, from the pieces read so far.

    seconds: that a piece should take at most.
    """

    def __init__(self, seconds: float):
        self.seconds, self.positions = seconds, LEAST

    def learn(self, positions: int, seconds: float) -> None:
        fitting = min(positions * self.seconds / max(seconds, 1e-9), GROWTH * positions)
        if seconds > self.seconds or positions >= self.positions:  # shorter ones say little of longer ones
            self.positions = min(max(int(fitting), LEAST), PROMPT)


class PiecewiseEngine(Engine):
    """An `Engine` that reads prompts in pieces. Its requests have one row each.

    Args:
        seconds: that a piece should take at most while rows run; it has LEAST positions in any case.
        pool: the memory of its rows; what a request begins with is granted before it is admitted.
        prefixes: where the keys and values of prompts that were read and of rows that leave are kept for prompts with
            the same prefix, if anywhere; see `reuses`.

    Attributes:
        preempted: requests that wait to be read again, the one that was admitted first in front.
        preemptions: how often a request was preempted.
    """

    def __init__(
        self, target: Target, control: Control, seconds: float, pool: Pool, prefixes: Prefixes | None = None
    ):  # fmt: skip
        super().__init__(target, control)
        self._size, self._pool, self._prefixes = PieceSize(seconds), pool, prefixes
        self.preempted: list[Request] = []
        self.preemptions = self._admissions = 0
        self._reading: list[Reading] = []  # the oldest first
        self._read_last = False  # whether the last step read a piece
        self._odd = 0  # of the number of pieces, in turn 0 and 1
        self._read, self._read_pieces = self._activated, target.read_pieces

    @property
    def running(self) -> bool:
        return bool(self._reading or self.preempted) or super().running

    @property
    def reading(self) -> int:
        """Requests whose prompts are being read."""
        return len(self._reading)

    def grant(self, request: Request) -> bool:
        """Grant a request the memory that it begins with; whether there was enough. Preempted ones go first."""
        row, spare = request.rows[0], SPARE if self.rows or self._reading else 0
        first = len(request.prompts[0]) if preemptible(self.target, request) else row.prompt + row.room
        return not self.preempted and self._pool.grant(request, first + request.reach, spare)

    def admit(self, request: Request) -> None:
        """Add a request; its prompt is read from the next step on, without the prefix that is stored of it or that an
        older prompt being read has in common with it."""
        request.admitted = self._admissions
        self._admissions += 1
        self._begin_reading(request)

    def _begin_reading(self, request: Request) -> None:
        one = Reading(request, self.target.open(), taps_of(request.rows))
        self._reading.append(one)
        if self._prefixes is not None and reuses(request):
            one.leaders = {other: self._loadable(self._prefixes, one, other) for other in self._reading[:-1]}
            self._load(self._prefixes, one)

    def step(self) -> list[Request]:
        """Read a piece of prompts, or make a pass over drafts of all rows; see `Engine.step`.

        Returns:
            The requests that took part in the pass, or that failed; none where no prompt was completed.
        """
        self._failed = []
        self._resume()
        self._read_last = bool(self._reading) and not (self.rows and self._read_last)
        if not self._read_last:
            self._grow()
        failed = self._failed  # as they were preempted
        if not self._read_last and (self.rows or not self._reading):
            return failed + super().step()
        complete = self._read_piece()
        if not complete:
            self.passes += 1
            return failed
        for one in complete:
            super().admit(one.request)
        advanced = super().step()
        for one in complete:
            if one in self._reading:  # it failed before it was activated
                self._drop(one)
        return failed + advanced

    def cancel(self, request: Request) -> None:
        if request in self.preempted:
            self.preempted.remove(request)
        for one in [one for one in self._reading if one.request is request]:
            self._drop(one)
        super().cancel(request)

    def close(self) -> None:
        self._reading.clear()
        self.preempted.clear()
        super().close()

    def _resume(self) -> None:
        """Read preempted requests again, as far as there is memory for them."""
        while self.preempted:
            request = self.preempted[0]
            spare = SPARE if self.rows or self._reading else 0
            if not self._pool.grant(request, len(request.prompts[0]) + request.reach, spare):
                break
            self.preempted.pop(0)
            self._begin_reading(request)

    def _grow(self) -> None:
        """Grant every row the positions that the next pass may write, those that were admitted first before others; for
        what is lacking, requests are preempted."""
        if all(self._pool.has(row.request, len(row.tokens) + row.request.reach) for row in self.rows):
            return
        for request in sorted((row.request for row in self.rows), key=_admitted):
            while request not in self.preempted:
                if self._pool.grant(request, len(request.rows[0].tokens) + request.reach):
                    break
                self._preempt(self._victim())

    def _victim(self) -> Request:
        """The request that was admitted last, of those that can be preempted; among these is any that has to grow."""
        held = [row.request for row in self.rows] + [one.request for one in self._reading]
        return max((request for request in held if preemptible(self.target, request)), key=_admitted)

    def _preempt(self, request: Request) -> None:
        """Give the memory of a request back; it will be read again from its first token on."""
        for one in [one for one in self._reading if one.request is request]:
            self._reading.remove(one)
            self.target.discard(one.slot)
        for row in [row for row in self.rows if row.request is request]:
            super()._leave(row.slot)
            row.request = request
            request.prompts = self.target.prompts([row], [row.tokens], 0)
        if request.prompt_scores is not None and not request.passes:
            request.prompt_scores.restart()
        self._pool.free(request)
        self.preempted.append(request)
        self.preempted.sort(key=_admitted)
        self.preemptions += 1

    def _read_piece(self) -> list[Reading]:
        """Read the next piece; returns the requests whose prompts it completes."""
        if self._prefixes is not None:
            self._follow(self._prefixes)
        ends = self._shares(self._size.positions if self.rows else PROMPT)
        pieces = [Piece(one.prompt, one.slot, one.end, end, one.scored) for one, end in ends.items()]
        taps = Taps()
        for one in ends:
            taps = taps | one.taps
        before = self.control.times.prefill
        for one, piece, scores in zip(ends, pieces, self._read_pieces(pieces, taps), strict=True):
            one.add(piece, scores)
        self._size.learn(sum(map(len, pieces)), self.control.times.prefill - before)
        return [one for one in ends if not one.left]

    def _shares(self, positions: int) -> dict[Reading, int]:
        """Divide a piece: up to where each prompt is read.

        The oldest prompt has half of it, so that none waits for ever, and those with least left the rest, so that a
        short one is not delayed by a long one; for a prompt that waits, its leader counts as if it were no longer.
        Spans of the target's granularity are not divided. Of prompts that are scored there are no more than SCORED
        bytes have room for, one span at least.
        """
        span = self.target.granularity or 1
        scored = max(SCORED // (4 * self.target.vocabulary * span), 1)
        spans, self._odd = max(positions // span, 1), 1 - self._odd
        ends: dict[Reading, int] = {}
        shares = [(self._reading[0], (spans + self._odd) // 2)]
        shortest = {one: len(one.prompt) for one in self._reading}
        for one in reversed(self._reading):
            if (leader := one.leader) is not None:
                shortest[leader] = min(shortest[leader], shortest[one])
        unhindered = [one for one in self._reading if not one.leaders]
        shares += [(one, spans) for one in sorted(unhindered, key=lambda one: shortest[one] - one.end)]
        for one, share in shares:
            start = ends.get(one, one.end)
            share = min(share, spans, scored) if one.scored else min(share, spans)
            end = min((start // span + share) * span, len(one.prompt))
            if end > start:
                ends[one] = end
                taken = -(-(end - start) // span)
                spans -= taken
                scored -= taken * one.scored
        return ends

    def _follow(self, prefixes: Prefixes) -> None:
        """Load what older prompts have in common with those that wait, where they have been read so far or have left.

        The oldest prompt has no leader, and leaders are older, so some prompt can always be read.
        """
        for one in self._reading:
            while (leader := one.leader) is not None:
                if leader in self._reading:
                    if leader.end < one.leaders[leader]:
                        break
                    self._store(leader.request, leader.slot)
                del one.leaders[leader]
                self._load(prefixes, one)

    def _load(self, prefixes: Prefixes, one: Reading) -> None:
        """Load the stored prefix of a prompt of which nothing has been read; leaders remain that have GAIN more."""
        one.end = prefixes.load(one.row.namespace, one.row.tokens, one.slot)
        if not one.request.passes:
            one.request.cached_tokens = one.end
        one.leaders = {other: count for other, count in one.leaders.items() if count >= one.end + GAIN}

    def _loadable(self, prefixes: Prefixes, one: Reading, other: Reading) -> int:
        """Positions of a prompt that it can load once another one has been read: all but the last of each, whose
        logits are required."""
        mine, theirs = one.prompt.ids, other.prompt.ids
        if mine is None or theirs is None or not (prefixes.shared or one.row.namespace == other.row.namespace):
            return 0
        count = agreeing(mine[:-1], theirs[:-1])
        return count - count % (self.target.granularity or 1)

    def _activated(self, prompts: Sequence[Prompt]) -> Scores:
        """Put the rows of prompts that were read into use: the scores of their last tokens."""
        rows = [next(one for one in self._reading if one.prompt is prompt) for prompt in prompts]
        for one in rows:
            self._store(one.request, one.slot)
            self._reading.remove(one)
            slot = self.target.activate(one.slot)
            for other in self._reading:
                if other.slot == slot:
                    other.slot = one.slot
        layers = {layer for one in rows for layer in one.taps.hidden}
        return Scores(
            torch.cat([one.logits for one in rows if one.logits is not None]),
            {layer: [one.states(layer) for one in rows] for layer in layers},
            [len(prompt) - 1 for prompt in prompts],
        )

    def _drop(self, one: Reading) -> None:
        """End the reading of a prompt, and free its slot."""
        self._store(one.request, one.slot)
        self._reading.remove(one)
        self.target.discard(one.slot)

    def _leave(self, slot: int) -> None:
        self._store(self.rows[slot].request, slot)
        super()._leave(slot)

    def _store(self, request: Request, slot: int) -> None:
        """Keep the keys and values of a row so far; only of its prompt, where those of passes over drafts may have
        other bits than those of prompts."""
        if self._prefixes is not None and request.prompts[0].ids is not None and not request.error:
            row = request.rows[0]
            ids = row.tokens if self.target.granularity == 1 else row.tokens[: row.prompt]
            self._prefixes.store(row.namespace, ids, slot)


def _admitted(request: Request) -> int:
    return request.admitted
