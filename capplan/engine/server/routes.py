"""HTTP application: OpenAI's routes, vLLM's routes for adapters and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from capplan.engine.request import SamplingParams
from capplan.engine.server.limiter import RequestLimiter
from capplan.engine.server.output_stream import OutputStream
from capplan.engine.server.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    answer_errors,
    bad_request,
)
from capplan.engine.server.responses import (
    ChatFormat,
    CompletionFormat,
    CompletionResponse,
    Format,
    StreamResponse,
)
from capplan.engine.server.service import AdapterInfo, Service
from capplan.errors import InputError

_COMPLETION_TOKENS = 16  # OpenAI's default

_HEALTH_S = 90.0
"""No step takes so long: an engine that does not answer within it is stuck."""

router = APIRouter()


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue a text, or each of several."""
    service = _service(request)
    adapter = service.adapter_of(body.model)
    max_tokens = body.max_tokens or _COMPLETION_TOKENS
    if not body.prompts():
        raise ApiError(400, "There must be at least one prompt", "prompt")
    prompts = await service.encode(body.prompts(), max_tokens)
    form = CompletionFormat(body.model, service.tokenizer, body.include_usage(), bool(body.return_token_ids))
    return _answer(service, body, prompts, adapter, max_tokens, body.logprobs, form)


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer the last turn of a conversation."""
    service = _service(request)
    adapter = service.adapter_of(body.model)
    wanted = body.max_completion_tokens or body.max_tokens
    text = service.written(body.messages)
    (prompt,) = await service.encode([text], wanted, special=service.template.adds_special)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    form = ChatFormat(body.model, service.tokenizer, body.include_usage(), bool(body.return_token_ids))
    max_tokens = wanted or service.max_model_len - len(prompt)
    return _answer(service, body, [prompt], adapter, max_tokens, logprobs, form)


def _answer(
    service: Service,
    body: CompletionRequest | ChatRequest,
    prompts: Sequence[Sequence[int]],
    adapter: str | None,
    max_tokens: int,
    logprobs: int | None,
    form: Format,
) -> Response:
    service.refuse_if_full(len(prompts))
    params = _sampling(body, max_tokens, logprobs)
    stream = bool(body.stream)
    reply = OutputStream(service.driver, service.tokenizer, prompts, adapter, params, body.stops(), stream)
    return StreamResponse(reply, form) if stream else CompletionResponse(reply, form)


def _sampling(body: CompletionRequest | ChatRequest, max_tokens: int, logprobs: int | None) -> SamplingParams:
    try:
        return body.sampling(max_tokens, logprobs)
    except InputError as error:
        raise bad_request(error) from None


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """List the base model and its adapters."""
    service = _service(request)
    adapters = [_adapter_card(service, info) for info in service.adapters.all()]
    return {"object": "list", "data": [_base_card(service), *adapters]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """Describe one of them."""
    cards = (await models(request))["data"]
    for card in cards:
        if card["id"] == name:
            return dict(card)
    raise ApiError(404, f"The model {name!r} does not exist", "model", "model_not_found")


def _base_card(service: Service) -> dict[str, Any]:
    return _card(service, service.settings.model_name, service.created, service.settings.model_name, None)


def _adapter_card(service: Service, info: AdapterInfo) -> dict[str, Any]:
    return _card(service, info.name, info.created, info.source, service.settings.model_name)


def _card(service: Service, name: str, created: int, root: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "capplan",
        "root": root,
        "parent": parent,
        "max_model_len": service.max_model_len,
    }


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> PlainTextResponse:
    """Load an adapter from a folder below the server's root."""
    await _service(request).adapters.load(body.lora_name, body.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> PlainTextResponse:
    """Forget an adapter that no request uses."""
    await _service(request).adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    """Say whether requests are taken; the engine's thread itself has to answer, between two steps."""
    service = _service(request)
    well = not service.draining and await service.driver.answers(_HEALTH_S)
    return JSONResponse({"status": "ok" if well else "unavailable"}, 200 if well else 503)


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Response(await _service(request).metrics_text(), media_type=CONTENT_TYPE_LATEST)


def make_app(service: Service) -> FastAPI:
    """Return the ASGI application of a service."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.driver.start()
        yield
        await asyncio.to_thread(service.driver.stop)

    # No pages of documentation: they would load scripts from elsewhere. The schema is at /openapi.json.
    app = FastAPI(title="capplan", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.include_router(router)
    app.add_middleware(RequestLimiter, settings=service.settings, refuse=partial(service.refuse_if_full, 1))
    answer_errors(app)
    return app
