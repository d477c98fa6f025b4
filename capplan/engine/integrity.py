"""`check_integrity`: what the engine keeps beside the scheduler's state, recounted and compared with it.

The state itself is checked by `capplan.testing.check_integrity`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capplan.serving import NONE, State
from capplan.serving import state as s

if TYPE_CHECKING:
    from capplan.engine.loop import Loop


def check_loop(loop: Loop) -> None:
    """Check requests, KV pages and adapters of a loop between two steps.

    Raises
    ------
    RuntimeError
        When a request is lost, a page belongs to nobody or to two, or an adapter is in no slot or in two.
    """
    _check_requests(loop)
    _check_pages(loop)
    _check_adapters(loop)


def _check_requests(loop: Loop) -> None:
    state, requests = loop.state, loop.requests
    running = _linked(state, int(state.counters[s.RUN_HEAD]))
    waiting = [row for head in state.adapters.queue_head for row in _linked(state, int(head))]
    rows = {number: request.row for number, request in requests.items()}
    _same("rows of requests", sorted(rows.values()), sorted(running + waiting))
    _same(
        "owners of rows", {n: int(state.rows.request[row]) for n, row in rows.items()}, {n: n for n in rows}
    )
    _same("running requests", sorted(r.row for r in requests.values() if r.running), sorted(running))
    _same("rows free and taken", int(state.counters[s.N_FREE_ROWS]) + len(rows), state.rows.size)
    _same("requests that are over", [n for n, r in requests.items() if r.finish_reason is not None], [])


def _check_pages(loop: Loop) -> None:
    c, pool = loop.state.counters, loop.blocks.pool
    used = int(c[s.CAPACITY] - c[s.FREE_BLOCKS] - c[s.ADAPTER_PAGES])
    _same("KV blocks in use", loop.blocks.in_use(), used)
    owned = [
        *pool.free_pages.tolist(),
        *loop.blocks.owned().tolist(),
        *loop.residency.memory.owned().tolist(),
    ]
    _same("pages free and owned", sorted(owned), list(range(1, pool.capacity + 1)))


def _check_adapters(loop: Loop) -> None:
    adapters, residency = loop.state.adapters, loop.residency
    resident = {number for number in range(1, adapters.size) if adapters.resident[number]}
    _same("residents without a place", resident - residency.in_memory, set())
    _same("adapters with a slot or pages", residency.memory.holders(), residency.in_memory)


def _linked(state: State, row: int) -> list[int]:
    rows: list[int] = []
    while row != NONE:
        rows.append(row)
        row = int(state.rows.following[row])
    return rows


def _same(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise RuntimeError(f"{what}: {found}, expected {expected}")
