"""Router process: start the instances, listen, drain and stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from capplan.fleet.app import RouterApp
from capplan.fleet.proxy import RouterState
from capplan.fleet.supervisor import InstanceFleet, RouterConfig
from capplan.processes import without_full_collections
from capplan.server.process import DrainingServer, bind, url_of

_FILES_PER_CONNECTION: Final = 2
"""Of the client, and of its request to an instance."""


def run_router(config: RouterConfig, ready: Callable[[str], None]) -> int:
    """Start all instances and serve until stopped.

    Parameters
    ----------
    ready
        Called with the URL once all instances accept requests.

    Returns
    -------
    int
        Exit status: 0 if stopped, 1 if all instances have failed for good.

    Raises
    ------
    InputError, LaunchError
        If an instance does not start.
    """
    state = RouterState(config.server, InstanceFleet(config))
    with bind(config.server.host, config.server.port) as listener:
        server = RouterServer(state, lambda: ready(url_of(listener)))
        with without_full_collections():
            server.run([listener])
    return int(state.failed.is_set())


class RouterServer(DrainingServer):
    """Server that starts its instances before it listens, and stops them at its end."""

    def __init__(self, state: RouterState, ready: Callable[[], None]) -> None:
        super().__init__(RouterApp(state), state, ready, _FILES_PER_CONNECTION)
        self._fleet = state.fleet
        self._starting: asyncio.Future[None] | None = None
        self._is_stopping = False

    async def _serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until stopped, with signals handled; no instance is left afterwards."""
        try:
            await super()._serve(sockets)
        finally:
            self._is_stopping = True
            for task in self._tasks:
                task.cancel()
            await self._fleet.stop(at_once=self.force_exit)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the instances, listen, and report it."""
        self._starting = asyncio.ensure_future(self._fleet.start())
        try:
            await self._starting
        except asyncio.CancelledError:  # stopped during the start
            self.should_exit = True
            return
        finally:
            self._starting = None
        await super().startup(sockets)

    def end(self) -> None:
        """Drain and stop; called again, or during the start, stop at once."""
        if self._starting is not None:
            self.force_exit = True
            self._starting.cancel()
        elif self._is_stopping:
            self._tasks.append(asyncio.ensure_future(self._fleet.stop(at_once=True)))
        else:
            super().end()
