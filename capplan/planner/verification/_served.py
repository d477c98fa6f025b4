"""Simulation of a plan as a cluster, also without some instances, and the highest load that it sustains.

Re-balancer of the running instances of a plan: adapters and operating points.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Final, Literal

import numpy as np
from scipy.stats import t as student_t

from capplan.datasets import load_profile
from capplan.errors import InfeasibleError, InputError
from capplan.planner.problem._evaluate import evaluations_of, violated_bounds
from capplan.planner.problem._execution import parallel_map
from capplan.planner.problem._operating_points import OperatingPoints, adapter_demand, rebalancing_of
from capplan.planner.problem._problem import Problem
from capplan.planner.problem._setup import make_problem, rebuild
from capplan.serving import adapter_bytes
from capplan.serving.rebalancing import Rebalancer, Replan
from capplan.spec import (
    BY_SHARES,
    PLAN_ROUTER,
    STATE_PERIOD_S,
    EngineArgs,
    Group,
    LatencyStats,
    Plan,
    Profile,
    RebalanceSettings,
    RouterOptions,
    Slo,
    Workload,
    latency_stats,
)
from capplan.twin.cluster import (
    ClusterResult,
    Instance,
    Rebalancing,
    served_router,
    simulate_cluster,
    simulate_without_adapters,
    workload_of,
)
from capplan.twin.instance import FINISHED, Extrapolation, bound_value, extrapolations, merged, values_of
from capplan.workload import draw_requests


def equal_engine_args(groups: Sequence[Group]) -> EngineArgs:
    """Return engine settings with which every instance of a plan can serve every adapter.

    They are those of the group with the largest slots; they fit the memory of the other instances, which are
    equal. Groups of a plan with re-balancing have them already.

    Raises
    ------
    InputError
        If the instances are not equal.
    """
    kinds = {(group.profile, group.tp, group.pool) for group in groups}
    if len(kinds) > 1:
        names = ", ".join(sorted({group.profile for group in groups}))
        raise InputError("must be of one profile and tp to be re-balanced", names, "groups")
    settings = (group.engine_args for group in groups)
    return max(settings, key=lambda args: (args.max_lora_rank, args.max_loras))


def served_rebalancer(
    plan: Plan,
    groups: Sequence[Group],
    settings: RebalanceSettings,
    size_bytes: Mapping[str, int],
    profiles: Mapping[str, Profile],
    workload: Workload | None = None,
    replan: Replan | None = None,
) -> Rebalancer:
    """Return the re-balancer of the instances of groups of a plan.

    Operating points are measured by the twin on the plan's profile, as by the solver `loraserve`.

    Parameters
    ----------
    size_bytes
        Size of adapters; that of others follows from their rank.
    profiles
        Profiles of the plan that are on this machine, by name.
    workload
        Workload of the plan, with its profile if it is not shipped; None: the plan's adapters with constant
        lengths, the means in its provenance.

    Raises
    ------
    InputError
        If the instances are not equal, the profile is not on this machine, or the workload lacks an adapter
        or the base traffic of the plan.
    InfeasibleError
        If an instance sustains no load of a rank.
    """
    equal_engine_args(groups)
    problem = _problem(plan, groups, profiles, workload)
    names = {adapter.name for group in groups for adapter in group.adapters}
    if workload is not None:
        _require_traffic(workload, names, any(group.base is not None for group in groups))
    traffic = [each for each in problem.traffic if each.rank == 0 or each.name in names]
    demands = [
        adapter_demand(problem, each, size_bytes.get(each.name) if each.rank else None) for each in traffic
    ]
    points = OperatingPoints(problem)(each.rank for each in traffic)
    return Rebalancer(demands, sum(group.replicas for group in groups), points, settings, replan)


def _require_traffic(workload: Workload, names: set[str], with_base: bool) -> None:
    if missing := names - {adapter.name for adapter in workload.adapters}:
        rule = f"must have all {len(names)} adapters of the plan"
        raise InputError(rule, f"no {min(missing)}", "workload: adapters")
    if with_base and workload.base is None:
        raise InputError("is required: the plan serves traffic of the base model", location="workload: base")


def _problem(
    plan: Plan, groups: Sequence[Group], profiles: Mapping[str, Profile], workload: Workload | None
) -> Problem:
    """Return the problem of equal instances, with the engine settings of the plan."""
    args = equal_engine_args(groups)
    instances = sum(group.replicas for group in groups)
    profile = _profile(groups[0].profile, profiles, workload)
    workload = workload or workload_of(plan, groups)
    fixed = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "gpu_memory_utilization")
    engine = workload.engine.model_copy(update={name: getattr(args, name) for name in fixed})
    alone = {"engine": engine, "pools": (), "profile": None, "slo": plan.slo}
    return make_problem(workload.model_copy(update=alone), instances, profile)


def _profile(name: str, profiles: Mapping[str, Profile], workload: Workload | None) -> Profile:
    """Return the profile of the plan; one that is not shipped is that of the workload."""
    if workload is not None and workload.profile is not None:
        own = load_profile(workload.profile)
        if own.name == name:
            return own
    return profiles[name] if name in profiles else load_profile(name)  # which says what is missing


UNLOADED: Final = 0.01
"""Load of the reference run `unloaded`, as a share of the workload's."""

