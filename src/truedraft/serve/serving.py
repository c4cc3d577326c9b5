"""The process of a server: its socket, its signals, its log, and what it leaves behind."""

from __future__ import annotations

import json
import logging
import signal
import socket
import sys
import time
from types import FrameType
from typing import Literal, Protocol

import uvicorn
from starlette.types import ASGIApp

from truedraft.accelerated import Accelerated
from truedraft.errors import Refused, why
from truedraft.serve.app import Server, create_app
from truedraft.serve.config import ServeConfig
from truedraft.serve.connections import bounded
from truedraft.serve.keys import Keys
from truedraft.serve.security import is_local

BACKLOG = 2048  # connections that wait to be accepted
END = 5  # seconds that clients have to read the error which ends their requests
SWITCH = 0.0005  # seconds after which a thread that computes in Python lets another one run
log = logging.getLogger("truedraft.serve")


class Serving(Protocol):
    """What answers requests: a server, or the front of several.

    draining: running requests end, new ones are refused.
    """

    config: ServeConfig
    draining: bool

    @property
    def idle(self) -> bool:
        """Whether no request runs."""

    def stop(self) -> None:
        """End all requests with an error."""


class Process(uvicorn.Server):
    """uvicorn's server with our signals: the first SIGTERM or SIGINT lets running requests finish and refuses new
    ones; the second ends them with an error."""

    def __init__(self, config: uvicorn.Config, server: Serving):
        super().__init__(config)
        self.server, self._grace = server, float("inf")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        name = signal.Signals(sig).name
        if self.server.draining:
            log.warning("%s again: ending at once", name)
            self._end()
            return
        log.info("%s: running requests finish, new ones are refused", name)
        self.server.draining = True
        self._grace = time.monotonic() + self.server.config.shutdown_seconds

    async def on_tick(self, counter: int) -> bool:
        if self.server.draining and not self.should_exit:
            if time.monotonic() > self._grace:
                log.warning("requests still ran after %s seconds", self.server.config.shutdown_seconds)
                self._end()
            elif self.server.idle and not self.server_state.tasks:
                self.should_exit = True
        return await super().on_tick(counter)

    def _end(self) -> None:
        self.server.stop()
        self.should_exit = True


class Lines(logging.Formatter):
    """One line per record, with its fields: as text, or as JSON."""

    def __init__(self, as_json: bool):
        super().__init__()
        self.as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        trace = {"trace": self.formatException(record.exc_info)} if record.exc_info else {}
        if self.as_json:
            event = {"time": when, "level": record.levelname.lower(), "event": record.getMessage()}
            return json.dumps(event | fields | trace)
        text = " ".join(f"{name}={value!r}" for name, value in fields.items())
        return "\n".join([f"{when} {record.levelname.lower()} {record.getMessage()} {text}".rstrip(), *trace.values()])


def set_up(config: ServeConfig) -> None:
    """Log to stderr, one line per event; let the event loop run beside a thread that computes."""
    sys.setswitchinterval(SWITCH)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(config.log_json))
    for name, level in (("truedraft.serve", config.log_level.upper()), ("uvicorn", "ERROR")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def serve(fast: Accelerated, config: ServeConfig, keys: Keys) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code.

    Raises:
        Refused: a setting cannot be honoured, there is not enough memory, or the address is taken.
    """
    set_up(config)
    bound = listen(config)
    if not keys and not is_local(config.host):
        log.warning("there are no API keys: everybody who reaches %s may use this server", config.host)
    app = create_app(fast, config, keys)
    server: Server = app.state.server
    server.restore()
    server.warm_up()
    try:
        run(app, server, bound)
    finally:
        server.save()
    return 0


def run(app: ASGIApp, server: Serving, bound: socket.socket, lifespan: Literal["on", "off"] = "on") -> None:
    """Answer connections until SIGTERM or SIGINT."""
    config = server.config
    protocol = bounded(config)
    process = Process(
        uvicorn.Config(
            app, http=protocol, ws="none", lifespan=lifespan, log_config=None, access_log=False,
            server_header=False, proxy_headers=False, backlog=BACKLOG, timeout_keep_alive=int(config.idle_seconds) or 1,
            timeout_graceful_shutdown=END,
        ),
        server,
    )  # fmt: skip
    host, port = bound.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    log.info("serving", extra={"fields": {"model": config.name, "url": url}})
    process.run(sockets=[bound])


def listen(config: ServeConfig) -> socket.socket:
    """The socket of a server's address.

    Raises:
        Refused: the address is taken, or not of this machine.
    """
    if not config.host:
        raise Refused("host='': name an address; 0.0.0.0 is every interface")
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((config.host, config.port))
        made.listen(BACKLOG)  # two processes could bind it, only one can listen
    except (OSError, TypeError, UnicodeError) as e:  # of a name that is none, TypeError
        made.close()
        raise Refused(f"host={config.host!r}, port={config.port}: {why(e)}") from e
    return made
