"""A doubly linked list over one flat array: add at either end or take out, each in constant time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from capplan.compile import inner, jit

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
