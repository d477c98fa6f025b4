"""A doubly linked list over one flat array: append, take out and pop the oldest, each in constant time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from capplan.serving.compile import jit

_BEFORE = 0
_AFTER = 1


def new_links(capacity: int) -> NDArray[np.int32]:
    """Return an empty list for the members 0 .. capacity - 1: shape (2, capacity + 1), sentinel last."""
    links = np.full((2, capacity + 1), -1, np.int32)
    links[:, capacity] = capacity
    return links


@jit
def links_append(links: NDArray[np.int32], member: int) -> None:
    """Add `member`, which must not be listed, at the end."""
    sentinel = links.shape[1] - 1
    last = links[_BEFORE, sentinel]
    links[_BEFORE, member] = last
    links[_AFTER, member] = sentinel
    links[_AFTER, last] = member
    links[_BEFORE, sentinel] = member


@jit
def links_remove(links: NDArray[np.int32], member: int) -> None:
    """Take out `member`, which must be listed."""
    before = links[_BEFORE, member]
    after = links[_AFTER, member]
    links[_AFTER, before] = after
    links[_BEFORE, after] = before
    links[_BEFORE, member] = -1
    links[_AFTER, member] = -1


@jit
def links_first(links: NDArray[np.int32]) -> int:
    """Return the oldest member, or -1 when the list is empty."""
    sentinel = links.shape[1] - 1
    first: int = links[_AFTER, sentinel]
    return -1 if first == sentinel else first
