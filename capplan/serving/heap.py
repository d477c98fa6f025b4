"""An indexed binary heap over flat arrays: smallest key first, any member removable in logarithmic time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.serving.compile import jit


class Heap(NamedTuple):
    """Members are small integers; `key` holds the key of every possible member."""

    ids: NDArray[np.int32]
    """Shape (capacity,): the members in heap order; the first `size[0]` entries count."""
    position: NDArray[np.int32]
    """Shape (capacity,): where a member stands in `ids`; -1 when it is not in the heap."""
    key: NDArray[np.int64]
    """Shape (capacity,): the keys. Equal keys are never used: ties are part of the key."""
    size: NDArray[np.int64]
    """Shape (1,): the number of members."""


def new_heap(capacity: int) -> Heap:
    """Return an empty heap for the members 0 .. capacity - 1."""
    return Heap(
        ids=np.zeros(capacity, np.int32),
        position=np.full(capacity, -1, np.int32),
        key=np.zeros(capacity, np.int64),
        size=np.zeros(1, np.int64),
    )


@jit
def _sift_up(heap: Heap, at: int) -> None:
    member = heap.ids[at]
    while at > 0:
        parent = (at - 1) >> 1
        other = heap.ids[parent]
        if heap.key[other] <= heap.key[member]:
            break
        heap.ids[at] = other
        heap.position[other] = at
        at = parent
    heap.ids[at] = member
    heap.position[member] = at


@jit
def _sift_down(heap: Heap, at: int) -> None:
    size = heap.size[0]
    member = heap.ids[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and heap.key[heap.ids[child + 1]] < heap.key[heap.ids[child]]:
            child += 1
        other = heap.ids[child]
        if heap.key[member] <= heap.key[other]:
            break
        heap.ids[at] = other
        heap.position[other] = at
        at = child
    heap.ids[at] = member
    heap.position[member] = at


@jit
def heap_push(heap: Heap, member: int, key: int) -> None:
    """Add `member`, which must not be in the heap, with `key`."""
    at = heap.size[0]
    heap.key[member] = key
    heap.ids[at] = member
    heap.size[0] = at + 1
    _sift_up(heap, at)


@jit
def heap_remove(heap: Heap, member: int) -> None:
    """Take out `member`, which must be in the heap."""
    at = heap.position[member]
    last = heap.size[0] - 1
    heap.size[0] = last
    heap.position[member] = -1
    if at == last:
        return
    moved = heap.ids[last]
    heap.ids[at] = moved
    heap.position[moved] = at
    _sift_up(heap, at)
    _sift_down(heap, heap.position[moved])
