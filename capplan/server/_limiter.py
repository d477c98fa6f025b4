"""Checks of requests before they are handled: key, queue length, size and time of the body."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections import Counter
from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capplan.server._protocol import ApiError, overloaded
from capplan.server._state import ServerState

GENERATION_PATHS: Final = ("/v1/completions", "/v1/chat/completions")
_ADMIN_PATHS: Final = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
PEER_PATH: Final = "/v1/adapter_files"
"""Of servers that send files, ``PEER_PATH/DIGEST/FILE``, and check them, ``PEER_PATH/DIGEST``."""
_POOL_PATHS: Final = (f"{PEER_PATH}/", "/v1/adapter_shares")


class RequestLimiter:
    """ASGI middleware that checks key, queue length, and size and time of bodies.

    Parameters
    ----------
    state
        State of the server.
    refuse
        Raises if no further request is accepted.
    """

    def __init__(self, app: ASGIApp, state: ServerState, refuse: Callable[[], None]) -> None:
        self._app = app
        self._state = state
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the connection leaves the body out
            scope = {**scope, "method": "GET"}
        try:
            self._check(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        body = _BodyReader(receive, self._state)
        try:
            await self._app(scope, body.receive, send)
        except asyncio.CancelledError:  # at the end of the process; the client has been disconnected
            if not self._state.draining:
                raise
        finally:
            body.close()

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        settings, path = self._state.settings, scope["path"]
        if path in _ADMIN_PATHS:
            if settings.lora_root is None:
                message = "Adapters cannot be loaded or unloaded: the server has no --lora-root"
                raise ApiError(403, message, code="no_lora_root")
            _require_key(headers, "admin API key", settings.admin_api_key)
        elif path.startswith(_POOL_PATHS):
            if settings.pool is None:
                message = "Adapters are not shared with other servers: the server has no --registry"
                raise ApiError(403, message, code="no_registry")
            _require_key(headers, "admin API key", *_pool_keys(path, settings.admin_api_key))
        elif path.startswith("/v1/"):
            _require_key(headers, "API key", settings.api_key)
        length = headers.get("content-length", "0").strip()
        if not length.isdecimal() or int(length[:20]) > self._state.max_body_bytes:
            raise _too_large(self._state.max_body_bytes, self._state.refusals)
        if generates(scope):
            self._refuse()
            self._state.refuse_if_late()


def transfer_key(admin_key: str, digest: str) -> str:
    """Return the key by which servers of a pool ask each other for one adapter.

    The address of a server that has ended may belong to another process, which learns this key and not the
    admin key.
    """
    return hmac.new(admin_key.encode(), digest.encode(), "sha256").hexdigest()


def _pool_keys(path: str, admin_key: str | None) -> tuple[str | None, ...]:
    """Return the keys that a request of another server may have."""
    if admin_key is None or not path.startswith(f"{PEER_PATH}/"):
        return (admin_key,)
    digest = path.removeprefix(f"{PEER_PATH}/").partition("/")[0]
    return admin_key, transfer_key(admin_key, digest)


def _require_key(headers: Headers, name: str, *keys: str | None) -> None:
    """Check the key of a request, which must be one of `keys`; None: none is required."""
    if None in keys:
        return
    scheme, _, given = headers.get("authorization", "").partition(" ")
    found = given.strip().encode("latin-1")
    # The comparison takes the same time wherever the keys differ.
    is_valid = [hmac.compare_digest(found, str(key).encode()) for key in keys]
    if scheme.lower() != "bearer" or not any(is_valid):
        header = {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, f"A valid {name} is required", None, "invalid_api_key", header)


class _BodyReader:
    """Request body with limits of size and time, declared or not."""

    def __init__(self, receive: Receive, state: ServerState) -> None:
        self._receive = receive
        self._max_bytes = state.max_body_bytes
        self._budget = state.budget
        self._refusals = state.refusals
        self._timeout_s = state.settings.limits.body_timeout_s
        self._until_s = asyncio.get_running_loop().time() + self._timeout_s
        self._timeout: asyncio.Timeout | None = None
        self._bytes = 0
        self._is_open = True
        self._is_refused = False

    async def receive(self) -> Message:
        """Return the next message of the request."""
        if not self._is_open:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until_s) as self._timeout:
                message = await self._receive()
        except TimeoutError:
            raise self._error() from None
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._max_bytes:
            raise _too_large(self._max_bytes, self._refusals)
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self.close()
        else:
            self._budget.hold(self, self._bytes)
        if self._is_refused:
            raise self._error()
        return message

    def refuse_overload(self) -> None:
        """End the request: its bytes are needed for others."""
        self._is_refused = True
        self._refusals[503] += 1
        if self._timeout is not None:
            with contextlib.suppress(RuntimeError):  # not waiting
                self._timeout.reschedule(0.0)

    def close(self) -> None:
        """End the body."""
        self._is_open = False
        self._budget.release(self)

    def _error(self) -> ApiError:
        if self._is_refused:
            return overloaded()
        self._refusals[408] += 1
        return ApiError(408, f"The body must come within {self._timeout_s:g} s", code="timeout")


def generates(scope: Scope) -> bool:
    """Return whether a request is for a completion."""
    return scope["method"] == "POST" and scope["path"] in GENERATION_PATHS


def _too_large(max_bytes: int, refusals: Counter[int]) -> ApiError:
    refusals[413] += 1
    return ApiError(413, f"The body must not be larger than {max_bytes} bytes", code="too_large")
