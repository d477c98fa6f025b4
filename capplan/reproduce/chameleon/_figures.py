"""Chameleon's figures: the highest load within the SLO, what the rows read of a run, and experiments.

Loads are relative to S-LoRA's knee on the same seed, workload and platform.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from capplan.reproduce._lab import Experiment, Lab, highest
from capplan.reproduce._results import Curve, Findings, mean_curve
from capplan.reproduce.chameleon._setting import (
    A40,
    BASELINE,
    TRACE,
    Platform,
    at_rate,
    load_ms,
    load_share,
    medium_ktokens,
    overhead_s,
    prefill_ms,
    profile,
    setting,
    slo_s,
    system,
    workload,
)
from capplan.twin.instance import (
    NEVER,
    NS_PER_S,
    STATUS_REJECTED,
    PoolMetrics,
    Scenario,
    TwinTrace,
    build_scenario,
    choose_policies,
    pool_metrics,
    run,
)

FULL_SHARE: Final = 0.9
"""Share of the pool in use from which memory counts as full."""

Numbers: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One system under one load."""

    system: str
    seed: int
    rps: float
    mix: str = ""
    """Preset workload, ``chameleon-`` and this, or other lengths of the setting; empty: the setting's."""
    platform: Platform = A40
    horizon_s: float = 0.0
    """0: that of the setting."""
    overdue_s: float = 0.0
    """Wait from which the head of a queue precedes all others; 0: a period of refreshes."""
    traces: str = field(default="", repr=False)
    """Folder of the lengths."""

    def at(self, rps: float) -> Case:
        return replace(self, rps=rps)

    def scenario(self) -> Scenario:
        load = at_rate(workload(self.mix or setting().mix, self.traces), self.rps)
        chosen = system(self.system)
        served = profile(self.platform)
        policies = choose_policies(load, served, scheduler=chosen.scheduler, cache=chosen.cache)
        args, horizon_s = self.platform.args(len(load.adapters)), self.horizon_s or setting().horizon_s
        made = build_scenario(load, served, args, duration_s=horizon_s, seed=self.seed, policies=policies)
        if self.overdue_s:
            made = made._replace(limits=made.limits._replace(refresh_ns=round(self.overdue_s * NS_PER_S)))
        return made

    def slo_s(self) -> float:
        """Return the SLO on the P99 of TTFT."""
        mix = self.mix if self.mix in setting().other_lengths else self.platform.mix
        return slo_s(self.platform, mix, self.traces)


def knee_rps(case: Case) -> float:
    """Return the highest load within the SLO, from the rate of the case."""
    slo = case.slo_s()

    def holds(rps: float) -> bool:
        scenario = case.at(rps).scenario()
        return _percentile(_ttft_s(case, scenario, run(scenario)), 99) <= slo

    return highest(holds, case.rps)


def measures(case: Case) -> Numbers:
    """Return what the rows read of a case."""
    scenario = case.scenario()
    trace = run(scenario)
    requests = scenario.requests
    pool = cast("PoolMetrics", pool_metrics(scenario, trace, overhead_s(case.platform)))
    ttft_s = _ttft_s(case, scenario, trace)
    rank = scenario.costs.rank[requests.adapter][_measured(case, scenario)]
    several = _measured(case, scenario) & (trace.finish_ns != NEVER) & (requests.output_tokens > 1)
    gaps = (trace.finish_ns - trace.first_ns)[several] / (requests.output_tokens[several] - 1)
    return {
        "ttft_p99_s": _percentile(ttft_s, 99),
        "ttft_p50_s": _percentile(ttft_s, 50),
        "ttft_max_s": float(ttft_s.max(initial=0.0)),
        "largest_rank_ttft_p99_s": _percentile(ttft_s[rank == rank.max(initial=0)], 99),
        "tbt_p99_ms": _percentile(gaps / 1e6, 99),
        "finished_rps": float((trace.finish_ns != NEVER).sum() / (scenario.horizon_ns / NS_PER_S)),
        "rejected": int(trace.counts.rejected),
        "hits": 100.0 * pool.hit_rate,
        "load_wait_ms_p99": pool.load_wait_ms.p99,
        "queue_shares": [100.0 * size.queue_share for size in pool.sizes],
        "queue_s": [size.queue_s.mean for size in pool.sizes],
        "ttft_p99_s_of_sizes": [size.ttft_s.p99 for size in pool.sizes],
        "squashed": 100.0 * pool.squashes / requests.arrival_ns.size,
        "evictions": pool.evictions,
        "scaled": 100.0 * pool.quotas_scaled / max(1, pool.refreshes),
        "link": pool.link_utilization,
        "full": 100.0 * _full_share(case, scenario, trace),
    }


