"""Server process: listen, report readiness, drain and stop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from capplan.engine import (
    AUTO,
    CoreProcess,
    CoreSettings,
    Ended,
    EngineOptions,
    RecordFile,
    StepRecord,
    bound_to,
    core_cpus,
    other_cpus,
)
from capplan.engine.models import model_config, require_shardable
from capplan.errors import InputError
from capplan.processes import collect_rarely, raise_file_limit, without_full_collections
from capplan.server._async_engine import RequestState
from capplan.server._http_protocol import ConnectionCap, LimitedProtocol
from capplan.server._routes import ServerApp
from capplan.server._service import Service
from capplan.server._settings import NAME_RULE, ServerSettings, is_name
from capplan.server._state import ServerState

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_KEEP_ALIVE_S: Final = 75
_SHUTDOWN_TIMEOUT_S: Final = 5
"""For responses that are complete but not sent, and for those that draining cut off."""
_CANCEL_TIMEOUT_S: Final = 7
"""For requests that do not end when they are disconnected."""
_LAST_REQUESTS_S: Final = 3.0
"""For the first request of clients that have connected when the server stops to listen."""
_TICK_S: Final = 0.02
_BACKLOG: Final = 8192
"""Connections in the queue of the kernel (at most ``net.core.somaxconn``), and accepted per iteration.