ReferenceRun = Literal["unloaded", "no-lora"]
REFERENCE_RUNS: Final[tuple[ReferenceRun, ...]] = ("unloaded", "no-lora")


@dataclass(frozen=True)
class SimulatedFleet:
    """Instances that serve a workload behind a router.

    Attributes
    ----------
    names
        Of the instances, as in `capplan serve PLAN`.
    state_period_s
        Time between reports of the instances to the router.
    gpus_per_link
        Consecutive instances that share a link from host memory.
    """

    workload: Workload
    instances: tuple[Instance, ...]
    names: tuple[str, ...]
    router: str = PLAN_ROUTER
    router_options: RouterOptions | None = None
    state_period_s: float = STATE_PERIOD_S
    rebalance: Rebalancing | None = None
    gpus_per_link: int = 1

    def simulate(self, seed: int, duration_s: float, load: float = 1.0) -> ClusterResult:
        """Simulate the fleet with every rate times `load`.

        Raises
        ------
        InfeasibleError
            If an instance does not start.
        """
        return simulate_cluster(
            self.workload.at_load(load),
            self.instances,
            router=served_router(self.router, self.router_options),
            duration_s=duration_s,
            seed=seed,
            state_period_s=self.state_period_s,
            rebalance=self.rebalance,
            gpus_per_link=self.gpus_per_link,
        )

    def replay(self, seed: int, duration_s: float, load: float = 1.0) -> ClusterResult:
        """Simulate the fleet as `simulate` does, but a trace to its end, which comes `load` times as early.

        Raises
        ------
        InfeasibleError
            If an instance does not start.
        """
        return self.simulate(seed, self.workload.at_load(load).horizon_s(duration_s), load)

    def extrapolations(self, result: ClusterResult) -> tuple[Extrapolation, ...]:
        """Return what a simulation used beyond the fitted ranges of the profiles; groups are instances."""
        found = []
        for name, own, traffic, simulated in zip(
            self.names, self.instances, self._traffic(), result.instances, strict=True
        ):
            values = values_of(traffic, own.engine_args(traffic), own.profile.tp, [simulated])
            found += [(name, each) for each in extrapolations(own.profile, values)]
        return merged(found)

    def _traffic(self) -> list[Workload]:
        """Return the part of each instance by the shares; all adapters in equal parts if they may move."""
        everything = dict.fromkeys(self.workload.traffic, 1.0)
        moves = self.rebalance is not None
        held = [everything if moves or own.adapters is None else own.adapters for own in self.instances]
        total: Counter[str] = Counter()
        for shares in held:
            total.update(shares)
        parts = [{name: s / total[name] for name, s in shares.items() if s > 0.0} for shares in held]
        return [self.workload.subset(part, part) for part in parts]

    def reference(self, run: ReferenceRun, seed: int, duration_s: float) -> ClusterResult:
        """Simulate a reference run of latency bounds.

        Parameters
        ----------
        run
            ``unloaded``: at 1 % of the load; ``no-lora``: the same requests without adapters, least loaded.
        duration_s
            Simulated time at the workload's load; a trace is replayed as a whole.
        """
        if run == "unloaded":
            return self.replay(seed, duration_s / UNLOADED, UNLOADED)
        length_s = self.workload.horizon_s(duration_s)
        return simulate_without_adapters(self.workload, self.instances, duration_s=length_s, seed=seed)