def alone(case: Case) -> Numbers:
    """Return percentiles of requests one by one, at the rate of the case."""
    scenario = case.scenario()
    trace = run(scenario)
    times_ns, done = {"ttft": trace.first_ns, "e2e": trace.finish_ns}, trace.finish_ns != NEVER
    return {
        f"{name}_p{percent}_s": _percentile((until - scenario.requests.arrival_ns)[done] / NS_PER_S, percent)
        for name, until in times_ns.items()
        for percent in (50, 99)
    }


def _ttft_s(case: Case, scenario: Scenario, trace: TwinTrace) -> NDArray[np.float64]:
    """Return the TTFT of measured requests, or the wait so far; infinite if rejected."""
    answered = (trace.first_ns >= 0) & (trace.first_ns <= scenario.horizon_ns)
    until_ns = np.where(answered, trace.first_ns, scenario.horizon_ns)
    waited = (until_ns - scenario.requests.arrival_ns) / NS_PER_S + overhead_s(case.platform)
    ttft_s = np.where(trace.status == STATUS_REJECTED, np.inf, waited)
    return ttft_s[_measured(case, scenario)]


def _measured(case: Case, scenario: Scenario) -> NDArray[np.bool_]:
    """Return which requests arrive after the warm-up and an SLO before the end."""
    arrival_ns = scenario.requests.arrival_ns
    late_ns = scenario.horizon_ns - case.slo_s() * NS_PER_S
    return (arrival_ns >= setting().warm_up_s * NS_PER_S) & (arrival_ns < late_ns)


def _percentile(values: NDArray[np.float64], percent: float) -> float:
    return float(np.percentile(values, percent, method="higher")) if values.size else 0.0


def _full_share(case: Case, scenario: Scenario, trace: TwinTrace) -> float:
    """Return the share of time, without the warm-up, in which admitted requests hold most of the pool.

    They hold their prompt, their output and their adapters.
    """
    requests = scenario.requests
    kept = np.flatnonzero(trace.admitted_ns != NEVER)
    end_ns = np.where(trace.finish_ns == NEVER, scenario.horizon_ns, trace.finish_ns)[kept]
    adapter = np.tile(requests.adapter[kept], 2)
    time_ns = np.concatenate([trace.admitted_ns[kept], end_ns])
    sign = np.repeat([1, -1], kept.size)
    held = np.tile(requests.prompt_tokens[kept] + requests.output_tokens[kept], 2) * sign
    order = np.lexsort((sign, time_ns))
    time_ns, adapter, sign, held = time_ns[order], adapter[order], sign[order], held[order]
    for each in np.unique(adapter[adapter > 0]):
        mine = np.flatnonzero(adapter == each)
        users = np.cumsum(sign[mine])
        held[mine] += scenario.costs.pages[each] * (np.diff(np.minimum(users, 1), prepend=0))
    since = time_ns >= setting().warm_up_s * NS_PER_S
    spans_ns = np.diff(time_ns, append=time_ns[-1:])[since]
    full = np.cumsum(held)[since] >= FULL_SHARE * case.platform.pool()
    return float(spans_ns[full].sum() / max(1, spans_ns.sum()))


CHAMELEON: Final = "chameleon"
LOADS: Final = ("low", "medium", "high")
COUNTS: Final = (10, 50, 100, 150, 200)
A100: Final = "a100-80g"
LARGE: Final = "llama-3.1-70b"
"""Its adapter of rank 32 on q, k, v and o has the 250 MiB that the paper gives (256 MB)."""
CURVE: Final = (0.5, 0.7, 0.85, 0.95, 1.05, 1.15, 1.25, 1.35, 1.5)
"""Loads of curves over S-LoRA's knee."""
SYSTEMS: Final[Mapping[str, str]] = {
    BASELINE: "S-LoRA",
    "no-cache": "NoCache",
    "no-sched": "NoSched",
    CHAMELEON: "Chameleon",
}
Values = Sequence[float]


