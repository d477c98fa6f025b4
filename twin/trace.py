"""What a simulated instance leaves behind: times per request, token gaps, sums over time, counts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.serving.compile import jit

# Positions in `Trace.counts`.
STEPS = 0
ADAPTER_LOADS = 1
DISK_LOADS = 2
PREEMPTIONS = 3
REJECTED = 4
NOW_NS = 5
NEXT_REQUEST = 6
MAX_RUNNING = 7
MAX_WAITING = 8
LOAD_NS = 9
N_COUNTS = 10

# Positions in `Trace.sums`: integrals over simulated time, in units x nanoseconds.
BUSY_NS = 0
RUNNING_NS = 1
WAITING_NS = 2
KV_TOKEN_NS = 3
ADAPTER_NS = 4
N_SUMS = 5

NEVER = -1

_GAP_BINS = 4096
_GAP_SMALLEST_NS = 1e5
_GAP_BIN_WIDTH = 0.005  # of the natural logarithm: half a percent


class Trace(NamedTuple):
    """The record of one instance; written by both forms of the twin in the same way."""

    first_ns: NDArray[np.int64]
    """Clock at each request's first token, shape (requests,); NEVER before."""
    finish_ns: NDArray[np.int64]
    """Clock at each request's last token; NEVER before."""
    stalled_ns: NDArray[np.int64]
    """Clock at the last token before a request was preempted or left out of a step."""
    running_at_end: NDArray[np.int8]
    """1 for requests in execution when the simulation ended."""
    gaps: NDArray[np.int64]
    """Histogram of the gaps between a request's tokens, in logarithmic bins."""
    counts: NDArray[np.int64]
    sums: NDArray[np.float64]


def new_trace(requests: int) -> Trace:
    """Return an empty record for that many requests."""
    return Trace(
        first_ns=np.full(requests, NEVER, np.int64),
        finish_ns=np.full(requests, NEVER, np.int64),
        stalled_ns=np.zeros(requests, np.int64),
        running_at_end=np.zeros(requests, np.int8),
        gaps=np.zeros(_GAP_BINS, np.int64),
        counts=np.zeros(N_COUNTS, np.int64),
        sums=np.zeros(N_SUMS),
    )


@jit
def gap_bin(gap_ns: int) -> int:
    """Return the bin of a gap between tokens."""
    if gap_ns <= _GAP_SMALLEST_NS:
        return 0
    return min(_GAP_BINS - 1, int(np.log(gap_ns / _GAP_SMALLEST_NS) / _GAP_BIN_WIDTH))


def gap_quantile_ms(gaps: NDArray[np.int64], quantile: float) -> float:
    """Return a quantile of the token gaps, exact to half a percent; NaN when there is none."""
    total = int(gaps.sum())
    if total == 0:
        return float("nan")
    at = int(np.searchsorted(np.cumsum(gaps), quantile * total))
    return float(_GAP_SMALLEST_NS * np.exp((min(at, _GAP_BINS - 1) + 0.5) * _GAP_BIN_WIDTH) / 1e6)
