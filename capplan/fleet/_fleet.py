"""Instances of a served plan, and the router's choice among them."""

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
from typing import Final

from capplan.errors import InputError
from capplan.fleet._instance import InstanceSupervisor, RestartPolicy
from capplan.fleet._launcher import InstanceSpec, Launcher
from capplan.fleet._rebalancing import RebalanceLoop, RebalancingConfig
from capplan.fleet._registered_adapters import RegisteredAdapters, RegistrySettings
from capplan.fleet._routing import InstanceRouter, RoutingSettings
from capplan.http_connection import ConnectionLostError
from capplan.server import ServerSettings
from capplan.serving.routers import report_time_ns

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