def _folder(lab: Lab) -> str:
    return lab.trace(TRACE).removesuffix(TRACE)


def _cases(lab: Lab, system: str, rps: Sequence[float], **fields: Any) -> list[Case]:
    return [
        Case(system, seed, rate, traces=_folder(lab), **fields)
        for seed, rate in zip(lab.seeds, rps, strict=True)
    ]


def _knees(lab: Lab, systems: Sequence[str], **fields: Any) -> list[list[float]]:
    """Return the highest load within the SLO per system and seed."""
    start = [setting().slora_knee_rps] * len(lab.seeds)
    cases = [case for system in systems for case in _cases(lab, system, start, **fields)]
    return _by_seed(lab, knee_rps, cases)


def _by_seed(lab: Lab, simulate: Callable[[Case], Any], cases: Sequence[Case]) -> list[list[Any]]:
    """Return the results of cases, a list for each run of them with all seeds."""
    size, found = len(lab.seeds), lab.each(simulate, cases)
    return [found[at : at + size] for at in range(0, len(found), size)]


def _slo_s(lab: Lab, mix: str = "") -> float:
    """Return the SLO on the P99 of TTFT, which is the same for all seeds."""
    (slo,) = lab.each(Case.slo_s, [Case(BASELINE, lab.seeds[0], 1.0, mix, traces=_folder(lab))])
    return slo


def _over_knee(load: str | float) -> float:
    """Return a load over S-LoRA's knee; a name stands for the paper's load."""
    return setting().loads_rps[load] / setting().slora_knee_rps if isinstance(load, str) else load


def _numbers(
    lab: Lab, points: Sequence[tuple[str, str | float, str]], platform: Platform
) -> list[list[Numbers]]:
    """Return the numbers per seed of each point, a system, a load and a workload."""
    (knees,) = _knees(lab, [BASELINE], mix=platform.mix, platform=platform)
    cases = [
        case
        for system, load, mix in points
        for case in _cases(
            lab, system, [_over_knee(load) * knee for knee in knees], mix=mix, platform=platform
        )
    ]
    return _by_seed(lab, measures, cases)


def _at(
    lab: Lab, systems: Sequence[str], loads: Sequence[str | float], mix: str = "", platform: Platform = A40
) -> dict[tuple[str, str | float], list[Numbers]]:
    """Return the numbers per seed of each system at each load."""
    keys = [(system, load) for system in systems for load in loads]
    found = _numbers(lab, [(*key, mix or platform.mix) for key in keys], platform)
    return dict(zip(keys, found, strict=True))


def _of_mixes(lab: Lab, systems: Sequence[str], mixes: Sequence[str]) -> dict[tuple[str, str], list[Numbers]]:
    """Return the numbers per seed of each system under each workload, at the load of Figs. 20 and 21."""
    keys = [(system, mix) for system in systems for mix in mixes]
    found = _numbers(lab, [(system, "traces", mix) for system, mix in keys], A40)
    return dict(zip(keys, found, strict=True))


def _all_of(found: Sequence[Numbers], key: str) -> list[float]:
    return [each[key] for each in found]


def _ratios(above: Values, below: Values) -> list[float]:
    return [a / b if b else float("inf") for a, b in zip(above, below, strict=True)]


def _cuts(ours: Sequence[Numbers], theirs: Sequence[Numbers], key: str = "ttft_p99_s") -> list[float]:
    """Return the cut in percent per seed."""
    return [100.0 * (1.0 - a[key] / b[key]) for a, b in zip(ours, theirs, strict=True)]


def _mean(found: Sequence[Numbers], key: str = "ttft_p99_s") -> float:
    return fmean(_all_of(found, key))


def _rises(values: Sequence[Values]) -> bool:
    means = [fmean(each) for each in values]
    return all(low < high for low, high in pairwise(means))


def _curves(lab: Lab, systems: Sequence[str], key: str) -> list[Curve]:
    found = _at(lab, systems, CURVE)
    return [
        mean_curve(SYSTEMS[system], CURVE, [_all_of(found[system, load], key) for load in CURVE])
        for system in systems
    ]


