"""Re-balancing of a served plan: settings of the command line, adapters of the registry, operating points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capplan.cli.rebalancing import RebalanceOptions
from capplan.errors import InputError
from capplan.spec import Group, Plan, Profile, RebalanceSettings

if TYPE_CHECKING:
    from capplan.fleet.rebalancing import RebalancingConfig
    from capplan.registry import AdapterRegistry

FLAGS = ("forecast", "rebalance_solver", "workload")
"""Options that go with ``--rebalance``."""


@dataclass(frozen=True)
class ServedRebalance:
    """Re-balancing of ``capplan serve PLAN``."""

    settings: RebalanceSettings
    registry: str
    admin_key: str
    workload: str | None = None


def rebalance_options(values: dict[str, Any], planned: RebalanceSettings | None) -> ServedRebalance | None:
    """Return the re-balancing that the options of the command or the plan name; None without any.

    Raises
    ------
    InputError
        If an option is invalid or lacks another one.
    """
    options = RebalanceOptions(values["rebalance"], values["forecast"], values["rebalance_solver"])
    settings = options.settings(planned)
    if settings is None:
        return None
    for flag, name in (("--registry", "registry"), ("--lora-root", "lora_root")):
        if values[name] is None:
            where = "plan: rebalance" if values["rebalance"] is None else "--rebalance"
            raise InputError(f"requires {flag}: instances share adapters", settings.every_s, where)
    return ServedRebalance(settings, values["registry"], values["admin_api_key"], values["workload"])


def equal_settings(plan: Plan, groups: Sequence[str]) -> dict[str, Any]:
    """Return engine settings with which every instance can serve every adapter of groups of a plan.

    Raises
    ------
    InputError
        If the instances are not equal.
    """
    from capplan.planner.verification.served_rebalancing import equal_engine_args

    chosen = [group for group in plan.groups if not groups or group.id in groups]
    return equal_engine_args(chosen).model_dump(exclude_none=True) if chosen else {}


def rebalancing(
    options: ServedRebalance,
    plan: Plan,
    groups: Sequence[Group],
    profiles: Mapping[str, Profile],
    log: Callable[[str], None],
) -> RebalancingConfig:
    """Return the re-balancing of the instances of groups of a plan; `profiles`: those on this machine.

    Raises
    ------
    InputError
        If an option is invalid, the instances are not equal, or the registry has an adapter that they cannot
        serve, or none of the plan's.
    InfeasibleError
        If an instance sustains no load of a rank.
    """
    from capplan.fleet.rebalancing import RebalancingConfig
    from capplan.planner.verification.served_rebalancing import served_rebalancer
    from capplan.registry import AdapterRegistry
    from capplan.twin.cluster.plans import workload_of
    from capplan.workload import load_workload

    with AdapterRegistry(options.registry, read_only=True) as registry:
        size_bytes = _sizes(registry, plan, groups, log)
    workload = None if options.workload is None else load_workload(options.workload)
    log("measuring operating points in the twin")
    rebalancer = served_rebalancer(plan, groups, options.settings, size_bytes, profiles, workload)
    return RebalancingConfig(
        rebalancer,
        options.admin_key,
        balances_base=any(group.base is not None for group in groups),
        prior_output_tokens=workload_of(plan, groups).output_tokens.mean_tokens,
    )


def _sizes(
    registry: AdapterRegistry, plan: Plan, groups: Sequence[Group], log: Callable[[str], None]
) -> dict[str, int]:
    """Return the sizes of the plan's adapters in the registry, as far as it has them.

    An adapter that has been removed from the registry is not served, as if it were removed later.

    Raises
    ------
    InputError
        If the registry has none of the adapters, or one for another model, of a rank that the instances do
        not serve, or without a digest.
    """
    sizes = {}
    largest = max(group.engine_args.max_lora_rank for group in groups)
    planned = {each.name: each.rank for group in groups for each in group.adapters}
    found = {name: adapter for name in planned if (adapter := registry.find(name)) is not None}
    if planned and not found:
        rule = "must have an adapter of the plan"
        raise InputError(rule, f"none of {len(planned)}", registry.location)
    for name, known in found.items():
        where = f"{registry.location}: adapter {name}"
        if known.base_model != plan.base_model:
            rule = f"must be that of the plan, {plan.base_model}"
            raise InputError(rule, known.base_model, f"{where}: base_model")
        if known.rank > largest:
            raise InputError(f"must be at most max_lora_rank, {largest}", known.rank, f"{where}: rank")
        if known.digest is None:
            raise InputError("is required: servers fetch adapters by it", location=f"{where}: digest")
        if known.rank != planned[name]:
            log(f"the plan was not verified with rank {known.rank} of {name} instead of {planned[name]}")
        if known.size_bytes is not None:
            sizes[name] = known.size_bytes
    return sizes
