"""The router's application: OpenAI's routes, passed on by the plan's shares."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from capplan.engine.cluster.asks import ask_of, fields_of
from capplan.engine.cluster.fleet import Fleet
from capplan.engine.cluster.metrics import RouterMetrics
from capplan.engine.cluster.relay import Relay
from capplan.engine.cluster.tally import Tally
from capplan.engine.server.api_error import ApiError, answer_errors
from capplan.engine.server.gate import Gate
from capplan.engine.server.settings import ServerSettings
from capplan.engine.tokenizer import Tokenizer

_FULL_RETRY_S: Final = "5"
_LONG_BODY: Final = 50_000
"""Bytes from which on a body is looked at beside the event loop."""

router = APIRouter()


@dataclass
class Front:
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
    fleet: Fleet
    tokenizer: Tokenizer | None
    tally: Tally = field(default_factory=Tally)
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


def make_app(front: Front) -> FastAPI:
    """Return the ASGI application."""
    app = FastAPI(title="capplan router", docs_url=None, redoc_url=None)
    app.state.front = front
    app.state.metrics = RouterMetrics(front.fleet, front.tally)
    app.state.cards = _cards(front)
    app.include_router(router)
    app.add_middleware(Gate, settings=front.settings, refuse=front.refuse_if_full)
    answer_errors(app)
    return app


def _front(request: Request) -> Front:
    front: Front = request.app.state.front
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
        fields = fields_of(body)
        return ask_of(fields, front.adapter_of(fields["model"]), chat, front.tokenizer)

    ask = look() if len(body) < _LONG_BODY else await asyncio.to_thread(look)
    content_type = request.headers.get("content-type", "application/json")
    return Relay(front.fleet, front.tally, request.url.path, body, content_type, ask)


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


def _cards(front: Front) -> dict[str, dict[str, Any]]:
    """Return the entry of every model by its name; the shortest max_model_len of its holders counts."""
    base = front.settings.model_name
    cards: dict[str, dict[str, Any]] = {}
    for member in front.fleet.members:
        longest = member.spec.engine["max_model_len"]
        for name, source in {base: base, **member.spec.adapters}.items():
            card = cards.setdefault(name, _card(front, name, str(source), None if name == base else base))
            card["max_model_len"] = min(card.get("max_model_len", longest), longest)
    return cards


def _card(front: Front, name: str, root: str, parent: str | None) -> dict[str, Any]:
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
