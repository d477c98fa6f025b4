"""Routing table of a running router: holders of each adapter with their shares, replaced as a whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.serving.routers import Placement
from capplan.serving.routers.fleet import normalised_shares, placement_of


@dataclass(frozen=True)
class RoutingTable:
    """Holders of every adapter, by number.

    Attributes
    ----------
    numbers
        Number of each adapter; None, the base model, is 0.
    ranks
        Rank of each adapter.
    placement
        Holders by number. Places beyond those of the last adapter are former ones, which get no requests.
    place_of
        Per instance, the places of its adapters, former ones included.
    """

    numbers: Mapping[str | None, int]
    ranks: Mapping[str, int]
    placement: Placement
    place_of: Sequence[Mapping[str | None, int]]

    @classmethod
    def of(
        cls,
        held: Sequence[Mapping[str, float]],
        base: Sequence[float] | None = None,
        ranks: Mapping[str, int] | None = None,
        previous: RoutingTable | None = None,
    ) -> RoutingTable:
        """Return the table of the shares of instances.

        Parameters
        ----------
        held
            Adapters of each instance with the share of the adapter's requests meant for it. Shares are
            normalised over holders.
        base
            Share of the base model's requests meant for each instance; None: equal shares.
        ranks
            Ranks of the adapters; None: those of `previous`, or 1.
        previous
            Table in force. Adapters that it has come first, in its order.

        Raises
        ------
        InputError
            If an adapter of `ranks` has no holder, another one has, or `previous` has another number of
            instances.
        """
        holders: dict[str | None, list[tuple[int, float]]] = {
            None: list(enumerate(base or [1.0] * len(held)))
        }
        for i, shares in enumerate(held):
            for name, share in shares.items():
                holders.setdefault(name, []).append((i, share))
        if previous is not None:
            if len(held) != len(previous.place_of):
                rule = f"must have an entry for each of {len(previous.place_of)} instances"
                raise InputError(rule, len(held), "shares")
            if ranks is None:
                ranks = previous.ranks
            first = [adapter for adapter in previous.numbers if adapter in holders]
            holders = {adapter: holders[adapter] for adapter in dict.fromkeys([*first, *holders])}
        names = [adapter for adapter in holders if adapter is not None]
        ranks = dict.fromkeys(names, 1) if ranks is None else ranks
        if other := ranks.keys() ^ set(names):
            rule = "must be an adapter of the table, with an instance that holds it"
            raise InputError(rule, min(other), "shares")
        placement = _placement(list(holders.values()))
        place_of: list[dict[str | None, int]] = [{} for _ in held]
        for number, (adapter, own) in enumerate(holders.items()):
            for place, (instance, _) in enumerate(own, int(placement.start[number])):
                place_of[instance][adapter] = place
        return cls({adapter: number for number, adapter in enumerate(holders)}, ranks, placement, place_of)

    def with_former(self, former: Sequence[Collection[str | None]]) -> RoutingTable:
        """Return the table with places for adapters that instances do not hold any more."""
        placement, place_of = self.placement, [dict(own) for own in self.place_of]
        instances: list[int] = []
        for i, names in enumerate(former):
            for name in names:
                if name not in place_of[i]:
                    place_of[i][name] = placement.instance.size + len(instances)
                    instances.append(i)
        more = np.zeros(len(instances), np.int32)
        placement = placement._replace(
            instance=np.append(placement.instance, np.array(instances, np.int32)),
            local=np.append(placement.local, more),
            share=np.append(placement.share, more.astype(np.float64)),
        )
        return RoutingTable(self.numbers, self.ranks, placement, place_of)

    def numbers_of(self, before: RoutingTable) -> NDArray[np.int64]:
        """Return the number here of each adapter of another table, -1 without."""
        return np.array([self.numbers.get(adapter, -1) for adapter in before.numbers], np.int64)

    def shares(self) -> tuple[list[dict[str, float]], list[float]]:
        """Return the shares of the adapters of each instance, and those of the base model's requests."""
        end, share = int(self.placement.start[-1]), self.placement.share.tolist()
        adapters = [
            {name: share[place] for name, place in own.items() if name is not None and place < end}
            for own in self.place_of
        ]
        return adapters, [share[own[None]] for own in self.place_of]

    def carry(self, values: NDArray[Any], before: RoutingTable, fresh: NDArray[Any]) -> NDArray[Any]:
        """Return `fresh`, an array by place, with the values of the places that the table before has too."""
        for own, old in zip(self.place_of, before.place_of, strict=True):
            both = own.keys() & old.keys()
            fresh[[own[name] for name in both]] = values[[old[name] for name in both]]
        return fresh


def _placement(lists: Sequence[Sequence[tuple[int, float]]]) -> Placement:
    """Return a placement from the (instance, share) of each adapter's holders; zero shares count as equal."""
    adapter = np.repeat(np.arange(len(lists)), [len(holders) for holders in lists])
    instance = np.array([i for holders in lists for i, _ in holders], np.int64)
    share = np.array([share for holders in lists for _, share in holders], np.float64)
    local = np.zeros(adapter.size, np.int64)  # not used: instances number their adapters themselves
    return placement_of(adapter, instance, local, normalised_shares(adapter, share), len(lists) - 1)
