"""Server process: listen, report readiness, drain and stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from capplan.engine.engine import Engine
from capplan.engine.request import SamplingParams
from capplan.engine.server.limiter import ServerSettings
from capplan.engine.server.routes import make_app
from capplan.engine.server.service import Service
from capplan.engine.timing import RecordFile
from capplan.errors import InputError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_KEEP_ALIVE_S = 75

_LAST_WORDS_S = 5
"""For answers that are written out already, and for those that the end of the engine cuts off."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that has an address and does not listen yet.

    Raises
    ------
    InputError
        When the address cannot be had.
    """
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Named as TCP, so that asyncio turns Nagle's algorithm off: events would wait for acknowledgements.
        listener = socket.socket(kind, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        raise _no_listening(error, f"{host}:{port}") from None


def _no_listening(error: OSError, address: str) -> InputError:
    return InputError(f"cannot be listened on: {error.strerror or error}", location=address)


def url_of(listener: socket.socket) -> str:
    """Return where a socket listens."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class EngineServer(uvicorn.Server):
    """uvicorn that ends in two steps.

    The first SIGTERM or SIGINT lets running requests finish, for a time, while new ones are refused with 503;
    the second ends at once.
    """

    def __init__(self, service: Service, ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(service),
                log_level=logging.WARNING,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_LAST_WORDS_S,
            )
        )
        self._service = service
        self._ready = ready
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        try:
            await super().startup(sockets)
        except OSError as error:
            raise _no_listening(error, "address") from None
        self._tasks.append(asyncio.ensure_future(self._watch_engine()))
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the server runs; unlike uvicorn, do not raise them again afterwards."""
        if threading.current_thread() is not threading.main_thread():  # where signals cannot be had
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
        """Finish what runs and stop; called again, stop."""
        if self._service.draining:
            self.should_exit = self.force_exit = True
        else:
            self._service.draining = True
            self._tasks.append(asyncio.ensure_future(self._drain()))

    async def _drain(self) -> None:
        driver = self._service.driver
        try:
            await asyncio.wait_for(driver.wait_idle(), self._service.settings.drain_timeout_s)
        except TimeoutError:
            driver.cancel_all()
        self.should_exit = True

    async def _watch_engine(self) -> None:
        await self._service.driver.failed.wait()
        self.should_exit = True


def serve(service: Service, listener: socket.socket, ready: Callable[[], None]) -> int:
    """Serve until told to stop.

    Parameters
    ----------
    service
        What to serve.
    listener
        Where.
    ready
        Called when requests are taken.

    Returns
    -------
    int
        Exit status: 0 when told to stop, 1 when the engine broke down.
    """
    try:
        EngineServer(service, ready).run([listener])
    finally:
        service.driver.stop()  # uvicorn does not see to that when it is to end at once
    failure = service.driver.failure
    if failure is None:
        return 0
    traceback.print_exception(failure, file=sys.stderr)
    return 1


AdapterSources = Mapping[str, str | Path | int]
"""Name to a folder that PEFT wrote, or to the rank of a random adapter."""


@dataclass(frozen=True)
class InstanceConfig:
    """One engine with its server, as settings.

    Attributes
    ----------
    model, adapters
        As `Engine` takes them.
    engine
        Fields of `EngineSettings`, but for `max_in_flight`, which follows from the server's.
    server
        The server's.
    records
        Where to write what every step did, as Parquet; None: nowhere.
    """

    model: str
    server: ServerSettings
    adapters: AdapterSources = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    records: Path | None = None


def run_instance(instance: InstanceConfig, ready: Callable[[str], None]) -> int:
    """Serve until told to stop.

    Parameters
    ----------
    instance
        What to serve.
    ready
        Called with the URL once requests are taken.

    Returns
    -------
    int
        Exit status: 0 when told to stop, 1 when the engine broke down.
    """
    settings = instance.server
    with contextlib.ExitStack() as stack:
        listener: socket.socket = stack.enter_context(bind(settings.host, settings.port))
        fields = {**instance.engine, "max_in_flight": settings.max_requests}
        engine = stack.enter_context(Engine(instance.model, instance.adapters, **fields))
        warm_up(engine)
        watchers = []
        if instance.records is not None:
            watchers.append(stack.enter_context(RecordFile(instance.records)))
        service = Service(engine, settings, instance.adapters, watchers)
        return serve(service, listener, lambda: ready(url_of(listener)))


def warm_up(engine: Engine) -> None:
    """Capture graphs, and run and end a few requests, so that nobody's first one waits for compilation."""
    engine.core.runner.capture_graphs()
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=1.0, logprobs=1)
    for adapter in (None, *engine.adapters[:1]):
        requests = [engine.new_request([0], adapter, params) for _ in range(4)]
        for request in requests:
            engine.submit(request)
        engine.abort(requests[0])  # while it waits ...
        while engine.step() is not None or engine.wait_for_adapter():
            engine.abort(requests[1])  # ... and while it runs
    engine.records.clear()
