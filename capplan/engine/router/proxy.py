"""Proxy of one request: its size, the instance it goes to, and the response."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, Final

import aiohttp
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Receive, Scope, Send

from capplan.engine.router.instance_client import (
    FileLimitError,
    InstanceClient,
    InstanceGoneError,
    QueueFullError,
    RequestSize,
)
from capplan.engine.router.supervisor import InstanceFleet, InstanceSupervisor
from capplan.engine.server.limiter import ServerSettings, ServerState
from capplan.engine.server.protocol import MAX_MODEL_NAME, MAX_PROMPTS, ApiError, error_code, parsed
from capplan.engine.tokenizer import Tokenizer
from capplan.errors import InputError

QUEUE_FULL_RETRY_S: Final = 5

_COMPLETION_TOKENS: Final = 16  # OpenAI's default
_FORWARDED_HEADERS: Final = ("content-type", "retry-after", "cache-control", "x-accel-buffering")
_END_OF_EVENT: Final = b"\n\n"
_MAX_TOKENS: Final = 2**31
"""Of the size of a request; its instance refuses more than fit."""
_LONG_BODY: Final = 50_000
"""Bytes of a body from which its tokens are counted in a thread."""
_CHAT_PATH: Final = "/v1/chat/completions"
_RETRIED_CODES: Final = ("engine_failed", "engine_stopped", "shutting_down")
"""Error codes of an instance that accepts no requests and has not started this one."""
_OVERLOADED: Final = "overloaded"
"""Error code of an instance that has not started this request, and may accept the next one."""


class RouterState(ServerState):
    """State of a router: its instances, and counts of its requests.

    Attributes
    ----------
    settings
        `max_requests` counts requests with any number of prompts.
    tokenizer
        Of the model; None: queues do not use sizes.
    by_instance
        Requests sent to each instance.
    retries
        Requests sent to another instance because one was gone.
    """

    def __init__(self, settings: ServerSettings, fleet: InstanceFleet, tokenizer: Tokenizer | None) -> None:
        lengths = [instance.spec.engine["max_model_len"] for instance in fleet.instances]
        super().__init__(settings, fleet, max(lengths))
        self.fleet = fleet
        self.tokenizer = tokenizer
        self._in_flight = 0
        self.by_instance: Counter[str] = Counter()
        self.retries = 0
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

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count a request in flight."""
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
        """Check that a request can be accepted.

        Raises
        ------
        ApiError
            503 if the router drains, 429 if too many requests are in flight.
        """
        if self.draining:
            raise self.refusal(503, "The server shuts down", "shutting_down", 1)
        if self.in_flight >= self.settings.max_requests:
            raise self.refusal(429, "The queue is full", "queue_full", QUEUE_FULL_RETRY_S)


class ForwardedRequest(BaseModel):
    """Fields of a request that the router uses; the instance checks the others."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: Annotated[str, Field(max_length=MAX_MODEL_NAME)]


class SizedRequest(ForwardedRequest):
    """Fields of a request whose size counts for a queue; the instance checks them."""

    prompt: Any = None
    messages: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None


def request_size(fields: SizedRequest, adapter: str | None, chat: bool, tokenizer: Tokenizer) -> RequestSize:
    """Return the size of a request.

    Parameters
    ----------
    chat
        Whether it is a conversation. The text of its template is not counted.

    Raises
    ------
    ApiError
        400 if it has too many prompts.
    """
    prompts = list(_texts(fields.messages) if chat else _prompts(fields.prompt))
    if len(prompts) > MAX_PROMPTS:
        raise ApiError(400, f"A request must not have more than {MAX_PROMPTS} prompts or texts", "prompt")
    limits = (fields.max_completion_tokens, fields.max_tokens)
    most = next((each for each in limits if isinstance(each, int) and each > 0), None)
    if most is None and not chat:
        most = _COMPLETION_TOKENS
    choices = 1 if chat else max(1, len(prompts))
    tokens = sum(_count(prompt, tokenizer) for prompt in prompts)
    return RequestSize(adapter, tokens, None if most is None else min(most * choices, _MAX_TOKENS))


def _prompts(prompt: Any) -> Iterator[Any]:
    """Yield the prompts of a completion, each as text or token ids."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        yield from prompt
    else:
        yield prompt