Beyond it the kernel drops packets, which clients repeat ever later.
"""

_SO_ATTACH_FILTER: Final = 26
_DROP_ALL: Final = struct.pack("=HBBI", 6, 0, 0, 0)
"""The program "return 0" of the Berkeley packet filter."""


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet.

    Raises
    ------
    InputError
        If the address is not available.
    """
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio disables Nagle's algorithm, which delays events, only for sockets created with IPPROTO_TCP.
        listener = socket.socket(kind, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        raise _cannot_listen(error, f"{host}:{port}") from None


def _cannot_listen(error: OSError, address: str) -> InputError:
    return InputError(f"cannot be listened on: {error.strerror or error}", location=address)


def url_of(listener: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def ignore_new_connections(listener: socket.socket) -> None:
    """Let the kernel drop requests for new connections; those it has accepted remain in its queue.

    To close a listening socket resets the connections in its queue. A client whose first packet is dropped
    repeats it after a second, and is refused then.
    """
    if sys.platform == "linux":
        filter_ = ctypes.create_string_buffer(_DROP_ALL)
        program = struct.pack("@HP", 1, ctypes.addressof(filter_))
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


class DrainingServer(uvicorn.Server):
    """uvicorn with a shutdown in two steps.

    The first SIGTERM or SIGINT lets running requests finish, for a limited time, while new ones are refused
    with 503. Every connection that the kernel has accepted is answered. The second stops the server at once.

    Parameters
    ----------
    ready
        Called once the server listens.
    files_each
        Open files per connection.
    """

    def __init__(
        self, app: ASGIApp, state: ServerState, ready: Callable[[], None], files_each: int = 1
    ) -> None:
        raise_file_limit()
        limits = state.settings.limits
        self._cap = cap = ConnectionCap(limits, limits.connections(files_each), state.budget, state.refusals)
        super().__init__(
            uvicorn.Config(
                app,
                http=cap.new_protocol,  # type: ignore[arg-type] # called like a class
                ws="none",
                log_level=logging.ERROR,  # warnings are about clients
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_CANCEL_TIMEOUT_S,
            )
        )
        self._state = state
        self._ready = ready
        self._tasks: list[asyncio.Task[None]] = []
        self._accepts = False
        self._accepting: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and report it."""
        try:
            await super().startup(sockets)
        except OSError as error:
            raise _cannot_listen(error, "address") from None
        self._cap.on_new = partial(self._accept_soon, list(sockets or ()))
        self._tasks.append(asyncio.ensure_future(self._exit_on_failure()))
        self._tasks.append(asyncio.ensure_future(self._state.concurrency.follow()))
        self._tasks.append(asyncio.ensure_future(collect_rarely()))
        self._ready()

    def _accept_soon(self, sockets: Sequence[socket.socket]) -> None:
        """After a new connection, accept the others that wait.

        uvloop accepts one per iteration. The connections of an overload would wait in the kernel, where
        nothing refuses them, until it resets them.
        """
        if not self._accepts:
            self._accepts = True
            asyncio.get_running_loop().call_soon(self._accept_waiting, sockets)

    def _accept_waiting(self, sockets: Sequence[socket.socket]) -> None:
        self._accepts = False
        for listener in sockets:
            for _ in range(_BACKLOG):
                try:
                    connection, _address = listener.accept()
                except OSError:  # none waits, or there are too many open files
                    break
                connection.setblocking(False)
                task = asyncio.ensure_future(self._connect(connection))
                self._accepting.add(task)
                task.add_done_callback(self._accepting.discard)

    async def _connect(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        protocol = self._cap.new_protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state, _loop=loop
        )
        with contextlib.suppress(OSError):  # the client has left
            await loop.connect_accepted_socket(lambda: protocol, connection)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the server runs; unlike uvicorn, do not raise them again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.end)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the clients that have connected, and stop."""
        self._cap.draining = True
        if not self.force_exit:
            await self._take_last_requests(sockets or [])
        self._state.draining = True
        cut_off = asyncio.get_running_loop().call_later(_SHUTDOWN_TIMEOUT_S, self._cut_off)
        await super().shutdown(sockets)
        cut_off.cancel()
        if self.force_exit:
            await self.lifespan.shutdown()

    async def _take_last_requests(self, sockets: Sequence[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _LAST_REQUESTS_S

        def waits() -> bool:
            return loop.time() < until_s and not self.force_exit

        for listener in sockets:
            ignore_new_connections(listener)
        while waits() and select.select(sockets, (), (), 0)[0]:
            await asyncio.sleep(_TICK_S)  # the event loop accepts what is in the kernel's queue
        for server in self.servers:
            server.close()
        while waits() and any(each.is_new for each in self._connections):
            await asyncio.sleep(_TICK_S)

    def _cut_off(self) -> None:
        for connection in self._connections:
            connection.cut_off()

    @property
    def _connections(self) -> list[LimitedProtocol]:
        return [each for each in self.server_state.connections if isinstance(each, LimitedProtocol)]

    def end(self) -> None:
        """Drain and stop; called again, stop at once."""
        if self._state.draining:
            self.should_exit = self.force_exit = True
            self._cut_off()
        else:
            self._state.draining = self._cap.draining = True
            self._tasks.append(asyncio.ensure_future(self._drain()))

    async def _drain(self) -> None:
        try:
            await self._state.drain()
        except Exception:
            logging.getLogger(__name__).exception("running requests are cut off: draining has failed")
        finally:
            self.should_exit = True

    async def _exit_on_failure(self) -> None:
        await self._state.failed.wait()
        self.should_exit = True


@dataclass(frozen=True)
class InstanceConfig:
    """Configuration of one engine with its server.

    Attributes
    ----------
    model, adapters
        As for `Engine`.
    engine
        Fields of `EngineArgs` and `EngineOptions` except `max_in_flight`, which is
        the server's `max_requests`.
    records
        Parquet file of step records; None: not written.
    cpu_affinity
        CPUs of the engine core, as for `capplan.engine._affinity.core_cpus`; the server uses the others.
    """

    model: str
    server: ServerSettings
    adapters: Mapping[str, str | Path | int] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    records: Path | None = None
    cpu_affinity: str = AUTO

    def core_settings(self) -> CoreSettings:
        """Return the arguments of the engine.

        Raises
        ------
        InputError
            For what can be refused before a process starts.
        """
        for name in self.adapters:
            if not is_name(name):
                raise InputError(NAME_RULE, name, "adapters")
        if self.server.model_name in self.adapters:
            rule = "must be other names than the base model's"
            raise InputError(rule, self.server.model_name, "adapters")
        options = {**self.engine, "max_in_flight": self.server.max_requests}
        parsed = EngineOptions.parse(options)
        require_shardable(model_config(self.model), parsed.tensor_parallel_size)
        return CoreSettings(self.model, dict(self.adapters), options)


def run_instance(instance: InstanceConfig, ready: Callable[[str], None]) -> int:
    """Start an engine core and serve until stopped.

    Parameters
    ----------
    ready
        Called with the URL once requests are accepted.

    Returns
    -------
    int
        Exit status: 0 if stopped, 1 if the engine core failed.

    Raises
    ------
    CapplanError
        If the engine cannot be built, or the address is not available.
    """
    settings = instance.server
    with contextlib.ExitStack() as stack:
        listener: socket.socket = stack.enter_context(bind(settings.host, settings.port))
        observers = []
        if instance.records is not None:
            observers.append(_Recorder(stack.enter_context(RecordFile(instance.records))))
        arguments = instance.core_settings()
        device = str(arguments.options.get("device") or "cpu")
        cpus = stack.enter_context(core_cpus(instance.cpu_affinity, device))
        core = stack.enter_context(CoreProcess(arguments, cpus))
        if cpus:
            stack.enter_context(bound_to(other_cpus(cpus)))
        service = Service(core.connection, core.ready, settings, instance.adapters, observers)
        if settings.pool is not None:
            from capplan.server._adapter_pool import open_pool  # with an HTTP client and SQLAlchemy

            service.join(open_pool(settings, service.adapters, url_of(listener)))
        server = DrainingServer(ServerApp(service), service, lambda: ready(url_of(listener)))
        with without_full_collections():
            server.run([listener])
        failure = service.engine.failure
        service.close()
        if server.force_exit:
            core.kill()
        if failure is None:
            return 0
        core.stop()
        sys.stderr.write(f"error: {failure}; its process ended {core.describe_end()}\n")
        return 1


class _Recorder:
    """Observer that appends the record of each step to a file."""

    def __init__(self, file: RecordFile) -> None:
        self._file = file

    def on_step(self, record: StepRecord, states: Sequence[RequestState]) -> None:
        self._file.add(record)

    def on_ended(self, state: RequestState, ended: Ended) -> None:
        """Do nothing: records are per step."""
