"""One instance through its lives: started, watched, started again."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import aiohttp

from capplan.engine.cluster.instances import InstanceSpec
from capplan.engine.cluster.launcher import Handle, Launcher, LaunchError
from capplan.engine.cluster.link import Link
from capplan.engine.cluster.queues import SizeQueues
from capplan.errors import InputError

State = Literal["starting", "up", "down", "failed"]


@dataclass(frozen=True)
class Care:
    """How instances are watched and started anew.

    Attributes
    ----------
    first_delay_s, longest_delay_s
        Pause before a restart; it doubles from one to the next.
    most_restarts
        Restarts in a row after which an instance is given up.
    steady_s
        An instance that has lived so long starts with a clean slate.
    probe_every_s, probe_timeout_s
        How often an instance is asked whether it is well, and how long it may take to answer.
    most_refused
        Probes in a row that find no connection, after which an instance counts as gone.
    start_timeout_s
        How long an instance may take until it takes requests.
    stop_grace_s
        How long an instance may take to end.
    """

    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0
    most_restarts: int = 5
    steady_s: float = 60.0
    probe_every_s: float = 5.0
    probe_timeout_s: float = 60.0
    most_refused: int = 12
    start_timeout_s: float = 1800.0
    stop_grace_s: float = 15.0

    def delay_s(self, restarts: int) -> float:
        """Return the pause before another restart after so many in a row."""
        return min(self.first_delay_s * 2.0**restarts, self.longest_delay_s)


class Member:
    """An instance of the cluster. Belongs to the event loop.

    Attributes
    ----------
    spec
        What it serves.
    state
        ``failed`` is for good.
    link
        The way to it; None while it is not up.
    restarts
        How often it was started anew.

    Parameters
    ----------
    spec, launcher, key, care
        What to start, how, with which API key, and how to look after it.
    new_queues
        Makes the queues before it, new ones for every life.
    say
        Told what happens, a line each.
    """

    def __init__(
        self,
        spec: InstanceSpec,
        launcher: Launcher,
        key: str,
        care: Care,
        new_queues: Callable[[], SizeQueues | None],
        say: Callable[[str], None],
    ) -> None:
        self.spec = spec
        self.state: State = "starting"
        self.link: Link | None = None
        self.restarts = 0
        self._launcher = launcher
        self._key = key
        self._care = care
        self._new_queues = new_queues
        self._say = say
        self._handle: Handle | None = None
        self._start_s = 1.0
        self._back_at = 0.0
        self._refused = 0

    @property
    def is_up(self) -> bool:
        """Whether it takes requests."""
        return self.link is not None

    def retry_after_s(self) -> int:
        """Return when it may be up again."""
        if self.state == "failed":
            return 60
        return max(1, min(60, math.ceil(self._back_at - time.monotonic())))

    async def start(self) -> None:
        """Start it.

        Raises
        ------
        InputError, LaunchError
            When it does not start.
        """
        started = time.monotonic()
        self._back_at = started + self._start_s
        try:
            async with asyncio.timeout(self._care.start_timeout_s):
                self._handle = await self._launcher.launch(self.spec, self._key)
        except TimeoutError:
            took = f"{self._care.start_timeout_s:g} s"
            raise LaunchError(f"instance {self.spec.name} does not take requests after {took}") from None
        self._start_s = time.monotonic() - started
        self.link = Link(self._handle.url, self._key, self._new_queues())
        self.state = "up"
        self._refused = 0

    async def look_after(self) -> None:
        """Start it anew whenever it ends; return when it is given up."""
        in_a_row = 0
        while self._handle is not None:
            since = time.monotonic()
            end = await self._end_of(self._handle)
            await self._leave()
            if time.monotonic() - since >= self._care.steady_s:
                in_a_row = 0
            self._say(f"instance {self.spec.name} has ended {end}")
            in_a_row = await self._start_again(in_a_row)

    async def _start_again(self, in_a_row: int) -> int:
        """Start it anew as often as allowed; return how many restarts in a row there have been."""
        while in_a_row < self._care.most_restarts:
            delay_s = self._care.delay_s(in_a_row)
            in_a_row += 1
            self.restarts += 1
            self._back_at = time.monotonic() + delay_s + self._start_s
            await asyncio.sleep(delay_s)
            try:
                await self.start()
            except (InputError, LaunchError, OSError) as error:
                self._say(str(error))
            else:
                self._say(f"instance {self.spec.name} is back")
                return in_a_row
        self.state = "failed"
        self._handle = None
        self._say(f"instance {self.spec.name} is given up after {in_a_row} restarts")
        return in_a_row

    async def _end_of(self, handle: Handle) -> str:
        """Wait until a process ends or does not answer any more, and return how it went."""
        ended = asyncio.ensure_future(handle.ended())
        try:
            while True:
                await asyncio.wait((ended,), timeout=self._care.probe_every_s)
                if ended.done():
                    return ended.result()
                if not await self._answers(ended):
                    await self._leave()  # first of all: whoever waits there is told now
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(handle.stop(0), self._care.stop_grace_s)
                    return "after it had not answered any more"
        finally:
            ended.cancel()

    async def _answers(self, ended: asyncio.Future[str]) -> bool:
        """Tell whether the process answers, with whatever; true also when it ends meanwhile."""
        if self.link is None:
            return True
        try:
            await self.link.get("/health", self._care.probe_timeout_s)
        except TimeoutError:
            return ended.done()
        except aiohttp.ClientResponseError:
            return True  # not well, and able to say so
        except aiohttp.ClientError:  # about to end, but not for ever
            self._refused += 1
            return self._refused < self._care.most_refused or ended.done()
        self._refused = 0
        return True

    async def _leave(self) -> None:
        self.state = "down"
        link, self.link = self.link, None
        if link is not None:
            await link.close()

    async def stop(self, at_once: bool) -> None:
        """End it; nobody must look after it any more."""
        if self._handle is not None:
            await self._handle.stop(0 if at_once else self._care.stop_grace_s)
        self._handle = None
        await self._leave()
