"""Shares of the placement in force, posted to the instances until each has acknowledged them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import aiohttp

from capplan.engine.router.instance_client import FileLimitError, InstanceClient
from capplan.errors import InputError

if TYPE_CHECKING:
    from capplan.engine.router.supervisor import InstanceSupervisor

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


class ShareUpdates:
    """Posts shares to instances and repeats what fails; an instance that has restarted gets all again.

    Parameters
    ----------
    admin_key
        Admin key of the instances.

    Attributes
    ----------
    wanted
        Share of every adapter at every instance, 0 where it gets no requests.
    failures
        Number of posts that failed.
    """

    def __init__(
        self, instances: Sequence[InstanceSupervisor], admin_key: str, params: PostParams = PostParams()
    ) -> None:
        self.wanted: list[dict[str, float]] = [{} for _ in instances]
        self.failures = 0
        self._instances = instances
        self._key = admin_key
        self._params = params
        self._told: list[tuple[InstanceClient | None, dict[str, float]]] = [(None, {}) for _ in instances]
        self._lock = asyncio.Lock()

    def want(self, shares: Sequence[Mapping[str, float]]) -> None:
        """Set the shares of every instance; adapters that it does not have get a share of 0 there."""
        every = dict.fromkeys((name for own in shares for name in own), 0.0)
        self.wanted = [{**every, **own} for own in shares]

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
            if await self._post(index, shares):
                return True
        return False

    async def run(self) -> None:
        """Post the wanted shares to every instance that does not have them."""
        while True:
            await self.update()
            await asyncio.sleep(self._params.retry_s)

    async def update(self) -> bool:
        """Post the wanted shares once; return whether all instances that are up have them."""
        async with self._lock:
            up = [i for i, each in enumerate(self._instances) if each.is_up]
            return all(await asyncio.gather(*(self._post(i, self.wanted[i]) for i in up)))

    async def _post(self, index: int, shares: Mapping[str, float]) -> bool:
        """Post the shares that an instance does not have yet; return whether it has all of them."""
        client = self._instances[index].client
        if client is None:
            return False
        if self._told[index][0] is not client:  # another process, which has no shares
            self._told[index] = client, {}
        told = self._told[index][1]
        new = [(name, share) for name, share in shares.items() if told.get(name) != share]
        for first in range(0, len(new), _BATCH):
            part = dict(new[first : first + _BATCH])
            body = json.dumps({"shares": part}).encode()
            try:
                await client.post_as(self._key, _PATH, body, self._params.timeout_s)
            except (aiohttp.ClientError, FileLimitError, TimeoutError):
                self.failures += 1
                return False
            told |= part
        return True
