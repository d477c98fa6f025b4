"""Flat data structures: records, an indexed binary heap, doubly linked lists."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import by_reference, inner, jit

Records = np.recarray[Any, Any]

ABSENT = -1
"""No member of a structure."""


def int_fields(*names: str) -> np.dtype[np.void]:
    """Return the type of records of 64-bit integers."""
    return np.dtype([(name, np.int64) for name in names], align=True)


def new_record(fields: np.dtype[np.void]) -> np.record:
    """Return one record of zeros."""
    record: np.record = np.zeros(1, fields).view(np.recarray)[0]
    return record


_ITEM = int_fields("ids", "position", "key")


@by_reference
class Heap(NamedTuple):
    """Indexed binary heap of small integers."""

    items: Records
    """Shape (capacity,). ``ids``: the members in heap order, valid up to `size[0]`. ``position``: 1 + index
    of a member in `ids`; 0 if it is not in the heap. ``key``: its key; no two keys are equal.
    """
    size: NDArray[np.int64]
    """Shape (1,): the number of members."""


def new_heap(capacity: int) -> Heap:
    """Return an empty heap for the members 0 .. capacity - 1."""
    # Untouched pages of zeros take no memory.
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


_BEFORE = 0
_AFTER = 1


def new_links(capacity: int, listed_from: int | None = None) -> NDArray[np.int64]:
    """Return a list for the members 0 .. capacity - 1: shape (2, capacity + 1), sentinel last.

    It is empty, or lists the members from `listed_from` on in their order.
    """
    links = np.full((2, capacity + 1), -1, np.int64)
    ring = np.arange(capacity if listed_from is None else min(listed_from, capacity), capacity + 1)
    links[_BEFORE, ring] = np.roll(ring, 1)
    links[_AFTER, ring] = np.roll(ring, -1)
    return links


def new_rings(capacity: int, rings: int) -> NDArray[np.int64]:
    """Return several empty lists over the same members: list i has the sentinel ``capacity + i``."""
    links = np.full((2, capacity + rings), -1, np.int64)
    links[:, capacity:] = np.arange(capacity, capacity + rings)
    return links


@jit
def links_append(links: NDArray[np.int64], member: int) -> None:
    """Add `member`, which must not be listed, at the end."""
    ring_append(links, links.shape[1] - 1, member)


@jit
def links_prepend(links: NDArray[np.int64], member: int) -> None:
    """Add `member`, which must not be listed, at the beginning."""
    _insert_after(links, links.shape[1] - 1, member)


@jit
def links_remove(links: NDArray[np.int64], member: int) -> None:
    """Take out `member`, which must be listed."""
    before = links[_BEFORE, member]
    after = links[_AFTER, member]
    links[_AFTER, before] = after
    links[_BEFORE, after] = before
    links[_BEFORE, member] = -1
    links[_AFTER, member] = -1


@jit
def links_first(links: NDArray[np.int64]) -> int:
    """Return the oldest member, or -1 when the list is empty."""
    sentinel = links.shape[1] - 1
    first: int = links[_AFTER, sentinel]
    return -1 if first == sentinel else first


@inner
def ring_append(links: NDArray[np.int64], sentinel: int, member: int) -> None:
    """Add `member`, which must not be listed, at the end of the list with this sentinel."""
    _insert_after(links, links[_BEFORE, sentinel], member)


@inner
def _insert_after(links: NDArray[np.int64], before: int, member: int) -> None:
    """Add `member`, which must not be listed, behind `before`, a member or a sentinel."""
    after = links[_AFTER, before]
    links[_BEFORE, member] = before
    links[_AFTER, member] = after
    links[_AFTER, before] = member
    links[_BEFORE, after] = member


@inner
def ring_next(links: NDArray[np.int64], member: int) -> int:
    """Return the member behind `member`, or the sentinel; of a sentinel, the first member."""
    following: int = links[_AFTER, member]
    return following
