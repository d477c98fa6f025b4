"""What a router is: its entry in the registry, its parameters and state in compiled code, and its input.

The input are the holders of adapters, and the current state of each instance: flat arrays, which the cluster
twin and the router of `capplan serve PLAN` keep up to date and compiled rules read. A rule looks at the
*holders* of the request's adapter, places ``first`` to ``last - 1`` of the placement, and returns one of
them. The state may be older than the request: then it contains what the instance reported last and the
requests that the router has sent there since (`note_waiting`). Requests that wait at an instance for the
transfer of their adapter count there as waiting ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import by_reference, inner, jit
from capplan.serving._structures import Records, int_fields


@by_reference
class Placement(NamedTuple):
    """Holders of every adapter, concatenated."""

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
    "queued",  # requests that wait, also for a transfer, and those that the scheduler has not seen yet
    "free_blocks",  # and those of cached adapters that no running request uses
    "active_adapters",  # adapters of running requests
    "queued_adapters",  # adapters of waiting requests, and adapters on their way to GPU memory
    "running_tokens",  # of running requests: with KV, and of prompts not computed yet
    "partial_tokens",  # of prompts of running requests that are not computed yet
    "seen_ns",  # time of the state; NEVER_SEEN before the first one
    # -- constant --
    "max_num_seqs",
    "max_loras",
    "block_size",
    "blocks",  # KV blocks in all
)

PRESENT = 0  # rows of `Fleet.by_rank`: unfinished requests at the instance,
QUEUED = 1  # waiting ones, as in `queued`,
QUEUED_TOKENS = 2  # and their prompt tokens
ACTIVE = 1  # bits of `Fleet.standing`: requests of the adapter run,
AWAITED = 2  # or wait,
RESIDENT = 4  # or it is in GPU memory
NEVER_SEEN = -(2**62)


@by_reference
class Fleet(NamedTuple):
    """State of the instances."""

    instances: Records
    """Shape (instances,); fields as in `_INSTANCE`."""
    by_rank: NDArray[np.int64]
    """Shape (instances, 3, largest rank + 1): requests by the rank of their adapter, 0 for the base model. No
    columns for routers that do not read it."""
    ranks: NDArray[np.int64]
    """Distinct ranks in descending order, 0 last."""
    standing: NDArray[np.int64]
    """Shape (places,): bits ACTIVE, AWAITED and RESIDENT of the adapter there, for routers that read them."""


class ArrivingRequest(NamedTuple):
    """A request to route."""

    adapter: int
    """Its number in the placement."""
    rank: int
    """Rank of its adapter; 0: the base model."""
    prompt_tokens: int
    mean_answer: float
    """Mean output tokens of the requests finished so far."""
    draw: float
    """Random number of this request, uniform in [0, 1)."""
    now_ns: int
    """Time on the clock of ``seen_ns``."""


def new_fleet(instances: int, ranks: NDArray[np.int64], by_rank: bool, places: int = 0) -> Fleet:
    """Return the state of idle instances at time 0.

    Parameters
    ----------
    ranks
        Ranks of the adapters.
    by_rank
        Whether the router reads counts by rank.
    places
        Places of the placement, for routers that read the state of adapters.
    """
    distinct = np.unique(np.append(ranks, 0))[::-1].astype(np.int64)
    records = np.zeros(instances, _INSTANCE).view(np.recarray)
    columns = int(distinct[0]) + 1 if by_rank else 0
    return Fleet(
        instances=records,
        by_rank=np.zeros((instances, 3, columns), np.int64),
        ranks=distinct.copy(),
        standing=np.zeros(places, np.int64),
    )


@inner
def add_waiting(fleet: Fleet, instance: int, rank: int, requests: int, prompt_tokens: int) -> None:
    """Add waiting requests of a rank to the counts of an instance; numbers below 0 remove some."""
    fleet.instances.queued[instance] += requests
    if fleet.by_rank.shape[2] > 0:
        fleet.by_rank[instance, PRESENT, rank] += requests
        fleet.by_rank[instance, QUEUED, rank] += requests
        fleet.by_rank[instance, QUEUED_TOKENS, rank] += prompt_tokens


@inner
def note_waiting(
    fleet: Fleet, placement: Placement, place: int, rank: int, requests: int, prompt_tokens: int
) -> None:
    """Add requests of the adapter at a place to the state of its instance, which does not contain them."""
    instance = placement.instance[place]
    add_waiting(fleet, instance, rank, requests, prompt_tokens)
    if fleet.standing.size > 0 and rank > 0:
        if not fleet.standing[place] & (ACTIVE | AWAITED):
            fleet.instances.queued_adapters[instance] += 1
        fleet.standing[place] |= AWAITED


@jit
def report_time_ns(number: int, instances: int, period_ns: int) -> int:
    """Return the time of a report, counted from 0 over all instances, after the start of a router.

    The reports of the instances, in their order, are spread evenly over the period.
    """
    return number // instances * period_ns + number % instances * period_ns // instances


@inner
def after(instance: int, last: int, instances: int) -> int:
    """Return the cyclic distance of an instance from the last chosen one, for rotating tie breaks."""
    distance = instance - last - 1
    return distance if distance >= 0 else distance + instances


@inner
def fits_memory(fleet: Fleet, instance: int, prompt: int) -> bool:
    """Return whether free KV blocks suffice for a prompt after those of the waiting requests."""
    record = fleet.instances[instance]
    return bool(prompt + queued_tokens(fleet, instance) <= record.free_blocks * record.block_size)


@inner
def queued_tokens(fleet: Fleet, instance: int) -> int:
    """Return the prompt tokens of the waiting requests, also of those that the scheduler has not seen."""
    tokens = 0
    for i in range(fleet.ranks.size):
        tokens += fleet.by_rank[instance, QUEUED_TOKENS, fleet.ranks[i]]
    return tokens


@inner
def has_room(fleet: Fleet, instance: int, prompt: int) -> bool:
    """Return whether the batch has a place and memory suffices."""
    record = fleet.instances[instance]
    return bool(record.running + record.queued < record.max_num_seqs and fits_memory(fleet, instance, prompt))


def placement_of(
    adapter: NDArray[np.int64],
    instance: NDArray[np.integer],
    local: NDArray[np.integer],
    share: NDArray[np.float64],
    adapters: int,
) -> Placement:
    """Return the placement of pairs of adapter and instance, in any order.

    Parameters
    ----------
    adapter, instance, local, share
        Of each pair; the base model is adapter 0.
    adapters
        Number of adapters without the base model.
    """
    order = np.lexsort((instance, adapter))
    holders = np.bincount(adapter, minlength=adapters + 1)
    return Placement(
        start=np.concatenate([[0], np.cumsum(holders)]).astype(np.int64),
        instance=instance[order].astype(np.int32),
        local=local[order].astype(np.int32),
        share=share[order],
    )


def normalised_shares(adapter: NDArray[np.int64], share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return shares that sum to 1 over the holders of each adapter; equal ones if all are 0."""
    total = np.bincount(adapter, share)[adapter]
    holders = np.bincount(adapter)[adapter]
    return np.where(total > 0, share / np.where(total > 0, total, 1.0), 1.0 / holders)


