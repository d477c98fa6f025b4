"""The verbs of the cluster twin: let an instance go on, look at it, hand a request over to it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.compile import by_reference, inner
from capplan.serving.routers.fleet import ACTIVE, AWAITED, Fleet, Placement
from capplan.serving.state import (
    NO_CLAIM,
    NONE,
)
from capplan.serving.structures import Records, int_fields
from capplan.twin.clock import count_present, count_queued, keeps_stats
from capplan.twin.cluster.member import ClusterMember, load_member
from capplan.twin.core import advance, next_event_ns
from capplan.workload import Requests

_PROGRESS = int_fields(
    "handed",  # requests handed over so far
    "tail",  # the last of those that the scheduler has not seen
    "wake_ns",  # when something can happen next
    "resting",  # 1: the clock stands still until then
)


@by_reference
class Cluster(NamedTuple):
    """Instances under one clock, and the requests they share."""

    memory: NDArray[np.int64]
    """The members, as `capplan.twin.cluster.member` stores them."""
    progress: Records
    """Shape (instances,); fields as in `_PROGRESS`."""
    fleet: Fleet
    placement: Placement
    adapter: NDArray[np.int32]
    """Adapter of each request, numbered over the whole cluster."""
    rank: NDArray[np.int64]
    """Rank of each adapter, shape (adapters + 1,)."""
    stream: Requests
    """The requests as instances see them: ``arrival_ns`` is when they were handed over, ``adapter`` is the
    number that the instance knows it by."""
    following: NDArray[np.int64]
    """Requests handed to an instance that its scheduler has not seen yet, as linked lists; the number of
    requests ends a list. `TwinTrace.counts.next_request` is where it begins."""
    instance: NDArray[np.int32]
    """Where each request is; NONE before it arrives."""
    shared_prefix_tokens: int
    horizon_ns: int


def new_progress(instances: int) -> Records:
    """Return the progress of instances that nobody has asked anything."""
    progress = np.zeros(instances, _PROGRESS).view(np.recarray)
    progress.wake_ns = np.iinfo(np.int64).max
    progress.resting = 1
    return progress


@inner
def go_on(cluster: Cluster, instance: int, until_ns: int) -> None:
    """Let an instance run to `until_ns`; not for one that has nothing to do before."""
    progress = cluster.progress[instance]
    member = load_member(cluster.memory, instance)
    counts = member.trace.counts
    if progress.resting:
        counts.now_ns = member.clock.at.visible_ns = progress.wake_ns
    advance(
        member.state,
        member.limits,
        cluster.stream,
        cluster.shared_prefix_tokens,
        member.costs,
        member.clock,
        member.trace,
        member.max_in_flight,
        until_ns,
        True,
    )
    progress.resting = counts.now_ns < until_ns
    progress.wake_ns = counts.now_ns
    if progress.resting:
        progress.wake_ns = next_event_ns(cluster.stream, member.clock, member.trace)
    look(cluster, instance, member)


@inner
def unseen(cluster: Cluster, instance: int, member: ClusterMember) -> int:
    """Return the requests that were handed over and that the scheduler has not seen yet."""
    seen = member.state.counters.submitted + member.trace.counts.rejected
    return int(cluster.progress.handed[instance] - seen)


@inner
def look(cluster: Cluster, instance: int, member: ClusterMember) -> None:
    """Write down what routers ask about an instance."""
    c = member.state.counters
    record = cluster.fleet.instances[instance]
    record.running = c.n_running - c.n_ending
    record.queued = c.n_waiting - c.n_gone + unseen(cluster, instance, member)
    record.free_blocks = c.free_blocks
    record.active_adapters = c.n_active - c.n_claimed
    record.queued_adapters = member.state.hot.size[0] + member.state.cold.size[0] + member.clock.at.n_copies
    if member.state.adapters.queue_head[0] != NONE:
        record.queued_adapters -= 1


@inner
def look_at_adapter(cluster: Cluster, place: int) -> None:
    """Write down how an instance stands to the adapter that it holds at a place."""
    instance = cluster.placement.instance[place]
    local = cluster.placement.local[place]
    adapters = load_member(cluster.memory, instance).state.adapters
    standing = 0
    if local > 0 and adapters.users[local] > 0 and adapters.claim[local] == NO_CLAIM:
        standing |= ACTIVE
    if local > 0 and adapters.queue_head[local] != NONE:
        standing |= AWAITED
    cluster.fleet.standing[instance] = standing


@inner
def lacks_rows(cluster: Cluster, instance: int, member: ClusterMember, requests: int) -> bool:
    """Tell whether an instance needs a larger table before it can take so many further requests."""
    free = member.state.counters.n_free_rows - unseen(cluster, instance, member)
    return bool(free < requests and member.state.rows.size < member.max_in_flight)


@inner
def hand_over(cluster: Cluster, place: int, request: int, at_ns: int, member: ClusterMember) -> None:
    """Give a request to the member at a place, whose scheduler will see it from `at_ns` on."""
    instance = cluster.placement.instance[place]
    stream = cluster.stream
    stream.arrival_ns[request] = at_ns
    stream.adapter[request] = cluster.placement.local[place]
    cluster.instance[request] = instance
    _queue(cluster, instance, request, member.trace.counts)
    progress = cluster.progress[instance]
    progress.handed += 1
    if progress.resting:
        progress.wake_ns = min(progress.wake_ns, at_ns)
    cluster.fleet.instances.queued[instance] += 1
    if keeps_stats(member.clock):
        rank = cluster.rank[cluster.adapter[request]]
        count_present(member.clock, rank, 1)
        count_queued(member.clock, rank, 1, stream.prompt_tokens[request])


@inner
def _queue(cluster: Cluster, instance: int, request: int, counts: np.record) -> None:
    """Put a request into the list of those that an instance has not seen, which is in order of time."""
    following, arrival_ns = cluster.following, cluster.stream.arrival_ns
    progress = cluster.progress[instance]
    end = following.size
    behind = end
    if counts.next_request < end:
        if arrival_ns[progress.tail] <= arrival_ns[request]:
            behind = progress.tail
        else:  # requests that were moved arrive a little later
            other = counts.next_request
            while arrival_ns[other] <= arrival_ns[request]:
                behind = other
                other = following[other]
    if behind < end:
        following[request] = following[behind]
        following[behind] = request
    else:
        following[request] = counts.next_request
        counts.next_request = request
    if following[request] == end:
        progress.tail = request
