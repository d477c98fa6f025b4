"""Routers in Toppings' settings: ``python -m benchmarks.toppings_cluster`` prints a table of docs/cluster.md.

SLO attainment is the share of requests whose TPT (end to end / output tokens) is at most 1.5 times the mean
TPT of the same requests on the same instances without adapters, where they go to the least loaded instance
(section 7.4). A request that does not finish within the horizon does not keep it. Every instance holds every
adapter, but for "dlora, placed". What the engines are made of stands in `benchmarks.toppings_setting`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import command_line, markdown
from capplan import Adapter, Profile, Workload, load_profile, load_workload
from capplan.models.step_latency import ADDITIVE, GRAPH_TOKENS
from capplan.spec import Kernel, write_text_atomic
from capplan.twin.cluster import (
    ROUTERS,
    ClusterResult,
    Instance,
    NamedRouter,
    Toppings,
    simulate_cluster,
    simulate_without_adapters,
)
from capplan.workload.presets import preset

SHIPPED: Final = "h100-64g/llama-3.1-8b/vllm-0.8.5"
BASE_MODEL: Final = "meta-llama/Llama-3.1-8B-Instruct"
RANKS: Final = (8, 16, 32, 64)
DECODE_MS_PER_KRANK: Final = {Kernel.BGMV: 3.5, Kernel.MBGMV: 2.34375}
SLO_FACTOR: Final = 1.5
RATES_RPS: Final = (30.0, 40.0, 50.0)
WITHOUT: Final = "(no LoRA, least-loaded)"
PLACED: Final = "dlora, placed"


def engine(profile: Profile, adapters: Mapping[str, float] | None = None) -> Instance:
    """Return an instance: 64 slots of rank 64, vLLM's default batch.

    Adapters are loaded beside the batch, which is nearest to the paper's engine, whose CPU computes for an
    adapter that is on its way: nobody else waits for it.
    """
    return Instance(profile, a_max=64, s_max=64, rules="capplan", prefix_caching=False, adapters=adapters)


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
    """Return the H100 with LoRA kernels of this kind; vLLM's are those of the shipped profile as it is."""
    shipped = load_profile(SHIPPED)
    if kernel is Kernel.VLLM:
        return shipped
    data = shipped.model_dump(mode="json")
    coefficients = data["step_latency"]["coefficients"]
    for name in coefficients:  # vLLM's own kernels
        if "slot" in name or "adapter" in name:
            coefficients[name] = {"value": 0.0}
    plain_ms = prefill_ms(shipped, 2000)
    # (plain + k * 2000 * 128 / 1000) / (plain + k * 2000 * 8 / 1000) = 2.7
    prefill = (2.7 - 1.0) * plain_ms / (2000 * (128 - 2.7 * 8) / 1000)
    coefficients["ms_per_decode_krank"] = {"value": DECODE_MS_PER_KRANK[kernel]}
    coefficients["ms_per_prefill_krank"] = {"value": prefill}
    data["engine"]["kernel"] = kernel.value
    data["name"] = f"h100-64g/llama-3.1-8b/{kernel.value}"
    data["provenance"] |= {
        "kind": "published",
        "source": "step without LoRA, memory, loading: shipped; LoRA: Toppings Figs 5, 6; LoRAServe III-A",
        "command": "python -m benchmarks.toppings_cluster",
        "notes": "put together for one benchmark; LoRA terms are those of other GPUs",
    }
    return Profile.model_validate(data)


def prefill_ms(profile: Profile, tokens: int) -> float:
    model = profile.step_latency
    beyond = model.value("ms_per_ktoken_beyond_graphs") * max(0, tokens - GRAPH_TOKENS)
    assert model.form == ADDITIVE.name
    return model.value("base_ms") + (model.value("ms_per_ktoken") * tokens + beyond) / 1e3


def cluster(rps: float) -> ClusterSetting:
    workload = _preset(f"toppings-cluster-{rps:g}")
    return ClusterSetting(f"8 instances, {rps:g} req/s", workload, 8)


