"""Server settings and state, and checks before a request body is read: key, size, queue length."""

from __future__ import annotations

import asyncio
import hmac
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capplan.engine.server.protocol import ApiError, unknown_model
from capplan.errors import InputError

_GENERATION_PATHS: Final = ("/v1/completions", "/v1/chat/completions")
_BODY_TIMEOUT_S: Final = 60.0
"""For a whole body: a slow client must not hold its place in the queue."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    Parameters
    ----------
    model_name
        Name of the base model.
    host, port
        Address; port 0 is any free one.
    api_key
        Required as ``Authorization: Bearer KEY`` for all paths under ``/v1/``; None: not required.
    lora_root
        Folder of adapters that clients may load; None: they may load none.
    max_requests
        Maximum number of prompts in the engine, running and waiting; further ones get 429.
    max_body_bytes
        Maximum size of a request body.
    drain_timeout_s
        Time for running requests after SIGTERM.
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


class ServerState(ABC):
    """State of a server that finishes running requests before it stops.

    Attributes
    ----------
    adapters
        Names of the adapters that are served.
    draining
        Whether new requests are refused.
    refusals
        Number of refused requests by status.
    """

    def __init__(self, settings: ServerSettings, adapters: Container[object]) -> None:
        self.settings = settings
        self.adapters = adapters
        self.created = int(time.time())
        self.draining = False
        self.refusals: Counter[int] = Counter()

    @property
    @abstractmethod
    def failed(self) -> asyncio.Event:
        """Event after which the server stops."""

    @abstractmethod
    async def drain(self) -> None:
        """Wait for running requests; end them after the drain timeout."""

    def adapter_of(self, model: str) -> str | None:
        """Return the adapter of a model name; None is the base model.

        Raises
        ------
        ApiError
            404 if the model does not exist.
        """
        if model == self.settings.model_name:
            return None
        if model not in self.adapters:
            raise unknown_model(model)
        return model

    def refusal(self, status: int, message: str, code: str, retry_after_s: int) -> ApiError:
        """Count a refusal and return its error."""
        self.refusals[status] += 1
        return ApiError(status, message, code=code, headers={"Retry-After": str(retry_after_s)})


class RequestLimiter:
    """ASGI middleware that checks key, size and queue length.

    Parameters
    ----------
    refuse
        Called with the number of requests whose body is being read; raises if no further one is accepted.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, refuse: Callable[[int], None]) -> None:
        self._app = app
        self._max_bytes = settings.max_body_bytes
        self._key = None if settings.api_key is None else settings.api_key.encode()
        self._refuse = refuse
        self._reading = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        generates = _generates(scope)
        body = _BodyReader(receive, self._max_bytes, self._body_read if generates else lambda: None)
        self._reading += generates
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.close()

    def _body_read(self) -> None:
        self._reading -= 1

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if scope["path"].startswith("/v1/") and not self._has_key(headers):
            raise ApiError(
                401, "A valid API key is required", None, "invalid_api_key", {"WWW-Authenticate": "Bearer"}
            )
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self._max_bytes:
            raise _too_large(self._max_bytes)
        if _generates(scope):
            self._refuse(self._reading)

    def _has_key(self, headers: Headers) -> bool:
        if self._key is None:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._key)


class _BodyReader:
    """Request body with limits of size and time, declared or not; calls `on_end` once."""

    def __init__(self, receive: Receive, max_bytes: int, on_end: Callable[[], None]) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._on_end = on_end
        self._bytes = 0
        self._is_open = True
        self._until_s = time.monotonic() + _BODY_TIMEOUT_S

    async def receive(self) -> Message:
        """Return the next message of the request."""
        if not self._is_open:
            return await self._receive()
        try:
            async with asyncio.timeout(self._until_s - time.monotonic()):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, f"The body must come within {_BODY_TIMEOUT_S:g} s", code="timeout") from None
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self.close()
        return message

    def close(self) -> None:
        """End the body."""
        if self._is_open:
            self._is_open = False
            self._on_end()


def _generates(scope: Scope) -> bool:
    return scope["method"] == "POST" and scope["path"] in _GENERATION_PATHS


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The body must not be larger than {max_bytes} bytes", code="too_large")
