"""Sending answers: as one document, or event by event while tokens come."""

from __future__ import annotations

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from capplan.engine.server.api_error import ApiError
from capplan.engine.server.formats import Format
from capplan.engine.server.reply import ClientGoneError, Reply

_JSON = b"application/json"
_EVENTS = b"text/event-stream; charset=utf-8"


class AnswerResponse(Response):
    """Runs a reply's prompts and sends the answer.

    A request that fails before its first token ends with the status of the error, streams included.
    """

    def __init__(self, reply: Reply, form: Format) -> None:
        super().__init__()
        self._reply = reply
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; leave nothing running."""
        try:
            async with self._reply.running(receive):
                await self._answer(send)
        except ClientGoneError:
            return

    async def _answer(self, send: Send) -> None:
        while not self._reply.ended:
            await self._reply.deltas()
        body = self._form.document(self._reply.choices)
        await _begin(send, _JSON, (b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.body", "body": body})


class StreamResponse(AnswerResponse):
    """Sends server-sent events."""

    async def _answer(self, send: Send) -> None:
        reply, form = self._reply, self._form
        deltas = await reply.deltas()
        await _begin(send, _EVENTS, (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))
        body = form.opening(reply.choices)
        try:
            while not reply.ended:
                body += b"".join([form.event(delta) for delta in deltas])
                await send({"type": "http.response.body", "body": body, "more_body": True})
                body, deltas = b"", await reply.deltas()
            body += b"".join([form.event(delta) for delta in deltas]) + form.closing(reply.choices)
        except ApiError as error:  # too late for a status
            body = b"data: " + error.body() + b"\n\n"
        await send({"type": "http.response.body", "body": body})


async def _begin(send: Send, media_type: bytes, *headers: tuple[bytes, bytes]) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-type", media_type), *headers],
        }
    )
