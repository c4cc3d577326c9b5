"""Responses that a server has given, kept in a file to train drafters on (`truedraft train --data FILE`)."""

from __future__ import annotations

import json
import logging
import os
from itertools import groupby
from pathlib import Path

from truedraft.errors import Refused, why
from truedraft.serve.job import Job
from truedraft.serve.loop import Observer

log = logging.getLogger("truedraft.serve")


class Recorder(Observer):
    """Adds a line of JSON to a file for each row that ends without an error, and hands on what it observes.

    A line has `prompt_ids` and `response_ids`, token ids as the model read and emitted them, and `accepted`, for each
    draft of which tokens were accepted, how many. It is of all namespaces; a file made here is for its owner alone.
    Lines are written whole, so that several processes may add to one file. If one cannot be written, the log says so,
    and no further ones are.

    Args:
        path: of the file.
        inner: the observer that it hands on to.

    Raises:
        Refused: the file cannot be written.
    """

    def __init__(self, path: Path, inner: Observer):
        self.path, self.inner = path, inner
        try:
            self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as e:
            raise Refused(f"record {path}: {why(e)}") from e

    def advanced(self, job: Job, tokens: int, drafted: int, offered: int, seconds: float) -> None:
        self.inner.advanced(job, tokens, drafted, offered, seconds)

    def passed(self, rows: int, tokens: int, seconds: float) -> None:
        self.inner.passed(rows, tokens, seconds)

    def ended(self, job: Job) -> None:
        self.inner.ended(job)
        if self._file is None or job.finish_reason is None or not job.tokens:
            return
        accepted = [len(list(run)) for right, run in groupby(job.drafted) if right]
        line = {"prompt_ids": [*job.ids], "response_ids": job.tokens, "accepted": accepted}
        try:
            os.write(self._file, json.dumps(line).encode() + b"\n")
        except OSError as e:
            log.error("responses are recorded no more", extra={"fields": {"file": str(self.path), "reason": why(e)}})
            os.close(self._file)
            self._file = None
