"""`check_integrity`: recompute everything that a state counts along the way, and compare."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from capplan.serving import NONE, Limits, State
from capplan.serving import state as s
from capplan.serving.heap import Heap


def check_integrity(state: State, limits: Limits, num_blocks: int) -> None:
    """Assert that `state` holds together between two steps, after `commit` or before the first `schedule`.

    Parameters
    ----------
    state
        The instance.
    limits
        The limits of its last step.
    num_blocks
        Usable KV blocks it was made with.

    Raises
    ------
    AssertionError
        When a counter differs from what the rows say, a row is in two places or in none, a list or heap is
        broken, or a limit is exceeded.
    """
    running = running_rows(state)
    waiting = waiting_rows(state)
    _check_rows(state, running, waiting)
    _check_blocks(state, limits, num_blocks, running)
    _check_decoding(state, limits, running)
    _check_queues(state, waiting)
    _check_adapters(state, limits, running)
    _check_last_step(state, limits, running)


def running_rows(state: State) -> list[int]:
    """Return the running rows in order of admission."""
    rows = _follow(state, int(state.counters[s.RUN_HEAD]))
    before = NONE
    for row in rows:
        _same("previous running row", state.previous[row], before)
        before = row
    _same("last running row", state.counters[s.RUN_TAIL], before)
    return rows


def waiting_rows(state: State) -> list[int]:
    """Return the waiting rows in queue order."""
    rows = []
    for adapter, head in enumerate(state.queue_head):
        queue = _follow(state, int(head))
        _same(f"tail of queue {adapter}", state.queue_tail[adapter], queue[-1] if queue else NONE)
        _same(f"adapters in queue {adapter}", {int(state.adapter[r]) for r in queue} - {adapter}, set())
        rows += queue
    return sorted(rows, key=lambda row: int(state.waiting_key[row]))


def computed(state: State, row: int) -> int:
    """Return the tokens of `row` with valid KV."""
    return int(state.computed[row]) + _decoded(state, row)


def _decoded(state: State, row: int) -> int:
    since = int(state.since[row])
    return 0 if since == NONE else int(state.counters[s.TICK]) - since


def _follow(state: State, row: int) -> list[int]:
    rows = []
    while row != NONE:
        rows.append(row)
        assert len(rows) <= state.following.size, "a list of rows runs in a circle"
        row = int(state.following[row])
    return rows


def _check_rows(state: State, running: list[int], waiting: list[int]) -> None:
    c = state.counters
    free = [int(row) for row in state.free_rows[: c[s.N_FREE_ROWS]]]
    _same("rows running, waiting and free", sorted(running + waiting + free), list(range(state.request.size)))
    _same("number of running rows", c[s.N_RUNNING], len(running))
    _same("number of waiting rows", c[s.N_WAITING], len(waiting))
    ages = [int(state.sequence[row]) for row in running]
    _same("ages of running rows", ages, sorted(set(ages)))
    for row in waiting:
        _same(f"computed tokens of waiting row {row}", computed(state, row), 0)


def _check_blocks(state: State, limits: Limits, num_blocks: int, running: list[int]) -> None:
    held = [computed(state, row) for row in running]
    blocks = sum(-(-tokens // limits.block_size) for tokens in held)
    _same("free and held blocks", state.counters[s.FREE_BLOCKS] + blocks, num_blocks)
    assert state.counters[s.FREE_BLOCKS] >= 0, "more blocks held than there are"
    _same("KV tokens", state.counters[s.KV_TOKENS], sum(held))
    for row, tokens in zip(running, held, strict=True):
        assert tokens < limits.max_model_len, f"row {row} outgrew max_model_len"


def _check_decoding(state: State, limits: Limits, running: list[int]) -> None:
    c = state.counters
    decoding = [row for row in running if state.since[row] != NONE]
    partial = [row for row in running if state.since[row] == NONE]
    _same("partial rows", [int(row) for row in state.partial[: c[s.N_PARTIAL]]], partial)
    _same("number of decoding rows", c[s.N_DECODING], len(decoding))
    phase = np.zeros(limits.block_size, np.int64)
    for row in decoding:
        phase[(state.computed[row] - state.since[row]) % limits.block_size] += 1
        known = int(state.prompt[row] + state.output[row]) + _decoded(state, row)
        _same(f"tokens that decoding row {row} lacks", known - computed(state, row), 1)
    _same("phases", state.phase.tolist(), phase.tolist())
    due = {row: _due(state, row) for row in decoding}
    _check_heap("finish", state.finish, due)
    assert all(key >> 32 > c[s.TICK] for key in due.values()), "a request that is over still runs"


def _due(state: State, row: int) -> int:
    last_tick = int(state.since[row]) + int(state.target[row]) - int(state.output[row])
    return (last_tick << 32) | int(state.sequence[row])


def _check_queues(state: State, waiting: list[int]) -> None:
    heads: dict[int, int] = {}
    for row in waiting:
        heads.setdefault(int(state.adapter[row]), int(state.waiting_key[row]))
    hot = {a: key for a, key in heads.items() if a == 0 or state.users[a] > 0}
    _check_heap("hot", state.hot, hot)
    _check_heap("cold", state.cold, {a: key for a, key in heads.items() if a not in hot})


def _check_heap(name: str, heap: Heap, members: dict[int, int]) -> None:
    ids = [int(i) for i in heap.ids[: heap.size[0]]]
    _same(f"members of heap {name}", sorted(ids), sorted(members))
    _same(f"keys of heap {name}", {i: int(heap.key[i]) for i in ids}, members)
    _same(f"positions in heap {name}", [int(heap.position[i]) for i in ids], list(range(len(ids))))
    _same(f"number of positions in heap {name}", int((heap.position >= 0).sum()), len(ids))
    for at, member in enumerate(ids[1:], start=1):
        assert members[ids[(at - 1) // 2]] < members[member], f"heap {name} is out of order"


def _check_adapters(state: State, limits: Limits, running: list[int]) -> None:
    c = state.counters
    adapters = range(1, state.users.size)
    users = np.bincount([int(state.adapter[row]) for row in running], minlength=state.users.size)
    _same("users of adapters", state.users[1:].tolist(), users[1:].tolist())
    active = {a for a in adapters if users[a] > 0}
    resident = {a for a in adapters if state.resident[a]}
    on_host = {a for a in adapters if state.on_host[a]}
    for name, counter, members in (
        ("active", s.N_ACTIVE, active),
        ("resident", s.N_RESIDENT, resident),
        ("on host", s.N_ON_HOST, on_host),
    ):
        _same(f"number of adapters {name}", c[counter], len(members))
    assert active <= resident <= on_host, (
        "an adapter runs without a slot, or has one without being on the host"
    )
    assert len(resident) <= limits.max_loras, "more adapters resident than slots"
    assert len(on_host) <= max(limits.max_cpu_loras, 0), "more adapters on the host than max_cpu_loras"
    _same("idle residents", set(_links(state.gpu_idle)), resident - active)
    _same("idle on host", set(_links(state.host_idle)), on_host - active)


def _links(links: NDArray[np.int32]) -> list[int]:
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


def _check_last_step(state: State, limits: Limits, running: list[int]) -> None:
    c = state.counters
    assert 0 <= c[s.STEP_TOKENS] <= limits.max_num_batched_tokens, "the step exceeded its token budget"
    assert len(running) <= limits.max_num_seqs, "more requests run than max_num_seqs"
    assert c[s.N_PREEMPTED] == 0 or c[s.N_ADMITTED] == 0, "a step preempted and admitted"


def _same(what: str, found: Any, expected: Any) -> None:
    assert found == expected, f"{what}: {found}, expected {expected}"
