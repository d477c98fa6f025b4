"""Router: process, and application with OpenAI's routes and metrics over all instances of a plan.

The process starts the instances, listens, drains and stops. Requests for completions go to one instance each,
which the proxy chooses, and their responses come back through it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Annotated, Any, Final, cast

import aiohttp
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict, Field
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from capplan.errors import InputError
from capplan.fleet._fleet import InstanceFleet, RouterConfig
from capplan.fleet._instance import FileLimitError, InstanceClient, InstanceGoneError, InstanceSupervisor
from capplan.fleet._rebalancing import CountedRequest, RebalanceLoop
from capplan.http_connection import ConnectionLostError, HttpConnection
from capplan.processes import without_full_collections
from capplan.server import (
    CLIENT,
    GENERATION_PATHS,
    MAX_MODEL_NAME,
    ApiError,
    ClientLink,
    DrainingServer,
    MetricKind,
    RequestLimiter,
    ServerSettings,
    ServerState,
    add_error_handlers,
    bind,
    error_code,
    generates,
    metric_family,
    model_card,
    parsed,
    unknown_model,
    url_of,
)
from capplan.spec import BYTES_PER_TOKEN

QUEUE_FULL_RETRY_S: Final = 5

_FORWARDED_HEADERS: Final[tuple[bytes, ...]] = (
    b"content-type",
    b"retry-after",
    b"cache-control",
    b"x-accel-buffering",
)
_EVENTS: Final = b"text/event-stream"
_END_OF_EVENT: Final = b"\n\n"
_RETRIED_CODES: Final = ("engine_failed", "engine_stopped", "shutting_down")
"""Error codes of an instance that accepts no requests and has not started this one."""
_NO_ADAPTER: Final = "No instance can fetch the adapter of this model at the moment"
_REFUSALS: Final = MappingProxyType(
    {
        "overloaded": "The instances of this model are overloaded",
        "adapter_changed": _NO_ADAPTER,
        "adapter_unavailable": _NO_ADAPTER,
        "registry_unavailable": _NO_ADAPTER,
        "server_name_taken": _NO_ADAPTER,
        "storage": _NO_ADAPTER,
    }
)
"""Error codes of an instance that has not started this request, and may accept the next one."""
_CANNOT_STORE: Final = ("server_name_taken", "storage")
"""Those that last: the instance cannot store the adapter."""


class RouterState(ServerState):
    """State of a router: its instances, and counts of its requests.

    `max_requests` of its settings counts requests with any number of prompts. `by_instance` has the requests
    sent to each instance, `retries` those that went on to another one, `refused_by_holders` those sent to an
    instance that does not hold their adapter, because its holders cannot get it. `demand` counts tokens by
    adapter if the cluster is re-balanced.
    """

    def __init__(self, settings: ServerSettings, fleet: InstanceFleet) -> None:
        lengths = [instance.spec.engine["max_model_len"] for instance in fleet.instances]
        super().__init__(settings, fleet, max(lengths))
        self.fleet = fleet
        self._in_flight = 0
        self.by_instance: collections.Counter[str] = collections.Counter()
        self.retries = self.refused_by_holders = 0
        self.demand = None if fleet.rebalancing is None else fleet.rebalancing.demand
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def failed(self) -> asyncio.Event:
        """Set when all instances have failed for good."""
        return self.fleet.failed

    @property
    def in_flight(self) -> int:
        """Number of requests that are not answered yet."""
        return self._in_flight

    async def look_up(self, model: str) -> None:
        """Serve the model from now on if it is an adapter that is new in the registry.

        If it is unknown and the registry cannot be used, raise 503.
        """
        registered = self.fleet.registered
        if registered is None or model == self.settings.model_name:
            return
        try:
            await registered.find(model)
        except InputError as error:
            logging.getLogger(__name__).warning("%s", error)
            message = "The adapter registry cannot be used at the moment"
            raise self.refusal(503, message, "registry_unavailable", 1) from None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def drain(self) -> None:
        """Wait for running requests; after the drain timeout stop the instances, which ends them."""
        try:
            await asyncio.wait_for(self._idle.wait(), self.settings.drain_timeout_s)
        except TimeoutError:
            await self.fleet.stop(at_once=False)

    def refuse_if_full(self) -> None:
        """Raise 503 if the router drains, 429 if too many requests are in flight."""
        if self.draining:
            raise self.refusal(503, "The server shuts down", "shutting_down", 1)
        if self.in_flight >= self.settings.max_requests:
            raise self.refusal(429, "The queue is full", "queue_full", QUEUE_FULL_RETRY_S)


class ForwardedRequest(BaseModel):
    """Fields of a request that the router uses; the instance checks the others."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: Annotated[str, Field(max_length=MAX_MODEL_NAME)]


