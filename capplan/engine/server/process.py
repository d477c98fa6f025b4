"""Server process: listen, report readiness, drain and stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import uvicorn
from fastapi import FastAPI

from capplan.engine.affinity import AUTO, bound_to, core_cpus, other_cpus
from capplan.engine.core_process import CoreProcess
from capplan.engine.messages import CoreSettings, Ended
from capplan.engine.models import model_config
from capplan.engine.server.http_protocol import ConnectionCap
from capplan.engine.server.limiter import ServerSettings, ServerState
from capplan.engine.server.limits import raise_file_limit
from capplan.engine.server.output_stream import RequestState
from capplan.engine.server.routes import make_app
from capplan.engine.server.service import Service
from capplan.engine.settings import EngineOptions
from capplan.engine.timing import RecordFile, StepRecord
from capplan.errors import InputError

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_KEEP_ALIVE_S: Final = 75
_SHUTDOWN_TIMEOUT_S: Final = 5
"""For responses that are complete but not sent, and for those that draining cut off."""


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


class DrainingServer(uvicorn.Server):
    """uvicorn with a shutdown in two steps.

    The first SIGTERM or SIGINT lets running requests finish, for a limited time, while new ones are refused
    with 503. The second stops the server at once.

    Parameters
    ----------
    ready
        Called once the server listens.
    files_each
        Open files per connection.
    """

    def __init__(
        self, app: FastAPI, state: ServerState, ready: Callable[[], None], files_each: int = 1
    ) -> None:
        raise_file_limit()
        limits = state.settings.limits
        cap = ConnectionCap(limits, limits.connections(files_each), state.budget)
        super().__init__(
            uvicorn.Config(
                app,
                http=cap.new_protocol,  # type: ignore[arg-type] # called like a class
                ws="none",
                log_level=logging.ERROR,  # warnings are about clients
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_S,
            )
        )
        self._state = state
        self._ready = ready
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and report it."""
        try:
            await super().startup(sockets)
        except OSError as error:
            raise _cannot_listen(error, "address") from None
        self._tasks.append(asyncio.ensure_future(self._exit_on_failure()))
        self._ready()

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

    def end(self) -> None:
        """Drain and stop; called again, stop at once."""
        if self._state.draining:
            self.should_exit = self.force_exit = True
        else:
            self._state.draining = True
            self._tasks.append(asyncio.ensure_future(self._drain()))

    async def _drain(self) -> None:
        await self._state.drain()
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
        CPUs of the engine core, as for `capplan.engine.affinity.core_cpus`; the server uses the others.
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
        if self.server.model_name in self.adapters:
            rule = "must be other names than the base model's"
            raise InputError(rule, self.server.model_name, "adapters")
        options = {**self.engine, "max_in_flight": self.server.max_requests}
        EngineOptions.parse(options)
        model_config(self.model)
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
        server = DrainingServer(make_app(service), service, lambda: ready(url_of(listener)))
        gc.freeze()  # shorter collections while requests are parsed
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
