"""The process in front of replicas of the server: it sends each request to the replica that has the request's texts,
and passes on what that one answers."""

from __future__ import annotations

import hashlib
import logging
import re
from codecs import BOM_UTF8
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from prometheus_client import Metric, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families
from pydantic_core import from_json, to_json
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from truedraft.serve.answer import error_response, json_response
from truedraft.serve.app import SMALL, read_body
from truedraft.serve.config import ServeConfig
from truedraft.serve.errors import ApiError
from truedraft.serve.keys import Keys, authenticated, bearer
from truedraft.serve.security import HEADERS, check_origin
from truedraft.serve.sending import Outlet, part

CARRIED = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers",
           "client", "server")  # fmt: skip
PREFIX = 256  # characters, or token ids, of a prompt by which requests without keys are told apart
PLACES = 100_000  # responses whose replica is remembered
ID = re.compile(rb'(?:data: )?\{"id":"([\w-]+)"')  # at the start of a response, or of a stream's first event
log = logging.getLogger("truedraft.serve")


@dataclass(frozen=True)
class Call:
    """A request on its way to a replica.

    Attributes:
        scope: of ASGI, what can be sent to another machine.
        body: the whole body.
        replica: id of the replica that has a response which the request refers to; "" where it refers to none.
    """

    scope: dict[str, Any]
    body: bytes
    replica: str = ""


class Reply(NamedTuple):
    """A part of an answer: ASGI messages, and the id of the replica that sent them."""

    replica: str
    messages: list[Message]


class Page(NamedTuple):
    """What a replica's `/metrics` shows. rank: of the replica, from 0."""

    rank: int
    text: str


class Replicas(Protocol):
    """Copies of the server."""

    def send(self, call: Call, key: str) -> AsyncGenerator[Reply, None]:
        """The answer to a request; the request is cancelled where this is closed before its end.

        Args:
            call: the request.
            key: calls of the same key go to the same replica as long as that one has room.

        Raises:
            Exception: of any kind, where the replica fails.
        """

    async def running(self) -> int:
        """How many there are at the moment."""

    async def pages(self) -> Sequence[Page]:
        """The metrics of each."""

    def stop(self) -> None:
        """End all requests with an error."""