def _setting(lab: Lab) -> Findings:
    here, largest = A40, setting().largest_rank
    ttft_ms = load_ms(here, largest) + prefill_ms(here, 1e3 * medium_ktokens(), largest)
    base_ms = prefill_ms(here, 1e3 * medium_ktokens(), 0)
    slo = _slo_s(lab)
    rates = [setting().loads_rps["full"]] * len(lab.seeds)
    full = lab.each(measures, _cases(lab, "no-sched", rates))
    return Findings(
        {
            "slo": slo,
            "full": _all_of(full, "full"),
            "load_share": 100.0 * load_share(here, largest),
            "adapter_share": 100.0 * (1.0 - base_ms / ttft_ms),
        }
    )


def _ttft_by_rank(_lab: Lab) -> Findings:
    ranks, inputs = setting().ranks, (128, 256, 512, 1024, 2048)
    curves = [
        Curve(name=f"rank {rank}", x=inputs, y=tuple(prefill_ms(A40, tokens, rank) for tokens in inputs))
        for rank in ranks
    ]
    columns = list(zip(*(curve.y for curve in curves), strict=True))
    added = [column[-1] - column[0] for column in columns]
    return Findings(
        {
            "rank": all(low < high for column in columns for low, high in pairwise(column)),
            "input": all(low < high for low, high in pairwise(added)),
        },
        curves,
    )


def _link(lab: Lab) -> Findings:
    rates = [setting().loads_rps["medium"]] * len(lab.seeds)
    counts = (1, 50, 500)
    cases = [case for count in counts for case in _cases(lab, BASELINE, rates, mix=f"pcie-{count}")]
    one, some, many = _by_seed(lab, measures, cases)
    p99 = [_all_of(found, "ttft_p99_s") for found in (one, some, many)]
    return Findings(
        {
            "lora50": _ratios(p99[1], p99[0]),
            "lora500": _ratios(p99[2], p99[0]),
            "order": _rises([_all_of(found, "link") for found in (one, some, many)]),
        }
    )


def _tensor_parallel_loads(_lab: Lab) -> Findings:
    def share(rank: int, tp: int) -> float:
        return 100.0 * load_share(Platform(A100, LARGE, tp), rank)

    ranks, degrees = (8, 32, 128), (2, 4, 8)
    by_rank = all(share(low, tp) < share(high, tp) for tp in degrees for low, high in pairwise(ranks))
    by_tp = all(share(rank, low) < share(rank, high) for rank in ranks for low, high in pairwise(degrees))
    prompt = highest(lambda tokens: 100.0 * load_share(Platform(A100, LARGE, 4), 32, tokens) >= 68.0, 500.0)
    return Findings({"tp4": share(32, 4), "rises": by_rank and by_tp, "prompt": prompt})


def _one_by_one(lab: Lab) -> Findings:
    rates = [0.02] * len(lab.seeds)
    cases = [
        case for mix in ("up", "base") for case in _cases(lab, BASELINE, rates, mix=mix, horizon_s=50_000.0)
    ]
    lora, base = _by_seed(lab, alone, cases)
    added = [{key: ours[key] - plain[key] for key in ours} for ours, plain in zip(lora, base, strict=True)]
    return Findings(
        {
            "tail": _mean(lora, "e2e_p99_s") >= 3.0 * _mean(lora, "e2e_p50_s"),
            "ttft": [each["ttft_p99_s"] > each["ttft_p50_s"] for each in added],
            "adapters": [each["e2e_p99_s"] > each["e2e_p50_s"] for each in added],
        }
    )


def _knee_and_tail(lab: Lab) -> Findings:
    slora, ours, no_sched, no_cache = _knees(lab, [BASELINE, CHAMELEON, "no-sched", "no-cache"])
    found = _at(lab, [BASELINE, CHAMELEON], LOADS)
    cuts = [_cuts(found[CHAMELEON, load], found[BASELINE, load]) for load in LOADS]
    return Findings(
        {
            "slora": slora,
            "chameleon": _ratios(ours, slora),
            "no_sched": _ratios(no_sched, slora),
            "no_cache": _ratios(no_cache, slora),
            **dict(zip(LOADS, cuts, strict=True)),
            "rises": _rises(cuts),
        },
        _curves(lab, list(SYSTEMS), "ttft_p99_s"),
    )


