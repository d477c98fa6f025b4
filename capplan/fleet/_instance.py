"""One instance of a served plan: its HTTP client, and its supervision: start, probe, restart, stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Final, Literal, TypeVar

import aiohttp

from capplan.errors import InputError
from capplan.fleet._launcher import InstanceHandle, InstanceSpec, Launcher, LaunchError
from capplan.http_connection import ConnectionLostError, ConnectionPool, HttpConnection, PoolLimits

T = TypeVar("T")

_TIMEOUT_PARTS: Final = 12
_FILE_LIMITS: Final = (errno.EMFILE, errno.ENFILE)


class InstanceGoneError(Exception):
    """The instance cannot be reached, or accepts no request; the request has not been started.

    `refusal` is the code of its error, if it has refused the request.
    """

    def __init__(self, refusal: str | None = None) -> None:
        super().__init__(refusal)
        self.refusal = refusal


class FileLimitError(Exception):
    """The router has too many open files to connect to an instance."""


@contextlib.contextmanager
def _file_limit() -> Iterator[None]:
    """Raise `FileLimitError` for errors of a connection that are no fault of the instance."""
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        if error.os_error.errno in _FILE_LIMITS:
            raise FileLimitError from None
        raise


class ForwardedResponse:
    """A request that is sent to an instance, and its response; a context manager.

    On entry, raise `InstanceGoneError` if the process cannot be reached, and `FileLimitError` if the router
    has too many open files; the request has not been sent then. If the connection fails after that, raise
    `ConnectionLostError`.
    """

    def __init__(self, client: InstanceClient, path: str, body: bytes, content_type: bytes) -> None:
        self._client = client
        self._pool = client.pool
        self._request = path, body, content_type
        self._connection: HttpConnection | None = None

    async def __aenter__(self) -> HttpConnection:
        self._client.running += 1
        try:
            self._connection = connection = await self._pool.connection()
            self._pool.post(connection, *self._request)
            await connection.wait_for_head()
        except BaseException as error:
            self._release()
            if isinstance(error, OSError):  # also TimeoutError
                raise (FileLimitError if error.errno in _FILE_LIMITS else InstanceGoneError) from None
            raise
        return connection

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        self._client.running -= 1
        if self._connection is not None:
            self._pool.release(self._connection)


class InstanceClient:
    """Connections to an engine process; closing it fails all its requests.

    `pool` is for forwarded requests, states and pings. `running` requests are not answered as a whole.
    `progress_s` is the time of the last part of a response to one of them, on the monotonic clock. Its
    methods raise `FileLimitError` if the router has too many open files.
    """

    def __init__(self, url: str, key: str) -> None:
        self.running = 0
        self.progress_s = -math.inf
        headers = {"Authorization": f"Bearer {key}"}
        limits = PoolLimits()
        self.pool = ConnectionPool(url, headers, limits)
        self._session = aiohttp.ClientSession(
            base_url=url,
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            # Responses may take any time; the supervisor detects dead processes.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_timeout_s),
            auto_decompress=False,
        )

    def post(self, path: str, body: bytes, content_type: bytes) -> ForwardedResponse:
        """Return a request, which is sent on entry of its context; the response may take any time."""
        return ForwardedResponse(self, path, body, content_type)

    def note_progress(self) -> None:
        """Note that a part of a response has come: evidence that the instance works, however slowly."""
        self.progress_s = time.monotonic()

    async def get(self, path: str, timeout_s: float) -> bytes:
        """Return the body of a response that is no error.

        Without one, raise `aiohttp.ClientError` or `TimeoutError`.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        with _file_limit():
            got = await self._session.get(path, timeout=timeout)
        async with got as response:
            response.raise_for_status()
            return await response.read()

    async def post_as(self, key: str, path: str, body: bytes, timeout_s: float) -> None:
        """Post a JSON document with another key than the client's; raise as `get`."""
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        if self._session.closed:
            raise aiohttp.ClientConnectionError("the connection has been closed")
        with _file_limit():
            posted = await self._session.post(path, data=body, headers=headers, timeout=timeout)
        async with posted as response:
            response.raise_for_status()

    async def state(self, timeout_s: float) -> bytes:
        """Return the state that the instance reports.

        Without one, raise `ConnectionLostError`, `OSError` or `TimeoutError`.
        """
        async with asyncio.timeout(timeout_s):
            status, body = await self._fetch("/state")
        if status != HTTPStatus.OK:
            raise ConnectionLostError
        return body

    async def _fetch(self, path: str) -> tuple[int, bytes]:
        """Return status and body of a small response, over the connections of forwarded requests."""
        connection = await self.pool.connection()
        try:
            self.pool.get(connection, path)
            await connection.wait_for_head()
            return connection.status, await connection.whole_body()
        finally:
            self.pool.release(connection)

    async def ping(self, timeout_s: float) -> str | None:
        """Return why the instance accepts no requests, or None; raise `TimeoutError` without a response."""
        try:
            status, body = await _within(timeout_s, self._fetch("/ping"))
        except TimeoutError:
            raise
        except OSError as error:
            if error.errno in _FILE_LIMITS:
                raise FileLimitError from None
            return "unreachable"
        except ConnectionLostError:
            return "unreachable"
        if status < HTTPStatus.BAD_REQUEST:
            return None
        try:
            return str(json.loads(body)["reason"])
        except (ValueError, TypeError, KeyError):
            return f"status {status}"

    async def close(self) -> None:
        """Fail all requests in progress."""
        self.pool.close()
        await self._session.close()


