"""State of a server, of one engine or of a router, and the checks of requests before they are handled.

The state is adapters, requests in flight, refusals, and the server's limits. Bytes of incomplete requests are
bounded. If the event loop is late, so is the number of requests in flight: requests are refused before they
delay others. The checks are of key, queue length, and size and time of the body.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Iterator
from typing import Final, Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capplan.server._protocol import ApiError, overloaded, unknown_model
from capplan.server._settings import ServerSettings

_TICK_S: Final = 0.1
_LATE_S: Final = 1.0
_DECREASE: Final = 2 / 3
_STEPS_TO_MAX: Final = 100
_MIN_LIMIT: Final = 32
"""An event loop that is late with fewer requests is late for another reason."""


class ConcurrencyLimit:
    """Limit of requests in flight that follows the lag of the event loop.

    A process beyond its capacity runs ever more behind, and with it health probes, streams and new
    connections. Additive increase and multiplicative decrease (Chiu and Jain, 1989) find the number of
    requests that it handles with a lag of about a second. The limit, `value`, is infinite unless the event
    loop has been late; `max_requests` is the maximum while it is in time.
    """

    def __init__(self, max_requests: int, in_flight: Callable[[], int]) -> None:
        self._step = max(1, max_requests // _STEPS_TO_MAX)
        self._max_requests = max_requests
        self._in_flight = in_flight
        self._is_reached = True
        """Whether the requests in flight have been within the limit since its last decrease."""
        self._was_late = False
        self.value = math.inf

    def admits(self) -> bool:
        """Return whether a further request is accepted."""
        has_room = self._in_flight() < self.value
        self._is_reached |= has_room
        return has_room

    async def follow(self) -> None:
        """Update the limit until cancelled."""
        while True:
            begin_s = time.monotonic()
            await asyncio.sleep(_TICK_S)
            self.update(time.monotonic() - begin_s - _TICK_S)

    def update(self, lag_s: float) -> None:
        """Update the limit by the present lag of the event loop.

        A decrease takes effect when requests that were accepted before it have ended. Until then the limit is
        not decreased again. A single lag is a pause, such as a garbage collection: not an overload.
        """
        in_flight = self._in_flight()
        self._is_reached |= in_flight <= self.value
        if lag_s <= _LATE_S:
            self.value += self._step
        elif self._was_late and self._is_reached and in_flight > _MIN_LIMIT:
            self.value = max(_MIN_LIMIT, _DECREASE * min(self.value, in_flight))
            self._is_reached = False
        self._was_late = lag_s > _LATE_S
        if self.value >= self._max_requests:
            self.value = math.inf


class ServerState(ABC):
    """State of a server that finishes running requests before it stops.

    Attributes
    ----------
    adapters
        Names of the adapters that are served.
    draining
        Whether new requests are refused.
    max_model_len
        Maximum number of tokens of prompt and output.
    refusals
        Number of refused requests by status.
    max_body_bytes
        Maximum size of a request body.
    budget
        Bytes of requests that are incomplete, or not submitted or forwarded yet.
    concurrency
        Limit of requests in flight while the event loop is late.
    """

    def __init__(self, settings: ServerSettings, adapters: Container[object], max_model_len: int) -> None:
        self.settings = settings
        self.adapters = adapters
        self.max_model_len = max_model_len
        self.max_body_bytes = settings.limits.body_bytes(max_model_len)
        self.budget = ByteBudget(settings.limits.buffered_bytes(max_model_len))
        self.concurrency = ConcurrencyLimit(settings.max_requests, lambda: self.in_flight)
        self.created = int(time.time())
        self.draining = False
        self.refusals: Counter[int] = Counter()

    @property
    @abstractmethod
    def failed(self) -> asyncio.Event:
        """Event after which the server stops."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Number of requests, or prompts, that are not answered yet."""

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

    def refuse_if_late(self) -> None:
        """Check that the event loop keeps up with the requests in flight.

        Raises
        ------
        ApiError
            503 if it is late.
        """
        if not self.concurrency.admits():
            self.refusals[503] += 1
            raise overloaded()

    @contextlib.contextmanager
    def holding(self, size_bytes: int) -> Iterator[None]:
        """Count the bytes of a complete request until it is submitted or forwarded.

        Raises
        ------
        ApiError
            503 if the budget has no room.
        """
        with self.budget.reserved(size_bytes) as has_room:
            if not has_room:
                self.refusals[503] += 1
                raise overloaded()
            yield

    def refusal(self, status: int, message: str, code: str, retry_after_s: int) -> ApiError:
        """Count a refusal and return its error."""
        self.refusals[status] += 1
        return ApiError(status, message, code=code, headers={"Retry-After": str(retry_after_s)})


class ByteBudget:
    """Budget of the bytes of all requests that are incomplete, or not submitted or forwarded yet.

    A request that arrives slowly holds its bytes for long. When the budget is exhausted, the requests that
    have been arriving for the longest time are refused, so that slow clients cannot lock others out.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: dict[IncompleteRequest, int] = {}  # in order of arrival
        self.used_bytes = 0

    def hold(self, request: IncompleteRequest, total_bytes: int) -> None:
        """Set the bytes of an incomplete request; it is refused itself if it is the oldest."""
        self.used_bytes += total_bytes - self._held.get(request, 0)
        self._held[request] = total_bytes
        self._make_room(0)

    def release(self, request: IncompleteRequest) -> None:
        """Return the bytes of a request, which is complete or has ended."""
        self.used_bytes -= self._held.pop(request, 0)

    @contextlib.contextmanager
    def reserved(self, size_bytes: int) -> Iterator[bool]:
        """Reserve bytes of a complete request, which is not refused later; yield whether there is room."""
        self._make_room(size_bytes)
        has_room = self.used_bytes + size_bytes <= self._max_bytes
        size_bytes = size_bytes if has_room else 0
        self.used_bytes += size_bytes
        try:
            yield has_room
        finally:
            self.used_bytes -= size_bytes

    def _make_room(self, size_bytes: int) -> None:
        while self._held and self.used_bytes + size_bytes > self._max_bytes:
            oldest = next(iter(self._held))
            self.release(oldest)
            oldest.refuse_overload()


class IncompleteRequest(Protocol):
    """Request that has not arrived as a whole."""

    def refuse_overload(self) -> None:
        """End the request: its bytes are needed for others."""
        ...


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
