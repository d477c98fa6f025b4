"""Routers: every instance is the paper's engine with assisted loading and holds every adapter.

SLO attainment is the share of requests whose TPT (end to end / output tokens) is at most `slo_factor` times
the mean TPT of the same requests on the same instances without adapters, routed to the least loaded instance
(section 7.4). A request that does not finish within the horizon violates it. dLoRA is on its own placement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, Literal

import numpy as np

from capplan.reproduce._lab import Lab
from capplan.reproduce._results import Curve, Findings
from capplan.reproduce.toppings._engine import profile
from capplan.reproduce.toppings._setting import PAPER, setting, systems
from capplan.reproduce.toppings._workloads import functions_workload, preset_workload
from capplan.serving.routers import Toppings
from capplan.spec import Adapter, Kernel, Lengths, Profile, Trace, Workload
from capplan.twin.cluster import Instance, NamedRouter, simulate_cluster, simulate_without_adapters

ROUTERS: Final = ("toppings", "dlora", "random", "first-fit")
SIMULATION: Final = 2019
"""Seed of the functions of section 7.5, which are all functions of the trace."""


SEEDS: Final = {Kernel.BGMV: 3, Kernel.MBGMV: 1}
"""Most seeds of section 7.5, whose simulations take the longest."""


def engine(used: Profile, adapters: Mapping[str, float] | None = None) -> Instance:
    """Return an instance of the paper's engine; adapters None: all."""
    longest = setting().max_model_len
    return Instance(
        used,
        a_max=1,
        s_max=max(setting().simulation.ranks),
        max_model_len=longest,
        max_num_batched_tokens=longest,
        scheduler="fifo",
        cache=systems()["toppings"].cache(),
        adapters=adapters,
    )


def simulation(
    adapters: int | None = None,
    rps: float | None = None,
    instances: int | None = None,
    outputs: float | None = None,
) -> tuple[Workload, list[Instance]]:
    """Return section 7.5, requests and instances, or the same with other numbers."""
    given = setting().simulation
    load = functions_workload(
        adapters or given.adapters,
        rps or given.rps,
        given.ranks,
        outputs or setting().outputs,
        SIMULATION,
    )
    return load, [engine(profile())] * (instances or given.instances)


def placed(load: Workload, instances: int, used: Profile) -> list[Instance]:
    """Return the instances with the adapters spread as dLoRA spreads them.

    Replicas in proportion to the rates, as many in all as adapters and engines less one; the busiest adapter
    first, each replica on the engine with the lowest rate so far.
    """
    held: list[dict[str, float]] = [{} for _ in range(instances)]
    rate_rps = np.zeros(instances)
    total = sum(adapter.rate_rps for adapter in load.adapters)
    for adapter in sorted(load.adapters, key=lambda each: -each.rate_rps):
        spare = int(adapter.rate_rps / total * (instances - 1))
        for i in np.argsort(rate_rps, kind="stable")[: 1 + spare].tolist():
            held[i][adapter.name] = 1.0
            rate_rps[i] += adapter.rate_rps / (1 + spare)
    return [engine(used, own) for own in held]


@dataclass(frozen=True)
class RouterCase:
    """All routers under one load; `cluster_rps` 0: section 7.5."""

    cluster_rps: float
    kernel: str
    seed: int

    def workload(self) -> Workload:
        """Return the requests' distribution."""
        given = setting()
        if self.cluster_rps:
            return preset_workload(f"{PAPER}-cluster-{self.cluster_rps:g}", given.cluster_outputs)
        return simulation(outputs=given.cluster_outputs)[0]


def routed(case: RouterCase) -> dict[str, tuple[float, float]]:
    """Return SLO attainment in per cent and mean TPT in ms by router."""
    given, kernel = setting(), Kernel(case.kernel)
    load, used = case.workload(), profile(kernel)
    shape = given.cluster if case.cluster_rps else given.simulation
    engines = [engine(used)] * shape.instances
    base = simulate_without_adapters(load, engines, duration_s=shape.duration_s, seed=case.seed)
    bound_ms = given.slo_factor * base.tpt_ms_mean
    found = {}
    for name in ROUTERS:
        router: NamedRouter = Toppings(_form(kernel), slo_ms=bound_ms) if name == "toppings" else name
        chosen = placed(load, shape.instances, used) if name == "dlora" else engines
        result = simulate_cluster(load, chosen, router=router, duration_s=shape.duration_s, seed=case.seed)
        found[name] = (100.0 * result.attainment(bound_ms), result.tpt_ms_mean)
    return found


