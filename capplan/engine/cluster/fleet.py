"""All instances of a plan: started together, looked after, chosen from, ended together."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from capplan.engine.cluster.instances import InstanceSpec
from capplan.engine.cluster.launcher import Launcher
from capplan.engine.cluster.member import Care, Member
from capplan.engine.cluster.queues import SizeQueues
from capplan.engine.cluster.shares import Shares


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

    care: Care
    adapter_tokens_per_rank: float = 0.0
    most_queued: int = 512


class Fleet:
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
            Member(spec, launcher, key, settings.care, _queues_of(spec, settings), say) for spec in specs
        ]
        self.failed = asyncio.Event()
        self._shares = Shares([spec.shares for spec in specs])
        self._tasks: list[asyncio.Task[None]] = []

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._shares

    def choose(self, adapter: str | None, but: Collection[Member] = ()) -> Member | None:
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