def _texts(messages: Any) -> Iterator[Any]:
    """Yield the texts of a conversation."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            yield from (part.get("text") for part in content if isinstance(part, dict))
        else:
            yield content


def _count(prompt: Any, tokenizer: Tokenizer) -> int:
    """Return the tokens of a prompt; 0 for one that the instance will refuse."""
    if isinstance(prompt, list):
        return len(prompt)
    if not isinstance(prompt, str):
        return 0
    try:
        return len(tokenizer.encode(prompt))
    except (InputError, UnicodeError, TypeError):
        return 0


class ProxyResponse(Response):
    """Sends a request to an instance and forwards the response.

    A request that was not started, because the instance is gone or overloaded, goes to another one. A request
    that is lost with its instance ends with 503, which clients may retry; after the start of a stream, with
    an error event.
    """

    def __init__(
        self,
        state: RouterState,
        path: str,
        body: bytes,
        content_type: str,
    ) -> None:
        super().__init__()
        self._state = state
        self._path = path
        self._request = body
        self._content_type = content_type
        self._started = False
        self._body_bytes = contextlib.ExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond; if the client disconnects, close the connection to the instance."""
        with self._state.running(), self._body_bytes:
            self._body_bytes.enter_context(self._state.holding(len(self._request)))
            is_long = self._state.tokenizer is not None and len(self._request) >= _LONG_BODY
            # Not cancelled by a disconnect: the thread has the body until it ends.
            size = await asyncio.to_thread(self._size) if is_long else self._size()
            await self._forward_while_connected(size, receive, send)

    async def _forward_while_connected(self, size: RequestSize, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._forward(size, send))
        watch = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, watch):
                if not task.done():
                    task.cancel()
            await asyncio.wait((work, watch))
        if not work.cancelled():
            work.result()

    async def _forward(self, size: RequestSize, send: Send) -> None:
        tried: list[InstanceSupervisor] = []
        is_overloaded = False
        while True:
            instance = self._state.fleet.choose(size.adapter, tried)
            if instance is None:
                raise self._no_instance(size.adapter, is_overloaded)
            try:
                await self._forward_to(instance, size, send)
                return
            except InstanceGoneError as gone:
                if gone.refusal == _OVERLOADED:
                    is_overloaded = True
                elif gone.refusal is not None:
                    instance.take_out(gone.refusal)
                tried.append(instance)
                self._state.retries += 1

    def _no_instance(self, adapter: str | None, is_overloaded: bool) -> ApiError:
        """Return the error if no instance has started the request; `is_overloaded`: one is up."""
        if self._state.draining:
            return self._state.refusal(503, "The server shuts down", "shutting_down", 1)
        if is_overloaded:
            return self._state.refusal(503, "The instances of this model are overloaded", _OVERLOADED, 1)
        retry_after_s = self._state.fleet.retry_after_s(adapter)
        return self._state.refusal(
            503, "No instance that serves this model is up", "no_instance", retry_after_s
        )

    def _size(self) -> RequestSize:
        """Return the size of the request.

        Raises
        ------
        ApiError
            400 if it is not valid, 404 if its model does not exist.
        """
        state = self._state
        if state.tokenizer is None:  # queues do not use sizes
            return RequestSize(state.adapter_of(parsed(self._request, ForwardedRequest).model), 0, None)
        fields = parsed(self._request, SizedRequest)
        is_chat = self._path == _CHAT_PATH
        return request_size(fields, state.adapter_of(fields.model), is_chat, state.tokenizer)

    async def _forward_to(self, instance: InstanceSupervisor, size: RequestSize, send: Send) -> None:
        """Forward the request to an instance and its response to the client.

        Raises
        ------
        InstanceGoneError
            If the instance has not received the request.
        ApiError
            If it does not respond, and nothing has been sent to the client.
        """
        client = instance.client
        if client is None:
            raise InstanceGoneError
        try:
            async with client.admitted(size):
                self._state.by_instance[instance.spec.name] += 1
                async with client.post(self._path, self._request, self._content_type) as response:
                    await self._send_response(response, client, send)
        except QueueFullError:
            error = self._state.refusal(429, "The queue is full", "queue_full", QUEUE_FULL_RETRY_S)
            raise error from None
        except FileLimitError:
            error = self._state.refusal(503, "The server is overloaded", _OVERLOADED, 1)
            raise error from None
        except aiohttp.ClientError:
            message = "The instance has failed or does not respond; please try again"
            error = self._state.refusal(503, message, "instance_failed", 1)
            if not self._started:
                raise error from None
            await _end(send, b"data: " + error.body() + _END_OF_EVENT)

    async def _send_response(
        self, response: aiohttp.ClientResponse, client: InstanceClient, send: Send
    ) -> None:
        headers = [
            (name.encode(), response.headers[name].encode("latin-1"))
            for name in _FORWARDED_HEADERS
            if name in response.headers
        ]
        if response.content_type != "text/event-stream":
            body = await response.read()  # whole, so that a failure still sets the status
            if response.status == 503 and (code := error_code(body)) in (*_RETRIED_CODES, _OVERLOADED):
                raise InstanceGoneError(code)
            if response.ok:  # a refusal says nothing of the engine
                client.note_progress()
            await self._start(send, response.status, [*headers, (b"content-length", str(len(body)).encode())])
            await _end(send, body)
            return
        held = b""
        async for part in response.content.iter_any():
            client.note_progress()
            if not self._started:
                await self._start(send, response.status, headers)
            whole, end, held = (held + part).rpartition(_END_OF_EVENT)  # clients get whole events
            if end:
                await send({"type": "http.response.body", "body": whole + end, "more_body": True})
        if not self._started:
            await self._start(send, response.status, headers)
        await _end(send, held)

    async def _start(self, send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        self._request = b""  # not sent again
        self._body_bytes.close()
        await send({"type": "http.response.start", "status": status, "headers": headers})


async def _disconnected(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    with contextlib.suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass


async def _end(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body})