class Proxy:
    """ASGI application that sends requests to instances and forwards the responses.

    A request that was not started, because the instance is gone or overloaded, goes to another one. A request
    that is lost with its instance ends with 503, which clients may retry; after the start of a stream, with
    an error event.
    """

    def __init__(self, state: RouterState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond; if the client disconnects, close the connection to the instance."""
        try:
            body = await _whole_body(receive)
            if body is None:
                return
            self._state.refuse_if_full()  # the state may have changed while the body was read
            with self._state.running():
                await _Exchange(self._state, scope, body, send).run()
        except ApiError as error:
            await error.response()(scope, receive, send)


class _Exchange:
    """One request of a client, and its response."""

    def __init__(self, state: RouterState, scope: Scope, body: bytes, send: Send) -> None:
        self._state = state
        self._path: str = scope["path"]
        self._request = body
        self._content_type = dict(scope["headers"]).get(b"content-type", b"application/json")
        self._client: ClientLink = scope["extensions"][CLIENT]
        self._send = send
        self._started = False
        self._counted: CountedRequest | None = None
        self._body_bytes = contextlib.ExitStack()

    async def run(self) -> None:
        """Respond while the client is connected."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        with self._body_bytes:
            self._body_bytes.enter_context(self._state.holding(len(self._request)))
            model = parsed(self._request, ForwardedRequest).model
            await self._state.look_up(model)
            adapter = self._state.adapter_of(model)
            if self._state.demand is not None:
                self._counted = self._state.demand.arrive(adapter, self._prompt_tokens)
            try:
                self._client.on_gone(task.cancel)
                await self._forward(adapter)
            except asyncio.CancelledError:
                if not self._client.is_gone or task.uncancel():
                    raise
            except ApiError:
                raise
            except Exception:
                logging.getLogger(__name__).exception("a request cannot be forwarded")
                if self._started:
                    raise
                raise ApiError(500, "The server made a mistake") from None
            finally:
                self._client.on_gone(None)

    @property
    def _prompt_tokens(self) -> int:
        """Estimate of the length of the prompt, which only the instance tokenizes."""
        return len(self._request) // BYTES_PER_TOKEN

    async def _forward(self, adapter: str | None) -> None:
        """Forward the request to the adapter's holders, one after the other, until one has started it.

        If none can get the adapter, one more instance that can fetch it gets the request: it may store it.
        More of them would multiply the load while the registry or all sources are gone.
        """
        tried: list[InstanceSupervisor] = []
        refusals: list[str] = []
        fleet, is_elsewhere = self._state.fleet, False
        while True:
            if adapter is not None and adapter not in fleet:  # removed from the registry meanwhile
                raise unknown_model(adapter)
            choice = fleet.choose(adapter, tried, self._prompt_tokens)
            if choice is None and refusals and "overloaded" not in refusals and not is_elsewhere:
                is_elsewhere = True
                choice = fleet.choose(adapter, tried, self._prompt_tokens, elsewhere=True)
                self._state.refused_by_holders += choice is not None
            if choice is None:
                raise self._no_instance(adapter, refusals[-1] if refusals else None)
            self._state.retries += bool(tried)
            instance, at_ns = choice
            try:
                if not tried and (held_s := (at_ns - time.monotonic_ns()) * 1e-9) > 0.0:
                    await asyncio.sleep(held_s)
                await self._forward_to(instance)
                return
            except InstanceGoneError as gone:
                code = gone.refusal
                if code is not None and code in _REFUSALS:
                    refusals.append(code)
                    self._note_refusal(instance, adapter, code)
                elif code is not None:
                    instance.take_out(code)
                tried.append(instance)

    def _note_refusal(self, instance: InstanceSupervisor, adapter: str | None, code: str) -> None:
        """Note an adapter that an instance cannot store, for the next re-balancing."""
        rebalancing = self._state.fleet.rebalancing
        if rebalancing is not None and adapter is not None and code in _CANNOT_STORE:
            rebalancing.refused.note(self._state.fleet.instances.index(instance), adapter)

    def _no_instance(self, adapter: str | None, refusal: str | None) -> ApiError:
        """Return the error if no instance has started the request; `refusal`: code of one that is up."""
        if self._state.draining:
            return self._state.refusal(503, "The server shuts down", "shutting_down", 1)
        if refusal is not None:
            return self._state.refusal(503, _REFUSALS[refusal], refusal, 1)
        retry_after_s = self._state.fleet.retry_after_s(adapter)
        return self._state.refusal(
            503, "No instance that serves this model is up", "no_instance", retry_after_s
        )

    async def _forward_to(self, instance: InstanceSupervisor) -> None:
        """Forward the request to an instance and its response to the client.

        If the instance has not received the request, raise `InstanceGoneError`; if it does not respond, and
        nothing has been sent to the client, `ApiError`.
        """
        client = instance.client
        if client is None:
            raise InstanceGoneError
        try:
            self._state.by_instance[instance.spec.name] += 1
            async with client.post(self._path, self._request, self._content_type) as response:
                await self._send_response(response, client)
        except FileLimitError:
            error = self._state.refusal(503, "The server is overloaded", "overloaded", 1)
            raise error from None
        except ConnectionLostError:
            message = "The instance has failed or does not respond; please try again"
            error = self._state.refusal(503, message, "instance_failed", 1)
            if not self._started:
                raise error from None
            await self._end(b"data: " + error.body() + _END_OF_EVENT)

    async def _send_response(self, response: HttpConnection, client: InstanceClient) -> None:
        found = response.headers
        headers = [(name, found[name]) for name in _FORWARDED_HEADERS if name in found]
        if found.get(b"content-type", b"").startswith(_EVENTS):
            await self._send_events(response, client, headers)
            return
        body = await response.whole_body()  # whole, so that a failure still sets the status
        if response.status == 503 and (code := error_code(body)) in (*_RETRIED_CODES, *_REFUSALS):
            raise InstanceGoneError(code)
        if response.status < 400:  # a refusal says nothing of the engine
            client.note_progress()
        self._count_answer(response.status, body)
        await self._start(response.status, [*headers, (b"content-length", str(len(body)).encode())])
        await self._end(body)

    async def _send_events(
        self, response: HttpConnection, client: InstanceClient, headers: list[tuple[bytes, bytes]]
    ) -> None:
        held = b""
        while True:
            part = await response.next_part()
            client.note_progress()
            if not self._started:
                await self._start(response.status, headers)
            if response.is_complete:
                if self._counted is not None:
                    self._counted.stream(held + part)
                    self._counted.finish()
                await self._end(held + part)
                return
            whole, end, held = (held + part).rpartition(_END_OF_EVENT)  # clients get whole events
            if end:
                if self._counted is not None:
                    self._counted.stream(whole + end)
                await self._send({"type": "http.response.body", "body": whole + end, "more_body": True})

    def _count_answer(self, status: int, body: bytes) -> None:
        """Count the tokens of a whole response; invalid requests do not count."""
        if self._counted is None:
            return
        if status == 200:
            self._counted.answer(body)
            self._counted.finish()
        elif status < 500 and status != 429:
            self._counted.drop()

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        self._request = b""  # not sent again
        self._body_bytes.close()
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _end(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body})


