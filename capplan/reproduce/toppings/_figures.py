"""Toppings' figures: servers by loading policy, and routers of a cluster.

Servers: all systems serve the same requests with the same base model and differ in `Cache.loading` alone,
S-LoRA also in its copies, dLoRA in its batches and LoRA operator.

Routers: every instance is the paper's engine with assisted loading and holds every adapter. SLO attainment is
the share of requests whose TPT (end to end / output tokens) is at most `slo_factor` times the mean TPT of the
same requests on the same instances without adapters, routed to the least loaded instance (section 7.4). A
request that does not finish within the horizon violates it. dLoRA is on its own placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Final, Literal

import numpy as np

from capplan.errors import InfeasibleError
from capplan.reproduce._lab import Experiment, Lab
from capplan.reproduce._results import Curve, Findings, mean_curve
from capplan.reproduce.toppings._setting import (
    PAPER,
    System,
    cumulative_workload,
    dlora_profile,
    functions_workload,
    padded_rank,
    pipeline_gain,
    preset_workload,
    profile,
    setting,
    systems,
)
from capplan.serving.routers import Toppings
from capplan.spec import Adapter, Kernel, Lengths, Merging, Profile, Scheduler, Trace, Workload
from capplan.twin import DetailedResult, simulate_detailed
from capplan.twin.cluster import Instance, NamedRouter, simulate_cluster, simulate_without_adapters

Metrics = dict[str, float]

METRICS: Final = ("ttft", "tpt", "e2e")
LARGE: Final = ("s5", "s6")
SYSTEMS: Final = ("cached", "s-lora", "toppings", "dlora")


@dataclass(frozen=True)
class Load:
    """Requests of a server: a setting of Table 2, or functions at a rate."""

    table2: str = ""
    functions: int = 0
    rps: float = 0.0
    traces: str | None = None

    def workload(self, seed: int) -> Workload:
        """Return the workload; the seed draws the functions."""
        given = setting()
        if self.table2:
            return preset_workload(f"{PAPER}-{self.table2}", given.outputs, self.traces)
        return functions_workload(self.functions, self.rps, (given.function_rank,), given.outputs, seed)


@dataclass(frozen=True)
class Case:
    """One simulation of a server."""

    load: Load
    system: str
    seed: int = 0


def served(case: Case) -> Metrics | None:
    """Return the means of a server's latencies and iterations; None: out of memory."""
    system, is_large = systems()[case.system], case.load.table2 in LARGE
    try:
        found = simulated(
            case.load.workload(case.seed), system, setting().duration_s, case.seed, is_large=is_large
        )
    except InfeasibleError:
        return None
    result, requests = found.result, found.requests
    done = np.isfinite(requests.finish_s)
    steps = (requests.output_tokens - 1)[done].sum()
    decoding_s = requests.finish_s - requests.first_token_s - requests.interruption_share * requests.e2e_s
    prefill_s = requests.first_token_s - requests.arrival_s - requests.queue_s
    return {
        "ttft": result.ttft_s_mean,
        "tpt": result.tpt_ms_mean,
        "e2e": result.e2e_s_mean,
        "interrupted share": result.interruption_share_mean,
        "interruptions": result.interruption_count_p50,
        "prefill": float(prefill_s[done].mean()),
        "decode": float(decoding_s[done].sum() / steps),
    }


def simulated(
    load: Workload, system: System, duration_s: float, seed: int, *, is_large: bool = False
) -> DetailedResult:
    """Simulate a server; dLoRA's adapters have the rank of their memory.

    For the large model the paper has S-LoRA's loads and dLoRA's products in its own engine.
    """
    given = setting()
    server = given.large if is_large else given.small
    small_copy_ms = given.slora_copy_ms if system.slora_copies else given.copy_ms
    engine = profile(server=server, copy_ms=given.large_copy_ms if is_large else small_copy_ms)
    if system.dlora:
        engine = dlora_profile(load.adapters[0].rank, server)
        padded = [a.replace(rank=padded_rank(a.rank, server)) for a in load.adapters]
        load = load.model_copy(update={"adapters": tuple(padded)})
    return simulate_detailed(
        load,
        engine,
        a_max=len(load.adapters),
        s_max=given.max_adapters_rank,
        scheduler=Scheduler(policy="fifo", merging=Merging() if system.dlora and not is_large else None),
        cache=system.cache(),
        max_model_len=given.max_model_len,
        max_num_batched_tokens=given.max_model_len,
        duration_s=duration_s,
        seed=seed,
    )


