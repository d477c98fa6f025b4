"""Router application: OpenAI's routes and metrics over all instances of a plan."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from capplan.engine.router.proxy import ProxyResponse, RouterStats, parse_body, request_size
from capplan.engine.router.supervisor import InstanceFleet, InstanceSupervisor
from capplan.engine.server.limiter import RequestLimiter, ServerSettings
from capplan.engine.server.protocol import ApiError, answer_errors
from capplan.engine.tokenizer import Tokenizer

_FULL_RETRY_S: Final = "5"

_LONG_BODY: Final = 50_000
"""Bytes from which on a body is looked at beside the event loop."""

router = APIRouter()


@dataclass
class RouterState:
    """What stands behind the routes. Belongs to the event loop.

    Attributes
    ----------
    settings
        The router's; `max_requests` counts requests, whatever they hold.
    fleet, tally
        The instances, and what is counted.
    tokenizer
        The model's, where queues need it.
    draining
        Whether the router ends: what runs is answered, nothing else is taken.
    """

    settings: ServerSettings
    fleet: InstanceFleet
    tokenizer: Tokenizer | None
    tally: RouterStats = field(default_factory=RouterStats)
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def refuse_if_full(self, coming: int = 0) -> None:
        """Raise when no further request is taken beside so many of which the body is being read.

        Raises
        ------
        ApiError
            503 when the router ends, 429 when too much is in flight.
        """
        if self.draining:
            headers = {"Retry-After": "1"}
            raise self.tally.refused(503, "The server shuts down", "shutting_down", headers)
        if self.tally.in_flight + coming >= self.settings.max_requests:
            headers = {"Retry-After": _FULL_RETRY_S}
            raise self.tally.refused(429, "The queue is full", "queue_full", headers)

    def adapter_of(self, model: str) -> str | None:
        """Return the adapter that a model name means; None is the base model.

        Raises
        ------
        ApiError
            404, when there is no such model.
        """
        if model == self.settings.model_name:
            return None
        if model not in self.fleet:
            raise ApiError(404, f"The model {model!r} does not exist", "model", "model_not_found")
        return model


def make_app(front: RouterState) -> FastAPI:
    """Return the ASGI application."""
    app = FastAPI(title="capplan router", docs_url=None, redoc_url=None)
    app.state.front = front
    app.state.metrics = RouterMetrics(front.fleet, front.tally)
    app.state.cards = _cards(front)
    app.include_router(router)
    app.add_middleware(RequestLimiter, settings=front.settings, refuse=front.refuse_if_full)
    answer_errors(app)
    return app


def _front(request: Request) -> RouterState:
    front: RouterState = request.app.state.front
    return front


@router.post("/v1/completions", response_model=None)
async def completions(request: Request) -> Response:
    """Continue a text, or each of several."""
    return await _relay(request, chat=False)


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(request: Request) -> Response:
    """Answer the last turn of a conversation."""
    return await _relay(request, chat=True)


async def _relay(request: Request, chat: bool) -> Response:
    front, body = _front(request), await request.body()
    front.refuse_if_full()  # much may have happened while the body came

    def look() -> Any:
        fields = parse_body(body)
        return request_size(fields, front.adapter_of(fields["model"]), chat, front.tokenizer)

    ask = look() if len(body) < _LONG_BODY else await asyncio.to_thread(look)
    content_type = request.headers.get("content-type", "application/json")
    return ProxyResponse(front.fleet, front.tally, request.url.path, body, content_type, ask)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """List the base model and the adapters of all instances, as the plan has them."""
    return {"object": "list", "data": list(request.app.state.cards.values())}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """Describe one of them."""
    card: dict[str, Any] | None = request.app.state.cards.get(name)
    if card is None:
        raise ApiError(404, f"The model {name!r} does not exist", "model", "model_not_found")
    return card


def _cards(front: RouterState) -> dict[str, dict[str, Any]]:
    """Return the entry of every model by its name; the shortest max_model_len of its holders counts."""
    base = front.settings.model_name
    cards: dict[str, dict[str, Any]] = {}
    for member in front.fleet.members:
        longest = member.spec.engine["max_model_len"]
        for name, source in {base: base, **member.spec.adapters}.items():
            card = cards.setdefault(name, _card(front, name, str(source), None if name == base else base))
            card["max_model_len"] = min(card.get("max_model_len", longest), longest)
    return cards


def _card(front: RouterState, name: str, root: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": front.created,
        "owned_by": "capplan",
        "root": root,
        "parent": parent,
    }


@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    """Say how all instances are; well is a router that takes requests for every model."""
    front = _front(request)
    members = front.fleet.members
    well = not front.draining and front.fleet.serves_everything()
    status = "unavailable" if not well else "ok" if all(m.is_up for m in members) else "degraded"
    instances = {m.spec.name: {"state": m.state, "restarts": m.restarts} for m in members}
    return JSONResponse({"status": status, "instances": instances}, 200 if well else 503)


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Return the metrics of the router and of its instances in Prometheus' text format."""
    return Response(await request.app.state.metrics.text(), media_type=CONTENT_TYPE_LATEST)


