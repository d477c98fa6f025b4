"""Server settings, and checks before a request body is read: key, size, queue length."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capplan.engine.server.protocol import ApiError
from capplan.errors import InputError


@dataclass(frozen=True)
class ServerSettings:
    """How an engine is offered to others.

    Parameters
    ----------
    host, port
        Where to listen; port 0 is any free one.
    api_key
        What clients must bring as ``Authorization: Bearer KEY`` to everything under ``/v1/``; None: nothing.
    model_name
        What the base model is called.
    lora_root
        The folder that adapters loaded at run time must be in; None: none can be loaded.
    max_requests
        Most prompts in the engine, running and waiting; further ones are refused with 429.
    max_body_bytes
        Largest request body.
    drain_timeout_s
        How long running requests may go on after SIGTERM.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    lora_root: Path | None = None
    max_requests: int = 1024
    max_body_bytes: int = 8 * 2**20
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise InputError("must be a port from 0 to 65535", self.port, "port")
        if self.max_body_bytes < 1:
            raise InputError("must be >= 1", self.max_body_bytes, "max_body_bytes")
        if not 0 <= self.drain_timeout_s < float("inf"):
            raise InputError("must be a finite number >= 0", self.drain_timeout_s, "drain_timeout_s")
        if self.api_key == "":
            raise InputError("must not be empty", location="api_key")
        if not self.model_name:
            raise InputError("must not be empty", location="served_model_name")
        if self.lora_root is not None and not self.lora_root.is_dir():
            raise InputError("must be a folder", str(self.lora_root), "lora_root")


GENERATING = ("/v1/completions", "/v1/chat/completions")

_BODY_TIMEOUT_S = 60.0
"""For all of a body: a client that sends it drop by drop would hold its place for ever."""


class RequestLimiter:
    """ASGI middleware.

    Parameters
    ----------
    app
        What lies behind it.
    settings
        Key and size.
    refuse
        Raises when no further generating request is taken beside so many of which the body is being read.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, refuse: Callable[[int], None]) -> None:
        self._app = app
        self._most_bytes = settings.max_body_bytes
        self._key = None if settings.api_key is None else settings.api_key.encode()
        self._refuse = refuse
        self._reading = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        generates = _generates(scope)
        body = _BodyReader(receive, self._most_bytes, self._read if generates else lambda: None)
        self._reading += generates
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.close()

    def _read(self) -> None:
        self._reading -= 1

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if scope["path"].startswith("/v1/") and not self._has_key(headers):
            raise ApiError(
                401, "A valid API key is required", None, "invalid_api_key", {"WWW-Authenticate": "Bearer"}
            )
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self._most_bytes:
            raise _too_large(self._most_bytes)
        if _generates(scope):
            self._refuse(self._reading)

    def _has_key(self, headers: Headers) -> bool:
        if self._key is None:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Compared in a time that tells nothing of where they differ.
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._key)


class _BodyReader:
    """The body of a request as it comes, up to a size and a time; neither need be declared.

    Parameters
    ----------
    receive
        Of the request.
    most_bytes
        Size at which it is stopped.
    ended
        Called once, when there is no more of it.
    """

    def __init__(self, receive: Receive, most_bytes: int, ended: Callable[[], None]) -> None:
        self._receive = receive
        self._most_bytes = most_bytes
        self._ended = ended
        self._bytes = 0
        self._is_open = True
        self._until_s = time.monotonic() + _BODY_TIMEOUT_S

    async def receive(self) -> Message:
        """Return the next part; after the last one, what becomes of the connection."""
        if not self._is_open:
            return await self._receive()
        try:
            async with asyncio.timeout(self._until_s - time.monotonic()):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, f"The body must come within {_BODY_TIMEOUT_S:g} s", code="timeout") from None
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._most_bytes:
            raise _too_large(self._most_bytes)
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self.close()
        return message

    def close(self) -> None:
        """Note that there is no more of it."""
        if self._is_open:
            self._is_open = False
            self._ended()


def _generates(scope: Scope) -> bool:
    return scope["method"] == "POST" and scope["path"] in GENERATING


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(413, f"The body must not be larger than {most_bytes} bytes", code="too_large")
