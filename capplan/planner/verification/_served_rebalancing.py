"""Re-balancer of the running instances of a plan: adapters and operating points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from capplan.datasets import load_profile
from capplan.errors import InputError
from capplan.planner.problem._operating_points import OperatingPoints
from capplan.planner.problem._problem import AdapterShare, Problem, make_problem
from capplan.serving.rebalancing import AdapterDemand, Rebalancer, Replan
from capplan.spec import EngineArgs, Group, Plan, Profile, RebalanceSettings, Workload
from capplan.twin.cluster import workload_of


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
        AdapterDemand(
            each.name,
            each.rank,
            problem.offered_tok_s(AdapterShare.of(each)),
            0 if each.rank == 0 else size_bytes.get(each.name, problem.adapter_bytes(each)),
            each.max_replicas,
        )
        for each in traffic
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
