"""Counter-based random streams, and inversion sampling of discrete distributions in compiled code.

The i-th number of a stream is a function of the stream's key and of i. Streams keep no state and can be read
in any order. The function is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014). It uses integer arithmetic only: results are the same on every machine.

Renewal processes: requests of many adapters at once, gaps drawn from one family of distributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammaln

from capplan._jit import jit
from capplan.errors import InputError

Floats: TypeAlias = NDArray[np.float64]
Owners: TypeAlias = NDArray[np.int64]
Draw: TypeAlias = Callable[[np.random.Generator, Owners], Floats]

MAX_REQUESTS: Final = 1e8  # more than fit in memory beside their results
_WEIBULL_SHAPES: Final = (0.05, 200.0)  # cv from 4e5 to 0.006


class GapDistribution(NamedTuple):
    """A distribution of gaps whose mean is 1, drawn once for every owner given."""

    cv: float
    """Standard deviation over mean."""
    gaps: Draw
    biased: Draw
    """The gap that covers a fixed instant; long ones cover more instants, so x weighs their density."""

    def first(self, rng: np.random.Generator, owners: Owners) -> Floats:
        """Return the wait for the first request of a process that began long before: a part of such a gap."""
        covering = self.biased(rng, owners)
        return covering * rng.random(len(owners))


@lru_cache(maxsize=64)
def gap_distribution(process: str, cv: float | None) -> GapDistribution:
    """Return the law of ``poisson``, ``deterministic``, ``gamma``, ``weibull`` or ``lognormal`` gaps."""
    match process:
        case "poisson":
            return _gamma(1.0)
        case "deterministic":
            return GapDistribution(
                0.0, lambda _, owners: np.ones(len(owners)), lambda _, owners: np.ones(len(owners))
            )
        case "gamma":
            return _gamma(_given(cv))
        case "weibull":
            return _weibull(_given(cv))
        case "lognormal":
            return _lognormal(_given(cv))
        case _:
            raise InputError("must be the name of a renewal process", process, "process")


def _given(cv: float | None) -> float:
    if cv is None:
        raise InputError("is required", location="cv")
    return cv


def _gamma(cv: float) -> GapDistribution:
    shape = 1 / cv**2
    return GapDistribution(
        cv,
        lambda rng, owners: rng.standard_gamma(shape, len(owners)) / shape,
        lambda rng, owners: rng.standard_gamma(shape + 1, len(owners)) / shape,
    )


def _weibull(cv: float) -> GapDistribution:
    """With E exponential, E^(1 / shape) is Weibull; weighted by its size, E becomes a gamma variable."""

    def excess(shape: float) -> float:
        return float(gammaln(1 + 2 / shape) - 2 * gammaln(1 + 1 / shape)) - math.log1p(cv**2)

    shape = float(brentq(excess, *_WEIBULL_SHAPES, xtol=1e-12))
    scale = math.exp(-float(gammaln(1 + 1 / shape)))
    return GapDistribution(
        cv,
        lambda rng, owners: scale * rng.standard_exponential(len(owners)) ** (1 / shape),
        lambda rng, owners: scale * rng.standard_gamma(1 + 1 / shape, len(owners)) ** (1 / shape),
    )


def _lognormal(cv: float) -> GapDistribution:
    sigma = math.sqrt(math.log1p(cv**2))
    return GapDistribution(
        cv,
        lambda rng, owners: np.exp(sigma * rng.standard_normal(len(owners)) - sigma**2 / 2),
        lambda rng, owners: np.exp(sigma * rng.standard_normal(len(owners)) + sigma**2 / 2),
    )


def renewals(
    rng: np.random.Generator, spans: Floats, cv: float, first: Draw, gaps: Draw
) -> tuple[Owners, Floats]:
    """Return the events of one process per span, each in [0, span), not sorted over the processes.

    Spans, shape (n,), say how far each process runs, in mean gaps as the times returned; the owners returned
    are the processes of the events, shape (events,) both. `cv` is about how much the gaps spread, and decides
    only how many are drawn at a time. `first` and `gaps` draw the wait for the first event, and the gaps
    after it, of the processes given by number. Over 1e8 expected events are an error.
    """
    expected = float(spans.sum())
    if expected > MAX_REQUESTS:
        raise InputError(
            f"rates x duration must not exceed {MAX_REQUESTS:g} requests", expected, "duration_s"
        )
    last = first(rng, np.arange(len(spans)))
    active = np.flatnonzero(last < spans)
    owners, times = [active], [last[active]]
    while len(active):
        left = spans[active] - last[active]
        counts = np.ceil(left + min(cv, 4.0) * np.sqrt(left) + 2).astype(np.int64)
        owner = np.repeat(active, counts)
        # No gap needs to be longer than its span; without the bound one alone could drown the sums of all.
        drawn = np.minimum(gaps(rng, owner), spans[owner] + 1)
        sums = np.cumsum(drawn)
        ends = np.cumsum(counts) - 1
        before = np.concatenate(([0.0], sums[ends[:-1]]))
        time = sums + np.repeat(last[active] - before, counts)
        inside = time < spans[owner]
        owners.append(owner[inside])
        times.append(time[inside])
        last[active] = time[ends]
        active = active[last[active] < spans[active]]
    return np.concatenate(owners), np.concatenate(times)


_STEP: Final = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio

_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)

_MIX_2: Final = np.uint64(0x94D049BB133111EB)

_SHIFT_1: Final = np.uint64(30)

_SHIFT_2: Final = np.uint64(27)

_SHIFT_3: Final = np.uint64(31)

_SHIFT_DOUBLE: Final = np.uint64(11)  # a double holds 53 bits

_UNIT: Final = 2.0**-53


class Streams(NamedTuple):
    """Keys of the streams that requests are drawn from, one per quantity."""

    arrivals: np.uint64
    adapters: np.uint64
    prompts: np.uint64
    outputs: np.uint64
    repetitions: np.uint64
    repeated: np.uint64


def streams(seed: int, branch: tuple[int, ...] = ()) -> Streams:
    """Return the keys for a seed, which is at least 0; seeds close to each other give unrelated keys."""
    sequence = np.random.SeedSequence(seed, spawn_key=branch)
    return Streams(*sequence.generate_state(len(Streams._fields), np.uint64))


@jit
def uniform(key: np.uint64, index: int) -> float:
    """Return the number at `index` of a stream, uniform over the multiples of 2^-53 in [0, 1)."""
    bits = key + np.uint64(index) * _STEP
    bits = (bits ^ (bits >> _SHIFT_1)) * _MIX_1
    bits = (bits ^ (bits >> _SHIFT_2)) * _MIX_2
    bits ^= bits >> _SHIFT_3
    return float(bits >> _SHIFT_DOUBLE) * _UNIT


@jit
def exponential(key: np.uint64, index: int) -> float:
    """Return an exponential number of mean 1 made from the one at `index`."""
    return -math.log(1.0 - uniform(key, index))


def uniforms(key: np.uint64, count: int) -> NDArray[np.float64]:
    """Return the first `count` numbers of a stream."""
    numbers = np.empty(count)
    _fill_uniform(numbers, key)
    return numbers


@jit
def _fill_uniform(numbers: NDArray[np.float64], key: np.uint64) -> None:
    for i in range(numbers.size):
        numbers[i] = uniform(key, i)


Distributions: TypeAlias = Sequence[tuple[NDArray[np.int32], NDArray[np.float64]]]

_BUCKETS_PER_VALUE: Final = 16
_MOST_BUCKETS: Final = 2**16  # of all distributions of a table together, if that leaves one per value


class DiscreteTable(NamedTuple):
    """Distributions over positive whole numbers, one behind the other, ready for inversion.

    For each distribution the unit interval is cut into equal buckets. Where the cumulative distribution does
    not jump inside a bucket, its answer is looked up; only draws in the other buckets search, which is a
    small part of them. What is drawn does not depend on how many buckets there are.
    """

    values: NDArray[np.int32]
    """What can be drawn; ascending within each distribution, or in the order of the weights given."""
    cumulative: NDArray[np.float64]
    """Share of numbers that stand for the values up to this one; ends in 1 for each distribution."""
    answer: NDArray[np.int32]
    """Value for each bucket, or -1 - (position in `values` where the search begins)."""
    first_bucket: NDArray[np.int64]
    """Where the buckets of each distribution begin, and where those of the last one end."""


def discrete_table(
    distributions: Distributions,
    over: Callable[[NDArray[np.float64]], NDArray[np.float64]] | None = None,
) -> DiscreteTable:
    """Return the table of distributions, which are values of at least 1 and their weights.

    `over` maps cumulative probabilities, 0 to 1, to what the table is to be inverted at instead, again 0 to 1
    and ascending.
    """
    sizes = np.array([values.size for values, _ in distributions])
    share = _MOST_BUCKETS // len(sizes)
    buckets = [_power_of_two(max(n, min(share, _BUCKETS_PER_VALUE * n))) for n in sizes.tolist()]
    first_bucket = np.concatenate(([0], np.cumsum(buckets)))
    cumulative = np.concatenate([_cumulative(weights) for _, weights in distributions])
    table = DiscreteTable(
        values=np.concatenate([values for values, _ in distributions], dtype=np.int32),
        cumulative=cumulative if over is None else over(cumulative),
        answer=np.empty(first_bucket[-1], np.int32),
        first_bucket=first_bucket,
    )
    _fill_answers(table, np.cumsum(sizes) - sizes)
    return table


def _power_of_two(least: int) -> int:
    """Return the power of two not below `least`: with it the borders of buckets are exact."""
    return 1 << (least - 1).bit_length()


def _cumulative(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    cumulative = np.cumsum(weights / weights.max())
    cumulative /= cumulative[-1]
    # Behind the last positive weight rounding must not leave a gap that a draw could fall into.
    cumulative[np.flatnonzero(weights)[-1] :] = 1.0
    return cumulative


@jit
def _fill_answers(table: DiscreteTable, first_value: NDArray[np.int64]) -> None:
    """Look every bucket up, in one walk over buckets and values."""
    for which in range(first_value.size):
        first = table.first_bucket[which]
        buckets = table.first_bucket[which + 1] - first
        at = first_value[which]
        for bucket in range(buckets):
            while table.cumulative[at] * buckets <= bucket:
                at += 1
            sure = table.cumulative[at] * buckets >= bucket + 1
            table.answer[first + bucket] = table.values[at] if sure else -1 - at


@jit
def invert(table: DiscreteTable, which: int, number: float) -> int:
    """Return what a distribution has at this number of [0, 1): where its cumulative first exceeds it."""
    first = table.first_bucket[which]
    found: int = table.answer[first + int(number * (table.first_bucket[which + 1] - first))]
    if found < 0:
        at = -1 - found
        while table.cumulative[at] <= number:
            at += 1
        found = table.values[at]
    return found


@jit
def sample(drawn: NDArray[np.int32], table: DiscreteTable, key: np.uint64) -> None:
    """Draw from the only distribution of a table, each at its own number of a stream."""
    for i in range(drawn.size):
        drawn[i] = invert(table, 0, uniform(key, i))


@jit
def sample_at(
    drawn: NDArray[np.int32], table: DiscreteTable, which: NDArray[np.int32], numbers: NDArray[np.float64]
) -> None:
    """Invert numbers of [0, 1), each under the distribution that `which` gives for it."""
    for i in range(drawn.size):
        drawn[i] = invert(table, which[i], numbers[i])