def distinct_seeds(workload: Workload, seeds: Sequence[int]) -> Sequence[int]:
    """Return the seeds to simulate: the first one only for a trace, whose requests are fixed."""
    return seeds if workload.trace is None else seeds[:1]


def fleet_of_plan(
    plan: Plan,
    workload: Workload,
    profile: Profile | None,
    source: str,
    router: str | None = None,
    rebalance: RebalanceSettings | None = None,
) -> SimulatedFleet:
    """Return the instances of a plan, with its router, re-balancing and GPUs per link.

    Parameters
    ----------
    plan, workload, profile, source
        As for `capplan.planner.problem._setup.rebuild`.
    router, rebalance
        Router and re-balancing instead of the plan's. Instances to re-balance have the engine settings of the
        group with the largest slots, as `capplan serve PLAN` starts them.

    Raises
    ------
    InputError
        If the workload or the profile is not the plan's, or instances to re-balance are not equal.
    """
    rebuilt = rebuild(plan, workload, profile, source)
    settings = rebalance or plan.rebalance
    args = None if settings is None else equal_engine_args(plan.groups)
    instances, names = [], []
    for each in rebuilt.groups:
        group = each.group
        own = Instance.of(
            rebuilt.problem.pools[each.assignment.pool].profile,
            args or group.engine_args,
            rebuilt.problem.stored(each.assignment),
            group.scheduling,
            group.queues,
        )
        instances += [own] * group.replicas
        names += [f"{group.id}-{replica}" for replica in range(1, group.replicas + 1)]
    chosen = router or plan.router or PLAN_ROUTER
    moves = None if settings is None else rebalancing_of(rebuilt.problem, settings)
    return SimulatedFleet(
        rebuilt.problem.workload,
        tuple(instances),
        tuple(names),
        chosen,
        plan.router_options,
        rebalance=moves,
        gpus_per_link=rebuilt.problem.gpus_per_link,
    )


@dataclass(frozen=True)
class RelativeBound:
    """Latency bound as a multiple of that of a reference run."""

    name: str
    """Such as ``ttft_p99_s``."""
    factor: float
    run: ReferenceRun


def with_bounds(
    fleet: SimulatedFleet, bounds: Sequence[RelativeBound], seed: int, duration_s: float
) -> dict[str, float]:
    """Return the values of bounds that are multiples of reference runs."""
    runs = {run: fleet.reference(run, seed, duration_s) for run in {each.run for each in bounds}}
    return {each.name: each.factor * bound_value(runs[each.run], each.name) for each in bounds}


@dataclass(frozen=True)
class LoadCapacity:
    """Highest load within the bounds, as a multiple of the workload's.

    Attributes
    ----------
    loads
        Per seed.
    mean
        Mean of the loads.
    low, high
        Ends of its confidence interval; None for one seed, or above the limit.
    binds
        Bounds that break just above the mean of the loads; empty above the limit.
    above_limit
        Whether the bounds hold at the largest load, 1024, on a seed. The mean is then a lower bound.
    """

    loads: tuple[float, ...]
    mean: float
    low: float | None
    high: float | None
    confidence: float
    binds: tuple[str, ...]
    above_limit: bool = False


PRECISION: Final = 0.01
_SMALLEST: Final = 1.0 / 1024.0
_LARGEST: Final = 1024.0


