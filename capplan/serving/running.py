"""Running requests: their order, what a decoding row has computed by now, and how rows change kind.

A decoding row needs a new block in the steps at which its computed tokens are a multiple of the block size,
so counting rows by `(computed - since) mod block_size` tells the blocks of a whole step at once.
"""

from __future__ import annotations

from capplan.serving.adapters import release_adapter
from capplan.serving.compile import jit
from capplan.serving.heap import heap_push, heap_remove
from capplan.serving.queue import push_front
from capplan.serving.state import (
    FREE_BLOCKS,
    KV_TOKENS,
    N_DECODING,
    N_FREE_ROWS,
    N_PREEMPTED,
    N_RUNNING,
    N_STALLED,
    NONE,
    RUN_HEAD,
    RUN_TAIL,
    TICK,
    Limits,
    State,
)


@jit
def blocks_for(tokens: int, block_size: int) -> int:
    """Return the number of KV blocks that hold `tokens`."""
    return (tokens + block_size - 1) // block_size


@jit
def computed_tokens(state: State, row: int) -> int:
    """Return the tokens of `row` with valid KV."""
    if state.since[row] == NONE:
        return state.computed[row]
    return state.computed[row] + state.counters[TICK] - state.since[row]


@jit
def output_tokens(state: State, row: int) -> int:
    """Return the tokens that `row` has generated."""
    if state.since[row] == NONE:
        return state.output[row]
    return state.output[row] + state.counters[TICK] - state.since[row]


@jit
def start_decoding(state: State, row: int) -> None:
    """Make a row that lacks exactly one token of its known sequence a decoding one, from this tick on."""
    c = state.counters
    tick = c[TICK]
    state.since[row] = tick
    state.phase[(state.computed[row] - tick) % state.phase.size] += 1
    last_tick = tick + state.target[row] - state.output[row]
    heap_push(state.finish, row, (last_tick << 32) | state.sequence[row])
    c[N_DECODING] += 1


@jit
def stop_decoding(state: State, row: int) -> None:
    """Write down what a decoding row has computed and generated; it is partial from now on."""
    c = state.counters
    state.phase[(state.computed[row] - state.since[row]) % state.phase.size] -= 1
    steps = c[TICK] - state.since[row]
    state.computed[row] += steps
    state.output[row] += steps
    state.since[row] = NONE
    heap_remove(state.finish, row)
    c[N_DECODING] -= 1


@jit
def append_running(state: State, row: int) -> None:
    """Put `row` at the end of the running order."""
    c = state.counters
    tail = c[RUN_TAIL]
    state.previous[row] = tail
    state.following[row] = NONE
    if tail == NONE:
        c[RUN_HEAD] = row
    else:
        state.following[tail] = row
    c[RUN_TAIL] = row
    c[N_RUNNING] += 1


@jit
def _remove_running(state: State, row: int) -> None:
    c = state.counters
    before, after = state.previous[row], state.following[row]
    if before == NONE:
        c[RUN_HEAD] = after
    else:
        state.following[before] = after
    if after == NONE:
        c[RUN_TAIL] = before
    else:
        state.previous[after] = before
    c[N_RUNNING] -= 1


@jit
def leave_running(state: State, limits: Limits, row: int) -> None:
    """Take a partial row out of the running order; its blocks and its use of the adapter end."""
    c = state.counters
    c[FREE_BLOCKS] += blocks_for(state.computed[row], limits.block_size)
    c[KV_TOKENS] -= state.computed[row]
    _remove_running(state, row)
    release_adapter(state, state.adapter[row])


@jit
def preempt_last(state: State, limits: Limits) -> int:
    """Preempt the request admitted last: it loses its KV and waits before all others. Return its row."""
    c = state.counters
    row = c[RUN_TAIL]
    if state.since[row] != NONE:
        stop_decoding(state, row)
        state.stalled[c[N_STALLED]] = row
        c[N_STALLED] += 1
    leave_running(state, limits, row)
    state.computed[row] = 0
    state.tokens[row] = 0
    push_front(state, row)
    state.preempted[c[N_PREEMPTED]] = row
    c[N_PREEMPTED] += 1
    return row


@jit
def free_row(state: State, row: int) -> None:
    """Hand the row of a finished request back for reuse."""
    c = state.counters
    state.free_rows[c[N_FREE_ROWS]] = row
    c[N_FREE_ROWS] += 1
