"""The server on Ray Serve: replicas on one machine or several, each a whole server."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import os
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.serve.schema import LoggingConfig
from starlette.concurrency import run_in_threadpool
from starlette.types import Message

from truedraft.accelerated import Accelerated
from truedraft.errors import Refused, why
from truedraft.serve.app import Server, create_app
from truedraft.serve.config import ServeConfig
from truedraft.serve.front import Call, Front, Page, Reply
from truedraft.serve.keys import Keys
from truedraft.serve.serving import listen, run, set_up

NAME = "truedraft"  # of the application, and of its one deployment
ADDRESS = "RAY_ADDRESS"  # Ray's variable: the cluster to use
OBJECTS = 128 << 20  # bytes of Ray's object store on a machine of its own; answers do not pass through it
QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)  # requests are in the server's own log
HEALTH_SECONDS = 2.0  # between two checks of a replica; one that has ended is replaced after the next
METRICS_SECONDS = 10.0  # that a replica may take to give its metrics
log = logging.getLogger("truedraft.serve")


class Rendezvous(RequestRouter):
    """Calls of a key go to one replica while it has a free row, then to another that has one, else they wait there.

    Highest random weight hashing (Thaler and Ravishankar, 1998): when a replica comes or goes, only the keys that
    it gets or had change their place.
    """

    def initialize_state(self, rows: int) -> None:
        """rows: that a replica runs at once."""
        self._rows = rows

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # wait between two attempts
        key = pending_request.metadata.session_id
        referred = pending_request.args[0].replica if pending_request.args else ""

        def rank(replica: RunningReplica) -> tuple[bool, bool, str]:
            id = replica.replica_id.unique_id
            running = self.replica_queue_len_cache.get(replica.replica_id) or 0
            return id != referred, running >= self._rows, hashlib.sha256(f"{key} {id}".encode()).hexdigest()

        return [[replica] for replica in sorted(candidate_replicas, key=rank)]


class Replica:
    """One server: its model, its engine's thread, and its application.

    Args:
        load: gives the accelerated model.
        config: the settings. A file of earlier outputs gets the replica's rank as a suffix.
        keys: API keys.
    """

    async def __init__(self, load: Callable[[], Accelerated], config: ServeConfig, keys: Keys):  # type: ignore[misc]
        self._running = AsyncExitStack()
        context = serve.get_replica_context()
        self.id, self.rank = context.replica_tag, context.rank.rank
        if config.memory is not None:
            path = config.memory.with_name(f"{config.memory.name}.{self.rank}")
            config = dataclasses.replace(config, memory=path)
        set_up(config)
        self.app = create_app(load(), config, keys)
        self.server: Server = self.app.state.server
        self.server.restore()
        self.server.warm_up()
        self._running.callback(self.server.save)
        await self._running.enter_async_context(self.app.router.lifespan_context(self.app))

    async def respond(self, call: Call) -> AsyncGenerator[Reply, None]:
        """The answer of the application, in parts as it sends them."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        requests: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> Message:
            if requests:
                return requests.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        answering = asyncio.ensure_future(self.app(dict(call.scope), receive, sent.put))
        answering.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                messages = [message]
                while not sent.empty() and (message := sent.get_nowait()) is not None:
                    messages.append(message)
                yield Reply(self.id, messages)
                if message is None:
                    break
            answering.result()
        finally:
            gone.set()
            await asyncio.wait({answering})

    def metrics(self) -> Page:
        """What the application's `/metrics` shows."""
        return Page(self.rank, self.server.metrics_page()[0].decode())

    def stop(self) -> None:
        """End all requests with an error."""
        self.server.stop()

    def check_health(self) -> None:
        """Called by Ray, which replaces a replica for which this fails."""
        if not self.server.loop.is_alive():
            raise RuntimeError("the engine's thread has ended")

    async def __del__(self) -> None:
        """Called by Ray when the requests of a replica that is to go have ended."""
        await self._running.aclose()


