"""dLoRA's reactive migration, applied: which requests move is `capplan.serving.routing.dlora`'s to say."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from capplan.compile import inner
from capplan.serving.heap import Heap, heap_push, heap_remove
from capplan.serving.routing.choose import Rule
from capplan.serving.routing.dlora import busiest, idlest, is_excessive, load, to_move
from capplan.serving.routing.fleet import Placement
from capplan.serving.state import NONE, State
from capplan.serving.withdraw import is_movable, withdraw
from capplan.twin.cluster.member import load_member
from capplan.twin.cluster.steps import Cluster, hand_over, lacks_rows, look
from capplan.twin.tally import keeps_tally, tally_present, tally_queued


@inner
def migrate(
    cluster: Cluster, rule: Rule, at_ns: int, movable: Heap, moved: NDArray[np.int64]
) -> tuple[int, int]:
    """Move waiting requests from the busiest instance to the idlest one, where that is due.

    Returns
    -------
    tuple of int
        How many moved; and NONE, or an instance that lacks rows, in which case none has moved yet.
    """
    here, there = busiest(cluster.fleet), idlest(cluster.fleet)
    if here == there or not is_excessive(cluster.fleet, here, rule.excess):
        return 0, NONE
    wanted = to_move(load(cluster.fleet, here), load(cluster.fleet, there), rule.request_s, rule.migration_s)
    member = load_member(cluster.memory, here)
    _list_movable(cluster, member.state, there, movable)
    count = min(wanted, movable.size[0])
    if count == 0:
        return 0, NONE
    target = load_member(cluster.memory, there)
    if lacks_rows(cluster, there, target, count):
        return 0, there
    for i in range(count - 1, -1, -1):  # the latest first, so that they come to stand in order
        moved[i] = movable.items.ids[0]
        heap_remove(movable, moved[i])
    for adapter in range(member.state.adapters.size):
        if _place(cluster, member.state, adapter, there) != NONE:
            withdraw(member.state, adapter, moved[0])
    later_ns = at_ns + round(rule.migration_s * 1e9)
    for i in range(count):
        request = moved[i]
        if keeps_tally(member.clock):
            rank = cluster.rank[cluster.adapter[request]]
            tally_present(member.clock, rank, -1)
            tally_queued(member.clock, rank, -1, -cluster.stream.prompt_tokens[request])
        place = find_place(cluster.placement, cluster.adapter[request], there)
        hand_over(cluster, place, request, later_ns, target)
    look(cluster, here, member)
    return count, NONE


@inner
def find_place(placement: Placement, adapter: int, instance: int) -> int:
    """Return the place where an instance holds an adapter, or NONE."""
    for place in range(placement.start[adapter], placement.start[adapter + 1]):
        if placement.instance[place] == instance:
            return place
    return NONE


@inner
def _place(cluster: Cluster, state: State, local: int, there: int) -> int:
    """Return the place at `there` for the requests that wait in a queue, by the queue's adapter; or NONE."""
    head = state.adapters.queue_head[local]
    if head == NONE:
        return NONE
    return find_place(cluster.placement, cluster.adapter[state.rows.request[head]], there)


@inner
def _list_movable(cluster: Cluster, state: State, there: int, movable: Heap) -> None:
    """List the waiting requests that could move to an instance, the latest on top."""
    movable.size[0] = 0
    for adapter in range(state.adapters.size):
        if _place(cluster, state, adapter, there) == NONE:
            continue
        row = state.adapters.queue_head[adapter]
        while row != NONE:
            if is_movable(state, row):
                heap_push(movable, state.rows.request[row], -state.rows.request[row])
            row = state.rows.following[row]