def _form(kernel: Kernel) -> Literal["bgmv", "mbgmv"]:
    return "mbgmv" if kernel is Kernel.MBGMV else "bgmv"


Routed = Sequence[Mapping[str, tuple[float, float]]]
"""What `routed` found, per seed."""


def _route(lab: Lab, cluster_rps: float, kernel: Kernel = Kernel.BGMV) -> Routed:
    seeds = lab.seeds if cluster_rps else lab.seeds[: SEEDS[kernel]]
    return lab.each(routed, [RouterCase(cluster_rps, kernel.value, seed) for seed in seeds])


def _first(found: Routed) -> list[float]:
    others = [name for name in ROUTERS if name != "toppings"]
    return [float(all(each["toppings"][0] >= each[name][0] for name in others)) for each in found]


def fig6(_lab: Lab) -> Findings:
    """One request, routed by the running twin."""
    return Findings({kernel.value: _chosen(kernel) == number for kernel, number in _FIG6.items()})


_FIG6: Final = {Kernel.BGMV: 1, Kernel.MBGMV: 0}


def _chosen(kernel: Kernel) -> int:
    """Return the instance of a request that comes when all others run."""
    given = setting()
    held = [f"r{point.rank}" for point in given.decode]
    names = [name for name, point in zip(held, given.decode, strict=True) for _ in range(point.requests)]
    ranks = dict(zip(held, (point.rank for point in given.decode), strict=True)) | {
        "new": given.routing.new_rank
    }
    arrivals_s = [*([0.0] * len(names)), 5.0]
    names.append("new")
    load = Workload(
        base_model=given.small.arch,
        adapters=tuple(Adapter(name=name, rank=rank, rate_rps=0.0) for name, rank in ranks.items()),
        prompt_tokens=Lengths(mean=16),
        output_tokens=Lengths(mean=400),
        trace=Trace.from_arrays(np.array(arrivals_s), names, [16] * len(names), [400] * len(names), 10.0),
    )
    instances = [engine(profile(kernel), {name: 1.0, "new": 1.0}) for name in held]
    router = Toppings(_form(kernel), slo_ms=given.routing.slo_ms)
    return int(simulate_cluster(load, instances, router=router, duration_s=10.0).requests.instance[-1])


def fig18(lab: Lab) -> Findings:
    """Eight instances."""
    found = {f"{rps:g}": _route(lab, rps) for rps in setting().cluster.rps}
    values: dict[str, list[float]] = {f"first.{rps}": _first(each) for rps, each in found.items()}
    for rps in ("40", "50"):
        values[f"gain.{rps}"] = [each["toppings"][0] - each["dlora"][0] for each in found[rps]]
    falls = [
        [low[name][0] > high[name][0] for name in ("dlora", "random")]
        for low, high in zip(found["30"], found["50"], strict=True)
    ]
    values["plummet"] = [float(all(each)) for each in falls]
    values["first-fit"] = [
        float(each["first-fit"][0] == min(value for value, _ in each.values())) for each in found["30"]
    ]
    curves = [
        Curve(
            name=name,
            x=setting().cluster.rps,
            y=tuple(fmean(each[name][0] for each in seeds) for seeds in found.values()),
        )
        for name in ROUTERS
    ]
    return Findings(values, curves)


def fig19(lab: Lab) -> Findings:
    """Sixty instances."""
    bgmv, mbgmv = (_route(lab, 0.0, kernel) for kernel in (Kernel.BGMV, Kernel.MBGMV))
    values: dict[str, list[float]] = {
        name: [100.0 * (1.0 - each["toppings"][1] / each[name][1]) for each in bgmv] for name in ROUTERS[1:]
    }
    shortest = [each["toppings"][1] == min(tpt_ms for _, tpt_ms in each.values()) for each in mbgmv]
    values |= {
        "attainment": [each["toppings"][0] for each in bgmv],
        "first": _first(bgmv),
        "mbgmv": [float(first and short) for first, short in zip(_first(mbgmv), shortest, strict=True)],
    }
    return Findings(values)