class Front:
    """An ASGI application that answers through replicas.

    Args:
        replicas: copies of the server.
        config: the settings.
        keys: API keys; without any, the beginning of a prompt says which replica has its prefix.

    Attributes:
        draining: running requests end, new ones are refused.
    """

    def __init__(self, replicas: Replicas, config: ServeConfig, keys: Keys):
        self.replicas, self.config, self.keys = replicas, config, keys
        self.draining, self._open = False, 0
        self._places: OrderedDict[str, str] = OrderedDict()  # response id -> replica id

    @property
    def idle(self) -> bool:
        return not self._open

    def stop(self) -> None:
        """End all requests with an error."""
        self.replicas.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = OWN.get(scope["path"])
        try:
            if own is None or scope["method"] not in ("GET", "HEAD"):
                await self._forward(Request(scope, receive), send)
                return
            response = await own(self)
        except ApiError as error:
            response = error_response(error)
        except TimeoutError:
            late = ApiError(408, "the body did not arrive in time", headers={"Connection": "close"})
            response = error_response(late)
        response.headers.update(HEADERS)
        await response(scope, receive, send)

    async def _health(self) -> Response:
        running = await self.replicas.running()
        status = "ending" if self.draining else "ready" if running else "starting"
        content = {"status": status, "replicas": {"running": running, "configured": self.config.replicas}}
        return json_response(content, 200 if status == "ready" else 503)

    async def _metrics(self) -> Response:
        try:
            pages = await self.replicas.pages()
        except TimeoutError:
            raise ApiError(503, "a replica does not give its metrics: retry later", code="replica_slow") from None
        return Response(merged(pages), media_type=CONTENT_TYPE_LATEST)

    async def _forward(self, request: Request, send: Send) -> None:
        if self.draining and request.method == "POST":
            raise ApiError(503, "the server is ending: send the request to another one", code="ending")
        if request.method == "POST":
            if not self.keys:
                check_origin(request.headers, self.config)
            authenticated(self.keys, request.headers)  # no body is read without a key
        body = bytes(await read_body(request, self.config))
        given = await run_in_threadpool(_parsed, body) if len(body) >= SMALL else _parsed(body)
        key, referred = self._place(request, given)
        call = Call({name: request.scope[name] for name in CARRIED if name in request.scope}, body, referred)
        self._open += 1
        try:
            outlet = Outlet(request.receive, send, self.config.write_seconds)
            await outlet.while_connected(self._pass_on(call, key, outlet), None)
        finally:
            self._open -= 1

    def _place(self, request: Request, given: dict[str, Any]) -> tuple[str, str]:
        """The key of a request, and the replica that has a response which it refers to."""
        namespace = self.keys.namespace(bearer(request.headers)) if self.keys else None
        text = to_json(_beginning(given)) if namespace is None else b"namespace " + namespace.encode()
        places = (self._places.get(id) for id in _responses(given))
        return hashlib.sha256(text).hexdigest(), next(filter(None, places), "")

    async def _pass_on(self, call: Call, key: str, outlet: Outlet) -> None:
        """Send the messages of a replica; where it fails, an error in their place."""
        begun = events = False
        place: str | None = None
        try:
            async with aclosing(self.replicas.send(call, key)) as replies:
                async for replica, messages in replies:
                    for message in messages:
                        events = events or _begins_events(message)
                        if place is None and message["type"] == "http.response.body":
                            place = replica
                            self._remember(message["body"], place)
                        await outlet(message)
                        begun = True
        except Exception as error:
            log.error("a replica failed: %s", type(error).__name__, exc_info=error)
            failure = ApiError(
                503, "the replica that answered has failed: send the request again", code="replica_failed",
                headers={"Retry-After": "1"},
            )  # fmt: skip
            if not begun:
                raise failure from None
            if not events:
                raise  # the connection is closed in the middle of the answer
            await outlet(part(b"data: " + to_json(failure.body()) + b"\n\n"))
            await outlet(part(b"", more=False))

    def _remember(self, body: bytes, replica: str) -> None:
        if match := ID.match(body):
            self._places[match[1].decode()] = replica
            if len(self._places) > PLACES:
                self._places.popitem(last=False)


OWN = {
    "/health": Front._health,
    "/v1/health": Front._health,
    "/ping": Front._health,
    "/metrics": Front._metrics,
}  # paths that the front answers itself


def _begins_events(message: Message) -> bool:
    headers = dict(message.get("headers", ()))
    return headers.get(b"content-type", b"").startswith(b"text/event-stream")


def _parsed(body: bytes) -> dict[str, Any]:
    """The object that a body is; for others an empty one, since the replica refuses them."""
    try:
        given = from_json(body.removeprefix(BOM_UTF8))
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}


def _beginning(body: dict[str, Any]) -> Any:
    """What a request's prompt begins with; for chats, all up to the first message of the user, which every later
    request of the conversation repeats."""
    messages = body.get("messages")
    if isinstance(messages, list):
        users = (i for i, each in enumerate(messages) if isinstance(each, dict) and each.get("role") == "user")
        return messages[: next(users, 0) + 1]
    prompt = body.get("prompt")
    while isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    return prompt[:PREFIX] if isinstance(prompt, str | list) else None


def _responses(body: dict[str, Any]) -> Iterator[str]:
    """The earlier responses that a request refers to."""
    references = body.get("references")
    for each in references if isinstance(references, list) else ():
        if isinstance(each, dict) and each.get("type") == "response":
            yield str(each.get("id"))


class _Merged:
    """The metrics of replicas, each with its rank as the label `engine`."""

    def __init__(self, pages: Sequence[Page]):
        self.pages = sorted(pages)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for rank, text in self.pages:
            for family in text_string_to_metric_families(text):
                one = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                one.samples += [
                    sample._replace(labels={**sample.labels, "engine": str(rank)}) for sample in family.samples
                ]
        yield from families.values()


def merged(pages: Sequence[Page]) -> bytes:
    """The metrics of replicas as one page, in Prometheus' text format."""
    return generate_latest(_Merged(pages))
