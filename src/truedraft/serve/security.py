"""Headers of every response, added without buffering it: what a browser may do with it, and the id of the request."""

from __future__ import annotations

import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
