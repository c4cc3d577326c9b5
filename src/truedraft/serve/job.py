"""One row of a request on its way through the engine's thread, and its tokens as the event loop reads them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

from truedraft.engine_request import EngineRequest
from truedraft.logprobs import PromptLogprobs, TokenLogprobs
from truedraft.serve.errors import ApiError

State = Literal["waiting", "reading", "running", "finished"]


class Job:
    """A row: what it asks for, and what it has emitted so far.

    The engine's thread writes, the event loop reads: lists only grow, and what a pass added is read once `publish` says
    so, all of it at once.

    Args:
        ids: the prompt.
        settings: further arguments of `ContinuousEngine.add_request`.
        max_tokens: most tokens to emit; 0 where the prompt alone is to be read.
        namespace: of the request's API key.
        deadline: seconds after which the row is ended by an error; None for no limit.
        id: of the request, for the live page and the log.
        changed: set when there are new tokens; shared by the jobs of a request, which have one reader.

    Attributes:
        tokens: emitted ids. drafted: for each, whether it is an accepted draft. logprobs: of each, where requested.
        finish_reason: "stop" or "length"; None while it waits or runs, or where it ended with `error`.
        published: tokens that may be read, and whether they are all.
        cached_tokens: tokens of the prompt whose KV was reused.
        first, last: times of the first and the last emission, by `time.perf_counter`.
    """

    def __init__(
        self,
        ids: Sequence[int],
        settings: Mapping[str, Any],
        max_tokens: int,
        namespace: str = "",
        deadline: float | None = None,
        id: str = "",
        changed: asyncio.Event | None = None,
    ):
        self.ids, self.settings, self.max_tokens = ids, settings, max_tokens
        self.namespace, self.id = namespace, id
        self.created = time.perf_counter()
        self.expires = None if deadline is None else self.created + deadline
        self.tokens: list[int] = []
        self.drafted: list[bool] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: Literal["stop", "length"] | None = None
        self.error: ApiError | None = None
        self.published = (0, False)
        self.admitted = self.first = self.last = 0.0
        self.passes = self.offered = 0
        self.request: EngineRequest | None = None
        self.changed = changed or asyncio.Event()
        self.notified = 0.0  # when the reader was last notified

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def state(self) -> State:
        if self.finished:
            return "finished"
        return "running" if self.tokens else "reading" if self.request is not None else "waiting"

    @property
    def prompt_logprobs(self) -> Sequence[PromptLogprobs]:
        """Of each token of the prompt after its first, where requested; all of them once there are emitted tokens, or
        the row has ended."""
        return () if self.request is None else self.request.prompt_logprobs or ()

    @property
    def cached_tokens(self) -> int:
        return 0 if self.request is None else self.request.cached_tokens

    @property
    def accepted(self) -> int:
        return sum(self.drafted)

    def publish(self) -> None:
        """Let the event loop read what there is; called in the engine's thread. A reader never sees the last tokens
        without why they are the last, which may take them out of the text."""
        self.published = len(self.tokens), self.finish_reason is not None

    def notify(self) -> None:
        """Wake the reader; called in the event loop."""
        self.changed.set()


async def advances(jobs: Sequence[Job]) -> AsyncIterator[tuple[int, int]]:
    """(index, number of tokens so far) whenever one of the jobs of a request has new tokens, and once at its end.

    Raises:
        ApiError: a job ended with an error.
    """
    sent, ended = [0] * len(jobs), [False] * len(jobs)
    changed = jobs[0].changed
    while not all(ended):
        changed.clear()
        for i, job in enumerate(jobs):
            count, finished = job.published
            if job.error is not None:
                raise job.error
            if not ended[i] and (count > sent[i] or finished):
                sent[i], ended[i] = count, finished
                yield i, count
        if not all(ended):
            await changed.wait()


async def prompts_read(jobs: Sequence[Job]) -> None:
    """Wait until the prompts of these jobs, which have one reader, have been read.

    Raises:
        ApiError: a job ended with an error.
    """
    while jobs:
        changed = jobs[0].changed
        changed.clear()
        for job in jobs:
            if job.error is not None:
                raise job.error
        if all(any(job.published) for job in jobs):
            return
        await changed.wait()
