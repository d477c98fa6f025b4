"""S-LoRA's look-ahead: whether a batch fits into memory until its last declared output token.

Source: S-LoRA c1ddf48, ``router/req_queue.py``.
"""

from __future__ import annotations

from capplan.compile import inner
from capplan.serving.running import output_tokens
from capplan.serving.state import NONE, Limits, State


@inner
def _left(state: State, row: int) -> int:
    """Return the tokens that a row may still generate after the next one."""
    return int(state.rows.target[row] - output_tokens(state, row) - 1)


@inner
def insert_by_end(state: State, row: int) -> None:
    """Insert an admitted row into the descending order of ends."""
    at = state.counters.n_running - 1
    left = _left(state, row)
    while at > 0 and _left(state, state.lists.by_end[at - 1]) < left:
        state.lists.by_end[at] = state.lists.by_end[at - 1]
        at -= 1
    state.lists.by_end[at] = row


@inner
def remove_from_order(state: State, row: int) -> None:
    """Remove an ending row, which still runs, from the order of ends."""
    last = state.counters.n_running - 1
    at = last
    while state.lists.by_end[at] != row:
        at -= 1
    for i in range(at, last):
        state.lists.by_end[i] = state.lists.by_end[i + 1]


@inner
def fits_to_end(state: State, limits: Limits, new: int, adapter_pages: int) -> bool:
    """Return whether the batch with the row `new` can run to its end beside so many blocks of adapters.

    When the i-th request in the descending order of ends ends, each of the first i has grown by the tokens
    left of the i-th: ``need = max_i(left_i * i + sum of what the first i hold now)``. `new` may be NONE.
    """
    c = state.counters
    waste = limits.block_size - 1  # what the last block of a request may leave unused
    room = (c.capacity - adapter_pages) * limits.block_size
    held = n = 0
    pending = new != NONE
    at = 0
    while at < c.n_running or pending:
        if pending and (at == c.n_running or _left(state, state.lists.by_end[at]) < _left(state, new)):
            row = new
            pending = False
        else:
            row = state.lists.by_end[at]
            at += 1
        left = _left(state, row)
        held += state.rows.prompt[row] + max(1, output_tokens(state, row)) + waste
        n += 1
        if left * n + held >= room:
            return False
    return True
