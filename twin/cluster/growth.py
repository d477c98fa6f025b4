"""Larger tables for an instance in mid-simulation, so that memory follows the requests in flight."""

from __future__ import annotations

import numpy as np

from capplan.serving import State
from capplan.serving.heap import Heap
from capplan.serving.state import N_FREE_ROWS, Records


def with_rows(state: State, rows: int) -> State:
    """Return the state with room for more requests in flight; what does not depend on it is shared."""
    before = state.rows.size
    state.counters[N_FREE_ROWS] += rows - before
    in_phase = state.in_phase
    if in_phase.shape[1] > state.phase.size:  # prefix caching: sentinels come behind the rows
        moved = np.where(in_phase >= before, in_phase + (rows - before), in_phase)
        in_phase = np.full((2, rows + state.phase.size), -1, np.int64)
        in_phase[:, :before] = moved[:, :before]
        in_phase[:, rows:] = moved[:, before:]
    return state._replace(
        rows=_longer(state.rows, rows),
        finish=Heap(_longer(state.finish.items, rows), state.finish.size),
        in_phase=in_phase,
    )


def _longer(records: Records, size: int) -> Records:
    longer = np.zeros(size, records.dtype)
    longer[: records.size] = records
    return longer.view(np.recarray)
