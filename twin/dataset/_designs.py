"""Experimental designs of datasets: the grid of the adapter-caching paper, and two space-filling designs.

A scenario is a pure function of (design, profile, seed, number): any part of a dataset can be drawn alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, combinations_with_replacement
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import qmc

from capplan.errors import InputError
from capplan.models import kv_budget
from capplan.models.surrogates import (
    MAX_IN_FLIGHT,
    common_inputs,
    feature_of,
    feature_vector,
    feature_vectors,
    gpu_limits,
    steady_share,
)
from capplan.spec import (
    STARVED_BELOW,
    Adapter,
    ArrivalProcess,
    Arrivals,
    EngineConfig,
    Lengths,
    Profile,
    Renewal,
    Workload,
    allowed_lora_rank,
    zipf,
)
from capplan.twin.instance._simulate import SimulateSettings, engine_args

GRID_COUNTS: Final = (8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384)
GRID_RATES_RPS: Final = (3.2, 1.6, 0.8, 0.4, 0.1, 0.05, 0.025, 0.0125, 0.00625, 0.003125)
GRID_RANKS: Final = (8, 16, 32)
GRID_LENGTHS: Final = ((223.0, 245.0), (194.0, 206.0))
"""Mean and standard deviation of prompts and outputs of the paper's requests (ShareGPT)."""

_RANK_SETS: Final = (
    *((8,), (16,), (32,), (64,), (8, 16), (8, 32), (16, 32), (8, 16, 32)),
    *((128,), (4, 8), (8, 16, 32, 64), (8, 16, 32, 64, 128)),
)
_MOST_RPS: Final = 1_000.0
_TWINS: Final = 2
_SHARED: Final = 10
_OWN: Final = 5
_NEAR: Final = 1.5
_EDGE_RPS: Final = (1e-3, _MOST_RPS)
_BISECTIONS: Final = 24

_Point = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """One scenario of one GPU, as arguments of `capplan.simulate`."""

    group: int
    """Scenarios of one group share adapters and lengths, and belong to the same part of a data split."""
    workload: Workload
    settings: SimulateSettings

    def features(self, profile: Profile) -> NDArray[np.float32]:
        """Return the features in the order of `FEATURES`."""
        return feature_vector(self.workload, profile, engine_args(self.workload, self.settings, profile))


def draw(design: str, profile: Profile, seed: int, start: int, stop: int) -> list[Sample]:
    """Return the scenarios of a design numbered from `start` to before `stop`.

    Parameters
    ----------
    design
        One of `DESIGNS`.
    profile
        Loads of space-filling scenarios are relative to its capacity.
    seed
        Seed of the whole design.

    Raises
    ------
    InputError
        For an unknown design.
    """
    if design not in DESIGNS:
        raise InputError(f"must be one of {', '.join(DESIGNS)}", design, "design")
    return DESIGNS[design](profile, seed, start, stop)