def adapter_of_places(placement: Placement) -> NDArray[np.int64]:
    """Return the adapter of every place."""
    return np.repeat(np.arange(placement.start.size - 1), np.diff(placement.start))


def places_in_both(
    before: Placement, after: Placement, numbers: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the places, in one table and in another, of the pairs of adapter and instance that both have.

    Parameters
    ----------
    numbers
        Number in `after` of each adapter of `before`, -1 if it has none; None: adapters have the same ones.
    """
    instances = 1 + max(int(each.instance.max(initial=0)) for each in (before, after))
    adapter = adapter_of_places(before)
    if numbers is not None:
        adapter = numbers[adapter]
    places = np.flatnonzero(adapter >= 0)
    old = adapter[places] * instances + before.instance[places]
    new = adapter_of_places(after) * instances + after.instance[: after.start[-1]]
    _, here, there = np.intersect1d(old, new, assume_unique=True, return_indices=True)
    return places[here], there


def with_ranks(fleet: Fleet, ranks: NDArray[np.int64]) -> Fleet:
    """Return the fleet with further ranks of adapters; its counts stay."""
    distinct = np.union1d(fleet.ranks, ranks)[::-1].astype(np.int64)
    if distinct.size == fleet.ranks.size:
        return fleet
    columns = fleet.by_rank.shape[2]
    more = max(0, int(distinct[0]) + 1 - columns) if columns else 0
    by_rank = np.pad(fleet.by_rank, ((0, 0), (0, 0), (0, more)))
    return fleet._replace(ranks=distinct.copy(), by_rank=by_rank)


@dataclass(frozen=True)
class Router:
    """A router, as its file registers it under its name in `ROUTERS`."""

    choose: Any
    """Function with `@inner` of (rule, fleet, placement, first, last, request) that returns a place, from
    `first` to `last` - 1. A router that does not read instances gets the request's draw in place of the
    request: a random number in [0, 1)."""
    rule: str
    """What it does, in a line of the documentation."""
    source: str = ""
    reads_state: bool = True
    """The three as in `RoutingRule`."""
    reads_ranks: bool = False
    reads_adapter: bool = False
    keeps_credit: bool = False
    """Whether it uses `RoutingRule.credit`."""
    sent_ns: Any = None
    """Function with `@inner` of (rule, fleet, instance, request) that returns the time at which the chosen
    instance gets the request; None: at once."""


@by_reference
class RoutingRule(NamedTuple):
    """A router with its parameters and its state."""

    code: int
    """Its number in the dispatch of `_choose`."""
    reads_state: bool
    """Whether it reads instances, which are then simulated up to the request."""
    reads_ranks: bool
    """Whether it reads the requests and tokens of instances by rank."""
    reads_adapter: bool
    """Whether it reads the state of the request's adapter on each instance."""
    turn: NDArray[np.int64]
    """Shape (1,): the last chosen instance."""
    credit: NDArray[np.float64]
    """Shape (places,) for rules that use smooth shares, else empty."""
    weights: NDArray[np.float64]
    """Weights of the gateway's scores, or parameters of least work left."""
    # -- dLoRA --
    period_ns: int
    """Time between migrations; 0: none."""
    excess: float
    request_s: float
    migration_s: float
    # -- Toppings, least work left --
    kernel: int
    models: NDArray[np.float64]
    """One line per instance."""
    slo_ms: float
    prior_output_tokens: float
    """Mean output tokens assumed before any request has finished; it counts as one request."""