class RayReplicas:
    """The replicas of a deployment; see `front.Replicas`."""

    def __init__(self, handle: DeploymentHandle):
        self._handle = handle
        self._tasks: set[asyncio.Task[Any]] = set()

    async def send(self, call: Call, key: str) -> AsyncGenerator[Reply, None]:
        replies = self._handle.options(method_name="respond", session_id=key, stream=True).remote(call)
        try:
            async for reply in replies:
                yield reply
        finally:
            replies.cancel()

    async def running(self) -> int:
        applications = (await run_in_threadpool(serve.status)).applications
        if NAME not in applications:
            return 0
        return applications[NAME].deployments[NAME].replica_states.get("RUNNING", 0)

    async def pages(self) -> Sequence[Page]:
        answers = self._handle.broadcast("metrics")
        pages = await answers.results_async(timeout_s=METRICS_SECONDS, return_exceptions=True)
        return [page for page in pages if isinstance(page, Page)]

    def stop(self) -> None:
        task = asyncio.get_running_loop().create_task(
            self._handle.broadcast("stop").results_async(return_exceptions=True)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def serve_on_ray(load: Callable[[], Accelerated], config: ServeConfig, keys: Keys) -> int:
    """Serve with replicas until SIGTERM or SIGINT; returns the exit code.

    The cluster is that of the variable RAY_ADDRESS, without it one that is started on this machine.

    Args:
        load: gives the accelerated model; called in each replica.

    Raises:
        Refused: the address is taken, there is no such cluster, it is too small, or a replica could not start.
    """
    set_up(config)
    bound = listen(config)
    _connect()
    try:
        handle = _deploy(load, config, keys)
        front = Front(RayReplicas(handle), config, keys)
        run(front, front, bound, lifespan="off")
        serve.delete(NAME)  # once the replicas' requests have ended
    finally:
        ray.shutdown()
    return 0


def _connect() -> None:
    """Connect to the cluster of RAY_ADDRESS, or start Ray on this machine, without its dashboard and its reports."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    quiet: dict[str, Any] = {"logging_level": logging.WARNING, "include_dashboard": False}
    try:
        if os.environ.get(ADDRESS):
            ray.init(**quiet)
        elif not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init("local", object_store_memory=OBJECTS, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as e:
        raise Refused(f"{ADDRESS}={os.environ.get(ADDRESS, '')!r}: Ray cannot be reached: {why(e)}") from e


def _deploy(load: Callable[[], Accelerated], config: ServeConfig, keys: Keys) -> DeploymentHandle:
    """The handle of the replicas, once they run."""
    cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    deployment = serve.deployment(
        Replica,
        name=NAME,
        num_replicas=config.replicas,
        ray_actor_options={"num_cpus": config.threads or threads_each(cpus, config.replicas)},
        max_ongoing_requests=config.max_connections,  # replicas have queues of their own
        graceful_shutdown_timeout_s=config.shutdown_seconds,
        logging_config=QUIET,
        health_check_period_s=HEALTH_SECONDS,
        request_router_config=RequestRouterConfig(
            request_router_class=Rendezvous, request_router_kwargs={"rows": config.max_rows}
        ),
    )
    serve.start(proxy_location="Disabled", logging_config=QUIET)
    try:
        return serve.run(deployment.bind(load, config, keys), name=NAME, route_prefix=None)
    except RuntimeError as e:
        status = serve.status().applications[NAME].deployments[NAME]
        refusals = re.findall(r"errors\.(?:Refused|NoRoom): (.+)", status.message)
        reason = refusals[-1] if refusals else "Ray's log above has the reason"
        raise Refused(f"replicas={config.replicas}: they could not start: {reason}") from e


def threads_each(cpus: Sequence[int], replicas: int) -> int:
    """Most threads of a replica with which all of them have room.

    Args:
        cpus: of each machine.

    Raises:
        Refused: there are fewer CPUs than replicas.
    """
    fitting = (n for n in range(max(cpus, default=0), 0, -1) if sum(each // n for each in cpus) >= replicas)
    if (found := next(fitting, None)) is None:
        raise Refused(f"replicas={replicas}: the cluster has {sum(cpus)} CPUs; give fewer replicas, or add machines")
    return found
