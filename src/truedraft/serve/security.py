"""Headers of every response, added without buffering it: what a browser may do with it, and the id of the request."""

from __future__ import annotations

import ipaddress
import uuid
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from truedraft.serve.config import ServeConfig
from truedraft.serve.errors import ApiError

HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


class Headers:
    """ASGI middleware that adds `HEADERS`, and `x-request-id`, which OpenAI's clients show and log.

    The id is `request_id` of the request's state: that of the response where it has one, else of its own.
    """

    def __init__(self, app: ASGIApp):
        self.app = app
        self._headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        state = scope.setdefault("state", {})
        state["request_id"] = f"req-{uuid.uuid4().hex}"

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                id = (b"x-request-id", state["request_id"].encode())
                message = {**message, "headers": [*message.get("headers", ()), *self._headers, id]}
            await send(message)

        await self.app(scope, receive, with_headers)


def is_local(host: str) -> bool:
    """Whether a host is this machine by its own name or address, which no name server decides."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_origin(headers: Mapping[str, str], config: ServeConfig) -> None:
    """Refuse what the page of another site sends, for servers without keys: a browser sends it without asking.

    A site whose name its owner lets point to this machine (DNS rebinding) has the origin that the request is sent to:
    a server that listens on this machine alone takes only its own names.

    Raises:
        ApiError: `allow_origin` does not list the page's origin, and it is not the server's own (403).
    """
    origin = headers.get("origin")
    if origin is None or {origin, "*"} & {*config.allow_origin}:
        return
    try:
        page = urlsplit(origin)
    except ValueError:
        page = urlsplit("")
    own = page.netloc != "" and page.netloc == headers.get("host")
    if not own or (is_local(config.host) and not is_local(page.hostname or "")):
        raise ApiError(
            403, f"pages of {origin[:200]!r} may not use this server: start it with --allow-origin to let them",
            code="origin_not_allowed",
        )  # fmt: skip
