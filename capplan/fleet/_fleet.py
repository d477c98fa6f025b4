"""Instances of a served plan: start, probe, restart, stop, and the router's choice among them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal

import aiohttp

from capplan.errors import InputError
from capplan.fleet._instance_client import FileLimitError, InstanceClient
from capplan.fleet._launcher import InstanceHandle, InstanceSpec, Launcher, LaunchError
from capplan.fleet._rebalancing import RebalanceLoop, RebalancingConfig
from capplan.fleet._registered_adapters import RegisteredAdapters, RegistrySettings
from capplan.fleet._routing import InstanceRouter, RoutingSettings
from capplan.http_connection import ConnectionLostError
from capplan.server import ServerSettings
from capplan.serving.routers import report_time_ns

InstanceState = Literal["starting", "up", "stalled", "down", "failed"]


@dataclass(frozen=True)
class RestartPolicy:
    """Probes and restarts of instances.

    The server answers pings, and its engine health probes, between two steps. An instance that does not
    respond to pings, and makes no progress with its requests meanwhile, or that refuses requests, is stalled:
    it gets no new requests until it responds again. One that does not respond to a probe, or is stalled for
    the time of a probe, is restarted.
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


_STATE_TIMEOUT_S: Final = 5.0
"""For the state of an instance, whose engine answers between two steps."""


@dataclass(frozen=True)
class RouterConfig:
    """Configuration of a router and its instances.

    Attributes
    ----------
    server
        Settings of the router.
    log
        Receives one line per event of an instance.
    routing
        The router; by default the plan's shares by smooth weighted round robin.
    registry
        Registry of the instances, whose adapters are served; None: those of the plan.
    rebalancing
        Re-balancing of the instances by the registry; None: the plan's shares stay in force.
    """

    specs: Sequence[InstanceSpec]
    launcher: Launcher
    server: ServerSettings
    restart_policy: RestartPolicy = field(default_factory=RestartPolicy)
    log: Callable[[str], None] = lambda line: logging.getLogger(__name__).warning(line)
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    registry: RegistrySettings | None = None
    rebalancing: RebalancingConfig | None = None

    def __post_init__(self) -> None:
        if self.rebalancing is not None and self.registry is None:
            raise InputError("is required by re-balancing", location="registry")