def highest_load(holds: Callable[[float], bool], precision: float = PRECISION) -> float:
    """Return a load that holds and is within `precision` of one that does not; 0 if none holds.

    The search ends at 1024. The load is bracketed from 1 on by doubling and halving, and bisected in its
    logarithm.
    """
    low, high = 0.5, 1.0
    while holds(high):
        low, high = high, 2.0 * high
        if high > _LARGEST:
            return low
    while high <= 1.0 and not holds(low):
        low, high = low / 2.0, low
        if low < _SMALLEST:
            return 0.0
    while high / low > 1.0 + precision:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def capacity(
    fleet: SimulatedFleet,
    slo: Slo,
    seeds: Sequence[int],
    duration_s: float,
    *,
    precision: float = PRECISION,
    confidence: float = 0.9,
    answered: Callable[[int], None] | None = None,
) -> LoadCapacity:
    """Return the highest load of a fleet within its bounds.

    A seed has the same random numbers at all loads. Its highest load is bracketed and bisected; the interval
    of the mean is Student's over the seeds. A trace is replayed as a whole at each load, on the first seed.

    Parameters
    ----------
    duration_s
        Simulated time, unless the workload is a trace.
    precision
        Relative error of the bisection.
    confidence
        Of the interval of the mean.
    answered
        Called with the number of seeds done.

    Raises
    ------
    InfeasibleError
        If an instance does not start.
    InputError
        Without seeds, or for a precision or confidence out of range.
    """
    if not seeds:
        raise InputError("must be at least one seed", [], "seeds")
    for name, value in (("precision", precision), ("confidence", confidence)):
        if not 0 < value < 1:
            raise InputError("must be above 0 and below 1", value, name)

    seeds = distinct_seeds(fleet.workload, seeds)

    def of_seed(seed: int) -> float:
        def holds(load: float) -> bool:
            return not violated_bounds(slo, fleet.replay(seed, duration_s, load))

        return highest_load(holds, precision)

    loads = parallel_map(of_seed, seeds, answered)
    mean = fmean(loads)
    if max(loads) >= _LARGEST:
        return LoadCapacity(tuple(loads), mean, None, None, confidence, (), above_limit=True)
    above = (mean or _SMALLEST) * (1.0 + 2.0 * precision)
    binds = violated_bounds(slo, fleet.replay(seeds[0], duration_s, above))
    low, high = _interval(loads, mean, confidence)
    return LoadCapacity(tuple(loads), mean, low, high, confidence, binds)


def _interval(
    loads: Sequence[float], mean: float, confidence: float
) -> tuple[float, float] | tuple[None, None]:
    """Return Student's interval of a mean of loads, which are not negative; None for one load."""
    if len(loads) < 2:
        return None, None
    quantile = float(student_t.ppf(0.5 + confidence / 2.0, len(loads) - 1))
    half = quantile * stdev(loads) / len(loads) ** 0.5
    return max(0.0, mean - half), mean + half


def fewest_instances(
    make: Callable[[int], SimulatedFleet], slo: Slo, seeds: Sequence[int], duration_s: float, most: int
) -> int:
    """Return the fewest instances that serve the workload within the bounds on every seed.

    The number is doubled until the bounds hold, and bisected. A trace is replayed as a whole, on the first
    seed.

    Raises
    ------
    InfeasibleError
        With reason ``slo`` if `most` do not.
    """

    def holds(count: int) -> bool:
        fleet = make(count)
        own = distinct_seeds(fleet.workload, seeds)
        results = parallel_map(lambda seed: fleet.replay(seed, duration_s), own)
        return not any(violated_bounds(slo, result) for result in results)

    low, high = 0, 1
    while not holds(high):
        if high == most:
            raise InfeasibleError(f"{most} instances do not serve the workload within its bounds", "slo")
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class StoredAdapters:
    """Adapters that an instance stores."""

    count: int
    bytes: int


def stored_adapters(fleet: SimulatedFleet) -> list[StoredAdapters]:
    """Return the adapters that each instance stores."""
    found = []
    for instance in fleet.instances:
        held = [
            adapter_bytes(instance.profile.model, adapter.rank, adapter.target_modules)
            for adapter in fleet.workload.adapters
            if instance.adapters is None or adapter.name in instance.adapters
        ]
        found.append(StoredAdapters(len(held), sum(held)))
    return found


