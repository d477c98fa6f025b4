"""Supervision of the instances of a plan: start, probe, restart, selection by share, stop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import aiohttp
import numpy as np
from numpy.typing import NDArray

from capplan.engine.router.instance_client import InstanceClient, SizeQueues
from capplan.engine.router.instances import InstanceSpec
from capplan.engine.router.launcher import InstanceHandle, Launcher, LaunchError
from capplan.errors import InputError
from capplan.serving.routers import Placement
from capplan.serving.routers import smooth_shares as rule

_by_credit: Final[Callable[..., int]] = getattr(rule.by_credit, "py_func", rule.by_credit)


class WeightedRoundRobin:
    """Smooth weighted round robin over the holders of each adapter that are there.

    The share of holders that are away goes to the others in proportion; their credits stand still meanwhile.

    Parameters
    ----------
    held
        For each instance the adapters it holds, with the share of the adapter's requests meant for it. Shares
        are normalised over holders; the base model is everywhere alike.
    """

    def __init__(self, held: Sequence[Mapping[str, float]]) -> None:
        holders: dict[str | None, list[tuple[int, float]]] = {None: [(i, 1.0) for i in range(len(held))]}
        for i, shares in enumerate(held):
            for name, share in shares.items():
                holders.setdefault(name, []).append((i, share))
        self._number = {name: number for number, name in enumerate(holders)}
        self._placement = _placement(list(holders.values()))
        self._credit = rule.first_credit(self._placement)

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._number

    def holders(self, adapter: str | None) -> list[int]:
        """Return the instances that hold an adapter; None is the base model."""
        return [int(each) for each in self._placement.instance[slice(*self._range(adapter))]]

    def choose(self, adapter: str | None, is_there: Callable[[int], bool]) -> int | None:
        """Return the instance that gets a request; None when no holder is there."""
        first, last = self._range(adapter)
        there = [place for place in range(first, last) if is_there(int(self._placement.instance[place]))]
        if not there:
            return None
        if len(there) == last - first:
            place = _by_credit(self._placement, first, last, self._credit)
        else:
            place = there[self._among(np.array(there))]
        return int(self._placement.instance[place])

    def _among(self, places: NDArray[Any]) -> int:
        """Choose among some of the places of an adapter, and return which of them."""
        parts = _placement([[(int(self._placement.instance[p]), self._placement.share[p]) for p in places]])
        credit = self._credit[places]
        chosen = _by_credit(parts, 0, places.size, credit)
        self._credit[places] = credit
        return chosen

    def _range(self, adapter: str | None) -> tuple[int, int]:
        number = self._number[adapter]
        return int(self._placement.start[number]), int(self._placement.start[number + 1])


def _placement(lists: Sequence[Sequence[tuple[int, float]]]) -> Placement:
    """Return a placement from the holders of each adapter; where all shares are 0, they get equal ones."""
    shares = []
    for holders in lists:
        total = sum(share for _, share in holders)
        shares += [share / total if total > 0 else 1.0 / len(holders) for _, share in holders]
    counts = [len(holders) for holders in lists]
    return Placement(
        start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        instance=np.array([i for holders in lists for i, _ in holders], np.int32),
        local=np.zeros(
            sum(counts), np.int32
        ),  # what an adapter's number is at an instance, is its own affair
        share=np.array(shares, np.float64),
    )


InstanceState = Literal["starting", "up", "down", "failed"]


@dataclass(frozen=True)
class RestartPolicy:
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


class InstanceSupervisor:
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
        care: RestartPolicy,
        new_queues: Callable[[], SizeQueues | None],
        say: Callable[[str], None],
    ) -> None:
        self.spec = spec
        self.state: InstanceState = "starting"
        self.link: InstanceClient | None = None
        self.restarts = 0
        self._launcher = launcher
        self._key = key
        self._care = care
        self._new_queues = new_queues
        self._say = say
        self._handle: InstanceHandle | None = None
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
        self.link = InstanceClient(self._handle.url, self._key, self._new_queues())
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

    async def _end_of(self, handle: InstanceHandle) -> str:
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


@dataclass(frozen=True)
class FleetSettings:
    """What instances have in common.

    Attributes
    ----------
    care
        How they are looked after.
    adapter_tokens_per_rank
        KV tokens that take the memory of one rank of an adapter, for queues by size.
    most_queued
        Most requests that wait before an instance.
    """

    care: RestartPolicy
    adapter_tokens_per_rank: float = 0.0
    most_queued: int = 512


class InstanceFleet:
    """The instances. Belongs to the event loop.

    Attributes
    ----------
    members
        In the order of the plan.
    failed
        Set when every instance has been given up.
    """

    def __init__(
        self,
        specs: Sequence[InstanceSpec],
        launcher: Launcher,
        settings: FleetSettings,
        say: Callable[[str], None],
    ) -> None:
        key = secrets.token_urlsafe(32)  # nobody but the router is to use the instances
        self.members = [
            InstanceSupervisor(spec, launcher, key, settings.care, _queues_of(spec, settings), say)
            for spec in specs
        ]
        self.failed = asyncio.Event()
        self._shares = WeightedRoundRobin([spec.shares for spec in specs])
        self._tasks: list[asyncio.Task[None]] = []

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._shares

    def choose(
        self, adapter: str | None, but: Collection[InstanceSupervisor] = ()
    ) -> InstanceSupervisor | None:
        """Return the instance that the plan's shares give a request to, of those that are up.

        Parameters
        ----------
        adapter
            What is asked for; None is the base model.
        but
            Instances that it must not be.
        """
        members = self.members
        index = self._shares.choose(adapter, lambda i: members[i].is_up and members[i] not in but)
        return None if index is None else members[index]

    def retry_after_s(self, adapter: str | None) -> int:
        """Return when the first of an adapter's holders may be up again."""
        return min(self.members[i].retry_after_s() for i in self._shares.holders(adapter))

    def serves_everything(self) -> bool:
        """Tell whether every adapter has a holder that is up."""
        there = {name for member in self.members if member.is_up for name in member.spec.adapters}
        return any(m.is_up for m in self.members) and there == {
            name for member in self.members for name in member.spec.adapters
        }

    async def start(self) -> None:
        """Start all instances, and look after them from then on.

        Raises
        ------
        InputError, LaunchError
            When one of them does not start; none is left then.
        """
        starts = [asyncio.ensure_future(member.start()) for member in self.members]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await _cancel(starts)
            await self.stop(at_once=True)
            raise
        self._tasks = [asyncio.ensure_future(member.look_after()) for member in self.members]
        self._tasks.append(asyncio.ensure_future(self._watch(tuple(self._tasks))))

    async def _watch(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait until no instance is looked after any more: all are given up, or there is a defect."""
        try:
            await asyncio.gather(*tasks)
        except Exception:
            self.failed.set()
            raise
        self.failed.set()

    async def stop(self, at_once: bool) -> None:
        """End all instances; raise what has ended somebody's care for one, if anything has."""
        tasks, self._tasks = self._tasks, []
        defects = await _cancel(tasks)
        await asyncio.gather(*(member.stop(at_once) for member in self.members))
        if defects:
            raise defects[0]


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> list[Exception]:
    """Cancel tasks, and return what had gone wrong in them before."""
    was_done = [task.done() for task in tasks]
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    return [
        each for each, done in zip(results, was_done, strict=True) if done and isinstance(each, Exception)
    ]


def _queues_of(spec: InstanceSpec, settings: FleetSettings) -> Callable[[], SizeQueues | None]:
    def new() -> SizeQueues | None:
        if spec.queues is None:
            return None
        return SizeQueues(spec.queues, spec.ranks, settings.adapter_tokens_per_rank, settings.most_queued)

    return new