def _token_gaps(lab: Lab) -> Findings:
    found = _at(lab, [BASELINE, CHAMELEON], LOADS)
    gaps = {key: _mean(numbers, "tbt_p99_ms") for key, numbers in found.items()}
    return Findings(
        {
            "slora_high": _all_of(found[BASELINE, "high"], "tbt_p99_ms"),
            "chameleon_high": _all_of(found[CHAMELEON, "high"], "tbt_p99_ms"),
            "lower": all(gaps[CHAMELEON, load] < gaps[BASELINE, load] for load in LOADS),
            "below": max(gaps.values()) < 150.0,
        },
        _curves(lab, [BASELINE, CHAMELEON], "tbt_p99_ms"),
    )


def _medians(lab: Lab) -> Findings:
    found = _at(lab, [BASELINE, CHAMELEON], LOADS)
    cuts = {load: _cuts(found[CHAMELEON, load], found[BASELINE, load], "ttft_p50_s") for load in LOADS}
    return Findings(cuts, _curves(lab, [BASELINE, CHAMELEON], "ttft_p50_s"))


def _hits(lab: Lab) -> Findings:
    found = _at(lab, [BASELINE, CHAMELEON], ["medium"])
    slora, ours = (_all_of(found[system, "medium"], "load_wait_ms_p99") for system in (BASELINE, CHAMELEON))
    return Findings(
        {
            "hits": _all_of(found[CHAMELEON, "medium"], "hits"),
            "slora": slora,
            "chameleon": ours,
            "less": fmean(slora) >= 3.0 * fmean(ours),
        }
    )


def _schedulers(lab: Lab) -> Findings:
    systems = (BASELINE, "sjf", "no-cache", CHAMELEON)
    found = _at(lab, systems, ["high"])
    fifo, sjf, no_cache, ours = (_mean(found[system, "high"]) for system in systems)
    slo = _slo_s(lab)
    return Findings(
        {
            "violated": min(fifo, sjf) > slo,
            "no_cache": no_cache < min(fifo, sjf),
            "chameleon": ours < no_cache,
        }
    )


def _queueing(lab: Lab) -> Findings:
    systems = (BASELINE, "sjf", CHAMELEON)
    found = _at(lab, systems, ["high"])
    slora, sjf, ours = (found[system, "high"] for system in systems)
    small, large = ([each["queue_shares"][at] for each in slora] for at in (0, -1))
    sjf_small, sjf_large = ([each["queue_s"][at] for each in sjf] for at in (0, -1))
    return Findings(
        {
            "fifo_small": small,
            "fifo_large": large,
            "fifo_order": fmean(small) > fmean(large),
            "sjf_small": sjf_small,
            "sjf_large": sjf_large,
            "sjf_ratio": _ratios(sjf_large, sjf_small),
            "chameleon": [max(each["queue_shares"]) for each in ours],
        }
    )


def _evictions(lab: Lab) -> Findings:
    names = ("lru", "fairshare", CHAMELEON)
    found = _at(lab, [BASELINE, *names], ["medium"])
    cuts = {name: _cuts(found[name, "medium"], found[BASELINE, "medium"]) for name in names}
    mix = setting().mix
    high = _of_mixes(lab, ["gdsf", CHAMELEON], [mix])
    key = "largest_rank_ttft_p99_s"
    return Findings(
        {
            **cuts,
            "order": [lru < fair < ours for lru, fair, ours in zip(*cuts.values(), strict=True)],
            "rank128": _cuts(found[CHAMELEON, "medium"], found["fairshare", "medium"], key),
            "gdsf": _mean(high["gdsf", mix]) > _mean(high[CHAMELEON, mix]),
            "evictions": _all_of(found[CHAMELEON, "medium"], "evictions"),
        }
    )


def _prefetch(lab: Lab) -> Findings:
    found = _at(lab, ["histogram", CHAMELEON], ["medium"])
    ahead, ours = found["histogram", "medium"], found[CHAMELEON, "medium"]
    evictions = _ratios(_all_of(ahead, "evictions"), _all_of(ours, "evictions"))
    return Findings({"cut": _cuts(ahead, ours), "hits": _all_of(ahead, "hits"), "evictions": evictions})


def _predictors(lab: Lab) -> Findings:
    names = ("predictor-100", CHAMELEON, "predictor-60", "output-only-100", "output-only-60")
    found = _at(lab, names, ["medium"], mix="up-burst")
    exact, at80, at60, output_exact, output60 = (found[name, "medium"] for name in names)
    growth = {
        "at80": _cuts(at80, exact),
        "at60": _cuts(at60, exact),
        "output60": _cuts(output60, output_exact),
    }
    rows = {name: [-cut for cut in cuts] for name, cuts in growth.items()}
    return Findings({**rows, "sensitive": fmean(rows["output60"]) > fmean(rows["at60"])})


