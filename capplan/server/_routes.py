"""HTTP application: OpenAI's routes, vLLM's routes for adapters and metrics.

Completions do not pass through the web framework, which takes as long per request as the server itself.
Their responses are in OpenAI's format, whole or as server-sent events. The constant part of a chunk is
serialised once per response.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeAlias

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Receive, Scope, Send

from capplan.engine import SamplingParams, Tokenizer
from capplan.errors import InputError
from capplan.server._async_engine import (
    ClientGoneError,
    EngineDeadError,
    OutputStream,
    RequestOutput,
    RequestState,
)
from capplan.server._http_protocol import CLIENT
from capplan.server._protocol import (
    AdapterSharesRequest,
    ApiError,
    ChatRequest,
    CompletionRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    add_error_handlers,
    bad_request,
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


_DONE: Final = b"data: [DONE]\n\n"
_JSON: Final = b"application/json"
_EVENTS: Final = b"text/event-stream; charset=utf-8"
_dumps: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_UNFINISHED: Final = ',"logprobs":null,"finish_reason":null,"stop_reason":null'
_quoted: Final = json.encoder.encode_basestring_ascii


class ResponseFormat(ABC):
    """Format of a response to a request for `model`.

    `continuous_usage` and `with_tokens` are vLLM's `continuous_usage_stats` and `return_token_ids`. `echo`
    has the texts of the prompts, which precede the output; without them they are not returned.
    """

    kind: str
    chunk_kind: str
    prefix: str
    text_field: str
    """JSON of a chunk's text, with a placeholder for the quoted text."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        *,
        with_usage: bool = False,
        continuous_usage: bool = False,
        with_tokens: bool = False,
        echo: Sequence[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._with_usage = with_usage
        self._with_tokens = with_tokens
        self._echo = dict(enumerate(echo))
        self._sent_tokens: Counter[int] | None = Counter() if continuous_usage else None
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._offsets: dict[int, int] = {}  # characters of each choice so far
        head = _dumps(self._head(self.chunk_kind))[:-1]
        self._before = f'data: {head},"choices":[{{"index":'
        self._after = '}],"usage":null}\n\n' if with_usage else "}]}\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    @abstractmethod
    def opening(self, states: Sequence[RequestState]) -> bytes:
        """Return the events before the first token."""

    def event(self, output: RequestOutput) -> bytes:
        shown = self._with_prompt(output)
        return self._event(shown, self.text_field % _quoted(shown.text), output.tokens)

    def closing(self, states: Sequence[RequestState]) -> bytes:
        """Return the events after the last token."""
        if not self._with_usage:
            return _DONE
        document = self._head(self.chunk_kind) | {"choices": [], "usage": usage(states)}
        return f"data: {_dumps(document)}\n\n".encode() + _DONE

    def document(self, states: Sequence[RequestState]) -> bytes:
        choices = []
        for state in states:
            shown = self._with_prompt(RequestOutput(state, state.tokens, state.logprobs, text=state.text))
            choice = {
                "index": state.index,
                **self._content(shown.text),
                "logprobs": self._logprobs(shown) if shown.logprobs else None,
                "finish_reason": state.finish_reason,
                "stop_reason": state.stop_reason,
            }
            if self._with_tokens:
                choice |= {"prompt_token_ids": list(state.prompt), "token_ids": state.tokens}
            choices.append(choice)
        return _dumps(self._head(self.kind) | {"choices": choices, "usage": usage(states)}).encode()

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]:
        """Return the fields of a choice that hold the text."""

    def _with_prompt(self, output: RequestOutput) -> RequestOutput:
        """Return an output after its prompt, if it is the first of a choice and the prompt is echoed."""
        state = output.state
        prompt = self._echo.pop(state.index, None)
        if prompt is None:
            return output
        tokens, logprobs = output.tokens, output.logprobs
        if logprobs:  # the first token has none
            tokens = [*state.prompt, *tokens]
            logprobs = [None, *state.prompt_logprobs, *logprobs]
        return output._replace(text=prompt + output.text, tokens=tokens, logprobs=logprobs)

    def _end_of_event(self, state: RequestState, new_tokens: int) -> str:
        """Return the end of an event, with the token counts of its choice so far if they are continuous."""
        counts = self._sent_tokens
        if counts is None:
            return self._after
        counts[state.index] += new_tokens
        document = _dumps(_usage(len(state.prompt), counts[state.index]))
        return f'}}],"usage":{document}}}\n\n'

    def _event(self, output: RequestOutput, content: str, token_ids: Sequence[int] = ()) -> bytes:
        """Return an event; `content` is the field that holds the text."""
        index = output.state.index
        after = self._end_of_event(output.state, len(token_ids))
        if output.finish_reason is None and not output.logprobs and not self._with_tokens:
            return f"{self._before}{index},{content}{_UNFINISHED}{after}".encode()
        more: dict[str, Any] = {
            "logprobs": self._logprobs(output) if output.logprobs else None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self._with_tokens:
            more["token_ids"] = list(token_ids)
        return f"{self._before}{index},{content},{_dumps(more)[1:-1]}{after}".encode()

    @abstractmethod
    def _logprobs(self, output: RequestOutput) -> dict[str, Any]:
        """Return log-probabilities in the form of this format."""

    def _word(self, token: int) -> str:
        return self._tokenizer.decode([token])


class CompletionFormat(ResponseFormat):
    """``text_completion``."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"
    text_field = '"text":%s'

    def opening(self, states: Sequence[RequestState]) -> bytes:
        """Return the prompts' token ids if requested."""
        if not self._with_tokens:
            return b""
        events = []
        for state in states:
            prompt = _dumps({"text": "", "prompt_token_ids": list(state.prompt)})[1:-1]
            events.append(f"{self._before}{state.index},{prompt}{self._end_of_event(state, 0)}".encode())
        return b"".join(events)

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, output: RequestOutput) -> dict[str, Any]:
        index = output.state.index
        words = [self._word(token) for token in output.tokens]
        offsets = [self._offsets.get(index, 0)]
        for word in words:
            offsets.append(offsets[-1] + len(word))
        self._offsets[index] = offsets[-1]
        tops: list[dict[str, float] | None] = []
        for word, each in zip(words, output.logprobs, strict=True):
            if each is None:
                tops.append(None)
                continue
            # Of tokens with the same text the likelier one remains.
            top = {self._word(token): _finite(logprob) for token, logprob in reversed(each.top)}
            tops.append({word: _finite(each.logprob)} | top)
        return {
            "tokens": words,
            "token_logprobs": [None if each is None else _finite(each.logprob) for each in output.logprobs],
            "top_logprobs": tops,
            "text_offset": offsets[:-1],
        }


