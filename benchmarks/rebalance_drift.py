"""Re-balancing under drift: ``python -m benchmarks.rebalance_drift --traces DIR --out DIR``.

Four instances of an H100 with S-LoRA's kernels as assumed in `standin`, in the cluster twin, behind
`smooth-shares`. Two workloads of an hour, with the lengths of the Azure conversations of 2023: LoRAServe's
Shifting Skew trace (25 adapters of ranks 8 to 128, whose popularity moves from the largest rank to the
smallest), and a drift of 60 adapters, whose Zipf popularity moves on by one adapter a minute.

The frozen placement is LoRAServe's by the declared rates. It is also the preference of `least-work-left` with
all adapters on all instances, which moves nothing. All others begin with it: re-balanced by Algorithm
1 with windows of 60, 300 and 900 s and several forecasts, and by capplan's moves from the placement in force.
Without the permutation the labels of Algorithm 1's servers are those of its packing order, or arbitrary
(drawn in each round). Instances fetch adapters with the first request, over links of 12.5 GB/s.

P95 TTFT is over all requests but those of the last 10 s, an unanswered one with its wait so far. Bytes are
those of copied adapters, and those that the new placements lack, both over the hour. Results are means over
seeds; all systems have the same requests. DIR of ``--out`` keeps the operating points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np

from benchmarks.common import H100_LLAMA, command_line, markdown, preset_workload, read_or_make
from capplan import Profile, Workload, load_profile
from capplan.models._step_latency import GRAPH_TOKENS
from capplan.planner.problem._operating_points import OperatingPoints
from capplan.planner.problem._setup import make_problem
from capplan.profiling.load._requests import scaled
from capplan.serving import adapter_bytes
from capplan.serving.rebalancing import AdapterDemand, Replan, ReplanRequest, place
from capplan.serving.routers import LeastWorkLeft
from capplan.spec import STATE_PERIOD_S, Adapter, Coefficient, Forecast, Kernel, RebalanceSettings, Trace
from capplan.twin.cluster import ClusterResult, Instance, Rebalancing, simulate_cluster
from capplan.twin.instance import REJECTED

SERVERS: Final = 4
HOUR_S: Final = 3600.0
BOUND_S: Final = 10.0
RANKS: Final = (8, 16, 32, 64, 128)
LIMITS: Final[Mapping[str, Any]] = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,  # S-LoRA computes a prompt in one batch or rejects it
    "max_model_len": 16384,  # the longest conversation has 14,089 tokens
    "gpu_memory_utilization": 0.9,
}
OFF_PLAN: Final = 1.25
RANK_RAISE: Final = 1.5
"""Factors of `least-work-left`."""
PREFILL_RATIO: Final = 2.7
"""Prefill of 2,000 tokens at rank 128 over that at rank 8 (LoRAServe, section III-A1)."""
BYTES_PER_S: Final = 2.0e12
"""Memory bandwidth of an H100 with 64 GB of HBM2, rounded."""
DRIFTING: Final = 60
SHIFT_S: Final = 60.0
"""Time after which the popularity of the drifting adapters moves on by one of them."""
_GB: Final = 1e9

FORECAST_NAMES: Final[tuple[Forecast, ...]] = ("holt", "last", "gamma-poisson")
LOOKING: Final = "all adapters everywhere, least-work-left"
ARBITRARY: Final = "300 s, holt, arbitrary labels"
HIGH_PRICE_PER_GB: Final = 0.05
"""Five times the default."""

SYSTEMS: Final[Mapping[str, RebalanceSettings | None]] = {
    "frozen": None,
    LOOKING: None,
    **{
        f"{every_s:g} s, {forecast}": RebalanceSettings(every_s=every_s, forecast=forecast)
        for every_s in (60.0, 300.0, 900.0)
        for forecast in FORECAST_NAMES
    },
    "300 s, holt, labels by packing": RebalanceSettings(permute=False),
    ARBITRARY: RebalanceSettings(permute=False, solver="capplan"),  # with `arbitrary_labels` as the solver
    **{
        f"capplan, {every_s:g} s, {forecast}": RebalanceSettings(
            every_s=every_s, forecast=forecast, solver="capplan"
        )
        for every_s in (60.0, 300.0)
        for forecast in FORECAST_NAMES
    },
    **{
        f"capplan, {every_s:g} s, {forecast}, price {HIGH_PRICE_PER_GB:g}": RebalanceSettings(
            every_s=every_s, forecast=forecast, solver="capplan", price_per_gb=HIGH_PRICE_PER_GB
        )
        for every_s in (60.0, 300.0)
        for forecast in FORECAST_NAMES[1:]
    },
}


def arbitrary_labels(seed: int) -> Replan:
    """Return Algorithm 1 without its permutation, whose servers are labelled at random in each round."""
    random = np.random.default_rng([seed, 11])

    def replan(request: ReplanRequest) -> list[Mapping[str, float]]:
        shares = place(request.adapters, request.operating_points, len(request.stored)).shares
        return [shares[i] for i in random.permutation(len(shares)).tolist()]

    return replan


@dataclass(frozen=True)
class Found:
    """Result of a system on one seed."""

    p95_ttft_s: float
    copied_gb: float
    lacking_gb: float
    waited: int
    stored: float


def standin() -> Profile:
    """Return the shipped profile with costs of ranks in place of those of slots and adapters.

    Decode reads the padded q, k, v and o weights of each request.
    """
    shipped = load_profile(H100_LLAMA)
    step, arch, tokens = shipped.step_latency, shipped.model, 2000
    base = {name: step.value(name) for name in ("base_ms", "ms_per_ktoken", "ms_per_ktoken_beyond_graphs")}
    alone_ms = np.dot(list(base.values()), [1.0, tokens / 1e3, (tokens - GRAPH_TOKENS) / 1e3])
    low, high = (tokens * rank / 1e3 for rank in (min(RANKS), max(RANKS)))
    wide, narrow = (
        arch.hidden_size + arch.heads * arch.head_dim,
        arch.hidden_size + arch.kv_heads * arch.head_dim,
    )
    values = {
        **dict.fromkeys(step.coefficients, 0.0),
        **base,
        "ms_per_kv_ktoken": step.value("ms_per_kv_ktoken"),
        "ms_per_decode_krank": 1e6 * arch.layers * 2 * (wide + narrow) * arch.dtype_bytes / BYTES_PER_S,
        "ms_per_prefill_krank": float(alone_ms) * (PREFILL_RATIO - 1.0) / (high - PREFILL_RATIO * low),
    }
    return shipped.replace(
        engine=shipped.engine.replace(name="s-lora", version="c1ddf48", rules="slora", kernel=Kernel.BGMV),
        step_latency=step.replace(coefficients={name: Coefficient(value=ms) for name, ms in values.items()}),
    )


def operating_points(workload: Workload, profile: Profile) -> dict[str, float]:
    """Return LoRAServe's operating points."""
    engine = workload.engine.model_copy(update={"max_num_batched_tokens": LIMITS["max_num_batched_tokens"]})
    changes = {"engine": engine, "headroom": 0.0, "gpus": None, "slo": workload.slo.replace(stable=False)}
    steady = at_rate(workload, 1.0).model_copy(update={**changes, "base_model": profile.model.hf_ids[0]})
    points = OperatingPoints(make_problem(steady, SERVERS, profile))(
        adapter.rank for adapter in workload.adapters
    )
    return {str(rank): point for rank, point in points.items()}


