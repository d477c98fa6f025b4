"""Routers in Toppings' settings: ``python -m benchmarks.papers.toppings.cluster`` prints a table of the docs.

Every instance is the engine of `baseline` with assisted loading, and outputs are those of `baseline`.
SLO attainment is the share of requests whose TPT (end to end / output tokens) is at most 1.5 times the mean
TPT of the same requests on the same instances without adapters, routed to the least loaded instance (section
7.4). A request that does not finish within the horizon violates it. Every instance holds every adapter, but
dLoRA is on its own placement.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import H100_LLAMA, command_line, cpu_timed, preset_workload, records_table
from benchmarks.papers.toppings import baseline
from benchmarks.papers.toppings.servers import MAX_MODEL_LEN, SYSTEMS
from capplan import Adapter, Profile, Workload, load_profile
from capplan.serving.routers import ROUTERS, Toppings
from capplan.spec import Kernel, write_text_atomic
from capplan.twin.cluster import (
    ClusterResult,
    Instance,
    NamedRouter,
    simulate_cluster,
    simulate_without_adapters,
)

RANKS: Final = (8, 16, 32, 64)
SLO_FACTOR: Final = 1.5
RATES_RPS: Final = (30.0, 40.0, 50.0)
WITHOUT: Final = "(no LoRA, least-loaded)"
DLORA: Final = "dlora"
COMPARED: Final = tuple(ROUTERS)


def engine(profile: Profile, adapters: Mapping[str, float] | None = None) -> Instance:
    """Return an instance: the paper's engine, or vLLM's with 64 slots of rank 64 for its kernel."""
    if profile.cpu_lora is None:
        return Instance(profile, a_max=64, s_max=64, rules="capplan", prefix_caching=False, adapters=adapters)
    return Instance(
        profile,
        a_max=1,
        s_max=64,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_MODEL_LEN,
        scheduler="fifo",
        cache=SYSTEMS["assisted"].cache(),
        adapters=adapters,
    )


@dataclass(frozen=True)
class ClusterSetting:
    name: str
    workload: Workload
    instances: int

    def engines(self, profile: Profile) -> list[Instance]:
        return [engine(profile)] * self.instances

    def placed(self, profile: Profile) -> list[Instance]:
        """Return the instances with the adapters spread as dLoRA spreads them.

        Replicas in proportion to the rates, as many in all as adapters and engines less one (PAPER_NOTES 9);
        the busiest adapter first, each replica on the engine with the lowest rate so far.
        """
        held: list[dict[str, float]] = [{} for _ in range(self.instances)]
        rate_rps = np.zeros(self.instances)
        total = sum(adapter.rate_rps for adapter in self.workload.adapters)
        for adapter in sorted(self.workload.adapters, key=lambda each: -each.rate_rps):
            spare = int(adapter.rate_rps / total * (self.instances - 1))
            for i in np.argsort(rate_rps, kind="stable")[: 1 + spare].tolist():
                held[i][adapter.name] = 1.0
                rate_rps[i] += adapter.rate_rps / (1 + spare)
        return [engine(profile, own) for own in held]


def profile_with(kernel: Kernel) -> Profile:
    """Return the paper's engine with these LoRA kernels; for vLLM's, the shipped profile of an H100."""
    return load_profile(H100_LLAMA) if kernel is Kernel.VLLM else baseline.profile(kernel)


def cluster(rps: float, outputs: float = baseline.OUTPUT_FACTOR) -> ClusterSetting:
    load = baseline.with_outputs(preset_workload(f"toppings-cluster-{rps:g}"), outputs)
    return ClusterSetting(f"8 instances, {rps:g} req/s", load, 8)


def simulation(
    popularity: str = "functions",
    adapters: int = 40_000,
    rps: float = 340.0,
    instances: int = 60,
    outputs: float = baseline.OUTPUT_FACTOR,
) -> ClusterSetting:
    """Return section 7.5: 60 instances and 40,000 adapters; the four ranks are assigned in turn (assumed)."""
    shares = function_shares(adapters) if popularity == "functions" else zipf_shares(adapters)
    lengths = baseline.with_outputs(preset_workload("toppings-cluster-30"), outputs)
    cycled = tuple(
        Adapter(name=f"f{i}", rank=RANKS[i % 4], rate_rps=rps * share)
        for i, share in enumerate(shares.tolist())
    )
    workload = lengths.model_copy(update={"adapters": cycled})
    name = f"{instances} instances, {rps:g} req/s, {adapters:,} adapters ({popularity})"
    return ClusterSetting(name, workload, instances)


def function_shares(functions: int, seed: int = 2019) -> NDArray[np.float64]:
    """Return shares like those of the functions of Azure's trace of 2019, by its published facts.

    45 % of the applications are called at most once an hour, 36 % up to once a minute, 16 % up to once a
    second, 3 % more often, over eight decades (Shahrad et al., ATC 2020). Log-uniform within each band, from
    1e-5 to 10 a second; those ends are assumed.
    """
    rng = np.random.default_rng(seed)
    ends = np.log10([1e-5, 1 / 3600, 1 / 60, 1.0, 10.0])
    band = rng.choice(4, functions, p=[0.45, 0.36, 0.16, 0.03])
    return _shares(10.0 ** rng.uniform(ends[band], ends[band + 1]))


def zipf_shares(adapters: int, s: float = 1.44) -> NDArray[np.float64]:
    return _shares(np.arange(1.0, adapters + 1) ** -s)


def _shares(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(weights / weights.sum())


Row = dict[str, Any]
"""One router in one setting; ``cpu_s`` includes drawing of requests and reduction to metrics."""


def compare(
    setting: ClusterSetting, kernel: Kernel, routers: Sequence[str], duration_s: float, seed: int
) -> Iterator[Row]:
    profile = profile_with(kernel)
    engines = setting.engines(profile)
    load = setting.workload
    times = {"duration_s": duration_s, "seed": seed}
    cpu_s, base = cpu_timed(partial(simulate_without_adapters, load, engines, **times))
    bound_ms = SLO_FACTOR * base.tpt_ms_mean
    yield _row(setting, kernel, WITHOUT, bound_ms, base, cpu_s)
    form: Literal["bgmv", "mbgmv"] = "mbgmv" if kernel is Kernel.MBGMV else "bgmv"
    for router in routers:
        chosen: NamedRouter = router
        instances = engines
        if router in ("toppings", "toppings-rank-blind"):
            chosen = Toppings(form, slo_ms=bound_ms, rank_aware=router == "toppings")
        elif router == DLORA:
            instances = setting.placed(profile)
        cpu_s, result = cpu_timed(partial(simulate_cluster, load, instances, router=chosen, **times))
        yield _row(setting, kernel, router, bound_ms, result, cpu_s)


def _row(
    setting: ClusterSetting, kernel: Kernel, router: str, bound_ms: float, result: ClusterResult, cpu_s: float
) -> Row:
    latencies = ("tpt_ms_mean", "tpt_ms_p99", "ttft_s_p99")
    counts = ("submitted", "completed", "adapter_loads", "migrations")
    return {
        "setting": setting.name,
        "kernel": kernel.value,
        "router": router,
        "bound_tpt_ms": bound_ms,
        "attainment": result.attainment(bound_ms),
        **{name: getattr(result, name) for name in (*latencies, *counts)},
        "busiest": max(result.requests_per_instance),
        "idlest": min(result.requests_per_instance),
        "steps": result.steps,
        "cpu_s": cpu_s,
    }


def table(rows: Sequence[Row]) -> str:
    return records_table(
        {
            "setting": row["setting"],
            "router": row["router"],
            "SLO attainment": f"{row['attainment']:.2%}",
            "TPT mean, p99 ms": f"{row['tpt_ms_mean']:.1f}, {row['tpt_ms_p99']:.1f}",
            "TTFT p99 s": f"{row['ttft_s_p99']:.2f}",
            "loads": f"{row['adapter_loads']:,}",
            "moved": f"{row['migrations']:,}",
            "most / fewest requests": f"{row['busiest']:,} / {row['idlest']:,}",
            "CPU s": f"{row['cpu_s']:.1f}",
        }
        for row in rows
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--setting", choices=("cluster", "simulation", "both"), default="both")
    parser.add_argument("--kernel", type=Kernel, choices=tuple(Kernel), default=Kernel.BGMV)
    parser.add_argument("--popularity", choices=("functions", "zipf"), default="functions")
    parser.add_argument("--routers", nargs="+", choices=COMPARED, default=COMPARED)
    parser.add_argument("--outputs", type=float, default=baseline.OUTPUT_FACTOR, help="factor of lengths")
    parser.add_argument("--duration", dest="duration_s", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    chosen = parser.parse_args(arguments)
    settings = []
    if chosen.setting != "simulation":
        settings += [cluster(rps, chosen.outputs) for rps in RATES_RPS]
    if chosen.setting != "cluster":
        settings.append(simulation(chosen.popularity, outputs=chosen.outputs))
    rows: list[Row] = []
    next(compare(settings[0], chosen.kernel, [], 1.0, 0))  # compile first
    for setting in settings:
        rows += compare(setting, chosen.kernel, chosen.routers, chosen.duration_s, chosen.seed)
    print(table(rows))
    if chosen.json:
        write_text_atomic(chosen.json, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
