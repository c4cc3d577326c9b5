"""The application: routes, who may call them, and what surrounds every request."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import uuid
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import torch
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from truedraft import __version__
from truedraft.accelerated import Accelerated
from truedraft.canvas.accelerated import AcceleratedCanvas
from truedraft.errors import Refused, why
from truedraft.serve import chat, completions
from truedraft.serve.answer import Answer, Rows, error_response, json_response
from truedraft.serve.canvases import ServedCanvas
from truedraft.serve.config import ServeConfig
from truedraft.serve.errors import ApiError
from truedraft.serve.formats import Format
from truedraft.serve.keys import Keys, authenticated
from truedraft.serve.learning import Learning
from truedraft.serve.live import add_page
from truedraft.serve.loop import EngineLoop
from truedraft.serve.metrics import Metrics
from truedraft.serve.model import ServedModel
from truedraft.serve.peers import spelled, translated
from truedraft.serve.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    StreamOptions,
    TokenizeBody,
)
from truedraft.serve.record import Recorder
from truedraft.serve.refusals import of_refusal, of_validation
from truedraft.serve.security import HEADERS, Headers, check_origin
from truedraft.serve.settings import Plan

B = TypeVar("B", bound=BaseModel)
SLOW = ("response_format", "structured_outputs", "tools", "prediction", "references")  # to prepare, at times
SMALL = 16_384  # bytes of a body that is prepared in the event loop; larger ones in a thread of their own
log = logging.getLogger("truedraft.serve")


class Server:
    """What the routes share.

    Args:
        fast: the accelerated model.
        config: the settings.
        keys: API keys; without any, requests need none.

    Attributes:
        draining: running requests end, new ones are refused.
    """

    def __init__(self, fast: Accelerated | AcceleratedCanvas, config: ServeConfig, keys: Keys):
        if not hasattr(type(fast), "engine"):
            name = type(fast.model).__name__
            raise Refused(f"{name} cannot be served, since rows do not enter and leave its passes: use its generate")
        kind = ServedCanvas if isinstance(fast, AcceleratedCanvas) else ServedModel
        self.config, self.keys, self.model = config, keys, kind(fast, config)  # type: ignore[arg-type]
        self.metrics = Metrics(config.name)
        observer = self.metrics if config.record is None else Recorder(config.record, self.metrics)
        self.loop = EngineLoop(
            self._engine, observer, config.max_waiting, config.max_rows_per_namespace, config.stream_interval
        )
        self.learning = None if config.train is None else Learning(self.model, self.loop, config)
        self.draining, self.started = False, time.time()

    def _engine(self) -> Any:
        config = self.config
        longest = self.model.max_model_len + self.model.scores_prompts  # what follows a prompt read alone is dropped
        return self.model.fast.engine(
            config.max_rows, longest, config.piece_seconds, config.prefix_bytes, config.share_prefixes,
            config.kv_cache_memory_bytes, config.memory_utilization,
        )  # fmt: skip

    @property
    def ready(self) -> bool:
        return self.loop.is_alive() and not self.draining

    @property
    def idle(self) -> bool:
        return self.loop.idle

    def stop(self) -> None:
        """End all requests with an error, then the engine's thread."""
        self.loop.stop()

    def warm_up(self) -> None:
        """Make a text of two tokens, since first passes take longest, then except all objects from garbage collection:
        to visit those of a loaded model takes 0.1 s and more, while streams wait. For a process that serves, before its
        engine's thread starts.

        Raises:
            Exception: from the model, whose passes fail.
        """
        engine, first = self.loop.engine, torch.tensor([[min(self.model.end_ids, default=0)]])
        engine.add_request(first, draft=None, max_new_tokens=2, do_sample=False)
        while engine.has_unfinished_requests():
            engine.step()
        gc.collect()
        gc.freeze()

    def metrics_page(self) -> tuple[bytes, str]:
        """The text of `/metrics`, and its content type."""
        loop = self.loop
        return self.metrics.page(len(loop.queue), len(loop.running), loop.engine.kv_cache_usage, loop.preemptions)

    def restore(self) -> None:
        """Read the file of earlier outputs, where the settings name one that exists, and write it: if that fails, then
        before anything is served.

        Raises:
            Refused: it is damaged, or of another tokenizer; the drafter keeps no outputs; or it cannot be written.
        """
        if self.config.memory is not None and self.config.memory.exists():
            self.model.fast.load_memory(self.config.memory)
        self.save()

    def save(self) -> None:
        """Write the file of earlier outputs, where the settings name one.

        Raises:
            Refused: it cannot be written, or the drafter keeps no outputs.
        """
        if self.config.memory is not None:
            try:
                self.model.fast.save_memory(self.config.memory)
            except OSError as e:
                raise Refused(f"memory {self.config.memory}: {why(e)}") from e

    def namespace(self, request: Request) -> str:
        """The namespace of a request's API key.

        Raises:
            ApiError: there is no key, or it is unknown (401).
        """
        return authenticated(self.keys, request.headers)

    async def body(self, request: Request, kind: type[B]) -> B:
        """The body of a request.

        Raises:
            ApiError: there is no valid key, the page of another site sends it, or the body is too long, no JSON, or
                does not fit the schema.
        """
        if not self.keys:
            check_origin(request.headers, self.config)
        self.namespace(request)  # no body is read without a key
        text = await read_body(request, self.config)
        try:
            given = from_json(text.removeprefix(BOM_UTF8), allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None
        if not isinstance(given, dict):
            raise ApiError(400, "the body is no JSON object: give parameters by name", code="invalid_json")
        named = translated(given)
        request.state.spelled = spelled(given)
        try:
            return kind.model_validate(named)
        except ValidationError as error:
            raise of_validation(error, named) from None

    async def answered(
        self, request: Request, body: GenerationBody, prepare: Callable[[str, str], tuple[Plan, Format]]
    ) -> Response:
        """Submit the rows of a request, and the response that sends what they emit.

        prepare: (namespace, id) -> the rows and their format.
        """
        namespace = self.namespace(request)
        if self.draining:
            raise ApiError(503, "the server is ending: send the request to another one", code="ending")
        id = request.state.request_id = f"{'chatcmpl' if isinstance(body, ChatBody) else 'cmpl'}-{uuid.uuid4().hex}"
        long = int(request.headers.get("content-length") or SMALL) >= SMALL
        threaded = long or any(getattr(body, name, None) for name in SLOW)
        plan, form = await run_in_threadpool(prepare, namespace, id) if threaded else prepare(namespace, id)

        def finished(plan: Plan, error: ApiError | None) -> None:
            if error is None:
                self.model.remember(namespace, id, [token for job in plan.jobs for token in job.tokens])
            else:
                self.metrics.error(error.status)
            self._log(id, namespace, plan, error)

        rows = Rows(self.model, self.loop, plan, form, body.stream_options or StreamOptions(), finished)
        self.loop.submit(plan.jobs)
        return Answer(rows, bool(body.stream), self.config.write_seconds)

    def _log(self, id: str, namespace: str, plan: Plan, error: ApiError | None) -> None:
        job = plan.jobs[0]
        fields: dict[str, Any] = {
            "id": id, "namespace": namespace, "status": 200 if error is None else error.status, "rows": len(plan.jobs),
            "prompt_tokens": sum(map(len, plan.prompts)), "tokens": sum(len(job.tokens) for job in plan.jobs),
            "passes": sum(job.passes for job in plan.jobs), "seconds": round(time.perf_counter() - job.created, 4),
        }  # fmt: skip
        if self.config.log_prompts:
            decode = self.model.tokenizer.decode
            fields |= {"prompt": decode(list(job.ids)), "text": decode(job.tokens)}
        log.info("request", extra={"fields": fields})


async def read_body(request: Request, config: ServeConfig) -> bytes:
    """The bytes of a request's body.

    Raises:
        ApiError: there are too many, or the client goes.
        TimeoutError: they do not arrive in time.
    """
    most, body = config.max_body_bytes, bytearray()
    too_long = ApiError(413, f"the body is longer than {most} bytes: shorten it", code="body_too_large")
    if (declared := request.headers.get("content-length", "0")).isdigit() and int(declared) > most:
        raise too_long
    try:
        async with asyncio.timeout(config.idle_seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_long
    except ClientDisconnect:
        raise ApiError(499, "the client has closed the connection", code="cancelled") from None
    return bytes(body)


def create_app(fast: Accelerated | AcceleratedCanvas, config: ServeConfig, keys: Keys | None = None) -> FastAPI:
    """The server as an ASGI application; its engine's thread runs from the application's start to its end.

    Raises:
        Refused: a setting cannot be honoured, or there is not enough memory.
    """
    server = Server(fast, config, keys or Keys({}))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.loop.attach(asyncio.get_running_loop())
        server.loop.start()
        if server.learning is not None:
            server.learning.start()
        yield
        if server.learning is not None:
            await run_in_threadpool(server.learning.stop)
        server.loop.stop()
        await run_in_threadpool(server.loop.join)

    app = FastAPI(title="truedraft", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    _add_routes(app, server)
    if config.page:
        add_page(app, server, fast)
    _add_handlers(app, server)
    app.add_middleware(Headers)
    if config.allow_origin:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.allow_origin), allow_methods=["GET", "POST"],
            allow_headers=["*"], expose_headers=["x-request-id", "retry-after"],
        )  # fmt: skip
    return app


def _add_routes(app: FastAPI, server: Server) -> None:
    model = server.model

    @app.post("/v1/completions", response_model=None, openapi_extra=_schema(CompletionBody))
    async def completions_(request: Request) -> Response:
        body = await server.body(request, CompletionBody)
        return await server.answered(
            request, body, lambda namespace, id: completions.prepare(model, body, namespace, id)
        )

    @app.post("/v1/chat/completions", response_model=None, openapi_extra=_schema(ChatBody))
    async def chat_completions(request: Request) -> Response:
        body = await server.body(request, ChatBody)
        return await server.answered(request, body, lambda namespace, id: chat.prepare(model, body, namespace, id))

    @app.get("/v1/models", response_model=None)
    async def models(request: Request) -> Response:
        server.namespace(request)
        return json_response({"object": "list", "data": [_model_card(server)]})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model_(request: Request, name: str) -> Response:
        server.namespace(request)
        if name != model.name:
            raise ApiError(404, f"model={name!r} is not served here: use {model.name!r}", "model", "model_not_found")
        return json_response(_model_card(server))

    @app.post("/tokenize", response_model=None, openapi_extra=_schema(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        body = await server.body(request, TokenizeBody)
        return json_response(await run_in_threadpool(chat.tokenized, model, body))

    @app.post("/detokenize", response_model=None, openapi_extra=_schema(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        body = await server.body(request, DetokenizeBody)
        tokens = completions.checked_ids(model, body.tokens, "tokens")
        return json_response({"prompt": await run_in_threadpool(model.tokenizer.decode, tokens)})

    @app.get("/health", response_model=None)
    @app.get("/v1/health", response_model=None)
    @app.get("/ping", response_model=None)
    async def health() -> Response:
        status = "ready" if server.ready else "ending" if server.draining else "starting"
        return json_response({"status": status}, 200 if server.ready else 503)

    @app.get("/version", response_model=None)
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        text, kind = server.metrics_page()
        return Response(text, media_type=kind)

    for route in [route for route in app.routes if isinstance(route, APIRoute) and route.methods == {"GET"}]:
        app.add_api_route(route.path, route.endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)


def _model_card(server: Server) -> dict[str, Any]:
    return {
        "id": server.model.name, "object": "model", "created": int(server.started), "owned_by": "truedraft",
        "root": server.config.model, "parent": None, "max_model_len": server.model.max_model_len,
        "drafts": list(server.config.drafts), "chat": server.model.has_chat,
    }  # fmt: skip


def _schema(kind: type[BaseModel]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}}


def _add_handlers(app: FastAPI, server: Server) -> None:
    def answered(error: ApiError) -> Response:
        server.metrics.error(error.status)
        return error_response(error)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return answered(error.renamed(getattr(request.state, "spelled", {})))

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return await api_error(request, of_refusal(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path[:200]
        reasons = {404: f"there is no {path} here", 405: f"{path} does not take {request.method}"}
        reason = reasons.get(error.status_code, str(error.detail))
        return answered(ApiError(error.status_code, reason, headers=error.headers))

    @app.exception_handler(TimeoutError)
    async def slow(request: Request, error: TimeoutError) -> Response:
        return answered(ApiError(408, "the body did not arrive in time", headers={"Connection": "close"}))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        log.error("a request failed", exc_info=error)
        response = answered(ApiError(500, "the server failed on this request; its log has the reason"))
        response.headers.update(HEADERS | {"x-request-id": request.state.request_id})  # sent outside of the middleware
        return response
