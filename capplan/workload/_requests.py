"""The requests of a workload: who asks when, and how long prompt and output are.

Length distributions are on [1, limit] tokens. Arrival times of every adapter are of renewal processes,
time-varying rates, or compiled Poisson processes.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammainc, gammaincc, ndtri

from capplan._jit import by_reference, jit
from capplan.errors import InputError
from capplan.spec import (
    MAX_SIMULATED_S,
    Adapter,
    Arrivals,
    BaseTraffic,
    Burst,
    Diurnal,
    Lengths,
    Renewal,
    ShiftingSkew,
    Steps,
    Trace,
    Unpredictable,
    Workload,
)
from capplan.workload._sampling import (
    MAX_REQUESTS,
    DiscreteTable,
    Floats,
    GapDistribution,
    Owners,
    Streams,
    discrete_table,
    exponential,
    gap_distribution,
    invert,
    renewals,
    sample,
    sample_at,
    streams,
    uniform,
    uniforms,
)

_EXACT: Final = 128  # integers summed one by one; beyond, the sum is an integral to within 0.003 tokens
_SHAPE_RANGE: Final = 4.0
_MIN_SHAPE: Final = 0.05  # std = 4.5 mean; below, the scale that reaches a mean outgrows floating point
_MAX_SCALE: Final = 1e140


def gamma_probabilities(mean: float, std: float, limit: int) -> NDArray[np.float64]:
    """Return the probabilities of 1, 2, ... ``limit`` tokens; for 1 < mean < limit and std >= 0.5 tokens.

    Their mean is ``mean``; their standard deviation is ``std`` where the clip allows it. If no gamma has this
    mean after the clip, raise an input error.
    """
    shape = _solve_shape(mean, std, limit)
    upper = np.arange(1, limit) + 0.5
    survival = np.asarray(gammaincc(shape, upper / _solve_scale(shape, mean, limit)), dtype=np.float64)
    return -np.diff(survival, prepend=1.0, append=0.0)


def _solve_shape(mean: float, std: float, limit: int) -> float:
    """Return the shape whose realised standard deviation is ``std``, or the nearest in range."""
    plain = (mean / std) ** 2
    low = max(plain / _SHAPE_RANGE, _MIN_SHAPE)
    high = max(plain * _SHAPE_RANGE, low)

    def excess(shape: float) -> float:
        first, second = _moments(shape, _solve_scale(shape, mean, limit), limit)
        return second - first**2 - std**2

    if excess(low) <= 0:
        return low
    if excess(high) >= 0:
        return high
    return float(brentq(excess, low, high, rtol=1e-5))


def _solve_scale(shape: float, mean: float, limit: int) -> float:
    """Return the scale whose realised mean is ``mean``: the mean grows with the scale from 1 to ``limit``."""

    def excess(scale: float) -> float:
        return _moments(shape, scale, limit)[0] - mean

    low = high = mean / shape
    while excess(low) > 0:
        low /= 2
    while excess(high) < 0:
        high *= 2
        if high > _MAX_SCALE:
            raise InputError(
                f"mean cannot be reached with lengths clipped to [1, {limit}]", mean, "Lengths.mean"
            )
    return float(brentq(excess, low, high, xtol=1e-300, rtol=1e-13)) if low < high else low


def _moments(shape: float, scale: float, limit: int) -> tuple[float, float]:
    """Return mean and mean square of the rounded, clipped variable.

    With S(x) the gamma's survival function, P(X > j) = S(j + 1/2) for 1 <= j < limit, so that
    E[X] = 1 + sum S(j + 1/2) and E[X^2] = 1 + sum 2 (j + 1/2) S(j + 1/2).
    """
    middles = np.arange(1, min(_EXACT, limit)) + 0.5
    survival = gammaincc(shape, middles / scale)
    first, second = 1 + survival.sum(), 1 + (2 * middles * survival).sum()
    if limit > _EXACT:  # midpoint rule backwards: the rest of each sum is an integral, which is known
        a, b = float(_EXACT), float(limit)
        at_a, at_b = gammaincc(shape, a / scale), gammaincc(shape, b / scale)
        inside_1 = gammainc(shape + 1, b / scale) - gammainc(shape + 1, a / scale)
        inside_2 = gammainc(shape + 2, b / scale) - gammainc(shape + 2, a / scale)
        first += b * at_b - a * at_a + shape * scale * inside_1
        second += b * b * at_b - a * a * at_a + shape * (shape + 1) * scale**2 * inside_2
    return float(first), float(second)


_LEVELS: Final = 2**14  # normal scores: linear between these, the outermost ones constant
_SIGMAS: Final = 6.0  # scores beyond are taken for these; a score is so large once in 1e9 draws
_LARGEST: Final = 1.0 - 2.0**-53


class Copula(NamedTuple):
    """The tables for one correlation."""

    correlation: float
    remainder: float
    """``sqrt(1 - correlation^2)``."""
    scores: NDArray[np.float64]


@lru_cache(maxsize=16)
def copula(correlation: float) -> Copula:
    """Return the tables for a correlation of normal scores, in (-1, 1)."""
    # The outermost levels stand for all beyond them: the mean score there, not infinity.
    borders = np.arange(_LEVELS + 1) / _LEVELS
    borders[0], borders[-1] = 0.25 / _LEVELS, 1.0 - 0.25 / _LEVELS
    return Copula(correlation, math.sqrt(1.0 - correlation**2), ndtri(borders))


def to_scores(cumulative: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return cumulative probabilities as normal scores, with those within reach mapped to [0, 1]."""
    return np.clip((ndtri(cumulative) + _SIGMAS) / (2 * _SIGMAS), 0.0, 1.0)


