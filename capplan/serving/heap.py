"""An indexed binary heap over flat arrays: smallest key first, any member removable in logarithmic time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.compile import inner, jit

_ITEM = np.dtype([("ids", np.int64), ("position", np.int64), ("key", np.int64)], align=True)


class Heap(NamedTuple):
    """Members are small integers."""

    items: np.recarray[Any, Any]
    """Shape (capacity,). ``ids``: the members in heap order, of which the first `size[0]` count.
    ``position``: 1 + where a member stands there; 0 when it is not in the heap. ``key``: its key;
    equal keys are never used, ties are part of the key.
    """
    size: NDArray[np.int64]
    """Shape (1,): the number of members."""


def new_heap(capacity: int) -> Heap:
    """Return an empty heap for the members 0 .. capacity - 1."""
    # All zeros, so that members nobody uses take no memory.
    return Heap(np.zeros(capacity, _ITEM).view(np.recarray), np.zeros(1, np.int64))


@inner
def _sift_up(heap: Heap, at: int) -> None:
    member = heap.items.ids[at]
    while at > 0:
        parent = (at - 1) >> 1
        other = heap.items.ids[parent]
        if heap.items.key[other] <= heap.items.key[member]:
            break
        heap.items.ids[at] = other
        heap.items.position[other] = at + 1
        at = parent
    heap.items.ids[at] = member
    heap.items.position[member] = at + 1


@inner
def _sift_down(heap: Heap, at: int) -> None:
    size = heap.size[0]
    member = heap.items.ids[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if (
            child + 1 < size
            and heap.items.key[heap.items.ids[child + 1]] < heap.items.key[heap.items.ids[child]]
        ):
            child += 1
        other = heap.items.ids[child]
        if heap.items.key[member] <= heap.items.key[other]:
            break
        heap.items.ids[at] = other
        heap.items.position[other] = at + 1
        at = child
    heap.items.ids[at] = member
    heap.items.position[member] = at + 1


@jit
def heap_push(heap: Heap, member: int, key: int) -> None:
    """Add `member`, which must not be in the heap, with `key`."""
    at = heap.size[0]
    heap.items.key[member] = key
    heap.items.ids[at] = member
    heap.size[0] = at + 1
    _sift_up(heap, at)


@jit
def heap_remove(heap: Heap, member: int) -> None:
    """Take out `member`, which must be in the heap."""
    at = heap.items.position[member] - 1
    last = heap.size[0] - 1
    heap.size[0] = last
    heap.items.position[member] = 0
    if at == last:
        return
    moved = heap.items.ids[last]
    heap.items.ids[at] = moved
    heap.items.position[moved] = at + 1
    _sift_up(heap, at)
    _sift_down(heap, heap.items.position[moved] - 1)