@dataclass(frozen=True)
class Served:
    """Metrics per seed of every system under every load."""

    found: Mapping[tuple[str, str], Sequence[Metrics | None]]

    def values(self, load: str, system: str, metric: str) -> list[float]:
        return [each[metric] for each in self.found[load, system] if each is not None]

    def ratios(self, load: str, system: str, other: str, metric: str) -> list[float]:
        """Return a metric over that of another system, per seed."""
        pairs = zip(self.values(load, system, metric), self.values(load, other, metric), strict=True)
        return [own / others for own, others in pairs]

    def value(self, row: str) -> list[float]:
        """Return the values of a row named load, system or two of them, and metric.

        One system's metric is its increase over CACHED in per cent; two systems' is their ratio. The metric
        `memory` is whether a system does not fit.
        """
        load, system, metric = row.split(".")
        if metric == "memory":
            return [float(each is None) for each in self.found[load, system]]
        if "/" in system:
            own, other = system.split("/")
            return self.ratios(load, own, other, metric)
        return [100.0 * (ratio - 1.0) for ratio in self.ratios(load, system, "cached", metric)]

    def ordered(self, load: str, names: Sequence[str], metrics: Sequence[str] = METRICS) -> list[float]:
        """Return per seed whether systems are in ascending order in all metrics."""
        columns = {metric: [self.values(load, name, metric) for name in names] for metric in metrics}
        return _all(
            [low < high for low, high in zip(first, second, strict=True)]
            for metric in metrics
            for first, second in pairwise(columns[metric])
        )


def _all(conditions: Iterable[Sequence[bool]]) -> list[float]:
    return [float(all(each)) for each in zip(*conditions, strict=True)]


def serve(lab: Lab, loads: Mapping[str, Load], names: Sequence[str]) -> Served:
    """Simulate every system under every load, with every seed."""
    keys = list(product(loads, names))
    found = lab.by_seed(served, [Case(loads[load], name) for load, name in keys])
    return Served(dict(zip(keys, found, strict=True)))


def table2(lab: Lab, *names: str) -> dict[str, Load]:
    """Return settings of Table 2; S4 reads recorded lengths."""
    traces = {"s4": str(lab.traces)}
    return {name: Load(table2=name, traces=traces.get(name)) for name in names}


def rows_with(
    lab: Lab, figure: str, found: Served, statements: Mapping[str, Sequence[float]]
) -> Mapping[str, Sequence[float]]:
    """Return the statements, and the values of all other rows of a figure by their names."""
    ids = [row.id for row in lab.recipe.figure(figure).rows]
    return {each: statements[each] if each in statements else found.value(each) for each in ids}


def fig3(_lab: Lab) -> Findings:
    """Five requests, each of which delays those before it."""
    curves = {}
    for name in SYSTEMS:
        e2e_s = simulated(cumulative_workload(), systems()[name], 10.0, 0).requests.e2e_s
        curves[name] = (e2e_s / e2e_s[-1]).tolist()
    late, ideal = curves["s-lora"], curves["cached"]
    return Findings(
        {
            "falling": all(first > second for first, second in pairwise(late)),
            "above": all(own > other for own, other in zip(late[:-1], ideal[:-1], strict=True)),
        },
        [Curve(name=name, x=tuple(range(1, len(y) + 1)), y=tuple(y)) for name, y in curves.items()],
    )


def fig4(lab: Lab) -> Findings:
    """Interruptions by load."""
    given = setting().motivation
    loads = {f"{rps:g}": Load(functions=given.adapters, rps=rps) for rps in given.rps}
    found = serve(lab, loads, ["s-lora"])
    shares = {
        rps: [100.0 * each for each in found.values(rps, "s-lora", "interrupted share")] for rps in loads
    }
    counts = {f"count.{rps}": found.values(rps, "s-lora", "interruptions") for rps in loads}
    curve = mean_curve("S-LoRA", given.rps, shares.values())
    return Findings({f"share.{rps}": each for rps, each in shares.items()} | counts, [curve])


