"""Assertions on the structures of a state: lists of rows, heaps, links."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capplan.serving import NONE, State
from capplan.serving.pooled.state import PooledState
from capplan.serving.structures import Heap


def snapshot(state: State) -> State:
    """Return a view of a state for reading from Python: records look their fields up once."""
    pooled = state.pooled
    if isinstance(pooled, PooledState):
        pooled = pooled._replace(
            counts=_fields(pooled.counts),
            rows=_fields(pooled.rows),
            queues=_fields(pooled.queues),
            adapters=_fields(pooled.adapters),
        )
    return state._replace(
        counters=_fields(state.counters),
        rows=_fields(state.rows),
        adapters=_fields(state.adapters),
        pooled=pooled,
    )


def _fields(records: Any) -> Any:
    plain = np.asarray(records)
    names = records.dtype.names
    if plain.ndim == 0:
        return SimpleNamespace(**dict(zip(names, plain.item(), strict=True)))
    return SimpleNamespace(size=plain.size, **{name: plain[name] for name in names})


def same(what: str, found: Any, expected: Any) -> None:
    """Assert that a stored value is the one recomputed from the rows."""
    assert found == expected, f"{what}: {found}, expected {expected}"


def follow(state: State, row: int) -> list[int]:
    """Return the rows of a linked list from `row` on."""
    rows = []
    while row != NONE:
        rows.append(row)
        assert len(rows) <= state.rows.following.size, "a list of rows runs in a circle"
        row = int(state.rows.following[row])
    return rows


def check_heap(name: str, heap: Heap, members: dict[int, int]) -> None:
    """Assert that a heap holds exactly these members with these keys, in heap order."""
    ids = [int(i) for i in heap.items.ids[: heap.size[0]]]
    same(f"members of heap {name}", sorted(ids), sorted(members))
    same(f"keys of heap {name}", {i: int(heap.items.key[i]) for i in ids}, members)
    positions = [int(heap.items.position[i]) for i in ids]
    same(f"positions in heap {name}", positions, list(range(1, len(ids) + 1)))
    same(f"number of positions in heap {name}", int((heap.items.position > 0).sum()), len(ids))
    for at, member in enumerate(ids[1:], start=1):
        assert members[ids[(at - 1) // 2]] < members[member], f"heap {name} is out of order"


def links_members(links: NDArray[np.int64]) -> list[int]:
    """Return the members of a linked list in order, after checking every link."""
    before, after = links
    sentinel = before.size - 1
    members: list[int] = []
    at = int(after[sentinel])
    same("link back to the sentinel", before[at], sentinel)
    while at != sentinel:
        members.append(at)
        assert len(members) < before.size, "links run in a circle"
        same(f"link back to {at}", before[after[at]], at)
        at = int(after[at])
    unlisted = np.setdiff1d(np.arange(sentinel), members)
    assert np.all(links[:, unlisted] == -1), "an unlisted member has links"
    return members
