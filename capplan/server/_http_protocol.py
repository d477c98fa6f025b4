"""HTTP protocol of a connection: uvicorn's, with limits on what comes before a request is complete.

uvicorn and httptools accept headers of any size and number, in any time. Bytes are counted before they are
parsed, because a header reaches Python only as a whole.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from capplan.server._protocol import ApiError, aborted, overloaded, shutting_down

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from capplan.server._settings import ServerLimits
    from capplan.server._state import ByteBudget

CLIENT: Final = "capplan.client"
_INTERIM: Final = b"HTTP/1.1 1"
_MAX_PIPELINED: Final = 16
"""Requests that one connection may send before the response to the first; clients hardly ever do."""
_MAX_PARTS: Final = 16_384
"""Of a body: chunks of a few bytes take more time than their size suggests."""


class ConnectionCap:
    """Maximum number of connections of a server.

    Beyond it, the connection is closed that has waited longest for a request or the rest of one. Refusals are
    counted by status. If the server is `draining`, connections are closed after their next response. `on_new`
    is called for every new connection.
    """

    def __init__(
        self, limits: ServerLimits, max_connections: int, budget: ByteBudget, refusals: Counter[int]
    ) -> None:
        self.limits = limits
        self.budget = budget
        self.refusals = refusals
        self.draining = False
        self.on_new: Callable[[], None] = lambda: None
        self._max_connections = max_connections
        self._open = 0
        self._waiting: dict[LimitedProtocol, None] = {}  # in the order in which they began to wait

    def new_protocol(self, **arguments: Any) -> LimitedProtocol:
        self.on_new()
        return LimitedProtocol(self, **arguments)

    def add(self, connection: LimitedProtocol) -> bool:
        """Count a connection; return whether there is a place."""
        self._open += 1
        if self._open > self._max_connections:
            if not self._waiting:
                return False
            next(iter(self._waiting)).refuse_overload()
        self._waiting[connection] = None
        return True

    def wait(self, connection: LimitedProtocol) -> None:
        """Note that a connection waits for a request."""
        self._waiting[connection] = None

    def complete(self, connection: LimitedProtocol) -> None:
        """Note that a request has come as a whole."""
        self._waiting.pop(connection, None)

    def remove(self, connection: LimitedProtocol) -> None:
        self._open -= 1
        self._waiting.pop(connection, None)


class ClientLink:
    """Presence of the client of a request: ``scope["extensions"][CLIENT]``.

    Unlike a wait for ASGI's message ``http.disconnect``, it takes no task.
    """

    def __init__(self) -> None:
        self.is_gone = False
        self._on_gone: Callable[[], object] | None = None

    def on_gone(self, call: Callable[[], object] | None) -> None:
        """Call a function when the client disconnects, or now if it has; None: no longer."""
        self._on_gone = call
        if self.is_gone and call is not None:
            call()

    def end(self) -> None:
        """Note that the client has disconnected."""
        if not self.is_gone:
            self.is_gone = True
            if self._on_gone is not None:
                self._on_gone()


class _HeldHead:
    """Transport of one response; holds its head until its first part: one system call and one packet.

    A head without a part is sent in the next iteration of the event loop.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""
        self._has_begun = False

    def write(self, data: bytes) -> None:
        if self._has_begun:
            if self._held:
                data, self._held = self._held + data, b""
            self._transport.write(data)
        elif data.startswith(_INTERIM):
            self._transport.write(data)
        else:
            self._has_begun = True
            self._held = data
            self._loop.call_soon(self._send_head)

    def close(self) -> None:
        self._send_head()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _send_head(self) -> None:
        if self._held and not self._transport.is_closing():
            self._transport.write(self._held)
        self._held = b""