async def _within(timeout_s: float, work: Coroutine[None, None, T]) -> T:
    """Return the result of work, or raise `TimeoutError`.

    Of the time in which this event loop is late, only a part counts: its timers run before it reads what has
    arrived meanwhile.
    """
    task = asyncio.ensure_future(work)
    try:
        for _ in range(_TIMEOUT_PARTS):
            done, _ = await asyncio.wait((task,), timeout=timeout_s / _TIMEOUT_PARTS)
            if done:
                return task.result()
        raise TimeoutError
    finally:
        task.cancel()


InstanceState = Literal["starting", "up", "stalled", "down", "failed"]


@dataclass(frozen=True)
class RestartPolicy:
    """Probes and restarts of instances.

    The server answers pings at any time, its engine health probes between two steps. An instance that does
    not respond to pings, and makes no progress with its requests meanwhile, or that refuses requests, is
    stalled: it gets no new requests until it responds again. One that does not respond to a probe, or is
    stalled for the time of a probe, is restarted.
    """

    initial_delay_s: float = 0.5
    """Delay before a restart; it doubles with every restart in a row, up to `max_delay_s`."""
    max_delay_s: float = 30.0
    max_restarts: int = 5
    """Restarts in a row after which an instance has failed for good."""
    reset_after_s: float = 60.0
    """Uptime after which the count of restarts in a row is reset."""
    ping_every_s: float = 1.0
    ping_timeout_s: float = 3.0
    probe_every_s: float = 5.0
    probe_timeout_s: float = 60.0
    abandon_after_s: float = 10.0
    """Time without progress after which the requests of a stalled instance are ended with an error."""
    max_refused_probes: int = 12
    """Refused probes in a row after which an instance is restarted."""
    start_timeout_s: float = 1800.0
    """Time until an instance accepts requests."""
    stop_grace_s: float = 15.0


