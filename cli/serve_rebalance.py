"""Re-balancing of a served plan: settings of the command line, adapters of the registry, operating points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capplan.cli.rebalancing import RebalanceOptions
from capplan.errors import InputError
from capplan.spec import Group, Plan, Profile, RebalanceSettings

if TYPE_CHECKING:
    from capplan.engine.router.rebalancing import RebalancingConfig
    from capplan.spec.registry import AdapterRegistry

FLAGS = ("forecast", "solver", "workload")
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
    options = RebalanceOptions(values["rebalance"], values["forecast"], values["solver"])
    settings = options.settings(planned)
    if settings is None:
        if values["workload"] is not None:
            raise InputError("goes with --rebalance", values["workload"], "--workload")
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
    from capplan.planner.served_rebalancing import equal_engine_args

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
        If an option is invalid, the instances are not equal, or the registry lacks an adapter.
    InfeasibleError
        If an instance sustains no load of a rank.
    """
    from capplan.engine.router.rebalancing import RebalancingConfig
    from capplan.planner.served_rebalancing import served_rebalancer
    from capplan.spec import load_workload
    from capplan.spec.registry import AdapterRegistry
    from capplan.twin.cluster.plans import workload_of

    with AdapterRegistry(options.registry) as registry:
        size_bytes = _sizes(registry, plan, groups)
    workload = None if options.workload is None else load_workload(options.workload)
    log("measuring operating points in the twin")
    rebalancer = served_rebalancer(plan, groups, options.settings, size_bytes, profiles, workload)
    return RebalancingConfig(
        rebalancer,
        options.registry,
        options.admin_key,
        plan.base_model,
        balances_base=any(group.base is not None for group in groups),
        prior_output_tokens=workload_of(plan, groups).output_tokens.mean_tokens,
    )


def _sizes(registry: AdapterRegistry, plan: Plan, groups: Sequence[Group]) -> dict[str, int]:
    """Return the sizes of the plan's adapters in the registry, as far as it has them.

    Raises
    ------
    InputError
        If the registry lacks an adapter or its digest, or has it for another model or of another rank.
    """
    sizes = {}
    for adapter in {each.name: each for group in groups for each in group.adapters}.values():
        known = registry.get(adapter.name)
        where = f"{registry.location}: adapter {adapter.name}"
        for name, there, planned in (
            ("base_model", known.base_model, plan.base_model),
            ("rank", known.rank, adapter.rank),
        ):
            if there != planned:
                raise InputError(f"must be that of the plan, {planned}", there, f"{where}: {name}")
        if known.digest is None:
            raise InputError("is required: servers fetch adapters by it", location=f"{where}: digest")
        if known.size_bytes is not None:
            sizes[adapter.name] = known.size_bytes
    return sizes
