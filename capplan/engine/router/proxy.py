"""Proxy of one request: its size, the instance it goes to, and the response."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import aiohttp
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from capplan.engine.router.instance_client import InstanceGoneError, QueueFullError, RequestSize
from capplan.engine.router.supervisor import InstanceFleet, InstanceSupervisor
from capplan.engine.server.protocol import ApiError, code_of
from capplan.engine.tokenizer import Tokenizer
from capplan.errors import InputError


class RouterStats:
    """Requests by what became of them. Belongs to the event loop.

    Attributes
    ----------
    in_flight
        Requests that are not answered yet.
    by_instance
        Requests sent to each.
    refusals
        Requests that the router itself refused, by status.
    retries
        Requests that went to another instance because one was gone.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self.by_instance: Counter[str] = Counter()
        self.refusals: Counter[int] = Counter()
        self.retries = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count a request while it runs."""
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    def sent(self, instance: str) -> None:
        """Count a request that goes to an instance."""
        self.by_instance[instance] += 1

    def refused(self, status: int, message: str, code: str, headers: Mapping[str, str]) -> ApiError:
        """Count a refusal, and return it."""
        self.refusals[status] += 1
        return ApiError(status, message, code=code, headers=headers)


_COMPLETION_TOKENS: Final = 16  # OpenAI's default


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the fields of a request.

    Raises
    ------
    ApiError
        400, when it is no JSON object or names no model.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "The body is not valid JSON") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "The body must be a JSON object, with Content-Type: application/json")
    if not isinstance(fields.get("model"), str):
        raise ApiError(400, "model: must be a string", "model")
    return fields


def request_size(
    fields: dict[str, Any], adapter: str | None, chat: bool, tokenizer: Tokenizer | None
) -> RequestSize:
    """Return a request as queues see it.

    Parameters
    ----------
    fields
        The request.
    adapter
        What it asks for.
    chat
        Whether it is a conversation.
    tokenizer
        Counts its tokens; None: nobody wants to know them. The words around the turns of a conversation are
        not counted.
    """
    if tokenizer is None:
        return RequestSize(adapter, 0, None)
    prompts = list(_texts(fields.get("messages")) if chat else _prompts(fields.get("prompt")))
    wanted = [fields.get(name) for name in ("max_completion_tokens", "max_tokens")]
    most = next((each for each in wanted if isinstance(each, int) and each > 0), None)
    if most is None and not chat:
        most = _COMPLETION_TOKENS
    answers = 1 if chat else max(1, len(prompts))
    tokens = sum(_count(prompt, tokenizer) for prompt in prompts)
    return RequestSize(adapter, tokens, None if most is None else most * answers)


def _prompts(prompt: Any) -> Iterator[Any]:
    """Yield the prompts of a completion, each as text or token ids."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        yield from prompt
    else:
        yield prompt


def _texts(messages: Any) -> Iterator[Any]:
    """Yield what is said in a conversation."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            yield from (part.get("text") for part in content if isinstance(part, dict))
        else:
            yield content


def _count(prompt: Any, tokenizer: Tokenizer) -> int:
    """Return the tokens of a prompt; 0 for what the instance will refuse."""
    if isinstance(prompt, list):
        return len(prompt)
    if not isinstance(prompt, str):
        return 0
    try:
        return len(tokenizer.encode(prompt))
    except (InputError, UnicodeError, TypeError):
        return 0


_PASSED_ON: Final = ("content-type", "retry-after", "cache-control", "x-accel-buffering")

_END_OF_EVENT: Final = b"\n\n"

_NOT_TAKEN: Final = ("engine_failed", "shutting_down")
"""Codes with which an instance says that it has not begun, or not finished, for reasons of its own."""

_FULL_RETRY_S: Final = "5"


class ProxyResponse(Response):
    """Asks an instance and passes its answer on.

    A request that has not reached an instance, because that one is gone, goes to another one. A request that
    an instance takes down with it ends with 503, which clients may try again; once its stream has begun, with
    an event that says so.

    Parameters
    ----------
    fleet, tally
        Whom to ask, and what is counted.
    path, body, content_type
        The request.
    ask
        What it asks for.
    """

    def __init__(
        self,
        fleet: InstanceFleet,
        tally: RouterStats,
        path: str,
        body: bytes,
        content_type: str,
        ask: RequestSize,
    ) -> None:
        super().__init__()
        self._fleet = fleet
        self._tally = tally
        self._path = path
        self._request = body
        self._content_type = content_type
        self._ask = ask
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client goes: then the instance is told by the end of its connection."""
        work = asyncio.ensure_future(self._work(send))
        watch = asyncio.ensure_future(_disconnected(receive))
        try:
            with self._tally.running():
                await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, watch):
                if not task.done():
                    task.cancel()
            await asyncio.wait((work, watch))
        if not work.cancelled():
            work.result()

    async def _work(self, send: Send) -> None:
        tried: list[InstanceSupervisor] = []
        while True:
            member = self._fleet.choose(self._ask.adapter, tried)
            if member is None:
                raise self._nobody()
            try:
                await self._at(member, send)
                return
            except InstanceGoneError:
                tried.append(member)
                self._tally.retries += 1

    async def _at(self, member: InstanceSupervisor, send: Send) -> None:
        """Have an instance answer.

        Raises
        ------
        InstanceGoneError
            When it has not got the request.
        ApiError
            When it cannot answer, and nothing has been sent yet.
        """
        link = member.link
        if link is None:
            raise InstanceGoneError
        try:
            async with link.turn(self._ask):
                self._tally.sent(member.spec.name)
                async with link.post(self._path, self._request, self._content_type) as answer:
                    await self._pass_on(answer, send)
        except QueueFullError:
            headers = {"Retry-After": _FULL_RETRY_S}
            raise self._tally.refused(429, "The queue is full", "queue_full", headers) from None
        except aiohttp.ClientError:
            error = self._tally.refused(
                503, "The instance has failed; please try again", "instance_failed", {"Retry-After": "1"}
            )
            if not self._begun:
                raise error from None
            await _end(send, b"data: " + error.body() + _END_OF_EVENT)

    async def _pass_on(self, answer: aiohttp.ClientResponse, send: Send) -> None:
        headers = [
            (name.encode(), answer.headers[name].encode("latin-1"))
            for name in _PASSED_ON
            if name in answer.headers
        ]
        if answer.content_type != "text/event-stream":
            body = await answer.read()  # in one piece, so that a failure can still be told by the status
            if answer.status == 503 and code_of(body) in _NOT_TAKEN:
                raise InstanceGoneError
            await self._begin(send, answer.status, [*headers, (b"content-length", str(len(body)).encode())])
            await _end(send, body)
            return
        held = b""
        async for part in answer.content.iter_any():
            if not self._begun:
                await self._begin(send, answer.status, headers)
            whole, end, held = (held + part).rpartition(_END_OF_EVENT)  # nobody is to see half an event
            if end:
                await send({"type": "http.response.body", "body": whole + end, "more_body": True})
        if not self._begun:
            await self._begin(send, answer.status, headers)
        await _end(send, held)

    async def _begin(self, send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._begun = True
        await send({"type": "http.response.start", "status": status, "headers": headers})

    def _nobody(self) -> ApiError:
        headers = {"Retry-After": str(self._fleet.retry_after_s(self._ask.adapter))}
        return self._tally.refused(503, "No instance that serves this model is up", "no_instance", headers)


async def _disconnected(receive: Receive) -> None:
    """Wait until the client has gone."""
    with contextlib.suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass


async def _end(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body})