def _adapters(lab: Lab) -> Findings:
    systems = (BASELINE, CHAMELEON)
    slo = _slo_s(lab)
    kinds, mixes = {"uniform": "up", "power": "pp"}, ("uu", "up", "pp")
    by_count = [f"{mix}-{count}" for mix in kinds.values() for count in COUNTS]
    found = _of_mixes(lab, systems, [*mixes, *by_count])
    most: dict[tuple[str, str], int] = {}
    curves = []
    for name, mix in kinds.items():
        for each in systems:
            p99 = tuple(_mean(found[each, f"{mix}-{count}"]) for count in COUNTS)
            within = [count for count, value in zip(COUNTS, p99, strict=True) if value <= slo]
            most[name, each] = max(within, default=0)
            curves.append(Curve(name=f"{SYSTEMS[each]}, {name}", x=COUNTS, y=p99))
    best = [min((_mean(found[system, mix]), mix) for mix in mixes)[1] for system in systems]
    rows: dict[str, float | bool] = {}
    for name in kinds:
        theirs, ours = (most[name, system] for system in systems)
        rows |= {f"{name}_slora": theirs, f"{name}_chameleon": ours, name: ours >= max(1, 5 * theirs)}
    rows["order"] = most["power", CHAMELEON] >= most["uniform", CHAMELEON] > 0
    return Findings({**rows, "best": best == ["pp", "pp"]}, curves)


def _other_lengths(lab: Lab) -> Findings:
    systems, mixes = (BASELINE, CHAMELEON), {"azure": "up", "lmsys": "lmsys"}
    found = _of_mixes(lab, systems, list(mixes.values()))
    rows: dict[str, Values | None] = {"wildchat_ratio": None}
    for name, mix in mixes.items():
        slo = _slo_s(lab, mix)
        slora, ours = (_all_of(found[system, mix], "ttft_p99_s") for system in systems)
        rows |= {
            f"{name}_slora": [p99 / slo for p99 in slora],
            f"{name}_chameleon": [p99 / slo for p99 in ours],
        }
        rows[f"{name}_ratio"] = _ratios(slora, ours)
    del rows["azure_ratio"]
    return Findings(rows)


def _static(lab: Lab) -> Findings:
    loads = ("medium", "high")
    found = _at(lab, ["static", CHAMELEON], loads)
    return Findings({load: _cuts(found[CHAMELEON, load], found["static", load]) for load in loads})


def _knee_ratio(lab: Lab, platform: Platform) -> list[float]:
    slora, ours = _knees(lab, [BASELINE, CHAMELEON], mix=platform.mix, platform=platform)
    return _ratios(ours, slora)


def _models(lab: Lab) -> Findings:
    rows: dict[str, Values] = {}
    for size in ("7b", "13b", "30b"):
        platform = Platform(A100, f"llama-{size}")
        rows[f"knee_{size}"] = _knee_ratio(lab, platform)
        found = _at(lab, [BASELINE, CHAMELEON], LOADS, platform=platform)
        cuts = [_cuts(found[CHAMELEON, load], found[BASELINE, load]) for load in LOADS]
        rows[f"cut_{size}"] = [fmean(of_seed) for of_seed in zip(*cuts, strict=True)]
    return Findings(rows)


def _memory(lab: Lab) -> Findings:
    sizes = (24, 48, 80)
    ratios = [_knee_ratio(lab, Platform(A100, memory_gib=float(gib) if gib < 80 else None)) for gib in sizes]
    rows = {f"{gib}gb": found for gib, found in zip(sizes, ratios, strict=True)}
    return Findings({**rows, "rises": _rises(ratios)}, [mean_curve(SYSTEMS[CHAMELEON], sizes, ratios)])


def _parallel(lab: Lab) -> Findings:
    cuts = []
    for tp in (1, 2, 4):
        found = _at(lab, [BASELINE, CHAMELEON], ["high"], platform=Platform(A100, tp=tp))
        cuts.append(_cuts(found[CHAMELEON, "high"], found[BASELINE, "high"]))
    return Findings({"tp1": cuts[0], "tp2": cuts[1], "tp4": cuts[2], "order": _rises(cuts)})


