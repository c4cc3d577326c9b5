"""What happens in a server, live: the feed `/live` of server-sent events, and the page `/` that shows it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from fastapi import FastAPI, Request
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from truedraft.accelerated import Accelerated
from truedraft.canvas.accelerated import AcceleratedCanvas
from truedraft.drafters._compose import name_of
from truedraft.reports import guarantee_of
from truedraft.serve.config import ServeConfig
from truedraft.serve.errors import ApiError
from truedraft.serve.job import Job
from truedraft.serve.keys import Keys
from truedraft.serve.loop import EngineLoop
from truedraft.serve.metrics import Metrics
from truedraft.serve.sending import EVENTS, Outlet, head, part

INTERVAL = 0.5  # seconds between two snapshots
LISTED = 100  # rows in a snapshot; those that run come before those that wait
WATCHERS = 32  # clients of a namespace that may read the feed at once
LONGEST = 600.0  # seconds after which a feed ends, so that clients that are gone do not count; the page reads another
TOTALS = {
    "prompt_tokens": "vllm:prompt_tokens",
    "cached_tokens": "vllm:prefix_cache_hits",
    "tokens": "vllm:generation_tokens",
    "row_passes": "truedraft:row_passes",
    "drafted_tokens": "vllm:spec_decode_num_draft_tokens",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
}
TRIES = 8  # of copying a collection that the engine's thread changes meanwhile
FILES = Path(__file__).with_name("page")
ROUTES = {"index.html": "/", "icon.svg": "/favicon.ico"}  # other files are served at /page/NAME
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class Watched(Protocol):
    """What the feed reads of a server; see `app.Server`."""

    config: ServeConfig
    keys: Keys
    loop: EngineLoop
    metrics: Metrics
    started: float

    @property
    def ready(self) -> bool: ...

    def namespace(self, request: Request) -> str: ...


class Feed:
    """Snapshots of a server, made when somebody reads them, and at most one per interval and namespace.

    They are read from plain attributes, without a lock: the engine's thread never waits for a reader.

    Attributes:
        watchers: for each namespace, the clients that read at the moment.
    """

    def __init__(self, server: Watched, fast: Accelerated | AcceleratedCanvas):
        self.server = server
        self.watchers: Counter[str] = Counter()
        if isinstance(fast, AcceleratedCanvas):
            drafter, guarantee = fast.names
        else:
            drafter, guarantee = name_of(fast.drafter), guarantee_of(fast.target, fast.rule)
        self._names = {
            "model": server.config.name,
            "drafter": drafter,
            "guarantee": guarantee,
        }
        self._made: dict[str, tuple[float, bytes]] = {}

    def event(self, namespace: str) -> bytes:
        """The newest snapshot as a server-sent event."""
        now = time.monotonic()
        at, event = self._made.get(namespace, (0.0, b""))
        if not event or now - at >= INTERVAL / 2:
            event = b"data: " + to_json(self.snapshot(namespace)) + b"\n\n"
            self._made[namespace] = now, event
        return event

    def snapshot(self, namespace: str) -> dict[str, Any]:
        """What happens now: rows of this namespace, or all where the server has no keys, and figures of all.

        Counts of tokens are since the start; rates are over the last seconds.
        """
        server, loop = self.server, self.server.loop
        totals = {name: server.metrics.counters[counter] for name, counter in TOTALS.items()}
        running, waiting = _copied(loop.running.values()), _copied(loop.queue)
        rates, now = server.metrics.rates(), time.perf_counter()
        own = (job for job in (*running, *waiting) if not server.keys or job.namespace == namespace)
        return (
            {
                "running": [self._row(job, now) for job in islice(own, LISTED)],
                "waiting": len(waiting),
                "rows": len(running),
                "max_rows": server.config.max_rows,
                "tokens_per_second": round(rates.tokens, 2),
                "passes_per_second": round(rates.passes, 2),
                "mean_acceptance_length": _ratio(totals["tokens"], totals["row_passes"]),
                "cache_usage": round(len(running) / server.config.max_rows, 4),
                "uptime": round(time.time() - server.started, 1),
            }
            | totals
            | self._names
        )

    def _row(self, job: Job, now: float) -> dict[str, Any]:
        tokens = len(job.tokens)
        return {
            "id": job.id,
            "model": self._names["model"],
            "state": job.state,
            "prompt_tokens": len(job.ids),
            "tokens": tokens,
            "passes": job.passes,
            "mean_acceptance_length": _ratio(tokens, job.passes),
            "seconds": round(now - job.created, 2),
        }


def _ratio(tokens: int, passes: int) -> float:
    return round(tokens / max(passes, 1), 4)


def _copied(jobs: Any) -> Sequence[Job]:
    """The jobs of a collection that another thread changes; none where it changed at every try."""
    for _ in range(TRIES):
        try:
            return list(jobs)
        except RuntimeError:  # changed during the iteration
            continue
    return []


class FeedResponse(Response):
    """Sends snapshots until the server ends, or the client goes away or leaves what was sent unread."""

    def __init__(self, feed: Feed, namespace: str):
        self.feed, self.namespace = feed, namespace
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.feed.watchers[self.namespace] += 1
        try:
            outlet = Outlet(receive, send, self.feed.server.config.write_seconds)
            await outlet.while_connected(self._sent(outlet), None)
        finally:
            self.feed.watchers[self.namespace] -= 1

    async def _sent(self, outlet: Outlet) -> None:
        await outlet(head(200, EVENTS))
        server, end = self.feed.server, time.monotonic() + LONGEST
        while server.ready and time.monotonic() < end:
            await outlet(part(self.feed.event(self.namespace)))
            await asyncio.sleep(INTERVAL)
        await outlet(part(b"", more=False))


class StaticFile:
    """A file of the page, read once; browsers ask whether it has changed before they show it again."""

    def __init__(self, path: Path):
        self.content = path.read_bytes()
        etag = f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'
        self.headers = {
            "etag": etag,
            "cache-control": "no-cache",
            "content-type": f"{KINDS[path.suffix]}; charset=utf-8",
        }

    async def response(self, request: Request) -> Response:
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self.headers["etag"] in known or "*" in known:
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers)


def add_page(app: FastAPI, server: Watched, fast: Accelerated | AcceleratedCanvas) -> None:
    """Add the page `/`, its files, and the feed `/live`."""
    feed = Feed(server, fast)
    app.state.feed = feed
    for path in sorted(FILES.iterdir()):
        app.add_route(ROUTES.get(path.name, f"/page/{path.name}"), StaticFile(path).response, methods=["GET"])

    @app.get("/live", response_model=None)
    async def live(request: Request) -> Response:
        namespace = server.namespace(request)
        if not server.ready:
            raise ApiError(503, "the server is ending: its page is closed", code="ending")
        if feed.watchers[namespace] >= WATCHERS:
            raise ApiError(
                429, f"{WATCHERS} clients watch already: close one of them", code="too_many_watchers",
                headers={"Retry-After": "10"},
            )  # fmt: skip
        return FeedResponse(feed, namespace)
