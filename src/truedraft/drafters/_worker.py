"""A thread that works for a drafter while the target's pass runs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch


class Worker:
    """Runs one job at a time, step by step, until it is stopped between two steps.

    The thread exists from the first job on until `close`. It shares with others what its job reads, and nothing that
    changes; torch's gradients are off in it, and torch's other settings of threads are the defaults.

    Args:
        threads: cores that torch's operations and compiled passes of its jobs use; those of other threads do not
            change.
    """

    def __init__(self, threads: int):
        self.threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._job: Future[None] | None = None
        self._stopped = False

    def start(self, steps: Iterator[Any]) -> None:
        """Begin a job, which makes a step whenever the next value is taken from `steps`. None may be running."""
        assert self._job is None
        if self._pool is None:
            self._pool = _pool(self.threads)
        self._stopped = False
        self._job = self._pool.submit(self._run, steps)

    def _run(self, steps: Iterator[Any]) -> None:
        while not self._stopped and next(steps, self) is not self:
            pass

    def stop(self) -> None:
        """Wait for the end of the current step; no further one is made. Nothing happens where no job is running.

        Raises:
            Exception: that of a step.
        """
        self._stopped = True
        self.finish()

    def finish(self) -> None:
        """Wait for the end of the job. Nothing happens where none is running.

        Raises:
            Exception: that of a step.
        """
        if self._job is not None:
            wait([self._job])  # an interruption leaves the job, for the next call
            job, self._job = self._job, None
            job.result()

    def close(self) -> None:
        """Stop, and end the thread. Exceptions of steps are dropped."""
        self._stopped = True
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = self._job = None


def _pool(threads: int) -> ThreadPoolExecutor:
    """A pool of one thread, in which torch uses so many cores.

    torch keeps this number by thread, and for threads that are yet to begin, and for MKL, that set last, which is
    therefore set back.
    """
    pool, before = ThreadPoolExecutor(1, "truedraft-draft"), torch.get_num_threads()
    try:
        pool.submit(_set_up, threads).result()
    finally:
        torch.set_num_threads(before)
    return pool


def _set_up(threads: int) -> None:
    torch.set_grad_enabled(False)
    torch.get_num_threads()  # the first use of it in a thread would undo what follows
    torch.set_num_threads(threads)