def fig8(lab: Lab) -> Findings:
    """The strawman at its worst."""
    loads = table2(lab, "s1", "s2", "s3", "s4")
    found = serve(lab, loads, ["cached", "s-lora", "strawman"])

    def worst(metric: str) -> list[float]:
        ratios = [found.ratios(load, "strawman", "cached", metric) for load in loads]
        return [max(each) for each in zip(*ratios, strict=True)]

    fewer = found.ordered("s3", ("strawman", "s-lora"), ("interrupted share",))
    return Findings({"ttft": worst("ttft"), "tpt": worst("tpt"), "fewer": fewer})


def micro(lab: Lab) -> Findings:
    """Pipelined loading; all else is of a machine."""
    gains = {f"pipeline.{rank}": pipeline_gain(rank, setting().copy_ms) for rank in (64, 128)}
    return Findings({row.id: gains.get(row.id) for row in lab.recipe.figure("micro").rows})


def fig11(lab: Lab) -> Findings:
    """Nothing: the kernels' times are of a GPU."""
    return Findings({row.id: None for row in lab.recipe.figure("fig11").rows})


def fig13(lab: Lab) -> Findings:
    """Scaled production."""
    loads = {str(each.adapters): Load(functions=each.adapters, rps=each.rps) for each in setting().production}
    found = serve(lab, loads, SYSTEMS)
    order = ("toppings", "s-lora", "dlora")
    statements = {f"{load}.order": found.ordered(load, order, ("tpt", "e2e")) for load in ("128", "256")}
    statements["128.dlora-ttft"] = found.ordered("128", ("dlora", "s-lora"), ("ttft",))
    return Findings(rows_with(lab, "fig13", found, statements))


def fig14(lab: Lab) -> Findings:
    """S1 to S3 of Table 2."""
    found = serve(lab, table2(lab, "s1", "s2", "s3"), [*SYSTEMS, "few-cores"])
    easier = ("s1", "s2")
    grows = [f"{{}}.s-lora/toppings.{metric}" for metric in METRICS]
    slower = [f"{{}}.{name}.e2e" for name in ("s-lora", "dlora")]

    def below_s3(rows: Sequence[str]) -> list[float]:
        pairs = [
            (found.value(row.format(load)), found.value(row.format("s3"))) for row in rows for load in easier
        ]
        return _all([low < high for low, high in zip(*pair, strict=True)] for pair in pairs)

    most = [found.value(f"{load}.toppings.{metric}") for load in easier for metric in METRICS]
    statements = {
        "s3.order": found.ordered("s3", ("toppings", "dlora", "s-lora")),
        "gain": below_s3(grows),
        "easier": below_s3(slower),
        "rivals": _all([value <= 12.0 for value in values] for values in most),
    }
    return Findings(rows_with(lab, "fig14", found, statements))


def fig15(lab: Lab) -> Findings:
    """Iterations in S3."""
    found = serve(lab, table2(lab, "s3"), SYSTEMS)

    def longest(name: str, iteration: str) -> list[float]:
        others = [each for each in SYSTEMS if each != name]
        orders = [found.ordered("s3", (other, name), (iteration,)) for other in others]
        return [min(each) for each in zip(*orders, strict=True)]

    return Findings({"prefill": longest("s-lora", "prefill"), "decode": longest("dlora", "decode")})


def fig16(lab: Lab) -> Findings:
    """The large model."""
    found = serve(lab, table2(lab, *LARGE), SYSTEMS)
    return Findings(rows_with(lab, "fig16", found, {}))


def fig16_s4(lab: Lab) -> Findings:
    """Long prompts."""
    found = serve(lab, table2(lab, "s4"), SYSTEMS)
    return Findings(
        {f"before-{name}": found.ordered("s4", ("toppings", name)) for name in ("s-lora", "dlora")}
    )


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
        mean_curve(name, setting().cluster.rps, [[each[name][0] for each in own] for own in found.values()])
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


EXPERIMENTS: Final[Mapping[str, Experiment]] = {
    "fig3": fig3,
    "fig4": fig4,
    "fig6": fig6,
    "fig8": fig8,
    "fig11": fig11,
    "micro": micro,
    "fig13": fig13,
    "fig14": fig14,
    "fig15": fig15,
    "fig16": fig16,
    "fig16-s4": fig16_s4,
    "fig18": fig18,
    "fig19": fig19,
}
"""By figure of the recipe."""