@dataclass(frozen=True)
class RankMetrics:
    """Requests of the adapters of one rank; 0: of the base model. Latencies are of those that have them."""

    rank: int
    submitted: int
    finished: int
    waiting: int
    """Without a token at the end."""
    queue_s: LatencyStats
    """Until the first admission to a batch, without the wait for the load of the adapter."""
    ttft_s: LatencyStats
    tpt_ms: LatencyStats


def by_rank(fleet: SimulatedFleet, result: ClusterResult) -> list[RankMetrics]:
    """Return the metrics of the requests by the rank of their adapters, ascending."""
    requests = result.requests
    rank_of = np.array([0, *(adapter.rank for adapter in fleet.workload.adapters)])
    ranks = rank_of[requests.adapter]
    found = []
    for rank in np.unique(ranks).tolist():
        own = ranks == rank
        ttft_s, tpt_ms = requests.ttft_s[own], requests.tpt_ms[own]
        found.append(
            RankMetrics(
                rank=rank,
                submitted=int(own.sum()),
                finished=int(np.count_nonzero(requests.status[own] == FINISHED)),
                waiting=int(np.count_nonzero(np.isnan(ttft_s))),
                queue_s=latency_stats(requests.queue_s[own]),
                ttft_s=latency_stats(ttft_s),
                tpt_ms=latency_stats(tpt_ms),
            )
        )
    return found


@dataclass(frozen=True)
class DegradedFleet:
    """The instances that are left, with the traffic that has a server.

    Attributes
    ----------
    fleet
        The instances, behind the same router.
    failed
        Names of those that are gone.
    unserved
        Adapters that no instance holds any more.
    unserved_share
        Their share of the request rate.
    whole
        Traffic of all adapters.
    """

    fleet: SimulatedFleet
    failed: tuple[str, ...]
    unserved: tuple[str, ...]
    unserved_share: float
    whole: Workload

    def simulate(self, seed: int, duration_s: float) -> DegradedResult:
        """Simulate the instances that are left, and count the requests without a server.

        Raises
        ------
        InfeasibleError
            If an instance does not start.
        """
        result = self.fleet.simulate(seed, duration_s)
        names = [self.whole.base_model, *(adapter.name for adapter in self.whole.adapters)]
        requests = draw_requests(self.whole, duration_s, seed, self._longest)
        counts = np.bincount(requests.adapter, minlength=len(names)).tolist()
        lost = {name: n for name, n in zip(names, counts, strict=True) if name in self.unserved}
        is_lost = np.isin(requests.adapter, [names.index(name) for name in self.unserved])
        tokens = int(requests.prompt_tokens[is_lost].sum() + requests.output_tokens[is_lost].sum())
        served = _served_fraction(result, tokens)
        return DegradedResult(
            result=result,
            unserved=dict(sorted(lost.items(), key=lambda item: -item[1])),
            served_fraction=served,
            broken=_broken(self.fleet, result, served, duration_s),
        )

    @property
    def _longest(self) -> int:
        """Longest request of the instances, in tokens."""
        lengths = (
            each.max_model_len or each.profile.model.default_max_model_len for each in self.fleet.instances
        )
        return max(lengths)


@dataclass(frozen=True)
class DegradedResult:
    """A simulation of what is left of a fleet.

    Attributes
    ----------
    result
        Of the requests that have a server.
    unserved
        Requests of each adapter without a server, most first.
    served_fraction
        Tokens of completed requests over those submitted, with the unserved ones.
    broken
        Bounds that an instance breaks by the criteria of the verification, and that all requests break, as
        text.
    """

    result: ClusterResult
    unserved: Mapping[str, int]
    served_fraction: float
    broken: tuple[str, ...]

    @property
    def submitted(self) -> int:
        """Requests, with the unserved ones."""
        return self.result.submitted + sum(self.unserved.values())


def _served_fraction(result: ClusterResult, unserved_tokens: int) -> float:
    """Return the served fraction with unserved tokens among those submitted."""
    completed = result.throughput_tok_s * result.duration_s
    if not unserved_tokens or not completed:
        return 0.0 if unserved_tokens else result.served_fraction
    return completed / (completed / result.served_fraction + unserved_tokens)


