"""What a router sees: who holds which adapter, and what is going on at each instance at this moment.

Flat arrays, which the cluster twin keeps up to date and compiled rules read. A rule looks at the *holders* of
the request's adapter, places ``first`` to ``last - 1`` of the placement, and returns one of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.compile import by_reference, inner
from capplan.serving.structures import Records, int_fields


@by_reference
class Placement(NamedTuple):
    """Who holds which adapter: a list of holders for every adapter, one behind the other."""

    start: NDArray[np.int64]
    """Shape (adapters + 2,): holders of adapter a are the places start[a] .. start[a + 1] - 1. Adapter 0 is
    the base model, which every instance holds."""
    instance: NDArray[np.int32]
    """Shape (places,): the instance, ascending within an adapter."""
    local: NDArray[np.int32]
    """Number of the adapter at that instance."""
    share: NDArray[np.float64]
    """Share of the adapter's requests that is meant for that instance; they sum to 1 over its holders."""


_INSTANCE = int_fields(
    "running",  # requests in the batch
    "queued",  # requests that wait, also those that the scheduler has not seen yet
    "free_blocks",
    "active_adapters",  # adapters of running requests
    "queued_adapters",  # adapters of waiting requests, and adapters on their way
    # -- constant --
    "max_num_seqs",
    "max_loras",
    "block_size",
    "blocks",  # KV blocks in all
)

PRESENT = 0  # rows of `Fleet.by_rank`: requests at the instance that have not ended,
QUEUED = 1  # those of them that wait,
QUEUED_TOKENS = 2  # and their prompt tokens
ACTIVE = 1  # bits of `Fleet.standing`: requests of the adapter run there,
AWAITED = 2  # or wait there


@by_reference
class Fleet(NamedTuple):
    """The instances, as a router sees them."""

    instances: Records
    """Shape (instances,); fields as in `_INSTANCE`."""
    by_rank: NDArray[np.int64]
    """Shape (instances, 3, largest rank + 1): requests by the rank of their adapter, 0 for the base model. No
    columns where the rule does not ask."""
    ranks: NDArray[np.int64]
    """The ranks that occur, descending; 0 is the last one."""
    standing: NDArray[np.int64]
    """Shape (instances,): how each stands to the adapter of the request at hand, where the rule asks."""


def new_fleet(instances: int, ranks: NDArray[np.int64], by_rank: bool) -> Fleet:
    """Return a fleet at rest.

    Parameters
    ----------
    instances
        How many.
    ranks
        Ranks of all adapters.
    by_rank
        Whether requests are counted by rank.
    """
    distinct = np.unique(np.append(ranks, 0))[::-1].astype(np.int64)
    records = np.zeros(instances, _INSTANCE).view(np.recarray)
    columns = int(distinct[0]) + 1 if by_rank else 0
    return Fleet(
        instances=records,
        by_rank=np.zeros((instances, 3, columns), np.int64),
        ranks=distinct.copy(),
        standing=np.zeros(instances, np.int64),
    )


@inner
def after(instance: int, last: int, instances: int) -> int:
    """Return how far an instance is behind the one that was chosen last, going round: the rotating tie break.

    Always the same instance would heat up where several are equally good.
    """
    distance = instance - last - 1
    return distance if distance >= 0 else distance + instances


@inner
def fits_memory(fleet: Fleet, instance: int, prompt: int) -> bool:
    """Tell whether the KV blocks of a prompt are left once those who wait have taken theirs."""
    tokens = prompt
    for i in range(fleet.ranks.size):
        tokens += fleet.by_rank[instance, QUEUED_TOKENS, fleet.ranks[i]]
    record = fleet.instances[instance]
    return bool(tokens <= record.free_blocks * record.block_size)


@inner
def has_room(fleet: Fleet, instance: int, prompt: int) -> bool:
    """Tell whether there is a place in the batch, too."""
    record = fleet.instances[instance]
    return bool(record.running + record.queued < record.max_num_seqs and fits_memory(fleet, instance, prompt))