@jit
def _score(scores: NDArray[np.float64], number: float) -> float:
    at = number * _LEVELS
    cell = int(at)
    return float(scores[cell] + (at - cell) * (scores[cell + 1] - scores[cell]))


@jit
def correlated_score(tables: Copula, first: float, second: float) -> float:
    """Return a score that goes together with that of `first`, mapped as `to_scores` does, in [0, 1)."""
    score = tables.correlation * _score(tables.scores, first) + tables.remainder * _score(
        tables.scores, second
    )
    return float(min(max((score + _SIGMAS) / (2 * _SIGMAS), 0.0), _LARGEST))


@jit
def sample_pairs(
    prompts: NDArray[np.int32],
    outputs: NDArray[np.int32],
    prompt_table: DiscreteTable,
    output_table: DiscreteTable,
    prompts_of: NDArray[np.int32],
    outputs_of: NDArray[np.int32],
    prompt_key: np.uint64,
    output_key: np.uint64,
    tables: Copula,
) -> None:
    """Draw prompt and output lengths that go together; the table of outputs is one over scores.

    `prompts_of` and `outputs_of` give the distribution of each request; where they are shorter than the
    requests, all have the first one.
    """
    alike = prompts_of.size < prompts.size
    for i in range(prompts.size):
        first = uniform(prompt_key, i)
        second = correlated_score(tables, first, uniform(output_key, i))
        prompts[i] = invert(prompt_table, 0 if alike else prompts_of[i], first)
        outputs[i] = invert(output_table, 0 if alike else outputs_of[i], second)


_CONSTANT_STD: Final = 0.5  # tokens; with less spread, rounding decides everything
_NEVER: Final = 1e-15  # probability of lengths left out of the table, to keep it small


class LengthTable(NamedTuple):
    """A distribution of whole-number lengths."""

    tokens: NDArray[np.int32]
    """Lengths that occur, ascending."""
    probabilities: NDArray[np.float64]
    """Probability of each; they sum to 1."""

    @property
    def mean_tokens(self) -> float:
        """Mean in tokens, after rounding and the clip."""
        return float(self.probabilities @ self.tokens)

    @property
    def std_tokens(self) -> float:
        """Standard deviation in tokens, after rounding and the clip."""
        return math.sqrt(float(self.probabilities @ (self.tokens - self.mean_tokens) ** 2))

    def draw(self, uniform: NDArray[np.float64]) -> NDArray[np.int32]:
        """Return the length at each number of [0, 1) of the inverse distribution."""
        drawn = np.empty(len(uniform), np.int32)
        only = np.zeros(len(uniform), np.int32)
        sample_at(drawn, discrete_table([(self.tokens, self.probabilities)]), only, uniform)
        return drawn


