"""Arrival times of every adapter: renewal processes, time-varying rates, compiled Poisson."""

from __future__ import annotations

import math
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from capplan._jit import jit
from capplan.errors import InputError
from capplan.spec import Arrivals, Burst, Diurnal, Renewal, ShiftingSkew, Steps, Unpredictable, Workload
from capplan.workload.renewal import Floats, GapDistribution, Owners, gap_distribution, renewals
from capplan.workload.sampling import exponential, uniform

_KNOTS_PER_SWING: Final = 256  # a sine's clock is exact at these, and linear between them


class OperationalTime(Protocol):
    """Time as the processes count it, in seconds of mean rate."""

    def passed(self, until_s: float) -> Floats:
        """Return how much time passes for each adapter in our first ``until_s`` seconds."""
        ...

    def seconds(self, passed: Floats, adapter: Owners) -> Floats:
        """Return our time when so much has passed for these adapters."""
        ...


class ConstantRate(NamedTuple):
    """The clock that shows our time."""

    adapters: int

    def passed(self, until_s: float) -> Floats:
        """Return our time."""
        return np.full(self.adapters, until_s)

    def seconds(self, passed: Floats, adapter: Owners) -> Floats:
        """Return the time as it is."""
        return passed


class PeriodicRate(NamedTuple):
    """The same cycle again and again, for all adapters; linear between its knots."""

    adapters: int
    knots_s: Floats
    """From 0 to the period."""
    knots_passed: Floats
    """From 0 to the period, never descending."""

    def passed(self, until_s: float) -> Floats:
        """Return whole cycles and what passes in the part that is left."""
        period_s = float(self.knots_s[-1])
        whole, rest = divmod(until_s, period_s)
        return np.full(self.adapters, whole * period_s + np.interp(rest, self.knots_s, self.knots_passed))

    def seconds(self, passed: Floats, adapter: Owners) -> Floats:
        """Return whole cycles and the time within the last one."""
        period_s = float(self.knots_s[-1])
        whole = np.floor(passed / period_s) * period_s
        within: Floats = np.interp(passed - whole, self.knots_passed, self.knots_s)
        return whole + within


class LinearRate(NamedTuple):
    """Rates that move linearly from (1 + bend) to (1 - bend) times their mean, then stay."""

    bend: Floats
    """Of each adapter, from -1 to 1."""
    over_s: float

    def passed(self, until_s: float) -> Floats:
        """Return the integral of the rate."""
        moving_s = min(until_s, self.over_s)
        moved: Floats = moving_s + self.bend * (moving_s - moving_s**2 / self.over_s)
        return moved + (1 - self.bend) * (until_s - moving_s)

    def seconds(self, passed: Floats, adapter: Owners) -> Floats:
        """Return the root of the quadratic in the form that also holds for a bend of 0."""
        bend = self.bend[adapter]
        start = 1 + bend
        moving = np.minimum(passed, self.over_s)
        root = np.sqrt(np.maximum(start**2 - 4 * bend * moving / self.over_s, 0.0))
        slid = 2 * moving / np.maximum(start + root, np.finfo(float).tiny)
        beyond = np.maximum(passed - self.over_s, 0.0) / np.maximum(1 - bend, np.finfo(float).tiny)
        result: Floats = slid + beyond
        return result


def operational_time(
    modulation: Steps | Diurnal | Burst | ShiftingSkew | None, workload: Workload, duration_s: float
) -> OperationalTime:
    """Return the clock of a modulation.

    Raises
    ------
    InputError
        When steps without a period have no positive factor in the first ``duration_s`` seconds.
    """
    adapters = len(workload.adapters)
    match modulation:
        case None:
            return ConstantRate(adapters)
        case Steps():
            return _step_rate(modulation, adapters, duration_s)
        case Diurnal():
            turns = np.linspace(0.0, 1.0, _KNOTS_PER_SWING + 1)
            angle = 2 * np.pi * (turns + modulation.phase)
            swing = (np.cos(angle[0]) - np.cos(angle)) * modulation.amplitude / (2 * np.pi)
            return _periodic_rate(adapters, turns * modulation.period_s, turns + swing)
        case Burst():
            return _burst_rate(modulation, adapters)
        case ShiftingSkew():
            ranks = np.array([adapter.rank for adapter in workload.adapters])
            falls, rises = ranks >= modulation.from_rank, ranks <= modulation.to_rank
            bend = modulation.swing * (falls.astype(np.float64) - rises)
            return LinearRate(bend, modulation.over_s or duration_s)


