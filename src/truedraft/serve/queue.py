"""Which waiting row begins next: namespaces take turns by the tokens that they have been served.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", 2024 (arXiv 2401.00588): the
namespace with the smallest counter is served next; a namespace that was idle starts at the smallest counter of the
others, so that it cannot save up turns.
"""

from __future__ import annotations

from collections import Counter, deque

from truedraft.serve.job import Job

PROMPT_TOKEN = 0.25  # cost of a token read, in tokens emitted: prompts are read many tokens at once


class FairQueue:
    """Rows that wait, by namespace, first come first served within each.

    Args:
        rows_per_namespace: rows that a namespace may have at once while others wait; None for no limit.
    """

    def __init__(self, rows_per_namespace: int | None = None):
        self.rows_per_namespace = rows_per_namespace
        self._waiting: dict[str, deque[Job]] = {}
        self._served: dict[str, float] = {}
        self._running: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self):  # type: ignore[no-untyped-def]
        return (job for jobs in self._waiting.values() for job in jobs)

    def waiting(self, namespace: str) -> int:
        return len(self._waiting.get(namespace, ()))

    def add(self, job: Job) -> None:
        name = job.namespace
        if name not in self._waiting and not self._running[name]:
            active = [self._served[other] for other in {*self._waiting, *+self._running} if other in self._served]
            self._served[name] = max(self._served.get(name, 0.0), min(active, default=0.0))
        self._waiting.setdefault(name, deque()).append(job)

    def remove(self, job: Job) -> bool:
        """Whether the job waited here."""
        jobs = self._waiting.get(job.namespace, deque())
        if job not in jobs:
            return False
        jobs.remove(job)
        if not jobs:
            del self._waiting[job.namespace]
        return True

    def take(self) -> Job | None:
        """The next row to begin; None where none waits, or none may begin."""
        names = [name for name in self._waiting if self._may_run(name)]
        if not names:
            return None
        name = min(names, key=lambda name: self._served[name])
        job = self._waiting[name][0]
        self.remove(job)
        self._running[name] += 1
        self._served[name] += PROMPT_TOKEN * len(job.ids)
        return job

    def _may_run(self, name: str) -> bool:
        most = self.rows_per_namespace
        return most is None or self._running[name] < most or len(self._waiting) == 1

    def served(self, namespace: str, tokens: int) -> None:
        """Count tokens that a namespace was served."""
        self._served[namespace] += tokens

    def ended(self, job: Job) -> None:
        """A row that was taken has ended."""
        self._running[job.namespace] -= 1
        if not self._running[job.namespace]:
            del self._running[job.namespace]
            if job.namespace not in self._waiting and not self._waiting and not self._running:
                self._served.clear()
