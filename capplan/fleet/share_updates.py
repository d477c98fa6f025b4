"""Shares of the placement in force, posted to the instances until each has acknowledged them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import aiohttp

from capplan.errors import InputError
from capplan.fleet.instance_client import FileLimitError, InstanceClient

if TYPE_CHECKING:
    from capplan.fleet.supervisor import InstanceSupervisor

_PATH: Final = "/v1/adapter_shares"
_BATCH: Final = 2000
"""Adapters of one post; their names have at most 256 characters, a body at least 1 MiB."""


@dataclass(frozen=True)
class PostParams:
    """Posts of shares.

    Attributes
    ----------
    timeout_s
        Time for the acknowledgement of a post.
    attempts
        Posts of new shares to an instance after which a re-balancing is given up.
    retry_s
        Time between attempts.
    """

    timeout_s: float = 5.0
    attempts: int = 3
    retry_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("timeout_s", "attempts", "retry_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError("must be a finite number > 0", getattr(self, name), name)


class _Told:
    """Shares that a process has acknowledged; those that are not listed are 0, or not known to it yet.

    Attributes
    ----------
    unknown
        Adapters that it has been told nothing of; None: all.
    """

    def __init__(self, client: InstanceClient | None) -> None:
        self.client = client
        self.shares: dict[str, float] = {}
        self.unknown: set[str] | None = None


class ShareUpdates:
    """Posts shares to instances and repeats what fails; an instance that has restarted gets all again.

    Parameters
    ----------
    adapters
        All that have shares; `set_adapters` changes them.
    admin_key
        Admin key of the instances.

    Attributes
    ----------
    in_force
        Shares of every instance in the placement in force; those of other adapters are 0.
    failures
        Number of posts that failed.
    """

    def __init__(
        self,
        instances: Sequence[InstanceSupervisor],
        adapters: Iterable[str],
        admin_key: str,
        params: PostParams = PostParams(),
    ) -> None:
        self.in_force: Sequence[Mapping[str, float]] = [{} for _ in instances]
        self.failures = 0
        self._instances = instances
        self._adapters = frozenset(adapters)
        self._key = admin_key
        self._params = params
        self._told = [_Told(None) for _ in instances]
        self._lock = asyncio.Lock()

    def set_adapters(self, adapters: Iterable[str]) -> None:
        """Change the adapters that have shares; those that are no longer among them have none."""
        before, self._adapters = self._adapters, frozenset(adapters)
        for told in self._told:
            if told.unknown is not None:
                told.unknown = (told.unknown | (self._adapters - before)) & self._adapters

    async def announce(self, shares: Sequence[Mapping[str, float]], indexes: Iterable[int]) -> list[int]:
        """Post shares before requests follow them; return the instances that did not acknowledge."""
        async with self._lock:
            chosen = list(indexes)
            told = await asyncio.gather(*(self._announce(i, shares[i]) for i in chosen))
            return [i for i, is_told in zip(chosen, told, strict=True) if not is_told]

    async def _announce(self, index: int, shares: Mapping[str, float]) -> bool:
        for attempt in range(self._params.attempts):
            if attempt:
                await asyncio.sleep(self._params.retry_s)
            if (told := self._told_of(index)) is not None:
                gains = {name: share for name, share in shares.items() if told.shares.get(name) != share}
                if await self._post(told, gains):
                    return True
        return False

    async def run(self) -> None:
        """Post the shares in force to every instance that does not have them."""
        while True:
            await self.update()
            await asyncio.sleep(self._params.retry_s)

    async def update(self) -> bool:
        """Post the shares in force once; return whether all instances that are up have them."""
        async with self._lock:
            up = [i for i, each in enumerate(self._instances) if each.is_up]
            return all(await asyncio.gather(*(self._update(i) for i in up)))

    async def _update(self, index: int) -> bool:
        told = self._told_of(index)
        if told is None:
            return False
        positive = {name: share for name, share in self.in_force[index].items() if share > 0.0}
        new = {name: share for name, share in positive.items() if told.shares.get(name) != share}
        adapters, unknown = self._adapters, told.unknown
        others = {*told.shares, *(adapters if unknown is None else unknown)}
        new |= {name: 0.0 for name in others if name not in positive}
        if await self._post(told, new):
            known = adapters if unknown is None else unknown
            told.unknown = set((self._adapters if told.unknown is None else told.unknown) - known)
        return told.shares == positive

    def _told_of(self, index: int) -> _Told | None:
        """Return what the process of an instance knows; None if there is none."""
        client = self._instances[index].client
        if client is not None and self._told[index].client is not client:
            self._told[index] = _Told(client)  # another process, which has no shares
        return None if client is None else self._told[index]

    async def _post(self, told: _Told, shares: Mapping[str, float]) -> bool:
        """Post shares; return whether all of them are acknowledged."""
        client, new = told.client, list(shares.items())
        if client is None:
            return False
        for first in range(0, len(new), _BATCH):
            part = dict(new[first : first + _BATCH])
            body = json.dumps({"shares": part}).encode()
            try:
                await client.post_as(self._key, _PATH, body, self._params.timeout_s)
            except (aiohttp.ClientError, FileLimitError, TimeoutError):
                self.failures += 1
                return False
            for name, share in part.items():
                if share > 0.0:
                    told.shares[name] = share
                else:
                    told.shares.pop(name, None)
        return True
