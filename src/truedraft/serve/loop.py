"""The thread that owns the engine: it admits waiting rows, makes passes, and hands tokens to the event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch

from truedraft.continuous import ContinuousEngine
from truedraft.engine_request import EngineRequest
from truedraft.errors import Refused, let_go, why
from truedraft.serve.errors import ApiError
from truedraft.serve.job import Job
from truedraft.serve.queue import FairQueue
from truedraft.serve.refusals import of_refusal

T = TypeVar("T")
EVENTS = 800  # most events of all streams per second: each takes the interpreter from the engine for some 0.1 ms
ADMITTING = 0.01  # seconds between two passes in which further rows are added to those that run
IDLE = 1.0  # seconds between two looks at deadlines while nothing runs
log = logging.getLogger("truedraft.serve")


class Observer(Protocol):
    """What is called in the engine's thread when rows advance; see `metrics.Metrics`."""

    def advanced(self, job: Job, tokens: int, drafted: int, offered: int, seconds: float) -> None: ...

    def ended(self, job: Job) -> None: ...

    def passed(self, rows: int, tokens: int, seconds: float) -> None: ...


class EngineLoop(threading.Thread):
    """Runs the rows of all requests; every call on the engine is made by this thread.

    Args:
        make_engine: makes its engine; called again after an error that closed the engine.
        observer: receives what happens.
        max_waiting: rows of a namespace that may wait.
        rows_per_namespace: rows that a namespace may have while others wait.
        interval: least seconds between two notifications of a row's reader, the first and the last excepted.
    """

    def __init__(
        self,
        make_engine: Callable[[], ContinuousEngine],
        observer: Observer,
        max_waiting: int,
        rows_per_namespace: int | None = None,
        interval: float = 0.0,
    ):
        super().__init__(name="truedraft-engine", daemon=True)
        self.observer, self.interval, self.max_waiting = observer, interval, max_waiting
        self._make_engine, self.engine = make_engine, make_engine()
        self.queue = FairQueue(rows_per_namespace)
        self.running: dict[EngineRequest, Job] = {}
        self._events: asyncio.AbstractEventLoop | None = None
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._new: list[Job] = []
        self._cancelled: list[Job] = []
        self._waiting_by_name: dict[str, int] = {}
        self._wake = threading.Condition()
        self._stopping = False
        self.busy_seconds, self.rows_ended = 0.0, 0
        self._preempted_before = 0  # in engines that errors have closed

    # ---------------------------------------------------------------- from the event loop

    def attach(self, events: asyncio.AbstractEventLoop) -> None:
        """Set the event loop that readers run in."""
        self._events = events

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the rows of a request.

        Raises:
            ApiError: too many rows of this namespace wait already (429), the request has more rows than may ever wait
                (400), or the server is ending (503).
        """
        with self._wake:
            if self._stopping:
                raise ApiError(503, "the server is ending: send the request to another one", code="ending")
            name = jobs[0].namespace
            waiting = self._waiting_by_name.get(name, 0)
            if len(jobs) > (most := self.max_waiting + self.engine.max_rows):
                raise ApiError(400, f"prompt and n make {len(jobs)} rows, this server allows {most}: send fewer", "n")
            free = self.engine.max_rows - len(self.running)  # some of which may be about to be taken
            if waiting + len(jobs) > self.max_waiting + free:
                after = str(max(1, round(self._seconds_per_row() * waiting)))
                raise ApiError(
                    429, f"{waiting} rows of this key wait already, at most {self.max_waiting} may: retry later",
                    code="queue_full", headers={"Retry-After": after},
                )  # fmt: skip
            self._waiting_by_name[name] = waiting + len(jobs)
            self._new += jobs
            self._wake.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """End rows whose client has gone; no effect on finished ones."""
        left = [job for job in jobs if not job.finished]
        if left:
            with self._wake:
                self._cancelled += left
                self._wake.notify()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in the engine's thread, between two passes."""
        future: Future[T] = Future()
        with self._wake:
            self._calls.append((function, future))
            self._wake.notify()
        return future

    def stop(self) -> None:
        """End all rows with an error, then the thread; see `drained` for an end without errors."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    @property
    def preemptions(self) -> int:
        """How often rows gave their memory back, to be read again later."""
        return self._preempted_before + self.engine.preemptions

    @property
    def idle(self) -> bool:
        return not (self.running or len(self.queue) or self._new)

    # ---------------------------------------------------------------- the engine's thread

    def run(self) -> None:
        try:
            with torch.no_grad():
                while not self._stopping:
                    try:
                        self._turn()
                    except Exception as error:  # of the target or the control: the engine is closed
                        log.exception("a pass failed")
                        self._restart(error)
        except Exception:
            log.exception("the engine could not be made again: the server has to be restarted")
        finally:
            self.stop()
            self._fail_all(ApiError(503, "the server has ended", code="ending"))
            self.engine.close()

    def _turn(self) -> None:
        with self._wake:
            if not (self._new or self._cancelled or self._calls or self.running or self._stopping or len(self.queue)):
                self._wake.wait(IDLE)
            cancelled, self._cancelled = self._cancelled, []
            calls, self._calls = self._calls, []
        self._enqueue()
        for function, future in calls:
            _resolve(function, future)
        for job in cancelled:
            self._end(job, ApiError(499, "the client has closed the connection", code="cancelled"))
        self._expire()
        self._admit()
        if self.engine.has_unfinished_requests():
            self._step()

    def _enqueue(self) -> None:
        with self._wake:
            new, self._new = self._new, []
        for job in new:
            self.queue.add(job)

    def _admit(self) -> None:
        """Add waiting rows to the engine, and those that arrive meanwhile: their prompts are read together. Where rows
        run, no longer than these may wait."""
        until = time.perf_counter() + ADMITTING if self.running else math.inf
        while self.engine.room() > 0 and time.perf_counter() < until:
            self._enqueue()
            if (job := self.queue.take()) is None:
                break
            self._left_queue(job)
            ids = torch.tensor([job.ids])
            try:
                request = self.engine.add_request(
                    ids, attention_mask=torch.ones_like(ids), namespace=job.namespace,
                    max_new_tokens=max(job.max_tokens, 1), **job.settings,
                )  # fmt: skip
            except Refused as error:
                job.error = of_refusal(error)
            except Exception as error:
                log.exception("a request could not begin")
                job.error = ApiError(500, f"the request failed: {why(error)}")
                let_go(error)
            else:
                job.request, job.admitted = request, time.perf_counter()
                self.running[request] = job
                continue
            self.queue.ended(job)
            self._ended([job])

    def _step(self) -> None:
        start = time.perf_counter()
        advanced = self.engine.step()
        now = time.perf_counter()
        self.busy_seconds += now - start
        emitted, changed, ended = 0, [], []
        interval = max(self.interval, len(self.running) / EVENTS)
        for request in advanced:
            job = self.running[request]
            emitted += self._take(job, request, now)
            if request.finished:
                self._finish(job, request)
                ended.append(job)
            elif job.notified == 0.0 or now - job.notified >= interval:
                changed.append(job)
            job.publish()
        for job in changed:
            job.notified = now
        self.observer.passed(len(advanced), emitted, now - start)
        self._ended(ended)
        self._notify(changed)

    def _take(self, job: Job, request: EngineRequest, now: float) -> int:
        """Take over the tokens that the last pass emitted for a row; returns how many."""
        passes = request.report().passes
        if len(passes) == job.passes:
            return 0
        emission = passes[-1].emitted[0]
        tokens = emission.tokens if job.max_tokens else []  # where only the prompt is read, the next token is dropped
        accepted = min(emission.drafted, len(tokens))
        job.passes += 1
        job.offered += emission.offered
        job.drafted += [True] * accepted + [False] * (len(tokens) - accepted)
        job.logprobs += (request.logprobs or ())[len(job.logprobs) :] if tokens else ()
        job.tokens += tokens
        since = job.last or now
        if tokens or not job.max_tokens:  # of a canvas, none may be known without a gap yet
            job.first, job.last = job.first or now, now
        self.observer.advanced(job, len(tokens), accepted, emission.offered, now - since)
        self.queue.served(job.namespace, len(tokens))
        return len(tokens)

    def _finish(self, job: Job, request: EngineRequest) -> None:
        del self.running[request]
        self.queue.ended(job)
        if request.error is not None:
            error = request.error
            job.error = _error_of(error)
        elif request.finish_reason in ("stop", "length"):
            job.finish_reason = request.finish_reason if job.max_tokens else "length"
        else:
            job.error = ApiError(500, "the request was aborted")

    def _expire(self) -> None:
        now = time.perf_counter()
        for job in [*self.queue, *self.running.values()]:
            if job.expires is not None and now > job.expires:
                self._end(job, ApiError(504, "the request's deadline has passed", "deadline", "deadline_exceeded"))

    def _end(self, job: Job, error: ApiError) -> None:
        """End a row that waits or runs."""
        if job.finished:
            return
        if self.queue.remove(job):
            self._left_queue(job)
        elif job.request is not None and job.request in self.running:
            self.engine.abort_request(job.request)
            del self.running[job.request]
            self.queue.ended(job)
        job.error = error
        self._ended([job])

    def _left_queue(self, job: Job) -> None:
        with self._wake:
            self._waiting_by_name[job.namespace] -= 1
            if not self._waiting_by_name[job.namespace]:
                del self._waiting_by_name[job.namespace]

    def _ended(self, jobs: Sequence[Job]) -> None:
        self.rows_ended += len(jobs)
        for job in jobs:
            self.observer.ended(job)
        self._notify(jobs)

    def _notify(self, jobs: Sequence[Job]) -> None:
        if jobs and self._events is not None and not self._events.is_closed():
            self._events.call_soon_threadsafe(_notify_all, jobs)

    def _fail_all(self, error: ApiError) -> None:
        with self._wake:
            new, self._new = self._new, []
        for job in new:
            self.queue.add(job)
        for job in [*self.queue, *self.running.values()]:
            self._end(job, error)

    def _restart(self, error: Exception) -> None:
        """Another engine in the place of one that an error has closed; its rows end with the error."""
        failed = [*self.running.values()]
        self.running.clear()
        for job in failed:
            self.queue.ended(job)
            job.error = ApiError(500, f"a pass failed: {why(error)}")
        self._ended(failed)
        let_go(error)
        self.engine.close()
        self._preempted_before = self.preemptions
        self.engine = self._make_engine()

    def _seconds_per_row(self) -> float:
        """Seconds between two rows that end, by what was measured so far; for `Retry-After`."""
        return self.busy_seconds / self.rows_ended if self.rows_ended else 1.0


def _error_of(error: Exception) -> ApiError:
    """The API's error for an exception of a part of one request."""
    return of_refusal(error) if isinstance(error, Refused) else ApiError(500, f"the request failed: {why(error)}")


def _notify_all(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job.notify()


def _resolve(function: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