def simulation(
    popularity: str = "functions", adapters: int = 40_000, rps: float = 340.0, instances: int = 60
) -> ClusterSetting:
    """Return section 7.5: 60 instances and 40,000 adapters; the four ranks are dealt in turn (assumed)."""
    shares = function_shares(adapters) if popularity == "functions" else zipf_shares(adapters)
    lengths = _preset("toppings-cluster-30")
    dealt = tuple(
        Adapter(name=f"f{i}", rank=RANKS[i % 4], rate_rps=rps * share)
        for i, share in enumerate(shares.tolist())
    )
    workload = lengths.model_copy(update={"adapters": dealt})
    name = f"{instances} instances, {rps:g} req/s, {adapters:,} adapters ({popularity})"
    return ClusterSetting(name, workload, instances)


def function_shares(functions: int, seed: int = 2019) -> NDArray[np.float64]:
    """Return shares like those of the functions of Azure's trace of 2019, by its published facts.

    45 % of the applications are asked at most once an hour, 36 % up to once a minute, 16 % up to once a
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


def _preset(name: str) -> Workload:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "workload.yaml"
        path.write_text(preset(name).yaml(profile=SHIPPED, base_model=BASE_MODEL))
        return load_workload(path)


Row = dict[str, Any]
"""One router in one setting; ``cpu_s`` includes drawing of requests and reduction to metrics."""


def compare(
    setting: ClusterSetting, kernel: Kernel, routers: Sequence[str], duration_s: float, seed: int
) -> Iterator[Row]:
    profile = profile_with(kernel)
    engines = setting.engines(profile)
    load = setting.workload
    base, cpu_s = timed(lambda: simulate_without_adapters(load, engines, duration_s=duration_s, seed=seed))
    bound_ms = SLO_FACTOR * base.tpt_ms_mean
    yield _row(setting, kernel, WITHOUT, bound_ms, base, cpu_s)
    form: Literal["bgmv", "mbgmv"] = "mbgmv" if kernel is Kernel.MBGMV else "bgmv"
    for router in routers:
        chosen: NamedRouter = router
        instances = engines
        if router == "toppings":
            chosen = Toppings(form, slo_ms=bound_ms)
        elif router == PLACED:
            chosen, instances = "dlora", setting.placed(profile)
        call = partial(simulate_cluster, load, instances, router=chosen, duration_s=duration_s, seed=seed)
        result, cpu_s = timed(call)
        yield _row(setting, kernel, router, bound_ms, result, cpu_s)


def timed(call: Callable[[], ClusterResult]) -> tuple[ClusterResult, float]:
    begin_s = time.process_time()
    answer = call()
    return answer, time.process_time() - begin_s


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
    titles = ("setting", "router", "SLO attainment", "TPT mean, p99 ms", "TTFT p99 s", "loads", "moved")
    cells = [
        (
            row["setting"],
            row["router"],
            f"{row['attainment']:.2%}",
            f"{row['tpt_ms_mean']:.1f}, {row['tpt_ms_p99']:.1f}",
            f"{row['ttft_s_p99']:.2f}",
            f"{row['adapter_loads']:,}",
            f"{row['migrations']:,}",
            f"{row['busiest']:,} / {row['idlest']:,}",
            f"{row['cpu_s']:.1f}",
        )
        for row in rows
    ]
    return markdown((*titles, "most / fewest requests", "CPU s"), cells) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--setting", choices=("cluster", "simulation", "both"), default="both")
    parser.add_argument("--kernel", type=Kernel, choices=tuple(Kernel), default=Kernel.BGMV)
    parser.add_argument("--popularity", choices=("functions", "zipf"), default="functions")
    parser.add_argument("--routers", nargs="+", choices=(*ROUTERS, PLACED), default=[*ROUTERS, PLACED])
    parser.add_argument("--duration-s", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    chosen = parser.parse_args(arguments)
    settings = [cluster(rps) for rps in RATES_RPS] if chosen.setting != "simulation" else []
    if chosen.setting != "cluster":
        settings.append(simulation(chosen.popularity))
    rows: list[Row] = []
    next(compare(settings[0], chosen.kernel, [], 1.0, 0))  # compile first
    for setting in settings:
        rows += compare(setting, chosen.kernel, chosen.routers, chosen.duration_s, chosen.seed)
    print(table(rows), end="")
    if chosen.json:
        write_text_atomic(chosen.json, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
