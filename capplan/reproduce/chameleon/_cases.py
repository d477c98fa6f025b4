"""Simulated cases: the highest load within the SLO, and what the rows read of a run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from capplan.reproduce._search import highest
from capplan.reproduce.chameleon._setting import (
    A40,
    Platform,
    at_rate,
    overhead_s,
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
        """Return the case under another load."""
        return replace(self, rps=rps)

    def scenario(self) -> Scenario:
        """Return the input of the simulation."""
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


def bound_s(case: Case) -> float:
    """Return the SLO of a case, from its workload and platform alone."""
    return case.slo_s()


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
