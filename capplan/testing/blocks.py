"""Checks of the block pool, the part of `check_integrity` that prefix caching needs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capplan.serving import NONE, Limits, State
from capplan.serving import state as s
from capplan.serving.blocks import EMPTY


def check_pool(state: State, limits: Limits, running: list[int]) -> None:
    """Assert that every block is free or held, each by those whose tables name it, and indexed once."""
    pool = state.pool
    free = links_members(pool.free)
    _same("free blocks", state.counters[s.FREE_BLOCKS], len(free))
    held: Counter[int] = Counter()
    for row in running:
        place = int(state.rows.place[row])
        assert place != NONE, f"row {row} runs without a place"
        blocks = pool.table[place, : -(-_computed(state, row) // limits.block_size)].tolist()
        assert len(set(blocks)) == len(blocks), f"row {row} holds a block twice"
        held.update(blocks)
    _same(
        "holders of blocks", pool.blocks.holders.tolist(), [held[b] for b in range(pool.blocks.holders.size)]
    )
    _same("blocks free or held", sorted([*free, *held]), list(range(pool.blocks.holders.size)))
    places = {int(state.rows.place[row]) for row in running}
    unused = pool.free_places[: state.counters[s.N_FREE_PLACES]].tolist()
    _same("places", sorted([*places, *unused]), list(range(pool.free_places.size)))
    _check_index(state)
    _check_phases(state, limits, running)


def _check_index(state: State) -> None:
    pool = state.pool
    indexed: list[int] = []
    for first, last in zip(pool.buckets.first, pool.buckets.last, strict=True):
        before, block = NONE, int(first)
        while block != NONE:
            indexed.append(block)
            _same(f"block before {block}", pool.blocks.before[block], before)
            before, block = block, int(pool.blocks.after[block])
        _same("last block of a bucket", last, before)
    _same("indexed blocks", sorted(indexed), np.flatnonzero(pool.blocks.content >= 0).tolist())
    assert np.all(pool.blocks.content >= EMPTY - 1), "a block with an unknown kind of content"


def _check_phases(state: State, limits: Limits, running: list[int]) -> None:
    rows = state.rows.request.size
    for phase in range(limits.block_size):
        listed = []
        at = int(state.in_phase[1, rows + phase])
        while at != rows + phase:
            listed.append(at)
            assert len(listed) <= rows, "a list of rows by phase runs in a circle"
            at = int(state.in_phase[1, at])
        expected = [
            row
            for row in running
            if state.rows.since[row] >= 0
            and (state.rows.computed[row] - state.rows.since[row]) % limits.block_size == phase
        ]
        _same(f"rows in phase {phase}", sorted(listed), sorted(expected))


def links_members(links: NDArray[np.int64]) -> list[int]:
    """Return the members of a linked list in order, after checking every link."""
    before, after = links
    sentinel = before.size - 1
    members: list[int] = []
    at = int(after[sentinel])
    _same("link back to the sentinel", before[at], sentinel)
    while at != sentinel:
        members.append(at)
        assert len(members) < before.size, "links run in a circle"
        _same(f"link back to {at}", before[after[at]], at)
        at = int(after[at])
    unlisted = np.setdiff1d(np.arange(sentinel), members)
    assert np.all(links[:, unlisted] == -1), "an unlisted member has links"
    return members


def _computed(state: State, row: int) -> int:
    since = int(state.rows.since[row])
    return int(state.rows.computed[row]) + (0 if since < 0 else int(state.counters[s.TICK]) - since)


def _same(what: str, found: Any, expected: Any) -> None:
    assert found == expected, f"{what}: {found}, expected {expected}"