def _sentences(lab: Lab) -> Findings:
    found = _at(lab, [CHAMELEON, "predictor-0"], ["medium", "high"])
    (knees,) = _knees(lab, [CHAMELEON])
    hour = lab.each(measures, _cases(lab, CHAMELEON, [0.95 * knee for knee in knees], horizon_s=3600.0))
    return Findings(
        {
            "squashed": _all_of(found[CHAMELEON, "high"], "squashed"),
            "starved": _all_of(hour, "ttft_max_s"),
            "lost": _all_of(found["predictor-0", "medium"], "rejected"),
        }
    )


def _why(lab: Lab) -> Findings:
    names = ("no-sched", "charge-each", "charge-none", "one-queue", "four-queues", "mean-size", "oracle")
    ours, fifo, *others = _knees(lab, [CHAMELEON, *names])
    ratios = [_ratios(fifo, ours), *(_ratios(other, ours) for other in others)]
    blocking, fifo_blocking, ten, slora_ten = _knees(
        lab, ["blocking", "no-sched-blocking", "ten-steps", "slora-ten-steps"]
    )
    cases = [case for name in (CHAMELEON, "mean-size") for case in _cases(lab, name, ours)]
    at_knee, with_mean = _by_seed(lab, measures, cases)
    rates = [_over_knee("medium") * knee for knee in slora_ten]
    systems = ("slora-ten-steps", "ten-steps")
    cases = [case for name in systems for case in _cases(lab, name, rates)]
    slora_after, ours_after = _by_seed(lab, measures, cases)
    waits = (_all_of(found, "load_wait_ms_p99") for found in (slora_after, ours_after))
    by_model: dict[str, Values] = {}
    for size, names_of in (("30b", ("no-sched", "one-queue")), ("13b", ("no-sched",))):
        platform = Platform(A100, f"llama-{size}")
        whole, *found = _knees(lab, [CHAMELEON, *names_of], mix=platform.mix, platform=platform)
        by_model |= {
            f"{name.replace('-', '_')}_{size}": _ratios(knees, whole)
            for name, knees in zip(names_of, found, strict=True)
        }
    overload = [1.1 * knee for knee in fifo]
    runs = {
        "fifo": ("no-sched", 0.0),
        "queues": (CHAMELEON, 0.0),
        "unguarded": (CHAMELEON, 1e6),
        "oracle": ("oracle", 0.0),
    }
    hour = {
        row: lab.each(measures, _cases(lab, name, overload, horizon_s=3600.0, overdue_s=overdue_s))
        for row, (name, overdue_s) in runs.items()
    }
    return Findings(
        {
            **{name.replace("-", "_"): found for name, found in zip(names, ratios, strict=True)},
            "ten_cut": _cuts(ours_after, slora_after),
            "ten_gaps": _all_of(slora_after, "tbt_p99_ms"),
            "ten_waits": _ratios(*waits),
            "ten_hits": _all_of(ours_after, "hits"),
            **by_model,
            "scaled": _all_of(at_knee, "scaled"),
            "scaled_mean": _all_of(with_mean, "scaled"),
            "blocking": _ratios(blocking, fifo_blocking),
            "ten_steps": _ratios(ten, slora_ten),
            **{
                f"small_{row}": [each["ttft_p99_s_of_sizes"][0] for each in found]
                for row, found in hour.items()
            },
            **{
                f"wait_{row}": [each["queue_s"][0] for each in hour[row]]
                for row in ("fifo", "queues", "oracle")
            },
        }
    )


FIGURES: Final[Mapping[str, Experiment]] = {
    "setting": _setting,
    "fig3": _ttft_by_rank,
    "fig4": _link,
    "fig5": _tensor_parallel_loads,
    "fig7": _one_by_one,
    "fig11": _knee_and_tail,
    "fig12": _token_gaps,
    "fig13": _medians,
    "fig14": _hits,
    "fig15": _schedulers,
    "fig16": _queueing,
    "fig17": _evictions,
    "fig18": _prefetch,
    "fig19": _predictors,
    "fig20": _adapters,
    "fig21": _other_lengths,
    "fig22": _static,
    "fig23": _models,
    "fig24": _memory,
    "fig25": _parallel,
    "text": _sentences,
    "why": _why,
}