def paper_grid(profile: Profile, seed: int, start: int, stop: int) -> list[Sample]:
    """Return cells of the grid of section 8.3 in random order, without repetition until all were drawn.

    Three different rates of ten; three sizes of {8, 16, 32} with at most one 32, as in the published
    launcher; adapters and A_max from 8 to 384, A_max <= adapters. Sizes and rates are assigned to adapters at
    random. Request lengths are constant or spread as in ShareGPT, at random.
    """
    del profile
    rates = list(combinations(GRID_RATES_RPS, 3))
    sizes = [s for s in combinations_with_replacement(GRID_RANKS, 3) if s.count(32) <= 1]
    pairs = [(count, a_max) for count in GRID_COUNTS for a_max in GRID_COUNTS if a_max <= count]
    cells = len(rates) * len(sizes) * len(pairs)
    samples = []
    for number in range(start, stop):
        turn, place = divmod(number, cells)
        order = np.random.default_rng([seed, turn]).permutation(cells)
        set_number, pair_number = divmod(int(order[place]), len(pairs))
        count, a_max = pairs[pair_number]
        rng = np.random.default_rng([seed, 1, number])
        workload = _workload(
            ranks=rng.choice(sizes[set_number % len(sizes)], count),
            rates_rps=rng.choice(rates[set_number // len(sizes)], count),
            prompt=GRID_LENGTHS[0],
            output=GRID_LENGTHS[1],
            spread=bool(rng.random() < 0.5),
        )
        max_num_seqs = int(rng.choice((256, 512, 1024, 2048), p=(0.45, 0.05, 0.05, 0.45)))
        engine = EngineConfig(max_loras=a_max, max_num_seqs=max_num_seqs)
        samples.append(Sample(set_number, workload, _settings(workload, engine)))
    return samples


def space_filling(profile: Profile, seed: int, start: int, stop: int) -> list[Sample]:
    """Return points of a scrambled Sobol sequence over workloads and engine settings.

    Dimensions beyond the grid: lengths, their spread and correlation, burstiness of arrivals, popularity,
    engine limits and memory. Loads lie around the profile's estimated capacity, where planners query. A pair
    of scenarios has one workload at two loads, with different A_max and engine settings.
    """
    return [
        replace(sample, workload=sample.workload.at_rates_times(load_rps))
        for sample, at in _unit_samples((seed,), (seed, 2), start, stop)
        for load_rps in [min(_MOST_RPS, _load(at) * _saturation_rps(sample, profile))]
    ]


def near_starvation(profile: Profile, seed: int, start: int, stop: int) -> list[Sample]:
    """Return scenarios as of `space_filling` whose loads lie around the edge of starvation.

    The edge is the load at which the fluid model serves `STARVED_BELOW`, be it for want of slots or of
    capacity. Loads are within a factor `_NEAR` of it, evenly on a logarithmic scale.
    """
    return [
        replace(sample, workload=sample.workload.at_rates_times(load_rps))
        for sample, at in _unit_samples((seed, 3), (seed, 4), start, stop)
        for load_rps in [min(_MOST_RPS, _between(at, 1.0 / _NEAR, _NEAR) * _edge_rps(sample, profile))]
    ]


def _unit_samples(
    sequence: tuple[int, ...], shares: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[Sample, float]]:
    """Yield samples `start` to before `stop` that offer 1 req/s, each with the place of its load in [0, 1).

    `sequence` seeds the Sobol sequence, `shares` ranks and popularity.
    """
    first = start // _TWINS
    points = _sobol(sequence, first, -(-stop // _TWINS))
    for number in range(start, stop):
        group, twin = divmod(number, _TWINS)
        point = points[group - first]
        own = point[_SHARED + twin * _OWN :][:_OWN]
        rng = np.random.default_rng([*shares, group])
        yield _unit_sample(rng, group, point[:_SHARED], own), own[-1]


def _sobol(seed: tuple[int, ...], start: int, stop: int) -> NDArray[np.float64]:
    """Return a section of a scrambled Sobol sequence, shape (stop - start, dimensions).

    A point holds the settings of a whole pair: two scrambled sequences would be correlated.
    """
    sequence = qmc.Sobol(_SHARED + _TWINS * _OWN, rng=np.random.default_rng(seed))
    if start:
        sequence.fast_forward(start)
    with warnings.catch_warnings():
        # Only the whole sequence is balanced at powers of two.
        warnings.filterwarnings("ignore", message="The balance properties")
        points: NDArray[np.float64] = sequence.random(stop - start)
    return points


Design = Callable[[Profile, int, int, int], list[Sample]]
DESIGNS: Final[Mapping[str, Design]] = MappingProxyType(
    {"paper-grid": paper_grid, "space-filling": space_filling, "near-starvation": near_starvation}
)


def _unit_sample(rng: np.random.Generator, group: int, base: _Point, own: _Point) -> Sample:
    """Return the sample of a point: `base` is shared by its group, `own` holds its engine settings."""
    count = round(_between(base[0] ** 0.75, 1, 512))
    prompt_mean, output_mean = _between(base[1], 16, 4000), _between(base[2], 8, 1000)
    a_max = min(384, max(1, round(_between(own[0], count / 32, count))))
    max_num_seqs = round(_between(own[1], 16, 2048))
    workload = _workload(
        ranks=rng.choice(_RANK_SETS[int(base[3] * len(_RANK_SETS))], count),
        rates_rps=_popularity(rng, count, base[4], base[5]),
        prompt=(prompt_mean, _spread(base[6]) * prompt_mean),
        output=(output_mean, _spread(base[7]) * output_mean),
        spread=True,
        arrivals=_arrivals(base[8]),
        length_correlation=None if base[9] < 0.8 else -0.6 + 1.2 * (base[9] - 0.8) / 0.2,
    )
    engine = EngineConfig(
        max_loras=a_max,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_seqs, round(_between(own[2], 256, 8192))),
        gpu_memory_utilization=0.9 if own[3] < 0.4 else 0.5 + 0.46 * (own[3] - 0.4) / 0.6,
    )
    return Sample(group, workload, _settings(workload, engine))


def _workload(
    ranks: NDArray[np.int64],
    rates_rps: NDArray[np.float64],
    prompt: tuple[float, float],
    output: tuple[float, float],
    spread: bool,
    arrivals: ArrivalProcess = Arrivals.POISSON,
    length_correlation: float | None = None,
) -> Workload:
    return Workload(
        base_model="any",
        adapters=tuple(
            Adapter(name=str(i), rank=int(rank), rate_rps=float(rate))
            for i, (rank, rate) in enumerate(zip(ranks, rates_rps, strict=True))
        ),
        prompt_tokens=Lengths(mean=prompt[0], std=prompt[1] if spread else None),
        output_tokens=Lengths(mean=output[0], std=output[1] if spread else None),
        arrivals=arrivals,
        length_correlation=length_correlation,
    )


def _settings(workload: Workload, engine: EngineConfig) -> SimulateSettings:
    rank = allowed_lora_rank(max(adapter.rank for adapter in workload.adapters))
    args = engine.complete(max_lora_rank=rank)
    return SimulateSettings(
        a_max=args.max_loras,
        s_max=rank,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_in_flight=MAX_IN_FLIGHT,
    )


def _saturation_rps(sample: Sample, profile: Profile) -> float:
    """Return the load at the capacity of the fluid model; the sample offers 1 req/s."""
    features = sample.features(profile)
    return 1.0 / float(feature_of(features, "load_over_capacity"))


def _edge_rps(sample: Sample, profile: Profile) -> float:
    """Return the load at which the fluid model serves `STARVED_BELOW`; the sample offers 1 req/s."""
    workload, args = sample.workload, engine_args(sample.workload, sample.settings, profile)
    common = common_inputs(workload, profile)
    limits = gpu_limits(kv_budget(profile, args.gpu_memory_utilization), args)
    rates_rps = np.array([adapter.rate_rps for adapter in workload.adapters])
    ranks = np.array([adapter.rank for adapter in workload.adapters], float)

    def serves(load_rps: float) -> bool:
        features = feature_vectors(common, [limits], load_rps * rates_rps, ranks)[0]
        return float(steady_share(features)) >= STARVED_BELOW

    low, high = np.log(_EDGE_RPS)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if serves(float(np.exp(middle))) else (low, middle)
    return float(np.exp(low))


def _popularity(rng: np.random.Generator, count: int, law: float, skew: float) -> NDArray[np.float64]:
    """Return shares of the load: equal, Zipf, log-normal, or three rates assigned at random."""
    if law < 0.15:
        shares = np.ones(count)
    elif law < 0.4:
        shares = rng.permutation(np.array(zipf(count, 2.0 * skew)))
    elif law < 0.75:
        shares = np.exp(2.0 * skew * rng.standard_normal(count))
    else:
        shares = rng.choice(rng.choice(GRID_RATES_RPS, 3, replace=False), count)
    normal: NDArray[np.float64] = shares / shares.sum()
    return normal


def _spread(at: float) -> float:
    """Return a coefficient of variation: one in six lengths is constant."""
    return max(0.0, (at - 1 / 6) * 6 / 5) * 1.5


def _arrivals(at: float) -> ArrivalProcess:
    """Return a Poisson process in half of all cases, else a gamma process from regular to very bursty."""
    return Arrivals.POISSON if at < 0.5 else Renewal(process="gamma", cv=_between(2 * at - 1, 0.25, 6.0))


def _load(at: float) -> float:
    """Return the load over the estimated capacity; 60 % of them lie between 0.5 and 2."""
    if at < 0.6:
        return _between(at / 0.6, 0.5, 2.0)
    return _between((at - 0.6) / 0.25, 0.02, 0.5) if at < 0.85 else _between((at - 0.85) / 0.15, 2.0, 30.0)


def _between(at: float, low: float, high: float) -> float:
    """Interpolate between `low` and `high` on a logarithmic scale."""
    return float(low * (high / low) ** at)