async def _whole_body(receive: Receive) -> bytes | None:
    """Return the bytes of a body; None if the client disconnects."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message["body"])
        if not message["more_body"]:
            return b"".join(parts)


_FILES_PER_CONNECTION: Final = 2
"""Of the client, and of its request to an instance."""


def run_router(config: RouterConfig, ready: Callable[[str], None]) -> int:
    """Start all instances and serve until stopped.

    Parameters
    ----------
    ready
        Called with the URL once all instances accept requests.

    Returns
    -------
    int
        Exit status: 0 if stopped, 1 if all instances have failed for good.

    Raises
    ------
    InputError, LaunchError
        If an instance does not start.
    """
    state = RouterState(config.server, InstanceFleet(config))
    with bind(config.server.host, config.server.port) as listener:
        server = RouterServer(state, lambda: ready(url_of(listener)))
        with without_full_collections():
            server.run([listener])
    return int(state.failed.is_set())


class RouterServer(DrainingServer):
    """Server that starts its instances before it listens, and stops them at its end."""

    def __init__(self, state: RouterState, ready: Callable[[], None]) -> None:
        super().__init__(RouterApp(state), state, ready, _FILES_PER_CONNECTION)
        self._fleet = state.fleet
        self._starting: asyncio.Future[None] | None = None
        self._is_stopping = False

    async def _serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until stopped, with signals handled; no instance is left afterwards."""
        try:
            await super()._serve(sockets)
        finally:
            self._is_stopping = True
            for task in self._tasks:
                task.cancel()
            await self._fleet.stop(at_once=self.force_exit)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the instances, listen, and report it."""
        self._starting = asyncio.ensure_future(self._fleet.start())
        try:
            await self._starting
        except asyncio.CancelledError:  # stopped during the start
            self.should_exit = True
            return
        finally:
            self._starting = None
        await super().startup(sockets)

    def end(self) -> None:
        """Drain and stop; called again, or during the start, stop at once."""
        if self._starting is not None:
            self.force_exit = True
            self._starting.cancel()
        elif self._is_stopping:
            self._tasks.append(asyncio.ensure_future(self._fleet.stop(at_once=True)))
        else:
            super().end()


def placement_document(fleet: InstanceFleet) -> dict[str, Any]:
    """Return the shares in force by instance, and the state of re-balancing; null if there is none."""
    shares, base = fleet.router.shares()
    placement = {
        each.spec.name: {"state": each.state, "base_share": base[i], "adapters": shares[i]}
        for i, each in enumerate(fleet.instances)
    }
    return {"placement": placement, "rebalancing": fleet.rebalancing and _rebalancing(fleet.rebalancing)}


def _rebalancing(loop: RebalanceLoop) -> dict[str, Any]:
    return {
        "every_s": loop.every_s,
        "done": loop.done,
        "failed": loop.failed,
        "moved_bytes": loop.moved_bytes,
        "unpermuted_bytes": loop.unpermuted_bytes,
        "failed_posts": loop.updates.failures,
        "last": None if loop.last is None else asdict(loop.last),
    }


def rebalancing_metrics(loop: RebalanceLoop) -> Iterator[Metric]:
    outcomes = [(("done",), float(loop.done)), (("failed",), float(loop.failed))]
    yield metric_family(Counter, "capplan:rebalances", "Rounds of re-balancing", ("outcome",), outcomes)
    last = loop.last
    for kind, name, help_text, value in (
        (Counter, "rebalance_moved_bytes", "Bytes of adapters at new instances", loop.moved_bytes),
        (
            Counter,
            "rebalance_unpermuted_bytes",
            "The same without the permutation of instances",
            loop.unpermuted_bytes,
        ),
        (Counter, "rebalance_failed_posts", "Posts of shares that failed", loop.updates.failures),
        (Gauge, "rebalance_seconds", "Time of the last round", 0.0 if last is None else last.duration_s),
    ):
        yield kind(f"capplan:{name}", help_text, value)
    if loop.target is not None:
        help_text = "Expected demand relative to what the instances sustain; above 1: overload"
        yield Gauge("capplan:rebalance_target", help_text, loop.target)


_METRICS_TIMEOUT_S: Final = 5.0

router = APIRouter()


class RouterApp:
    """ASGI application of a router.

    Requests for completions go to the proxy directly: what a web framework does with a request takes as long
    as the proxy itself.
    """

    def __init__(self, state: RouterState) -> None:
        proxy = Proxy(state)
        self._proxy = RequestLimiter(proxy, state, state.refuse_if_full)
        self._other = _other_routes(state, proxy)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._proxy if scope["type"] == "http" and generates(scope) else self._other
        await app(scope, receive, send)


def _other_routes(state: RouterState, proxy: Proxy) -> FastAPI:
    app = FastAPI(title="capplan router", docs_url=None, redoc_url=None)
    app.state.router = state
    app.state.metrics = RouterMetrics(state)
    app.state.cards = ModelCards(state)
    app.include_router(router)
    app.routes.extend(Route(path, proxy, methods=["POST"]) for path in GENERATION_PATHS)
    app.add_middleware(RequestLimiter, state=state, refuse=state.refuse_if_full)
    add_error_handlers(app)
    return app


class ModelCards:
    """Entries of all models; max_model_len is the smallest of the instances of a model."""

    def __init__(self, state: RouterState) -> None:
        self._state = state
        self._ranks: Mapping[str, int] | None = None
        self._cards: dict[str, dict[str, Any]] = {}

    def all(self) -> Mapping[str, dict[str, Any]]:
        """Return the entries by name, those of the adapters that are served now."""
        ranks = self._state.fleet.router.ranks
        if ranks is not self._ranks:
            self._ranks, self._cards = ranks, self._made()
        return self._cards

    def _made(self) -> dict[str, dict[str, Any]]:
        state, base = self._state, self._state.settings.model_name
        shares, _ = state.fleet.router.shares()
        new_s = int(time.time()) if self._cards else state.created
        cards: dict[str, dict[str, Any]] = {}
        for instance, own in zip(state.fleet.instances, shares, strict=True):
            longest = instance.spec.engine["max_model_len"]
            for name in (base, *own):
                before = self._cards.get(name)
                created = new_s if before is None else before["created"]
                card = cards.setdefault(
                    name, model_card(name, created, None if name == base else base, longest)
                )
                card["max_model_len"] = min(card["max_model_len"], longest)
        return cards


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """List the base model and the adapters of all instances of the plan."""
    return {"object": "list", "data": list(request.app.state.cards.all().values())}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """Describe one model."""
    await request.app.state.router.look_up(name)
    card: dict[str, Any] | None = request.app.state.cards.all().get(name)
    if card is None:
        raise unknown_model(name)
    return card


@router.get("/v1/placement", response_model=None)
async def placement(request: Request) -> Response:
    """Return the placement in force and the last re-balancing."""
    state: RouterState = request.app.state.router
    return JSONResponse(placement_document(state.fleet))


@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    """Report the state of all instances; a healthy router accepts requests for every model."""
    state: RouterState = request.app.state.router
    instances = state.fleet.instances
    healthy = not state.draining and state.fleet.serves_everything()
    status = "unavailable" if not healthy else "ok" if all(i.is_up for i in instances) else "degraded"
    states = {each.spec.name: {"state": each.state, "restarts": each.restarts} for each in instances}
    reason = {"reason": "shutting_down"} if state.draining else {}
    return JSONResponse({"status": status, **reason, "instances": states}, 200 if healthy else 503)


@router.get("/ping", response_model=None)
async def ping(request: Request) -> Response:
    """Report whether the router accepts requests, in any state of its instances."""
    if request.app.state.router.draining:
        return JSONResponse({"status": "unavailable", "reason": "shutting_down"}, 503)
    return JSONResponse({"status": "ok"})


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Return the metrics of the router and its instances in Prometheus' text format."""
    return Response(await request.app.state.metrics.text(), media_type=CONTENT_TYPE_LATEST)


