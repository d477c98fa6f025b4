"""One pass over the requests of a trace, and order statistics of what it finds."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.compile import jit
from capplan.twin.trace import NEVER, STATUS_RUNNING, Trace
from capplan.workload import Requests

PERCENTILES = (50, 90, 95, 99)

# Positions in `Reduced.totals`.
COMPLETED = 0
SEVERAL = 1  # completed requests of two output tokens or more
TOKENS = 2  # of all requests
EXECUTING_TOKENS = 3  # of requests in execution at the end
PROMPT_TOKENS = 4  # of completed requests
OUTPUT_TOKENS = 5
DECODING_NS = 6  # first to last token, completed requests
_N_TOTALS = 7


class Reduced(NamedTuple):
    """Latencies of completed requests, in the order of arrival, and totals."""

    ttft_s: NDArray[np.float64]
    e2e_s: NDArray[np.float64]
    tpt_ms: NDArray[np.float64]
    tpot_ms: NDArray[np.float64]
    """Requests of several output tokens only."""
    totals: NDArray[np.int64]


def reduce_trace(
    requests: Requests, trace: Trace, horizon_ns: int, max_model_len: int, overhead_s: float
) -> Reduced:
    """Reduce a trace to what its metrics are computed from.

    Parameters
    ----------
    requests, trace
        What was asked and what happened.
    horizon_ns
        End of the simulation; a request that ended later was in execution then.
    max_model_len
        Longest prompt and output together, where a request ends.
    overhead_s
        Time of a request outside the engine, in its TTFT and E2E.
    """
    n = requests.arrival_ns.size
    # Untouched pages of these take no memory, so room for all requests costs nothing where most are rejected.
    ttft_s, e2e_s, tpt_ms, tpot_ms = (np.empty(n) for _ in range(4))
    totals = np.zeros(_N_TOTALS, np.int64)
    everything = Reduced(ttft_s, e2e_s, tpt_ms, tpot_ms, totals)
    _reduce(requests, trace, horizon_ns, max_model_len, overhead_s, everything)
    done, several = int(totals[COMPLETED]), int(totals[SEVERAL])
    return Reduced(ttft_s[:done], e2e_s[:done], tpt_ms[:done], tpot_ms[:several], totals)


@jit
def _reduce(
    requests: Requests, trace: Trace, horizon_ns: int, max_model_len: int, overhead_s: float, out: Reduced
) -> None:
    completed = several = tokens = executing = prompts = outputs = decoding_ns = 0
    for i in range(requests.arrival_ns.size):
        prompt: int = requests.prompt_tokens[i]
        output: int = min(requests.output_tokens[i], max(max_model_len - prompt, 1))
        tokens += prompt + output
        finish_ns: int = trace.finish_ns[i]
        if finish_ns == NEVER:
            if trace.status[i] == STATUS_RUNNING:
                executing += prompt + output
            continue
        if finish_ns > horizon_ns:
            executing += prompt + output
            continue
        prompts += prompt
        outputs += output
        arrival_ns, first_ns = requests.arrival_ns[i], trace.first_ns[i]
        e2e_s = (finish_ns - arrival_ns) / 1e9 + overhead_s
        out.ttft_s[completed] = (first_ns - arrival_ns) / 1e9 + overhead_s
        out.e2e_s[completed] = e2e_s
        out.tpt_ms[completed] = e2e_s * 1e3 / output
        completed += 1
        if output > 1:
            decoding_ns += finish_ns - first_ns
            out.tpot_ms[several] = (finish_ns - first_ns) / 1e6 / (output - 1)
            several += 1
    out.totals[COMPLETED] = completed
    out.totals[SEVERAL] = several
    out.totals[TOKENS] = tokens
    out.totals[EXECUTING_TOKENS] = executing
    out.totals[PROMPT_TOKENS] = prompts
    out.totals[OUTPUT_TOKENS] = outputs
    out.totals[DECODING_NS] = decoding_ns


def statistics(values: NDArray[np.float64]) -> tuple[float, ...]:
    """Return the mean and the percentiles, interpolated linearly; reorders `values`. NaN without any."""
    if values.size == 0:
        return (math.nan,) * (1 + len(PERCENTILES))
    found = [float(values.mean())]
    last = values.size - 1
    above, skipped = values, 0  # the values from the last percentile on, and how many are below
    for percent in PERCENTILES:
        at = percent / 100 * last
        below = int(at) - skipped
        above.partition(below)
        above, skipped = above[below:], int(at)
        low = float(above[0])
        high = float(above[1:].min()) if above.size > 1 else low
        found.append(low + (at - skipped) * (high - low))
    return tuple(found)
