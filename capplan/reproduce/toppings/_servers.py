"""Servers by loading policy.

All systems serve the same requests with the same base model and differ in `Cache.loading` alone, S-LoRA also
in its copies, dLoRA in its batches and LoRA operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import fmean
from typing import Final

import numpy as np

from capplan.errors import InfeasibleError
from capplan.reproduce._lab import Lab
from capplan.reproduce._results import Curve, Findings
from capplan.reproduce.toppings._engine import dlora_profile, padded_rank, pipeline_gain, profile
from capplan.reproduce.toppings._setting import PAPER, System, setting, systems
from capplan.reproduce.toppings._workloads import cumulative_workload, functions_workload, preset_workload
from capplan.spec import Merging, Scheduler, Workload
from capplan.twin import DetailedResult, simulate_detailed

Metrics = dict[str, float]

METRICS: Final = ("ttft", "tpt", "e2e")
LARGE: Final = ("s5", "s6")
RECORDED: Final = "qmsum_lengths.parquet"
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
    seed: int


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
        """Return a metric per seed."""
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
    cases = [Case(loads[load], name, seed) for load, name in keys for seed in lab.seeds]
    results = lab.each(served, cases)
    count = len(lab.seeds)
    return Served({key: results[i * count : (i + 1) * count] for i, key in enumerate(keys)})


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
    curve = Curve(name="S-LoRA", x=given.rps, y=tuple(fmean(each) for each in shares.values()))
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
