"""Server settings and state, and checks of requests: key, queue length, size and time of the body."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capplan.engine.server.byte_budget import ByteBudget
from capplan.engine.server.concurrency import ConcurrencyLimit
from capplan.engine.server.limits import ServerLimits
from capplan.engine.server.protocol import ApiError, overloaded, unknown_model
from capplan.errors import InputError

GENERATION_PATHS: Final = ("/v1/completions", "/v1/chat/completions")
_ADMIN_PATHS: Final = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
PEER_PATH: Final = "/v1/adapter_files"
"""Of servers that send files, ``PEER_PATH/DIGEST/FILE``, and check them, ``PEER_PATH/DIGEST``."""
_POOL_PATHS: Final = (f"{PEER_PATH}/", "/v1/adapter_shares")


@dataclass(frozen=True)
class PoolSettings:
    """Settings of a server that shares adapters with others.

    Parameters
    ----------
    registry
        Adapter registry: SQLite file or URL.
    server_name
        Name in the registry; None: host and port.
    server_url
        Where other servers reach this one; None: where it listens.
    base_model
        Base model in the registry of the adapters to serve; None: the name of the server's.
    max_stored_gib
        Limit of the files of all adapters that the server stores.
    """

    registry: str
    server_name: str | None = None
    server_url: str | None = None
    base_model: str | None = None
    max_stored_gib: float = 64.0

    def __post_init__(self) -> None:
        for name in ("registry", "server_name", "server_url"):
            if getattr(self, name) == "":
                raise InputError("must not be empty", location=name)
        if not 0 < self.max_stored_gib < float("inf"):
            raise InputError("must be a finite number > 0", self.max_stored_gib, "max_stored_gib")

    @property
    def max_stored_bytes(self) -> int:
        """Limit in bytes."""
        return int(self.max_stored_gib * 2**30)


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
    admin_api_key
        Required instead to load and unload adapters.
    lora_root
        Folder of adapters that may be loaded at run time; None: none can be loaded or unloaded.
    pool
        Adapter registry whose adapters are served on demand, and stored below `lora_root`.
    max_requests
        Maximum number of prompts in the engine, running and waiting; further ones get 429.
    drain_timeout_s
        Time for running requests after SIGTERM.
    limits
        Limits of requests and connections.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    admin_api_key: str | None = None
    lora_root: Path | None = None
    pool: PoolSettings | None = None
    max_requests: int = 1024
    drain_timeout_s: float = 30.0
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise InputError("must be a port from 0 to 65535", self.port, "port")
        if not 0 <= self.drain_timeout_s < float("inf"):
            raise InputError("must be a finite number >= 0", self.drain_timeout_s, "drain_timeout_s")
        for name in ("api_key", "admin_api_key"):
            if getattr(self, name) == "":
                raise InputError("must not be empty", location=name)
        if self.admin_api_key is not None and self.admin_api_key == self.api_key:
            rule = "must be another key than --api-key, which all clients have"
            raise InputError(rule, location="admin_api_key")
        if not (self.model_name and self.model_name.isprintable()):  # of any length: it may be a path
            raise InputError("must be printable characters, not empty", self.model_name, "served_model_name")
        if self.lora_root is not None and not self.lora_root.is_dir():
            raise InputError("must be a folder", str(self.lora_root), "lora_root")
        if self.lora_root is not None and self.admin_api_key is None:
            rule = "requires --admin-api-key: the key of those who may load and unload adapters"
            raise InputError(rule, location="lora_root")
        if self.pool is not None and self.lora_root is None:
            rule = "requires --lora-root: the folder of adapters that this server stores"
            raise InputError(rule, location="registry")


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
        length = headers.get("content-length", "0")
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
