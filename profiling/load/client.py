"""Streaming completions from one server, over connections that are used again, and what became of each."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from capplan.profiling.load.outcome import (
    BAD_RESPONSE,
    CLIENT_LIMIT,
    DISCONNECTED,
    FINISHED,
    HTTP_PREFIX,
    REFUSED,
    TIMEOUT,
    UNFINISHED,
    Outcome,
)
from capplan.profiling.load.settings import Target
from capplan.profiling.load.wire import Connection, Exchange, WireError

_PATH: Final = "/v1/completions"
_KEEPALIVE_S: Final = 2.0
"""Idle connections are dropped before servers drop them: uvicorn does after 5 s, and a request that is sent
at that moment is lost.
"""
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)
_PORTS: Final = {"http": 80, "https": 443}
_OK: Final = 200


class Client:
    """Sends completions to one server.

    Parameters
    ----------
    target
        The server.
    timeout_s
        How long one completion may take.
    clock
        Seconds on the clock of the run.
    """

    def __init__(self, target: Target, timeout_s: float, clock: Callable[[], float]) -> None:
        parts = urlsplit(target.at(_PATH))
        self._host = parts.hostname or ""
        self._port = parts.port or _PORTS[parts.scheme]
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        fields = {"Host": parts.netloc, **target.headers()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._head = f"POST {parts.path} HTTP/1.1\r\n{lines}Content-Length: ".encode("latin-1")
        self._timeout_s = timeout_s
        self._clock = clock
        self._idle: list[Connection] = []
        self._addresses: list[str] = []

    async def complete(self, number: int, body: bytes) -> Outcome:
        """Send a request and read its answer to the end; cancelled, it is told as unfinished.

        Never raises for what a server does.
        """
        clock = self._clock
        exchange = Exchange(clock, asyncio.get_running_loop().create_future())
        sent_s = clock()
        connection = None
        kind, message = FINISHED, ""
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = self._idle_connection() or await self._connect()
                connection.ask(b"%s%d\r\n\r\n%s" % (self._head, len(body), body), exchange)
                await exchange.ended
        except TimeoutError:
            kind, message = TIMEOUT, f"took longer than {self._timeout_s:g} s"
        except asyncio.CancelledError:
            kind = UNFINISHED
        except WireError as error:
            kind, message = BAD_RESPONSE, str(error)
        except OSError as error:
            kind, message = _broken(error, connected=connection is not None), str(error)
        self._release(connection, whole=kind == FINISHED)
        return _outcome(number, kind, message, sent_s, clock(), exchange)

    def close(self) -> None:
        """Drop the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _idle_connection(self) -> Connection | None:
        """Return the connection that was used last, unless it is stale; then all of them are."""
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and self._clock() - connection.idle_since < _KEEPALIVE_S:
                return connection
            connection.close()
        return None

    def _release(self, connection: Connection | None, *, whole: bool) -> None:
        if connection is None:
            return
        if whole and connection.reusable:
            connection.idle_since = self._clock()
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> Connection:
        """Open a connection to the first address that takes one."""
        loop = asyncio.get_running_loop()
        if not self._addresses:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._addresses = [str(address[0]) for *_, address in found]
        name = self._host if self._tls else None
        failure: OSError | None = None
        for address in self._addresses:
            try:
                _, connection = await loop.create_connection(
                    Connection, address, self._port, ssl=self._tls, server_hostname=name
                )
            except OSError as error:
                failure = failure or error
            else:
                self._addresses = [address]
                return connection
        raise failure or OSError(f"{self._host} has no address")


def _outcome(
    number: int, kind: str, message: str, sent_s: float, ended_s: float, exchange: Exchange
) -> Outcome:
    """Return what became of a request; what looks like an answer must end like one, too."""
    times = exchange.events.times
    if kind != FINISHED:
        return Outcome(number, kind, sent_s, ended_s, times, message=message)
    if exchange.status != _OK:
        text = exchange.message.decode("utf-8", "replace")
        return Outcome(number, f"{HTTP_PREFIX}{exchange.status}", sent_s, ended_s, times, message=text)
    ending = exchange.events.ending()
    if ending.error or not times:
        told = ending.error or "an answer without a single event"
        return Outcome(number, BAD_RESPONSE, sent_s, ended_s, times, message=told)
    if not ending.complete:
        return Outcome(number, DISCONNECTED, sent_s, ended_s, times, message="the answer ended half-way")
    tokens = times[: len(times) - ending.without_token]
    if not tokens:
        return Outcome(number, BAD_RESPONSE, sent_s, ended_s, tokens, message="an answer without a token")
    return Outcome(number, FINISHED, sent_s, ended_s, tokens, ending.prompt_tokens, ending.output_tokens)


def _broken(error: OSError, *, connected: bool) -> str:
    if connected:
        return DISCONNECTED
    return CLIENT_LIMIT if error.errno in _EXHAUSTED else REFUSED