class RouterMetrics:
    """Prometheus collector of a router."""

    def __init__(self, state: RouterState) -> None:
        self._state = state
        self._of_instances: list[Metric] = []
        self._collecting: asyncio.Task[bytes] | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)

    async def text(self) -> bytes:
        """Return the metrics of the router and of the instances that respond; concurrent calls share them."""
        if self._collecting is None or self._collecting.done():
            self._collecting = asyncio.create_task(self._collected())
        return await asyncio.shield(self._collecting)

    async def _collected(self) -> bytes:
        instances = self._state.fleet.instances
        pages = await asyncio.gather(*(_metrics_of(instance) for instance in instances))
        texts = {each.spec.name: page for each, page in zip(instances, pages, strict=True)}
        self._of_instances = await asyncio.to_thread(merged, texts)
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the router's own metrics and those of its instances."""
        state, instances = self._state, self._state.fleet.instances
        for kind, name, help_text, value in _INSTANCE_METRICS:
            rows = [((each.spec.name, each.spec.group), value(state, each)) for each in instances]
            yield metric_family(kind, f"capplan:{name}", help_text, ("instance", "group"), rows)
        if state.fleet.router.reads_state:
            ages = [
                ((each.spec.name, each.spec.group), state.fleet.router.age_s(i))
                for i, each in enumerate(instances)
            ]
            help_text = "Age of the state by which requests are routed; NaN: not known"
            labels = ("instance", "group")
            yield metric_family(Gauge, "capplan:router_state_age_seconds", help_text, labels, ages)
        for kind, name, help_text, count in (
            (Gauge, "instances_up", "Instances that are up", sum(each.is_up for each in instances)),
            (Gauge, "router_requests_in_flight", "Requests not answered yet", state.in_flight),
            (Counter, "router_retries", "Requests that went on to another instance", state.retries),
            (
                Counter,
                "router_refused_by_holders",
                "Requests sent to an instance without their adapter, as its holders cannot get it",
                state.refused_by_holders,
            ),
        ):
            yield kind(f"capplan:{name}", help_text, count)
        refusals = [((str(status),), count) for status, count in sorted(state.refusals.items())]
        help_text = "Requests that the router refused"
        yield metric_family(Counter, "capplan:router_requests_refused", help_text, ("status",), refusals)
        if state.fleet.rebalancing is not None:
            yield from rebalancing_metrics(state.fleet.rebalancing)
        yield from self._of_instances


_INSTANCE_METRICS: Final[
    tuple[tuple[MetricKind, str, str, Callable[[RouterState, InstanceSupervisor], float]], ...]
] = (
    (Counter, "router_requests", "Requests sent to an instance", lambda s, i: s.by_instance[i.spec.name]),
    (Counter, "instance_restarts", "Starts after an end", lambda _, i: i.restarts),
    (Gauge, "instance_up", "Whether it is up", lambda _, i: float(i.is_up)),
)


async def _metrics_of(instance: InstanceSupervisor) -> str:
    if instance.client is None:
        return ""
    try:
        return (await instance.client.get("/metrics", _METRICS_TIMEOUT_S)).decode()
    except (aiohttp.ClientError, FileLimitError, TimeoutError):
        return ""


def merged(pages: Mapping[str, str]) -> list[Metric]:
    """Merge the pages of Prometheus metrics of instances by family; samples get the instance as a label."""
    families: dict[str, Metric] = {}
    for instance, page in pages.items():
        for found in text_string_to_metric_families(page):
            family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
            for sample in found.samples:
                family.add_sample(sample.name, {"instance": instance, **sample.labels}, sample.value)
    return list(families.values())