def _broken(
    fleet: SimulatedFleet, result: ClusterResult, served_fraction: float, duration_s: float
) -> tuple[str, ...]:
    evaluations = evaluations_of(fleet.workload, result, duration_s)
    broken = [
        f"{name}: {violation}"
        for name, evaluation in zip(fleet.names, evaluations, strict=True)
        for violation in evaluation.violations
    ]
    least = fleet.workload.slo.served_fraction
    if served_fraction < least:
        broken.append(f"all requests: served_fraction {served_fraction:.3f} < {least:g}")
    return tuple(broken)


def without_instances(fleet: SimulatedFleet, failed: Sequence[str]) -> DegradedFleet:
    """Return a fleet without some instances, whose adapters the others serve as far as they hold them.

    Shares of the others keep their ratios; where all of them are 0, they get equal ones.

    Parameters
    ----------
    failed
        Instances: ``GROUP`` for all replicas of a group, or ``GROUP:REPLICA``, from 1.

    Raises
    ------
    InputError
        If there is no such instance, none is left, none holds an adapter that has requests, or the fleet
        re-balances, which would load the adapters elsewhere.
    """
    if fleet.rebalance is not None:
        rule = "does not go with re-balancing, which loads the adapters of a failed instance elsewhere"
        raise InputError(rule, location="--fail")
    gone = {index for name in failed for index in _places(fleet.names, name)}
    left = [index for index in range(len(fleet.names)) if index not in gone]
    if not left:
        raise InputError("must leave an instance", ", ".join(failed), "--fail")
    instances = _with_shares(fleet, [fleet.instances[index] for index in left])
    traffic = fleet.workload.traffic
    held = {name for each in instances for name in (traffic if each.adapters is None else each.adapters)}
    # Every instance has the base model.
    unserved = tuple(name for name in traffic if name not in held and name != fleet.workload.base_model)
    rates = {name: each.rate_rps for name, each in traffic.items()}
    served = [name for name in traffic if name not in unserved]
    if not served:
        raise InputError("must leave an instance with an adapter", ", ".join(failed), "--fail")
    total = sum(rates.values())
    return DegradedFleet(
        fleet=replace(
            fleet,
            workload=fleet.workload.subset(served),
            instances=tuple(instances),
            names=tuple(fleet.names[index] for index in left),
        ),
        failed=tuple(fleet.names[index] for index in sorted(gone)),
        unserved=unserved,
        unserved_share=sum(rates[name] for name in unserved) / total if total > 0 else 0.0,
        whole=fleet.workload,
    )


def _places(names: Sequence[str], failed: str) -> list[int]:
    """Return the places of the instances that a name stands for."""
    group, _, replica = failed.rpartition(":")
    if group and replica.isdigit():
        found = [index for index, name in enumerate(names) if name == f"{group}-{replica}"]
    else:
        found = [index for index, name in enumerate(names) if name.rpartition("-")[0] == failed]
    if not found:
        groups = ", ".join(dict.fromkeys(name.rpartition("-")[0] for name in names))
        rule = f"must be a group, GROUP or GROUP:REPLICA (from 1), of {groups}"
        raise InputError(rule, failed, "--fail")
    return found


def _with_shares(fleet: SimulatedFleet, instances: Sequence[Instance]) -> list[Instance]:
    """Return the instances with a share above 0 of every name that is only stored now."""
    if fleet.router not in BY_SHARES:
        return list(instances)
    base = fleet.workload.base_model
    totals: dict[str, float] = {}
    for each in instances:
        for name, share in (each.adapters or {}).items():
            totals[name] = totals.get(name, 0.0) + share
    found = []
    for each in instances:
        shares = dict(each.adapters or {})
        shares |= {name: 1.0 for name in shares if totals[name] == 0.0}
        if base in fleet.workload.traffic and totals.get(base, 0.0) == 0.0:
            shares[base] = 1.0
        found.append(each if each.adapters is None else replace(each, adapters=shares))
    return found