@lru_cache(maxsize=1024)
def length_table(lengths: Lengths, max_model_len: int) -> LengthTable:
    """Return the distribution of ``lengths`` on [1, ``max_model_len``] tokens.

    ``Lengths(mean)`` and ``Lengths(mean, std)`` keep their mean under the clip; a histogram's longer values
    become ``max_model_len``.

    Raises
    ------
    InputError
        When no distribution on this range has the mean.
    """
    if max_model_len < 1:
        raise InputError("must be a whole number >= 1", max_model_len, "max_model_len")
    tokens, weights = _weights(lengths, max_model_len)
    tokens = np.minimum(tokens, max_model_len)
    last = int(np.searchsorted(tokens, max_model_len))  # the first of those the clip made equal
    if last < len(tokens):
        tokens, weights = tokens[: last + 1], np.append(weights[:last], weights[last:].sum())
    kept = weights > _NEVER * weights.sum()
    tokens, probabilities = tokens[kept], weights[kept] / weights[kept].sum()
    return LengthTable(tokens.astype(np.int32), probabilities)


@lru_cache(maxsize=64)
def length_sampler(lengths: tuple[Lengths, ...], max_model_len: int, longest: int) -> DiscreteTable:
    """Return these distributions on [1, ``max_model_len``], then cut to ``longest``, ready to draw from."""
    tables = [length_table(each, max_model_len) for each in lengths]
    return discrete_table(
        [(np.minimum(table.tokens, np.int32(longest)), table.probabilities) for table in tables]
    )


@lru_cache(maxsize=64)
def length_score_sampler(lengths: tuple[Lengths, ...], max_model_len: int) -> DiscreteTable:
    """Return these distributions on [1, ``max_model_len``], ready to draw from at normal scores."""
    tables = [length_table(each, max_model_len) for each in lengths]
    return discrete_table([(table.tokens, table.probabilities) for table in tables], to_scores)


