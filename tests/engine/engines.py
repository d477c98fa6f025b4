"""Replay of timed requests, and consistency of an engine between two steps."""

from collections.abc import Sequence
from typing import NamedTuple

from capplan.engine import Completion, Engine, ModelConfig, Request, SamplingParams
from capplan.engine._engine import Prompt
from capplan.engine._engine_core import EngineCore
from capplan.serving import NONE, State
from capplan.serving.state import ENDING
from capplan.testing import check_integrity

TINY_MODEL = ModelConfig(
    name="tiny",
    layers=1,
    hidden_size=16,
    heads=2,
    kv_heads=1,
    head_dim=8,
    intermediate_size=16,
    vocab_size=300,
    max_positions=128,
)


def check_engine(engine: Engine) -> None:
    """Recount requests, KV pages and adapters, and compare them with the scheduler's state."""
    core = engine.core
    check_integrity(core.state, core.limits, engine.sizes.num_blocks)
    check_requests(core)
    c, pool, memory = core.state.counters, core.blocks.pool, core.lora.memory
    assert core.blocks.in_use() == c.capacity - c.free_blocks - c.adapter_pages
    owned = [*pool.free_pages.tolist(), *core.blocks.owned().tolist(), *memory.owned().tolist()]
    assert sorted(owned) == list(range(1, pool.capacity + 1)), "a page has no owner or two"
    adapters = core.state.adapters
    resident = {number for number in range(1, adapters.size) if adapters.resident[number]}
    assert resident <= core.lora.in_memory
    assert memory.holders() == core.lora.in_memory


def check_requests(core: EngineCore) -> None:
    """Check that every request has its own row, in the list of its state, until it ends or is about to."""
    state, requests = core.state, core.requests
    running = [
        row for row in linked_rows(state, int(state.counters.run_head)) if state.rows.since[row] != ENDING
    ]
    waiting = [row for head in state.adapters.queue_head for row in linked_rows(state, int(head))]
    rows = {number: request.row for number, request in requests.items() if request in core._by_row}
    assert sorted(rows.values()) == sorted(running + waiting)
    assert {number: int(state.rows.request[row]) for number, row in rows.items()} == {n: n for n in rows}
    assert sorted(row for number, row in rows.items() if requests[number].running) == sorted(running)
    assert int(state.counters.n_free_rows + state.counters.n_ending) + len(rows) == state.rows.size
    assert all(request.finish_reason is None for request in requests.values())


def linked_rows(state: State, row: int) -> list[int]:
    rows: list[int] = []
    while row != NONE:
        rows.append(row)
        row = int(state.rows.following[row])
    return rows


class TimedRequest(NamedTuple):
    """Request with its arrival time, in nanoseconds after the start of a replay."""

    arrival_ns: int
    prompt: Prompt
    adapter: str | None
    params: SamplingParams


def replay(engine: Engine, arrivals: Sequence[TimedRequest]) -> list[Completion | None]:
    """Serve requests in order of arrival and return their completions; None if the engine was full.

    With `Engine(virtual_time=True)` idle time is skipped, and equal durations of steps lead to equal
    decisions.
    """
    clock = engine.core.clock
    start_ns = clock.now_ns()
    requests: list[Request | None] = []
    while True:
        while len(requests) < len(arrivals):
            arrival_ns, prompt, adapter, params = arrivals[len(requests)]
            if arrival_ns > clock.now_ns() - start_ns:
                break
            request = engine.new_request(prompt, adapter, params, start_ns + arrival_ns)
            requests.append(request if engine.submit(request) else None)
        if engine.step() is not None:
            continue
        upcoming = [start_ns + arrivals[len(requests)].arrival_ns] if len(requests) < len(arrivals) else []
        timeout_s = (upcoming[0] - clock.now_ns()) * 1e-9 if upcoming else 60.0
        loaded_ns = engine.core.loader.next_ns(max(0.0, timeout_s))
        if loaded_ns is not None:
            upcoming.append(loaded_ns)
        if not upcoming:
            return [None if request is None else engine.completion(request) for request in requests]
        clock.sleep_until(min(upcoming))
