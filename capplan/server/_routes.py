"""HTTP application: OpenAI's routes, vLLM's routes for adapters and metrics."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Receive, Scope, Send

from capplan.server._async_engine import EngineDeadError
from capplan.server._generation import Generation
from capplan.server._protocol import (
    AdapterSharesRequest,
    ApiError,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    add_error_handlers,
    json_body,
    model_card,
    parsed,
    request_schema,
    unknown_model,
)
from capplan.server._service import Service
from capplan.server._state import RequestLimiter, generates

if TYPE_CHECKING:
    from capplan.server._adapter_pool import AdapterPool

_PART_BYTES: Final = 2**18
"""Of a file that is sent to another server."""
_HEALTH_S = 90.0
"""Longer than any step: an engine that does not answer within it hangs."""

router = APIRouter()


class ServerApp:
    """ASGI application of a service, which connects it to the engine core."""

    def __init__(self, service: Service) -> None:
        generation = Generation(service)
        self._generation = RequestLimiter(generation, service, service.refuse_if_full)
        self._other = _other_routes(service, generation)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request."""
        app = self._generation if scope["type"] == "http" and generates(scope) else self._other
        await app(scope, receive, send)


def _other_routes(service: Service, generation: Generation) -> FastAPI:

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.engine.start()
        if service.pool is not None:
            service.pool.start()
        yield
        if service.pool is not None:
            await service.pool.close()
        service.close()

    # No documentation pages: they load scripts from other hosts. The schema is at /openapi.json.
    app = FastAPI(title="capplan", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.include_router(router)
    for path, (endpoint, body) in generation.endpoints.items():  # for the schema, and other methods
        more = request_schema(body)
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None, openapi_extra=more)
    app.add_middleware(RequestLimiter, state=service, refuse=service.refuse_if_full)
    add_error_handlers(app)
    return app


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """List the base model and its adapters."""
    service = _service(request)
    base, longest = service.settings.model_name, service.max_model_len
    adapters = [model_card(info.name, info.created, base, longest) for info in service.adapters.all()]
    return {"object": "list", "data": [model_card(base, service.created, None, longest), *adapters]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """Describe one model."""
    cards = (await models(request))["data"]
    for card in cards:
        if card["id"] == name:
            return dict(card)
    raise unknown_model(name)


@router.post("/v1/load_lora_adapter", openapi_extra=request_schema(LoadAdapterRequest))
async def load_lora_adapter(request: Request) -> PlainTextResponse:
    """Load an adapter from a folder below the server's root."""
    body = parsed(await json_body(request), LoadAdapterRequest)
    await _service(request).adapters.load(body.lora_name, body.lora_path, in_place=bool(body.load_inplace))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", openapi_extra=request_schema(UnloadAdapterRequest))
async def unload_lora_adapter(request: Request) -> PlainTextResponse:
    """Remove an adapter that no request uses."""
    body = parsed(await json_body(request), UnloadAdapterRequest)
    await _service(request).adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.get("/v1/adapter_files/{digest}/{name}", response_model=None)
async def adapter_file(digest: str, name: str, request: Request) -> Response:
    """Send a file of a stored adapter to another server."""
    file = await _pool(request).open_file(digest, name)
    size_bytes = os.fstat(file.fileno()).st_size
    headers = {"content-length": str(size_bytes)}
    return StreamingResponse(_parts(file), headers=headers, media_type="application/octet-stream")


@router.post("/v1/adapter_files/{digest}")
async def check_adapter(digest: str, request: Request) -> JSONResponse:
    """Compare files of a stored adapter with their digest, for a server that would remove its own copy."""
    return JSONResponse(await _pool(request).check(digest))


async def _parts(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while part := await asyncio.to_thread(file.read, _PART_BYTES):
            yield part


@router.post("/v1/adapter_shares", openapi_extra=request_schema(AdapterSharesRequest))
async def adapter_shares(request: Request) -> PlainTextResponse:
    """Set shares of the requests of adapters; copies of those with a share of zero are removed in time."""
    body = parsed(await json_body(request), AdapterSharesRequest)
    _pool(request).set_shares(body.shares)
    return PlainTextResponse(f"Success: shares of {len(body.shares)} adapters set.")


def _pool(request: Request) -> AdapterPool:
    pool = _service(request).pool
    if pool is None:
        raise ApiError(403, "The server has no --registry", code="no_registry")
    return pool


@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    """Report whether requests are accepted; the engine core answers between two steps."""
    service = _service(request)
    reason = _unavailability(service)
    if reason is None and not await service.engine.is_alive(_HEALTH_S):
        reason = "engine_unresponsive"
    return _health(reason)


@router.get("/ping", response_model=None)
async def ping(request: Request) -> Response:
    """Report whether requests are accepted, at once: the engine core may be in the midst of a long step."""
    return _health(_unavailability(_service(request)))


def _unavailability(service: Service) -> str | None:
    error = service.unavailability()
    return None if error is None else error.code


def _health(reason: str | None) -> Response:
    """Return the state of a server; `reason`: code of the error of requests, None: they are accepted."""
    if reason is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "unavailable", "reason": reason}, 503)


@router.get("/state", response_model=None)
async def state(request: Request) -> Response:
    """Return the state of the engine between two steps, which routers read."""
    try:
        return JSONResponse(await _service(request).state())
    except (EngineDeadError, TimeoutError):
        return _health("engine_unresponsive")


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Response(await _service(request).metrics_text(), media_type=CONTENT_TYPE_LATEST)
