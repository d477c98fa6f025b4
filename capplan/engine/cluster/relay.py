"""One request on its way: to an instance, and the answer back as it comes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import aiohttp
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from capplan.engine.cluster.fleet import Fleet
from capplan.engine.cluster.member import Member
from capplan.engine.cluster.queues import Ask, GoneError, QueueFullError
from capplan.engine.cluster.tally import Tally
from capplan.engine.server.api_error import ApiError, code_of

_PASSED_ON: Final = ("content-type", "retry-after", "cache-control", "x-accel-buffering")
_END_OF_EVENT: Final = b"\n\n"
_NOT_TAKEN: Final = ("engine_failed", "shutting_down")
"""Codes with which an instance says that it has not begun, or not finished, for reasons of its own."""
_FULL_RETRY_S: Final = "5"


class Relay(Response):
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
        self, fleet: Fleet, tally: Tally, path: str, body: bytes, content_type: str, ask: Ask
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
        watch = asyncio.ensure_future(_gone(receive))
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
        tried: list[Member] = []
        while True:
            member = self._fleet.choose(self._ask.adapter, tried)
            if member is None:
                raise self._nobody()
            try:
                await self._at(member, send)
                return
            except GoneError:
                tried.append(member)
                self._tally.retries += 1

    async def _at(self, member: Member, send: Send) -> None:
        """Have an instance answer.

        Raises
        ------
        GoneError
            When it has not got the request.
        ApiError
            When it cannot answer, and nothing has been sent yet.
        """
        link = member.link
        if link is None:
            raise GoneError
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
                raise GoneError
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


async def _gone(receive: Receive) -> None:
    """Wait until the client has gone."""
    with contextlib.suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass


async def _end(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body})
