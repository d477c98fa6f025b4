"""The way to one engine process while it lives."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import aiohttp

from capplan.engine.cluster.queues import Ask, GoneError, SizeQueues

_CONNECT_S = 10.0


class Link:
    """Connections to an engine process, and the queues before it. Belongs to the event loop.

    Closing it ends all requests that are under way there: none waits for an answer that cannot come.

    Parameters
    ----------
    url, key
        Where the process listens, and what it asks for.
    queues
        Queues by request size; None: requests go straight on.
    """

    def __init__(self, url: str, key: str, queues: SizeQueues | None) -> None:
        self.url = url
        self.queues = queues
        self._session = aiohttp.ClientSession(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            connector=aiohttp.TCPConnector(limit=0),
            # Answers may take any time; whether the process still lives is found out by its supervisor.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            auto_decompress=False,
        )

    @contextlib.asynccontextmanager
    async def turn(self, ask: Ask) -> AsyncIterator[None]:
        """Wait for a request's turn; see `SizeQueues.turn`."""
        if self.queues is None:
            yield
            return
        async with self.queues.turn(ask):
            yield

    @contextlib.asynccontextmanager
    async def post(self, path: str, body: bytes, content_type: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request.

        Raises
        ------
        GoneError
            When the process cannot be reached, so that the request has not been sent.
        aiohttp.ClientError
            When the process or the connection breaks down after that.
        """
        if self._session.closed:
            raise GoneError
        sent = False
        try:
            async with self._session.post(path, data=body, headers={"Content-Type": content_type}) as answer:
                sent = True
                yield answer
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            if sent:
                raise
            raise GoneError from None

    async def get(self, path: str, timeout_s: float) -> bytes:
        """Return what the process answers.

        Raises
        ------
        aiohttp.ClientError, TimeoutError
            When it does not, or with an error.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.get(path, timeout=timeout) as answer:
            answer.raise_for_status()
            return await answer.read()

    async def close(self) -> None:
        """End all that is under way."""
        if self.queues is not None:
            self.queues.close()
        await self._session.close()
