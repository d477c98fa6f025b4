"""Re-balancing of a served plan: settings of the command line, adapters of the registry, operating points."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capplan.errors import InputError
from capplan.spec import Group, Plan

if TYPE_CHECKING:
    from capplan.engine.router.rebalancing import RebalancingConfig
    from capplan.spec.registry import AdapterRegistry

FLAGS = ("forecast", "solver", "workload")
"""Options that go with ``--rebalance``."""


@dataclass(frozen=True)
class ServedRebalance:
    """Options of ``capplan serve PLAN --rebalance S``."""

    period_s: float
    registry: str
    admin_key: str
    forecast: str | None = None
    solver: str | None = None
    workload: str | None = None


def rebalance_options(values: dict[str, Any], given: Collection[str]) -> ServedRebalance | None:
    """Return the options of re-balancing from those of the command; None without ``--rebalance``.

    Raises
    ------
    InputError
        If an option lacks another one.
    """
    if values["rebalance"] is None:
        for name in FLAGS:
            if name in given:
                raise InputError("goes with --rebalance", values[name], f"--{name}")
        return None
    for flag, name in (("--registry", "registry"), ("--lora-root", "lora_root")):
        if values[name] is None:
            rule = f"requires {flag}: instances share adapters"
            raise InputError(rule, values["rebalance"], "--rebalance")
    return ServedRebalance(
        values["rebalance"], values["registry"], values["admin_api_key"], *(values[name] for name in FLAGS)
    )


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
    options: ServedRebalance, plan: Plan, groups: Sequence[Group], log: Callable[[str], None]
) -> RebalancingConfig:
    """Return the re-balancing of the instances of groups of a plan.

    Raises
    ------
    InputError
        If an option is invalid, the instances are not equal, or the registry lacks an adapter.
    InfeasibleError
        If an instance sustains no load of a rank.
    """
    from capplan.engine.router.rebalancing import RebalancingConfig
    from capplan.planner.served_rebalancing import served_rebalancer
    from capplan.serving.rebalancing import RebalanceSettings
    from capplan.spec import load_workload
    from capplan.spec.registry import AdapterRegistry

    fields: dict[str, Any] = {
        "period_s": options.period_s,
        "forecast": options.forecast,
        "solver": options.solver,
    }
    try:
        settings = RebalanceSettings(**{name: value for name, value in fields.items() if value is not None})
    except InputError as error:
        name = error.location.rpartition(".")[2]
        flag = "--rebalance" if name == "period_s" else f"--{name}"
        raise InputError(error.rule, error.value, flag) from None
    with AdapterRegistry(options.registry) as registry:
        size_bytes = _sizes(registry, plan, groups)
    workload = None if options.workload is None else load_workload(options.workload)
    log("measuring operating points in the twin")
    rebalancer = served_rebalancer(plan, groups, settings, size_bytes, workload)
    return RebalancingConfig(
        rebalancer,
        options.registry,
        options.admin_key,
        plan.base_model,
        balances_base=any(group.base is not None for group in groups),
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