class ChatFormat(ResponseFormat):
    """``chat.completion``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"
    text_field = '"delta":{"content":%s}'

    def opening(self, states: Sequence[RequestState]) -> bytes:
        """Return the role of every choice."""
        role = '"delta":{"role":"assistant","content":""}'
        return b"".join([self._event(RequestOutput(state), role) for state in states])

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, output: RequestOutput) -> dict[str, Any]:
        content = []
        for token, each in zip(output.tokens, output.logprobs, strict=True):
            if each is None:  # of an echoed prompt, which chats do not have
                continue
            top = [self._logprob(other, logprob) for other, logprob in each.top]
            content.append(self._logprob(token, each.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        word = self._word(token)
        return {"token": word, "logprob": _finite(logprob), "bytes": list(word.encode())}


def usage(states: Sequence[RequestState]) -> dict[str, int]:
    """Return the token counts of a response; a prompt counts once, whatever the number of its choices."""
    prompts = states[:: states[0].stream.choices]
    return _usage(sum(len(state.prompt) for state in prompts), sum(len(state.tokens) for state in states))


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else -9999.0  # JSON has no infinity; as in OpenAI's API


class FullResponse(Response):
    """Runs the prompts of a stream and sends one document.

    A request that fails before its first token ends with the status of the error, also if it is streamed.
    `has_begun`: the status has been sent.
    """

    def __init__(self, stream: OutputStream, form: ResponseFormat) -> None:
        super().__init__()
        self._stream = stream
        self._form = form
        self.has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond; leave no prompt running."""
        try:
            with self._stream.running(scope["extensions"][CLIENT]):
                await self._respond(send)
        except ClientGoneError:
            return

    async def _respond(self, send: Send) -> None:
        while not self._stream.finished:
            await self._stream.next_outputs()
        body = self._form.document(self._stream.states)
        await self._start(send, _JSON, (b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.body", "body": body})

    async def _start(self, send: Send, media_type: bytes, *headers: tuple[bytes, bytes]) -> None:
        self.has_begun = True
        start = {"type": "http.response.start", "status": 200}
        await send({**start, "headers": [(b"content-type", media_type), *headers]})


class EventStreamResponse(FullResponse):
    """Runs the prompts of a stream and sends server-sent events."""

    async def _respond(self, send: Send) -> None:
        stream, form = self._stream, self._form
        outputs = await stream.next_outputs()
        await self._start(send, _EVENTS, (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))
        body = form.opening(stream.states)
        try:
            while not stream.finished:
                body += b"".join([form.event(output) for output in outputs])
                await send({"type": "http.response.body", "body": body, "more_body": True})
                body, outputs = b"", await stream.next_outputs()
            body += b"".join([form.event(output) for output in outputs]) + form.closing(stream.states)
        except ApiError as error:  # the status has been sent
            body = b"data: " + error.body() + b"\n\n"
        await send({"type": "http.response.body", "body": body})


_COMPLETION_TOKENS: Final = 16  # OpenAI's default

Endpoint: TypeAlias = Callable[[Request], Awaitable[FullResponse]]


class Generation:
    """ASGI application that completes prompts and conversations."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.endpoints: Mapping[str, tuple[Endpoint, type[CompletionRequest | ChatRequest]]] = (
            MappingProxyType(
                {
                    "/v1/completions": (self.completions, CompletionRequest),
                    "/v1/chat/completions": (self.chat_completions, ChatRequest),
                }
            )
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond; an error before the first token has its status."""
        endpoint, _ = self.endpoints[scope["path"]]
        response: FullResponse | None = None
        try:
            response = await endpoint(Request(scope, receive))
            await response(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except Exception:
            if response is not None and response.has_begun:
                raise
            logging.getLogger(__name__).exception("a request has failed")
            await ApiError(500, "The server made a mistake").response()(scope, receive, send)

    async def completions(self, request: Request) -> FullResponse:
        """Complete a prompt, or each of several."""
        service, data = self._service, await json_body(request)
        with ExitStack() as held:
            with service.holding(len(data)):
                body = parsed(data, CompletionRequest)
                size = len(data)
                del data
                adapter = await service.served_adapter(body.model, size, held)
                max_tokens = body.token_limit() or max(_COMPLETION_TOKENS, body.min_tokens or 0)
                if not body.prompts():
                    raise ApiError(400, "There must be at least one prompt", "prompt")
                texts = body.prompts()
                special = body.add_special_tokens is not False
                prompts = await service.encode(texts, max_tokens, special=special, choices=body.n or 1)
                echo = [service.text_of(each) for each in texts] if body.echo else []
            params = self._params(body, max_tokens, body.logprobs, bool(body.echo))
            return self._response(body, prompts, adapter, params, CompletionFormat, echo)

    async def chat_completions(self, request: Request) -> FullResponse:
        """Complete a conversation."""
        service, data = self._service, await json_body(request)
        with ExitStack() as held:
            with service.holding(len(data)):
                body = parsed(data, ChatRequest)
                size = len(data)
                del data
                adapter = await service.served_adapter(body.model, size, held)
                limit = body.token_limit()
                text = await service.apply_chat_template(body.messages, body.chat_template_kwargs or {})
                special = service.template.adds_special or bool(body.add_special_tokens)
                (prompt,) = await service.encode([text], limit, special=special, choices=body.n or 1)
            logprobs = (body.top_logprobs or 0) if body.logprobs else None
            max_tokens = limit or service.max_model_len - len(prompt)
            params = self._params(body, max_tokens, logprobs)
            return self._response(body, [prompt], adapter, params, ChatFormat)

    def _params(
        self, body: CompletionRequest | ChatRequest, max_tokens: int, logprobs: int | None, echo: bool = False
    ) -> SamplingParams:
        try:
            return body.sampling(max_tokens, logprobs, prompt_logprobs=echo and logprobs is not None)
        except InputError as error:
            field = error.location.rpartition(".")[2]
            raise bad_request(InputError(error.rule, error.value, field)) from None

    def _response(
        self,
        body: CompletionRequest | ChatRequest,
        prompts: Sequence[Sequence[int]],
        adapter: str | None,
        params: SamplingParams,
        format_type: type[ResponseFormat],
        echo: Sequence[str] = (),
    ) -> FullResponse:
        service, choices = self._service, body.n or 1
        service.refuse_if_full(len(prompts) * choices)
        tokenizer, streamed = service.tokenizer, bool(body.stream)
        form = format_type(
            body.model,
            tokenizer,
            with_usage=body.include_usage(),
            continuous_usage=body.continuous_usage(),
            with_tokens=bool(body.return_token_ids),
            echo=[text for text in echo for _ in range(choices)],
        )
        stops = body.stops()
        stream = OutputStream(service.engine, tokenizer, prompts, adapter, params, stops, streamed, choices)
        return EventStreamResponse(stream, form) if streamed else FullResponse(stream, form)


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
    adapters = [
        model_card(adapter, created, base, longest) for adapter, created in service.adapters.created().items()
    ]
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
