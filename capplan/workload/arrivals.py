"""Arrivals of every adapter: of the plain Poisson process in compiled code, of all others in arrays."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.compile import jit
from capplan.spec import Arrivals, Renewal, Unpredictable, Workload
from capplan.workload.modulation import clock
from capplan.workload.renewal import Floats, GapLaw, Owners, gap_law, renewals
from capplan.workload.streams import exponential, uniform

NS_PER_S: Final = 1_000_000_000
_LARGEST_EXPONENT: Final = 700.0  # e to it is still a floating-point number


def draw_arrivals(rng: np.random.Generator, workload: Workload, duration_s: float) -> tuple[Owners, Floats]:
    """Return position of the adapter, and time in seconds, of each request in [0, ``duration_s``), sorted.

    Adapters are independent of each other.

    Raises
    ------
    InputError
        When over 1e8 requests are to be expected.
    """
    rates_rps = np.array([adapter.rate_rps for adapter in workload.adapters])
    match workload.arrivals:
        case Unpredictable() as process:
            owner, time_s = _unpredictable(rng, process, rates_rps, duration_s)
        case Renewal() as process:
            owner, time_s = _renewal(rng, process, workload, rates_rps, duration_s)
        case Arrivals() as name:
            owner, time_s = _renewal(rng, Renewal(process=name.value), workload, rates_rps, duration_s)
    order = np.argsort(time_s, kind="stable")
    return owner[order], time_s[order]


def _renewal(
    rng: np.random.Generator, process: Renewal, workload: Workload, rates_rps: Floats, duration_s: float
) -> tuple[Owners, Floats]:
    """Return a stationary renewal process per adapter, on the clock of its modulation."""
    law = gap_law(process.process, process.cv)
    time = clock(process.modulation, workload, duration_s)
    owner, gaps = renewals(rng, rates_rps * time.passed(duration_s), law.cv, law.first, law.gaps)
    return owner, time.seconds(gaps / rates_rps[owner], owner)


def _unpredictable(
    rng: np.random.Generator, process: Unpredictable, rates_rps: Floats, duration_s: float
) -> tuple[Owners, Floats]:
    """Return a process per adapter and interval: at a border the pending gap is dropped and drawn anew."""
    intervals = math.ceil(duration_s / process.every_s)
    rates = rates_rps[:, None] * _multipliers(rng, process, len(rates_rps), intervals)
    heavy = rng.random(rates.shape) < 0.5
    begin_s = np.arange(intervals) * process.every_s
    length_s = np.minimum(process.every_s, duration_s - begin_s)
    begin_s, length_s = np.broadcast_to(begin_s, rates.shape), np.broadcast_to(length_s, rates.shape)
    adapter = np.broadcast_to(np.arange(len(rates_rps))[:, None], rates.shape)
    owners, times = [], []
    for lognormal in (False, True):
        cells = (heavy == lognormal) & (rates > 0)
        law, unit_s = _law_of_cells(process, rates[cells], lognormal=lognormal)
        owner, gaps = renewals(rng, length_s[cells] / unit_s, law.cv, law.gaps, law.gaps)
        owners.append(adapter[cells][owner])
        times.append(begin_s[cells][owner] + gaps * unit_s[owner])
    return np.concatenate(owners), np.concatenate(times)


def _multipliers(rng: np.random.Generator, process: Unpredictable, adapters: int, intervals: int) -> Floats:
    """Return each adapter's rate in each interval over its first, shape (adapters, intervals)."""
    step = np.where(rng.random((adapters, intervals)) < 0.5, process.factor, 1 / process.factor)
    result = np.ones((adapters, intervals))
    for i in range(1, intervals):
        result[:, i] = np.clip(result[:, i - 1] * step[:, i], 1 / process.clip, process.clip)
    return result


def _law_of_cells(process: Unpredictable, rates_rps: Floats, *, lognormal: bool) -> tuple[GapLaw, Floats]:
    """Return the law of the gaps in cells of these rates, and its unit in each cell, in seconds."""
    if not lognormal:
        return gap_law("poisson", None), 1 / rates_rps
    if process.lognormal_gaps == "mean_preserving":
        return gap_law("lognormal", math.sqrt(math.expm1(process.sigma**2))), 1 / rates_rps

    def gaps(rng: np.random.Generator, owners: Owners) -> Floats:
        exponent = rates_rps[owners] * rng.standard_normal(len(owners))
        return np.exp(np.minimum(exponent, _LARGEST_EXPONENT))

    return GapLaw(1.0, gaps, gaps), np.ones(len(rates_rps))


def poisson_arrivals(key: np.uint64, rate_rps: float, horizon_ns: int) -> NDArray[np.int64]:
    """Return the times of a Poisson process in [0, `horizon_ns`), sorted, in nanoseconds.

    A longer horizon adds arrivals behind these and changes none of them.
    """
    if rate_rps == 0:
        return np.zeros(0, np.int64)
    mean_gap_ns = NS_PER_S / rate_rps
    expected = horizon_ns / mean_gap_ns
    room = math.ceil(expected + 8 * math.sqrt(expected)) + 32
    while True:
        arrival_ns = np.empty(room, np.int64)
        count = _fill_poisson(arrival_ns, key, mean_gap_ns, horizon_ns)
        if count < room:  # so it is but for one draw in 1e14
            return arrival_ns[:count]
        room *= 2


@jit
def _fill_poisson(arrival_ns: NDArray[np.int64], key: np.uint64, mean_gap_ns: float, horizon_ns: int) -> int:
    """Write arrivals until the horizon, or until there is no room left, and return their number."""
    time_ns = 0.0
    for i in range(arrival_ns.size):
        time_ns += exponential(key, i) * mean_gap_ns
        if time_ns >= horizon_ns:
            return i
        arrival_ns[i] = int(time_ns)
    return arrival_ns.size


@jit
def repeat_recent(
    adapter: NDArray[np.int32],
    recent: NDArray[np.int32],
    probability: float,
    repetitions: np.uint64,
    repeated: np.uint64,
) -> None:
    """Let requests repeat one of the adapters asked for last, each of them equally likely.

    Parameters
    ----------
    adapter : ndarray of int32, shape (n,)
        Adapter of each request that does not repeat; changed in place.
    recent : ndarray of int32, shape (last,)
        Room for the adapters asked for last.
    probability : float
        Of a repetition.
    repetitions, repeated : uint64
        Streams that say which requests repeat, and which adapter.
    """
    known = 0
    for i in range(adapter.size):
        if known > 0 and uniform(repetitions, i) < probability:
            adapter[i] = recent[int(uniform(repeated, i) * known)]
        at = 0
        while at < known and recent[at] != adapter[i]:
            at += 1
        if at == known:
            known = min(known + 1, recent.size)
            at = known - 1
        for later in range(at, 0, -1):
            recent[later] = recent[later - 1]
        recent[0] = adapter[i]