_TIMEOUT_S: Final = 5.0

_HEADER: Final = re.compile(r"# (HELP|TYPE) (\S+)")

_SAMPLE: Final = re.compile(r"([a-zA-Z_:][\w:]*)(\{)?")


class RouterMetrics:
    """Reads what there is to tell; see `prometheus_client.registry.Collector`."""

    def __init__(self, fleet: InstanceFleet, tally: RouterStats) -> None:
        self._fleet = fleet
        self._tally = tally
        self._registry = CollectorRegistry()
        self._registry.register(self)

    async def text(self) -> bytes:
        """Return everything in Prometheus' text format, of those instances that answer."""
        pages = await asyncio.gather(*(_page_of(member) for member in self._fleet.members))
        texts = {m.spec.name: page for m, page in zip(self._fleet.members, pages, strict=True)}
        return generate_latest(self._registry) + merged(texts).encode()

    def collect(self) -> Iterator[Metric]:
        """Yield the router's own."""
        members = self._fleet.members
        requests = CounterMetricFamily(
            "capplan:router_requests", "Requests sent to an instance", labels=["instance", "group"]
        )
        restarts = CounterMetricFamily(
            "capplan:instance_restarts", "Starts after an end", labels=["instance", "group"]
        )
        up = GaugeMetricFamily("capplan:instance_up", "Whether it is up", labels=["instance", "group"])
        queued = GaugeMetricFamily(
            "capplan:router_requests_queued", "Requests before an instance", labels=["instance", "group"]
        )
        for member in members:
            labels = [member.spec.name, member.spec.group]
            waiting = 0 if member.link is None or member.link.queues is None else member.link.queues.waiting
            requests.add_metric(labels, self._tally.by_instance[member.spec.name])
            restarts.add_metric(labels, member.restarts)
            up.add_metric(labels, float(member.is_up))
            queued.add_metric(labels, waiting)
        yield from (requests, restarts, up, queued)
        yield GaugeMetricFamily(
            "capplan:instances_up", "Instances that are up", sum(member.is_up for member in members)
        )
        yield GaugeMetricFamily(
            "capplan:router_requests_in_flight", "Requests not answered yet", self._tally.in_flight
        )
        yield CounterMetricFamily(
            "capplan:router_retries", "Requests that went on to another instance", self._tally.retries
        )
        refused = CounterMetricFamily(
            "capplan:router_requests_refused", "Requests that the router refused", labels=["status"]
        )
        for status, count in sorted(self._tally.refusals.items()):
            refused.add_metric([str(status)], count)
        yield refused


async def _page_of(member: InstanceSupervisor) -> str:
    if member.link is None:
        return ""
    try:
        return (await member.link.get("/metrics", _TIMEOUT_S)).decode()
    except (aiohttp.ClientError, TimeoutError):
        return ""  # what is missing tells that


def merged(pages: Mapping[str, str]) -> str:
    """Return pages of metrics as one, every sample with the label ``instance``, families together.

    Parameters
    ----------
    pages
        Prometheus' text of each instance, by name.
    """
    headers: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for instance, page in pages.items():
        family = ""
        for line in page.splitlines():
            header = _HEADER.match(line)
            if header is not None:
                family = header[2]
                lines = headers.setdefault(family, [])
                if line not in lines:
                    lines.append(line)
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(_labelled(line, instance))
    return "".join("\n".join([*headers.get(family, ()), *lines]) + "\n" for family, lines in samples.items())


def _labelled(line: str, instance: str) -> str:
    escaped = instance.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    label = f'instance="{escaped}"'

    def with_label(match: re.Match[str]) -> str:
        return f"{match[1]}{{{label}," if match[2] else f"{match[1]}{{{label}}}"

    return _SAMPLE.sub(with_label, line, count=1)