def at_rate(workload: Workload, rps: float) -> Workload:
    return scaled(workload, rps / workload.total_rate_rps)


def mean_and_range(values: Sequence[float], digits: int = 1) -> str:
    """Return mean and range, in words."""
    spread = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(set(values)) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}"


def shifting(traces: Path, rps: float, _seed: int) -> Workload:
    """Return LoRAServe's Shifting Skew trace, whose arrivals differ by the seed of the simulation."""
    return at_rate(preset_workload("loraserve-poisson-shifting", traces=str(traces)), rps)


def drifting(traces: Path, rps: float, seed: int) -> Workload:
    """Return a trace of Poisson arrivals with a popularity that moves on."""
    base = preset_workload("loraserve-poisson-uniform", traces=str(traces))
    pairs = base.length_pairs
    assert pairs is not None
    rng = np.random.default_rng([seed, 7])
    count = rng.poisson(rps * HOUR_S)
    arrival_s = np.sort(rng.uniform(0.0, HOUR_S, count))
    weights = 1.0 / np.arange(1, DRIFTING + 1)
    position = rng.choice(DRIFTING, count, p=weights / weights.sum())
    adapter = (position + (arrival_s // SHIFT_S).astype(np.int64)) % DRIFTING
    row = rng.integers(pairs.prompt_tokens.size, size=count)
    names = [f"r{RANKS[i % len(RANKS)]}-{i}" for i in range(DRIFTING)]
    trace = Trace.from_arrays(
        arrival_s, [names[i] for i in adapter], pairs.prompt_tokens[row], pairs.output_tokens[row], HOUR_S
    )
    rates_rps = np.bincount(adapter, minlength=DRIFTING) / HOUR_S
    adapters = tuple(
        Adapter(name=name, rank=RANKS[i % len(RANKS)], rate_rps=float(rates_rps[i]))
        for i, name in enumerate(names)
    )
    return base.model_copy(update={"adapters": adapters, "trace": trace})


WORKLOADS: Final = {"Shifting Skew": shifting, "drift of 60 adapters": drifting}


def run(workload: Workload, points: Mapping[int, float], system: str, seed: int) -> Found:
    """Simulate a system."""
    settings = SYSTEMS[system]
    replan = arbitrary_labels(seed) if system == ARBITRARY else None
    profile = standin()
    tokens = sum(lengths.mean_tokens for lengths in workload.lengths_of(workload.adapters[0]))
    demands = [
        AdapterDemand(a.name, a.rank, a.rate_rps * tokens, adapter_bytes(profile.model, a.rank))
        for a in workload.adapters
    ]
    shares: Sequence[Mapping[str, float]] = place(demands, points, SERVERS).shares
    if system == LOOKING:
        shares = [{each.name: own.get(each.name, 0.0) for each in demands} for own in shares]
    instances = [Instance(profile, len(demands), max(RANKS), adapters=dict(own), **LIMITS) for own in shares]
    result = simulate_cluster(
        workload,
        instances,
        router=LeastWorkLeft(OFF_PLAN, rank_raise=RANK_RAISE) if system == LOOKING else "smooth-shares",
        duration_s=HOUR_S,
        seed=seed,
        state_period_s=STATE_PERIOD_S,
        rebalance=None if settings is None else Rebalancing(settings, points, replan=replan),
    )
    moves = result.moves
    if moves is None:
        return Found(p95_ttft_s(result), 0.0, 0.0, 0, fmean(len(own) for own in shares))
    lacking = sum(each.moved_bytes for each in moves.rounds)
    return Found(
        p95_ttft_s(result), moves.transferred_bytes / _GB, lacking / _GB, moves.waited, moves.stored_mean
    )


def p95_ttft_s(result: ClusterResult) -> float:
    requests = result.requests
    waited_s = np.where(np.isnan(requests.ttft_s), HOUR_S - requests.arrival_s, requests.ttft_s)
    waited_s = np.where(requests.status == REJECTED, np.inf, waited_s)
    return float(np.percentile(waited_s[requests.arrival_s < HOUR_S - BOUND_S], 95, method="higher"))


def table(name: str, traces: Path, out: Path, rates_rps: Sequence[float], seeds: int) -> str:
    """Return the table of a workload: P95 TTFT at each rate, the rest at the last one."""
    make = WORKLOADS[name]
    path = out / f"{name.replace(' ', '-')}.operating-points.json"
    known = read_or_make(path, lambda: operating_points(make(traces, rates_rps[-1], 0), standin()))
    points = {int(rank): point for rank, point in known.items()}
    rows = []
    for system in SYSTEMS:
        found = [
            [run(make(traces, rps, seed), points, system, seed) for seed in range(seeds)] for rps in rates_rps
        ]
        last = found[-1]
        rows.append(
            [
                system,
                *(mean_and_range([each.p95_ttft_s for each in own], digits=2) for own in found),
                f"{fmean(each.copied_gb for each in last):.1f}",
                f"{fmean(each.lacking_gb for each in last):.1f}",
                f"{fmean(each.waited for each in last):.0f}",
                f"{fmean(each.stored for each in last):.1f}",
            ]
        )
        print(name, rows[-1], flush=True)
    rates = [f"P95 TTFT at {rps:g} req/s, s" for rps in rates_rps]
    return markdown(
        ["system", *rates, "copied, GB", "lacking, GB", "requests that waited", "stored per server"], rows
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the Azure traces")
    parser.add_argument("--out", type=Path, required=True, help="folder of the operating points")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rps", type=float, nargs="+", default=[17.0])
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.only:
        print(f"\n{name}:\n\n{table(name, given.traces, given.out, given.rps, given.seeds)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