class InstanceFleet:
    """All instances of a plan, in its order, and the router among them.

    `failed` is set when all instances have failed for good, or a task of the fleet has a defect. `registered`
    are the adapters of a registry, if those are served, and not the plan's.
    """

    def __init__(self, config: RouterConfig) -> None:
        key = secrets.token_urlsafe(32)  # only the router uses the instances
        self.failed = asyncio.Event()
        routing = config.routing
        self._has_pool = all(spec.server.pool is not None for spec in config.specs)
        if self._has_pool:
            every = (pair for spec in config.specs for pair in spec.adapters.items())
            own = {name: rank for name, rank in every if isinstance(rank, int)}
            ranks = {**own, **(routing.rank_of or {})}
            fetch_ranks = [spec.max_lora_rank for spec in config.specs]
            routing = replace(routing, rank_of=ranks, fetch_ranks=fetch_ranks)
        self.router = InstanceRouter(
            [spec.shares for spec in config.specs],
            [spec.base_share for spec in config.specs],
            routing,
        )
        self.instances = [
            InstanceSupervisor(
                spec,
                config.launcher,
                config.restart_policy,
                key,
                config.log,
                partial(self.router.set_available, i),
            )
            for i, spec in enumerate(config.specs)
        ]
        self.registered: RegisteredAdapters | None = None
        self.rebalancing: RebalanceLoop | None = None
        if config.registry is not None:
            shared = self.instances, self.router, config.log
            self.registered = RegisteredAdapters(config.registry, *shared)
            if config.rebalancing is not None:
                self.rebalancing = RebalanceLoop(config.rebalancing, self.registered, *shared)
        self._state_period_s = config.routing.state_period_s
        self._tasks: list[asyncio.Task[None]] = []

    def __contains__(self, adapter: object) -> bool:
        return adapter in self.router

    def choose(
        self,
        adapter: str | None,
        excluded: Collection[InstanceSupervisor] = (),
        prompt_tokens: int = 0,
        *,
        elsewhere: bool = False,
    ) -> tuple[InstanceSupervisor, int] | None:
        """Return the instance of a request and its time as `InstanceRouter.decide`; None if none is up."""
        instances = self.instances
        without = [instances.index(each) for each in excluded]
        choice = self.router.decide(adapter, prompt_tokens, without, elsewhere=elsewhere)
        return None if choice is None else (instances[choice.instance], choice.at_ns)

    def retry_after_s(self, adapter: str | None) -> int:
        """Return the time until the first of an adapter's holders may be up again."""
        return min(self.instances[i].retry_after_s() for i in self.router.holders(adapter))

    def serves_everything(self) -> bool:
        """Return whether an instance that is up serves each adapter; every instance serves the base model."""
        up = [instance.spec for instance in self.instances if instance.is_up]
        if self._has_pool:  # instances fetch what they do not store
            largest = max((spec.max_lora_rank for spec in up), default=0)
            return bool(up) and all(rank <= largest for rank in self.router.ranks.values())
        served = {name for spec in up for name in spec.adapters}
        return bool(up) and served >= self.router.ranks.keys()

    async def start(self) -> None:
        """Start all instances and supervise them from then on.

        If one of them does not start, stop all and raise its `InputError` or `LaunchError`.
        """
        starts = [asyncio.ensure_future(instance.start()) for instance in self.instances]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await _cancel(starts)
            await self.stop(at_once=True)
            raise
        self._tasks = [asyncio.ensure_future(instance.supervise()) for instance in self.instances]
        self._tasks.append(asyncio.ensure_future(self._wait_for_failure(tuple(self._tasks))))
        if self.router.reads_state:
            watches = [self._until_failure(self._watch_state(i)) for i in range(len(self.instances))]
            self._tasks += map(asyncio.ensure_future, watches)
        if self.registered is not None:
            await self.registered.refresh()
            self._tasks.append(asyncio.ensure_future(self._until_failure(self.registered.run())))
        if self.rebalancing is not None:
            self._tasks.append(asyncio.ensure_future(self._until_failure(self.rebalancing.run())))

    async def _watch_state(self, index: int) -> None:
        """Read the state of an instance periodically; forget it when the instance has ended.

        The instances take turns, as in the cluster twin.
        """
        instance, known = self.instances[index], None
        period_s, now_s = self._state_period_s, asyncio.get_running_loop().time
        next_s = now_s() + 1e-9 * report_time_ns(index, len(self.instances), round(1e9 * period_s))
        while True:
            await asyncio.sleep(next_s - now_s())
            client = instance.client
            if client is not known:
                self.router.forget(index)
                known = client
            if client is not None:
                asked_ns = time.monotonic_ns()
                with contextlib.suppress(ConnectionLostError, OSError, TimeoutError, ValueError):
                    document = await client.state(_STATE_TIMEOUT_S)
                    if client is instance.client:
                        self.router.report(index, document, asked_ns)
            next_s += period_s * max(1, math.ceil((now_s() - next_s) / period_s))

    async def _wait_for_failure(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        await self._until_failure(asyncio.gather(*tasks))
        self.failed.set()

    async def _until_failure(self, work: Awaitable[object]) -> None:
        """Do work; a defect of it ends the router."""
        try:
            await work
        except Exception:
            self.failed.set()
            raise

    async def stop(self, at_once: bool) -> None:
        """Stop all instances; raise the defect of a task, if there was one."""
        tasks, self._tasks = self._tasks, []
        defects = await _cancel(tasks)
        if self.registered is not None:
            self.registered.close()
        await asyncio.gather(*(instance.stop(at_once) for instance in self.instances))
        if defects:
            raise defects[0]


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> list[Exception]:
    """Cancel tasks and return the exceptions of those that had ended before."""
    was_done = [task.done() for task in tasks]
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    return [
        each for each, done in zip(results, was_done, strict=True) if done and isinstance(each, Exception)
    ]