class _UnframedSend:
    """`send` of a response to HTTP/1.0, without chunks: a body of unknown length ends with the connection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._has_length = False

    async def __call__(self, message: Any) -> None:
        cycle = self._cycle
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not self._has_length:
                cycle.chunked_encoding = False
        elif not self._has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


class LimitedProtocol(HttpToolsProtocol):
    """HTTP connection with limits on its headers, and on the time in which a client sends and reads."""

    def __init__(self, cap: ConnectionCap, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._cap = cap
        self._limits = cap.limits
        self._unparsed_bytes = 0
        """Received since the last complete headers or part of a body."""
        self._receives_body = False
        self._parts = 0
        self._running: RequestResponseCycle | None = None
        self._refusal: ApiError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for headers."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(self._limits.client_buffer_bytes)
        if self._cap.add(self):
            self._start_timer()
        else:
            self._refuse(overloaded("The server has too many connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Release what the connection holds."""
        self._disconnect()
        self.resume_writing()
        self._cap.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes, within the limits."""
        if self.transport.is_closing():
            return
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._unparsed_bytes > self._limits.max_header_bytes:
            self._refuse(self._too_large())
            return
        if self._unparsed_bytes:
            self._cap.budget.hold(self, self._unparsed_bytes)
        if self._running is None and self.timeout_keep_alive_task is None:
            self._start_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._receives_body = False

    def on_headers_complete(self) -> None:
        """Check the headers, and pass the request on."""
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._limits.max_header_bytes or len(self.headers) > self._limits.max_header_count:
            self._refusal = self._too_large()
            raise self._refusal
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._refusal = overloaded(f"At most {_MAX_PIPELINED} requests may be pipelined")
            raise self._refusal
        self._parsed()
        self._stop_timer()
        super().on_headers_complete()
        self.cycle.transport = _HeldHead(self.transport, self.loop)  # type: ignore[assignment]
        if self.scope["http_version"] != "1.1":
            self.cycle.send = _UnframedSend(self.cycle)  # type: ignore[method-assign]
            self.cycle.keep_alive = self.cycle.waiting_for_100_continue = False
        self.scope["extensions"] = {CLIENT: ClientLink()}  # type: ignore[dict-item]
        self._receives_body = True
        self._parts = 0
        if self._running is None:
            self._running = self.cycle

    def on_body(self, body: bytes) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            message = f"The body must not come in more than {_MAX_PARTS} parts"
            self._refusal = ApiError(413, message, code="too_large")
            raise self._refusal
        self._parsed()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._parsed()
        self._receives_body = False
        if self._running is None:  # the rest of a refused body
            self._stop_timer()
            if self._cap.draining:
                self._close()
        else:
            self._cap.complete(self)
            # Not earlier: to close a connection while its client still sends can destroy the response.
            self.cycle.keep_alive &= not self._cap.draining
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of a refused body, which is discarded."""
        self._running = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self.transport.is_closing():
            self.pause_writing()  # limits the time of what is buffered
        elif self._running is None:
            self._cap.wait(self)
            if self._receives_body:
                self._start_timer()

    def pause_writing(self) -> None:
        """Wait for a client that does not read, for a limited time."""
        super().pause_writing()
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(self._limits.send_timeout_s, self._abort)

    def resume_writing(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, also if its client has not read the last response."""
        self._close()

    @property
    def is_new(self) -> bool:
        """Whether the first request of the connection has not come yet."""
        return self.cycle is None

    def shutdown(self) -> None:
        """Close the connection after its running request, or now; a request that has begun is answered."""
        if self._running is not None:
            super().shutdown()
        elif not self._receives_body:  # else after the rest of a refused body
            self._refuse(shutting_down())

    def cut_off(self) -> None:
        """Close the connection, with an error for a request whose response has not begun."""
        if self.pipeline:
            self._abort()
        elif self._running is None:
            self._refuse(shutting_down())
        else:
            if not self._running.response_started:
                self.transport.write(_response(shutting_down() if self._receives_body else aborted()))
            _leave(self._running)
            self.flow.resume_writing()
            self._close()

    def refuse_overload(self) -> None:
        """Close the connection, which waits for a request or the rest of one, in favour of others."""
        self._refuse(overloaded())

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP or beyond a limit; whole requests before it are answered."""
        if self._refusal is None and self._running is not None and not self._receives_body:
            self.cycle.keep_alive = False  # of the last whole one; nothing is parsed any more
            return
        self._refuse(self._refusal or ApiError(400, msg), has_begun=True)

    def _refuse(self, error: ApiError, has_begun: bool = False) -> None:
        """Send an error if a request has begun that has no response yet, and close the connection.

        The first request of a connection counts as begun: its bytes may be on their way for long.
        """
        if self.transport.is_closing():
            return
        if self._running is None:
            can_send = not self._receives_body and (has_begun or self._unparsed_bytes > 0 or self.is_new)
        else:
            can_send = self._receives_body and not self._running.response_started and not self.pipeline
        if can_send:
            self.transport.write(_response(error))
            if error.status_code != HTTPStatus.BAD_REQUEST:
                self._cap.refusals[error.status_code] += 1
        self._close()

    def _close(self) -> None:
        """Close the connection once its buffer is sent; what is being processed cannot be answered."""
        self._disconnect()
        if self.transport.get_write_buffer_size():
            self.pause_writing()
        self.transport.close()

    def _abort(self) -> None:
        self._disconnect()
        self.transport.abort()

    def _disconnect(self) -> None:
        self._stop_timer()
        self._cap.complete(self)
        self._cap.budget.release(self)
        if self._running is not None:
            _leave(self._running)
            self._running.message_event.set()

    def _start_timer(self) -> None:
        if self._timer is not None:
            return
        timeout_s = self._limits.header_timeout_s
        error = ApiError(408, f"The headers must come within {timeout_s:g} s", code="timeout")
        self._timer = self.loop.call_later(timeout_s, self._refuse, error)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _parsed(self) -> None:
        if self._unparsed_bytes:
            self._unparsed_bytes = 0
            self._cap.budget.release(self)

    def _too_large(self) -> ApiError:
        limits = self._limits
        message = (
            f"Request line and headers must not have more than {limits.max_header_bytes} bytes and"
            f" {limits.max_header_count} headers"
        )
        return ApiError(431, message, code="headers_too_large")


def _leave(cycle: RequestResponseCycle) -> None:
    """Process a request as if its client had left."""
    cycle.disconnected = True
    link: ClientLink = cycle.scope["extensions"][CLIENT]  # type: ignore[assignment]
    link.end()


def _response(error: ApiError) -> bytes:
    """Return an error as HTTP/1.1."""
    body = error.body()
    status = HTTPStatus(error.status_code)
    headers = {
        **(error.headers or {}),
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    }
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
