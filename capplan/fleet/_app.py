"""Router application: OpenAI's routes and metrics over all instances of a plan.

Placement in force and re-balancing, as documents and metrics.

Router process: start the instances, listen, drain and stop.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

import aiohttp
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from capplan.fleet._fleet import InstanceFleet, InstanceSupervisor, RouterConfig
from capplan.fleet._instance_client import FileLimitError
from capplan.fleet._proxy import Proxy, RouterState
from capplan.fleet._rebalancing import RebalanceLoop
from capplan.processes import without_full_collections
from capplan.server import (
    GENERATION_PATHS,
    DrainingServer,
    MetricKind,
    RequestLimiter,
    add_error_handlers,
    bind,
    generates,
    metric_family,
    model_card,
    unknown_model,
    url_of,
)

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
    """Yield the metrics of re-balancing."""
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
        yield metric_family(kind, f"capplan:{name}", help_text, (), [((), float(value))])
    if loop.target is not None:
        help_text = "Expected demand relative to what the instances sustain; above 1: overload"
        yield metric_family(Gauge, "capplan:rebalance_target", help_text, (), [((), loop.target)])


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
        """Respond to a request."""
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
            yield metric_family(kind, f"capplan:{name}", help_text, (), [((), count)])
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
    """Merge pages of Prometheus metrics by family; every sample gets the label ``instance``.

    Parameters
    ----------
    pages
        Prometheus text of each instance, by name.
    """
    families: dict[str, Metric] = {}
    for instance, page in pages.items():
        for found in text_string_to_metric_families(page):
            family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
            for sample in found.samples:
                family.add_sample(sample.name, {"instance": instance, **sample.labels}, sample.value)
    return list(families.values())