class InstanceSupervisor:
    """Starts, probes and restarts one instance, which has an API key of its own.

    `on_available` is called with whether the instance accepts requests, at each change of its state. `client`
    is None if the instance is not up.
    """

    def __init__(
        self,
        spec: InstanceSpec,
        launcher: Launcher,
        policy: RestartPolicy,
        key: str,
        log: Callable[[str], None],
        on_available: Callable[[bool], None],
    ) -> None:
        self.spec = spec
        self._on_available = on_available
        self.state = "starting"
        self.client: InstanceClient | None = None
        self.restarts = 0
        self._launcher = launcher
        self._key = key
        self._policy = policy
        self._log = log
        self._handle: InstanceHandle | None = None
        self._start_duration_s = 1.0
        self._back_at_s = 0.0
        self._refused = 0
        self._stalled_since_s = 0.0

    @property
    def state(self) -> InstanceState:
        """State; ``stalled``: running, but without new requests; ``failed`` is final."""
        return self._state

    @state.setter
    def state(self, state: InstanceState) -> None:
        self._state = state
        self._on_available(self.is_up)

    @property
    def is_up(self) -> bool:
        """Whether the instance accepts requests."""
        return self.state == "up"

    def retry_after_s(self) -> int:
        """Return the time until the instance may be up again."""
        if self.state == "failed":
            return 60
        return max(1, min(60, math.ceil(self._back_at_s - time.monotonic())))

    async def start(self) -> None:
        """Start the instance; raise `InputError` or `LaunchError` if it does not start."""
        started_s = time.monotonic()
        self._back_at_s = started_s + self._start_duration_s
        try:
            async with asyncio.timeout(self._policy.start_timeout_s):
                self._handle = await self._launcher.launch(self.spec, self._key)
        except TimeoutError:
            took = f"{self._policy.start_timeout_s:g} s"
            raise LaunchError(f"instance {self.spec.name} does not take requests after {took}") from None
        self._start_duration_s = time.monotonic() - started_s
        self.client = InstanceClient(self._handle.url, self._key)
        self.state = "up"
        self._refused = 0

    async def supervise(self) -> None:
        """Restart the instance whenever it ends; return when it has failed for good."""
        in_a_row = 0
        while self._handle is not None:
            since_s = time.monotonic()
            end = await self._end_of(self._handle)
            await self._disconnect()
            if time.monotonic() - since_s >= self._policy.reset_after_s:
                in_a_row = 0
            self._log(f"instance {self.spec.name} has ended {end}")
            in_a_row = await self._restart(in_a_row)

    async def _restart(self, in_a_row: int) -> int:
        """Restart within the policy's limit; return the number of restarts in a row."""
        while in_a_row < self._policy.max_restarts:
            delay_s = min(self._policy.initial_delay_s * 2.0**in_a_row, self._policy.max_delay_s)
            in_a_row += 1
            self.restarts += 1
            self._back_at_s = time.monotonic() + delay_s + self._start_duration_s
            await asyncio.sleep(delay_s)
            try:
                await self.start()
            except (InputError, LaunchError, OSError) as error:
                self._log(str(error))
            else:
                self._log(f"instance {self.spec.name} is back")
                return in_a_row
        self.state = "failed"
        self._handle = None
        self._log(f"instance {self.spec.name} is given up after {in_a_row} restarts")
        return in_a_row

    async def _end_of(self, handle: InstanceHandle) -> str:
        """Wait until a process ends or does not respond, and return a description."""
        ended = asyncio.ensure_future(handle.ended())
        pings = asyncio.ensure_future(self._watch_pings())
        try:
            while True:
                await asyncio.wait((ended,), timeout=self._policy.probe_every_s)
                if ended.done():
                    return ended.result()
                if not await self._responds(ended):
                    await self._disconnect()  # first: its requests fail at once
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(handle.stop(0), self._policy.stop_grace_s)
                    return "after it stopped responding"
        finally:
            ended.cancel()
            pings.cancel()

    async def _watch_pings(self) -> None:
        """Take the instance out of the rotation while it does not respond, and end its requests then."""
        while True:
            await asyncio.sleep(self._policy.ping_every_s)
            client, handle = self.client, self._handle
            if client is None or handle is None:
                return
            await self._ping(client, handle)
            if client.running and self._makes_no_progress(client, self._policy.abandon_after_s):
                self._log(f"instance {self.spec.name} makes no progress: {client.running} requests are ended")
                self.client = InstanceClient(handle.url, self._key)
                await client.close()

    async def _ping(self, client: InstanceClient, handle: InstanceHandle) -> None:
        begin_s = time.monotonic()
        try:
            reason = "stopped" if handle.is_stopped() else await client.ping(self._policy.ping_timeout_s)
        except FileLimitError:
            return
        except TimeoutError:
            if client.progress_s > begin_s and not handle.is_stopped():
                return  # busy
            reason = "no response"
        if client is not self.client:
            return
        if reason is not None:
            self.take_out(reason)
        elif self.state == "stalled":
            self.state = "up"
            self._log(f"instance {self.spec.name} responds again")

    def take_out(self, reason: str) -> None:
        """Send no new requests until the instance responds again; running ones go on."""
        if not self.is_up or self.client is None:
            return
        self.state = "stalled"
        self._stalled_since_s = time.monotonic()
        self._log(f"instance {self.spec.name} is stalled: {reason}")

    def _makes_no_progress(self, client: InstanceClient, time_s: float) -> bool:
        """Return whether a stalled instance has made no progress for a time."""
        since_s = max(self._stalled_since_s, client.progress_s)
        return self.state == "stalled" and time.monotonic() - since_s > time_s

    async def _responds(self, ended: asyncio.Future[str]) -> bool:
        """Return whether the process responds in any way, or has ended meanwhile."""
        client, timeout_s, begin_s = self.client, self._policy.probe_timeout_s, time.monotonic()
        if client is None:
            return True
        if self._makes_no_progress(client, timeout_s):
            return ended.done()
        try:
            await client.get("/health", timeout_s)
        except TimeoutError:
            return client.progress_s > begin_s or ended.done()
        except (aiohttp.ClientResponseError, FileLimitError):
            return True  # unhealthy, but responsive; or no fault of its own
        except aiohttp.ClientError:  # refused: it may be about to end
            self._refused += 1
            return self._refused < self._policy.max_refused_probes or ended.done()
        self._refused = 0
        return True

    async def _disconnect(self) -> None:
        self.state = "down"
        client, self.client = self.client, None
        if client is not None:
            await client.close()

    async def stop(self, at_once: bool) -> None:
        """Stop the instance; `supervise` must have been cancelled."""
        if self._handle is not None:
            await self._handle.stop(0 if at_once else self._policy.stop_grace_s)
        self._handle = None
        await self._disconnect()
