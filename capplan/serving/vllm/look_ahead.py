"""S-LoRA's look-ahead: whether a batch fits into memory until its last declared output token.

Rows that start at an unknown time, such as those that wait for their adapters, count in full from the start.

Source: S-LoRA c1ddf48, ``router/req_queue.py``.
"""

from __future__ import annotations

from capplan._jit import inner
from capplan.serving.state import NONE, Limits, State
from capplan.serving.vllm.running import output_tokens


@inner
def _left(state: State, row: int) -> int:
    """Return the tokens that a row may still generate after the next one."""
    return int(state.rows.target[row] - output_tokens(state, row) - 1)


@inner
def insert_by_end(state: State, row: int, ordered: int) -> None:
    """Insert a row into the descending order of ends, the first `ordered` entries of a list."""
    at = ordered
    left = _left(state, row)
    while at > 0 and _left(state, state.lists.by_end[at - 1]) < left:
        state.lists.by_end[at] = state.lists.by_end[at - 1]
        at -= 1
    state.lists.by_end[at] = row


@inner
def remove_from_order(state: State, row: int) -> int:
    """Remove an ending row, which still runs, from the order of ends; return its place."""
    last = state.counters.n_running - 1
    at = last
    while state.lists.by_end[at] != row:
        at -= 1
    for i in range(at, last):
        state.lists.by_end[i] = state.lists.by_end[i + 1]
    return int(at)


@inner
def held_to_end(state: State, limits: Limits, row: int) -> int:
    """Return the most tokens that a row will hold; its last block may be partly unused."""
    return int(state.rows.prompt[row] + state.rows.target[row] + limits.block_size - 1)


@inner
def fits_to_end(
    state: State, limits: Limits, new: int, adapter_pages: int, ordered: int, held_late: int
) -> bool:
    """Return whether the batch with the row `new` can run to its end beside so many blocks of adapters.

    When the i-th request in the descending order of ends ends, each of the first i has grown by the tokens
    left of the i-th: ``need = max_i(left_i * i + sum of what the first i hold now)``.

    Parameters
    ----------
    new
        A row in the order of ends, which starts now; NONE: no further row.
    ordered
        Number of rows in the order of ends.
    held_late
        Tokens that the others, which start later, will hold at their end.
    """
    waste = limits.block_size - 1
    room = (state.counters.capacity - adapter_pages) * limits.block_size
    held, n = held_late, 0
    if held > 0 and held >= room:
        return False
    pending = new != NONE
    at = 0
    while at < ordered or pending:
        if pending and (at == ordered or _left(state, state.lists.by_end[at]) < _left(state, new)):
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