def _periodic_rate(adapters: int, knots_s: Floats, amount: Floats) -> PeriodicRate:
    """Return a cycle that passes in proportion to ``amount`` at the knots, speed 1 on average."""
    rising = np.maximum.accumulate(amount)  # rounding must not let time go back
    return PeriodicRate(adapters, knots_s, rising * (knots_s[-1] / rising[-1]))


def _step_rate(steps: Steps, adapters: int, duration_s: float) -> PeriodicRate:
    end_s = steps.period_s or duration_s
    times, factors = np.array(steps.steps).T
    seen = times < end_s
    knots_s = np.append(times[seen], end_s)
    amount = np.concatenate(([0.0], np.cumsum(factors[seen] * np.diff(knots_s))))
    if amount[-1] == 0:
        raise InputError(
            "must have a factor above 0 within the duration", duration_s, "arrivals.modulation.steps"
        )
    return _periodic_rate(adapters, knots_s, amount)


def _burst_rate(burst: Burst, adapters: int) -> PeriodicRate:
    begin_s, end_s = burst.at_s, burst.at_s + burst.length_s
    knots_s = np.array([0.0, begin_s, min(end_s, burst.every_s), burst.every_s])
    speed = np.array([1.0, burst.factor, 1.0])
    return _periodic_rate(adapters, knots_s, np.concatenate(([0.0], np.cumsum(speed * np.diff(knots_s)))))


NS_PER_S: Final = 1_000_000_000
_MAX_DRAWS: Final = 2e7
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
    law = gap_distribution(process.process, process.cv)
    time = operational_time(process.modulation, workload, duration_s)
    owner, gaps = renewals(rng, rates_rps * time.passed(duration_s), law.cv, law.first, law.gaps)
    return owner, time.seconds(gaps / rates_rps[owner], owner)


def _unpredictable(
    rng: np.random.Generator, process: Unpredictable, rates_rps: Floats, duration_s: float
) -> tuple[Owners, Floats]:
    """Return a process per adapter and interval: at a border the pending gap is dropped and drawn again."""
    intervals = math.ceil(min(duration_s / process.every_s, _MAX_DRAWS + 1.0))
    if intervals * len(rates_rps) > _MAX_DRAWS:
        rule = f"must leave at most {_MAX_DRAWS:g} redraws of all adapters in the duration"
        raise InputError(rule, process.every_s, "arrivals.every_s")
    rates = rates_rps[:, None] * _multipliers(rng, process, len(rates_rps), intervals)
    heavy = rng.random(rates.shape) < 0.5
    begin_s = np.arange(intervals) * process.every_s
    length_s = np.minimum(process.every_s, duration_s - begin_s)
    begin_s, length_s = np.broadcast_to(begin_s, rates.shape), np.broadcast_to(length_s, rates.shape)
    adapter = np.broadcast_to(np.arange(len(rates_rps))[:, None], rates.shape)
    owners, times = [], []
    for lognormal in (False, True):
        cells = (heavy == lognormal) & (rates > 0)
        law, unit_s = _gaps_of_cells(process, rates[cells], lognormal=lognormal)
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


def _gaps_of_cells(
    process: Unpredictable, rates_rps: Floats, *, lognormal: bool
) -> tuple[GapDistribution, Floats]:
    """Return the law of the gaps in cells of these rates, and its unit in each cell, in seconds."""
    if not lognormal:
        return gap_distribution("poisson", None), 1 / rates_rps
    if process.lognormal_gaps == "mean_preserving":
        return gap_distribution("lognormal", math.sqrt(math.expm1(process.sigma**2))), 1 / rates_rps

    def gaps(rng: np.random.Generator, owners: Owners) -> Floats:
        exponent = rates_rps[owners] * rng.standard_normal(len(owners))
        return np.exp(np.minimum(exponent, _LARGEST_EXPONENT))

    return GapDistribution(1.0, gaps, gaps), np.ones(len(rates_rps))


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
