"""Scenarios of one GPU and what the twin makes of them: the training data of surrogates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray
from scipy.stats import qmc

from capplan.errors import InfeasibleError
from capplan.models.surrogates.features import FEATURES, feature_vector
from capplan.spec import Adapter, Lengths, Profile, Workload, allowed_lora_rank
from capplan.twin.simulate import simulate

UTILIZATION = 0.9
_RANK_SETS = ((8,), (16,), (32,), (64,), (8, 16), (8, 32), (16, 32), (8, 16, 32), (8, 16, 32, 64))
_DIMENSIONS = 10


@dataclass(frozen=True)
class Sample:
    """One scenario's settings."""

    workload: Workload
    a_max: int
    s_max: int
    max_num_seqs: int
    max_num_batched_tokens: int


class _Settings(TypedDict):
    """What twin and features are both told of a scenario."""

    a_max: int
    s_max: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float


@dataclass(frozen=True)
class Dataset:
    """Feature vectors and answers.

    Attributes
    ----------
    features
        Shape (scenarios, features), in the order of `capplan.models.surrogates.features.FEATURES`.
    throughput_tok_s
        Tokens of completed requests per second, shape (scenarios,).
    served_fraction
        Shape (scenarios,).
    """

    features: NDArray[np.float32]
    throughput_tok_s: NDArray[np.float64]
    served_fraction: NDArray[np.float64]


def generate_dataset(
    profile: Profile,
    scenarios: int,
    *,
    seed: int = 0,
    duration_s: float = 1800.0,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Dataset:
    """Simulate a space-filling set of scenarios; those that the memory model refuses are left out.

    Parameters
    ----------
    profile
        The profile whose twin answers.
    scenarios
        Number of scenarios to draw.
    seed
        Seed of the set and of every simulation; the result does not depend on `workers`.
    duration_s
        Horizon of each simulation.
    workers
        Processes.
    progress
        Called with (done, total).
    """
    sobol = qmc.Sobol(_DIMENSIONS, rng=np.random.default_rng(seed))
    points = sobol.random_base2(max(0, scenarios - 1).bit_length())[:scenarios]
    numbered = list(enumerate(points))
    answer = partial(_answer, profile, seed, duration_s)
    rows = []
    for done, row in enumerate(_in_order(answer, numbered, workers), start=1):
        if row is not None:
            rows.append(row)
        if progress is not None:
            progress(done, scenarios)
    table = np.array(rows)
    return Dataset(table[:, :-2].astype(np.float32), table[:, -2], table[:, -1])


def _in_order(
    answer: Callable[[tuple[int, NDArray[np.float64]]], list[float] | None],
    points: list[tuple[int, NDArray[np.float64]]],
    workers: int,
) -> Iterator[list[float] | None]:
    if workers == 1:
        yield from map(answer, points)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(answer, points, chunksize=16)


def _answer(
    profile: Profile, seed: int, duration_s: float, numbered: tuple[int, NDArray[np.float64]]
) -> list[float] | None:
    number, point = numbered
    sample = sample_at(point, np.random.default_rng([seed, number]))
    settings = _Settings(
        a_max=sample.a_max,
        s_max=sample.s_max,
        max_num_seqs=sample.max_num_seqs,
        max_num_batched_tokens=sample.max_num_batched_tokens,
        gpu_memory_utilization=UTILIZATION,
    )
    try:
        result = simulate(
            sample.workload, profile, duration_s=duration_s, seed=number, max_in_flight=25_000, **settings
        )
    except InfeasibleError:
        return None
    if result.submitted == 0:
        return None
    features = feature_vector(sample.workload, profile, **settings)
    # Offered as declared, not as drawn: a planner knows rates, not arrivals.
    share = result.throughput_tok_s / result.offered_tok_s
    throughput = share * float(features[FEATURES.index("offered_tok_s")])
    return [*features.tolist(), throughput, result.served_fraction]


def sample_at(point: NDArray[np.float64], rng: np.random.Generator) -> Sample:
    """Turn a point of the unit cube into a scenario; `rng` deals ranks and rates.

    Three in four loads lie between a tenth and four times of what a GPU can do, since the planner asks most
    near the edge; the rest reach up to forty times.
    """
    adapters = round(_between(point[0], 1, 512))
    prompt_mean, output_mean = _between(point[1], 16, 4000), _between(point[2], 8, 800)
    ranks = _RANK_SETS[int(point[3] * len(_RANK_SETS))]
    a_max = max(1, round(_between(point[4], 1, min(adapters, 384))))
    # About what an H100 does with an 8B model: so many output tokens per second beside so many prompt tokens.
    seconds_per_request = prompt_mean / 25_000 + output_mean / 4_000
    load = (
        _between(point[5] / 0.75, 0.1, 4.0) if point[5] < 0.75 else _between(4.0 * point[5] - 3.0, 4.0, 40.0)
    )
    rates = _rates(rng, adapters, load / seconds_per_request, spread=2.0 * point[6])
    dealt = rng.choice(ranks, size=adapters)
    workload = Workload(
        base_model="any",
        adapters=tuple(
            Adapter(name=str(i), rank=int(rank), rate_rps=float(rate))
            for i, (rank, rate) in enumerate(zip(dealt, rates, strict=True))
        ),
        prompt_tokens=Lengths(mean=prompt_mean, std=1.2 * point[7] * prompt_mean),
        output_tokens=Lengths(mean=output_mean, std=1.2 * point[8] * output_mean),
    )
    return Sample(
        workload=workload,
        a_max=a_max,
        s_max=allowed_lora_rank(int(dealt.max())),
        max_num_seqs=round(_between(point[9], 64, 2048)),
        max_num_batched_tokens=2048 if rng.random() < 0.8 else 1024,
    )


def _between(at: float, low: float, high: float) -> float:
    """Return a number between `low` and `high`, even on a logarithmic scale."""
    return float(low * (high / low) ** at)


def _rates(rng: np.random.Generator, adapters: int, total_rps: float, spread: float) -> NDArray[np.float64]:
    """Return log-normal rates that add up to `total_rps`."""
    weights = np.exp(spread * rng.standard_normal(adapters))
    rates: NDArray[np.float64] = total_rps * weights / weights.sum()
    return rates