def _weights(lengths: Lengths, limit: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return ascending lengths and their weights, before the clip."""
    counts = np.array(lengths.counts or (), dtype=np.float64)
    if lengths.values is not None:
        return np.array(lengths.values, dtype=np.int64), counts
    if lengths.edges is not None:
        widths = [high - low for low, high in pairwise(lengths.edges)]
        return np.arange(lengths.edges[0], lengths.edges[-1]), np.repeat(counts / widths, widths)
    return _around_mean(lengths.mean_tokens, lengths.std_tokens, limit)


def _around_mean(mean: float, std: float, limit: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    constant = std < _CONSTANT_STD
    if mean > limit or (not constant and not 1 < mean < limit):
        bounds = f"[1, {limit}]" if constant else f"1 to {limit}, ends excluded"
        raise InputError(f"must be within {bounds}: lengths end at max_model_len", mean, "Lengths.mean")
    if constant:
        below = math.floor(mean)
        part = mean - below
        return np.array([below, below + 1]), np.array([1 - part, part])
    return np.arange(1, limit + 1), gamma_probabilities(mean, std, limit)


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
        return np.full(self.adapters, until_s)

    def seconds(self, passed: Floats, adapter: Owners) -> Floats:
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

    Steps without a period must have a positive factor in the first ``duration_s`` seconds.
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

    Adapters are independent of each other. Over 1e8 expected requests are an error.
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

    `adapter` is changed in place, shape (n,). `recent` is room for the adapters asked for last, shape
    (last,). The two streams say which requests repeat, and which adapter.
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


_BASE: Final = (1,)
"""Branch of the seed for the traffic of the base model."""

Column: TypeAlias = NDArray[np.int32]


@by_reference
class Requests(NamedTuple):
    """Requests sorted by arrival: arrays of equal length."""

    arrival_ns: NDArray[np.int64]
    """Arrival in nanoseconds from the start."""
    adapter: NDArray[np.int32]
    """1 + position in ``workload.adapters``; 0 stands for the base model."""
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    predicted_tokens: NDArray[np.int32] = np.zeros(0, np.int32)
    """Outputs as predicted at arrival; empty: as they are."""


def draw_requests(
    workload: Workload, duration_s: float, seed: int, max_model_len: int, max_prompt_tokens: int | None = None
) -> Requests:
    """Return the requests that arrive in [0, ``duration_s``).

    Each adapter has an arrival process of its own. Poisson ones together are one of the summed rate whose
    requests choose their adapter in proportion. Arrivals, adapters, prompts, outputs and repetitions have
    random streams of their own, so that changing lengths leaves arrivals as they are. So has the traffic of
    the base model: adding it leaves the requests of adapters as they are.

    A workload with a trace is replayed instead, whatever the seed, with the recorded lengths as they are:
    refusing a request that is too long is up to the serving rules.

    Parameters
    ----------
    duration_s : float
        Seconds, above 0.
    seed : int
        At least 0; the same seed gives the same requests.
    max_model_len : int
        Where length distributions end, in tokens.
    max_prompt_tokens : int, optional
        What longer prompts are cut to after they were drawn; `max_model_len` unless given.

    Raises
    ------
    InputError
        For a parameter out of range, over 1e8 requests, or a mean length that cannot be reached.
    """
    if not 0 < duration_s <= MAX_SIMULATED_S:
        rule = f"must be a number of seconds above 0, at most {MAX_SIMULATED_S:g}"
        raise InputError(rule, duration_s, "duration_s")
    if workload.trace is not None:
        return _replay(workload, workload.trace, duration_s)
    if seed < 0:
        raise InputError("must be a whole number >= 0", seed, "seed")
    longest_prompt = max_model_len if max_prompt_tokens is None else max_prompt_tokens
    limits = (duration_s, max_model_len, longest_prompt)
    if workload.base is None:
        return _draw(workload, seed, (), *limits)
    alone = _draw(_base_alone(workload, workload.base), seed, _BASE, *limits)
    base = alone._replace(adapter=np.zeros_like(alone.adapter))
    if not workload.adapters:
        return base
    return _merge(_draw(workload, seed, (), *limits), base)


def _draw(
    workload: Workload,
    seed: int,
    branch: tuple[int, ...],
    duration_s: float,
    max_model_len: int,
    longest_prompt: int,
) -> Requests:
    """Draw the requests of the adapters from a branch of the seed."""
    keys = streams(seed, branch)
    arrival_ns, adapter = _arrivals(workload, duration_s, (seed, branch), keys)
    sticky = workload.stickiness
    if sticky is not None:
        recent = np.zeros(sticky.last, np.int32)
        repeat_recent(adapter, recent, sticky.probability, keys.repetitions, keys.repeated)
    prompt_tokens, output_tokens = _lengths(workload, adapter, keys, max_model_len, longest_prompt)
    return Requests(arrival_ns, adapter, prompt_tokens, output_tokens)


def _base_alone(workload: Workload, base: BaseTraffic) -> Workload:
    """Return a workload whose only adapter has the traffic of the base model."""
    prompts, outputs = base.prompt_tokens, base.output_tokens
    stand_in = Adapter(
        name="base", rank=1, rate_rps=base.rate_rps, prompt_tokens=prompts, output_tokens=outputs
    )
    arrivals = base.arrivals or workload.arrivals
    if isinstance(arrivals, Renewal) and isinstance(arrivals.modulation, ShiftingSkew):
        arrivals = arrivals.replace(modulation=None)  # it moves requests between ranks
    changes = {"adapters": (stand_in,), "base": None, "arrivals": arrivals, "stickiness": None}
    return workload.model_copy(update=changes)


def _merge(first: Requests, second: Requests) -> Requests:
    """Return the requests of both by arrival, at one time those of the first before the others."""
    order = np.argsort(np.concatenate((first.arrival_ns, second.arrival_ns)), kind="stable")
    return Requests(
        np.concatenate((first.arrival_ns, second.arrival_ns))[order],
        np.concatenate((first.adapter, second.adapter))[order],
        np.concatenate((first.prompt_tokens, second.prompt_tokens))[order],
        np.concatenate((first.output_tokens, second.output_tokens))[order],
    )


def _arrivals(
    workload: Workload, duration_s: float, source: tuple[int, tuple[int, ...]], keys: Streams
) -> tuple[NDArray[np.int64], Column]:
    """Return when requests arrive, and whose adapter each asks for; `source` is a seed and its branch."""
    rates_rps = tuple(adapter.rate_rps for adapter in workload.adapters)
    total_rps = math.fsum(rates_rps)
    if total_rps * duration_s > MAX_REQUESTS:
        rule = f"rates x duration must not exceed {MAX_REQUESTS:g} requests"
        raise InputError(rule, total_rps * duration_s, "duration_s")
    horizon_ns = round(duration_s * NS_PER_S)
    if workload.arrivals == Arrivals.POISSON:
        arrival_ns = poisson_arrivals(keys.arrivals, total_rps, horizon_ns)
        adapter = np.empty(len(arrival_ns), np.int32)
        if len(arrival_ns):  # without any, all rates may be 0
            sample(adapter, _chooser(rates_rps), keys.adapters)
        return arrival_ns, adapter
    seed, branch = source
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(*branch, 0))))
    position, time_s = draw_arrivals(rng, workload, duration_s)
    arrival_ns = np.minimum((time_s * NS_PER_S).astype(np.int64), horizon_ns - 1)
    return arrival_ns, position.astype(np.int32) + np.int32(1)


@lru_cache(maxsize=64)
def _chooser(rates_rps: tuple[float, ...]) -> DiscreteTable:
    return discrete_table([(np.arange(1, len(rates_rps) + 1, dtype=np.int32), np.array(rates_rps))])


def _lengths(
    workload: Workload, adapter: Column, keys: Streams, max_model_len: int, longest_prompt: int
) -> tuple[Column, Column]:
    """Return each request's prompt and output length, in tokens."""
    prompts, prompts_of = _distinct_lengths(
        [workload.prompt_tokens, *(a.prompt_tokens for a in workload.adapters)]
    )
    outputs, outputs_of = _distinct_lengths(
        [workload.output_tokens, *(a.output_tokens for a in workload.adapters)]
    )
    prompt_table = length_sampler(prompts, max_model_len, longest_prompt)
    n = len(adapter)
    prompt_tokens, output_tokens = np.empty(n, np.int32), np.empty(n, np.int32)
    alike = len(prompts) == len(outputs) == 1
    correlation = workload.length_correlation or 0.0
    if correlation != 0.0 and workload.length_pairs is None:
        over_scores = length_score_sampler(outputs, max_model_len)
        of_prompt, of_output = (prompts_of[:0],) * 2 if alike else (prompts_of[adapter], outputs_of[adapter])
        tables = (prompt_table, over_scores, of_prompt, of_output)
        sample_pairs(prompt_tokens, output_tokens, *tables, keys.prompts, keys.outputs, copula(correlation))
        return prompt_tokens, output_tokens
    output_table = length_sampler(outputs, max_model_len, max_model_len)
    if alike and workload.length_pairs is None:
        sample(prompt_tokens, prompt_table, keys.prompts)
        sample(output_tokens, output_table, keys.outputs)
        return prompt_tokens, output_tokens
    for_prompt = uniforms(keys.prompts, n)
    sample_at(prompt_tokens, prompt_table, prompts_of[adapter], for_prompt)
    sample_at(output_tokens, output_table, outputs_of[adapter], uniforms(keys.outputs, n))
    if workload.length_pairs is not None:
        rows = np.flatnonzero((prompts_of + outputs_of)[adapter] == 0)
        chosen = (for_prompt[rows] * len(workload.length_pairs)).astype(np.int64)
        prompt_tokens[rows] = np.minimum(workload.length_pairs.prompt_tokens[chosen], longest_prompt)
        output_tokens[rows] = np.minimum(workload.length_pairs.output_tokens[chosen], max_model_len)
    return prompt_tokens, output_tokens


def _distinct_lengths(lengths: list[Lengths | None]) -> tuple[tuple[Lengths, ...], Column]:
    """Return the distinct lengths, and which of them each adapter has; the first is that of None."""
    kinds: dict[Lengths, int] = {}
    which = np.zeros(len(lengths), np.int32)
    for number, own in enumerate(lengths):
        if own is not None:
            which[number] = kinds.setdefault(own, len(kinds))
    return tuple(kinds), which


def _replay(workload: Workload, trace: Trace, duration_s: float) -> Requests:
    """Return the trace up to ``duration_s``, adapters numbered as in the workload."""
    number = {adapter.name: position for position, adapter in enumerate(workload.adapters, start=1)}
    if workload.base is not None:
        number[workload.base_model] = 0
    renumber = np.array([number[name] for name in trace.names], dtype=np.int32)
    end = int(np.searchsorted(trace.arrival_ns, math.ceil(duration_s * NS_PER_S), side="left"))
    return Requests(  # of copies: for arrays that cannot be written to, numba would compile the twin again
        trace.arrival_ns[:end].copy(),
        renumber[trace.adapter[:end]],
        trace.prompt_tokens[:end].copy(),
        trace.output_tokens[:end].copy(),
    )
