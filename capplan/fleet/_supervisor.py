"""Supervision of the instances of a plan: start, probe, restart, selection by share, stop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import aiohttp

from capplan.errors import InputError
from capplan.fleet._instance_client import FileLimitError, InstanceClient
from capplan.fleet._instances import InstanceSpec
from capplan.fleet._launcher import InstanceHandle, Launcher, LaunchError

InstanceState = Literal["starting", "up", "stalled", "down", "failed"]


@dataclass(frozen=True)
class RestartPolicy:
    """Probes and restarts of instances.

    Attributes
    ----------
    initial_delay_s, max_delay_s
        Delay before a restart; it doubles with every restart in a row.
    max_restarts
        Restarts in a row after which an instance has failed for good.
    reset_after_s
        Uptime after which the count of restarts in a row is reset.
    ping_every_s, ping_timeout_s
        Interval of pings of the server, and the time for their response. An instance that does not respond,
        and makes no progress with its requests meanwhile, is stalled: it gets no new requests until it
        responds again. The same holds for one that refuses requests.
    probe_every_s, probe_timeout_s
        Interval of health probes, which an engine answers between two steps, and the time for their response.
        An instance that does not respond, or is stalled for this time, is restarted.
    abandon_after_s
        Time without progress after which the requests of a stalled instance are ended with an error.
    max_refused_probes
        Refused probes in a row after which an instance is restarted.
    start_timeout_s
        Time until an instance accepts requests.
    stop_grace_s
        Time for an instance to stop.
    """

    initial_delay_s: float = 0.5
    max_delay_s: float = 30.0
    max_restarts: int = 5
    reset_after_s: float = 60.0
    ping_every_s: float = 1.0
    ping_timeout_s: float = 3.0
    probe_every_s: float = 5.0
    probe_timeout_s: float = 60.0
    abandon_after_s: float = 10.0
    max_refused_probes: int = 12
    start_timeout_s: float = 1800.0
    stop_grace_s: float = 15.0


class InstanceSupervisor:
    """Starts, probes and restarts one instance.

    Parameters
    ----------
    spec, launcher, policy
        The instance, what starts it, and when it is probed and started again.
    key
        API key of the instance.
    log
        Takes lines for the operator.
    on_available
        Called with whether the instance accepts requests, at each change of its state.

    Attributes
    ----------
    client
        Client of the running process; None if the instance is not up.
    restarts
        Number of restarts.
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
        """Start the instance.

        Raises
        ------
        InputError, LaunchError
            If it does not start.
        """
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
