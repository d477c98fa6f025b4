"""A server as a process: listening, saying that it is ready, ending when told to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator

import uvicorn

from capplan.engine.server.app import make_app
from capplan.engine.server.service import Service
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


class Server(uvicorn.Server):
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
        Server(service, ready).run([listener])
    finally:
        service.driver.stop()  # uvicorn does not see to that when it is to end at once
    failure = service.driver.failure
    if failure is None:
        return 0
    traceback.print_exception(failure, file=sys.stderr)
    return 1
