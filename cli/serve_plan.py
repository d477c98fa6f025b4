"""Parts of a served plan: profiles, model, router, launcher of the instances, folder of adapters.

Re-balancing of a served plan: settings of the command line, adapters of the registry, operating points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capplan.cli.options import RebalanceOptions, require_extra, require_state_period
from capplan.errors import InputError
from capplan.spec import (
    PLAN_ROUTER,
    Cache,
    EngineArgs,
    Group,
    Plan,
    Profile,
    Queues,
    RebalanceSettings,
    Scheduler,
    stores_everywhere,
)

if TYPE_CHECKING:
    from capplan.fleet import InstanceSpec, Launcher, RebalancingConfig, RegistrySettings, RoutingSettings
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
    from capplan.planner.verification import equal_engine_args

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
    from capplan.fleet import RebalancingConfig
    from capplan.planner.verification import served_rebalancer
    from capplan.registry import AdapterRegistry
    from capplan.twin.cluster import workload_of
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


@dataclass(frozen=True)
class PlanProfiles:
    """Profiles that a plan names.

    Attributes
    ----------
    known
        Those on this machine, by name.
    errors
        Errors of the others.
    """

    known: Mapping[str, Profile]
    errors: Mapping[str, InputError]

    @classmethod
    def of(cls, plan: Plan, workload: str | None = None) -> PlanProfiles:
        """Load the profiles of the groups of a plan, each once: those of a workload file, else shipped ones.

        Raises
        ------
        InputError
            If the workload file, or a profile that it names, cannot be read.
        """
        from capplan.datasets import load_profile

        known, errors = _profiles_of(workload), {}
        for name in dict.fromkeys(group.profile for group in plan.groups):
            if name in known:
                continue
            try:
                known[name] = load_profile(name)
            except InputError as error:
                errors[name] = error
        return cls(known, errors)

    def require(self, names: Iterable[str]) -> dict[str, Profile]:
        """Return some of the profiles.

        Raises
        ------
        InputError
            If one is not on this machine.
        """
        found = {}
        for name in names:
            if name in self.errors:
                error = self.errors[name]
                rule = f"{error.rule}; --workload FILE reads the profile of the plan's workload"
                raise InputError(rule, error.value, error.location)
            found[name] = self.known[name]
        return found


def _profiles_of(file: str | None) -> dict[str, Profile]:
    """Return the profiles of a workload file by name; none without a file."""
    from capplan.datasets import load_profile
    from capplan.workload import load_workload

    if file is None:
        return {}
    workload = load_workload(file)
    names: list[str | None] = [pool.profile for pool in workload.pools]
    names += [workload.profile]
    loaded = [load_profile(name) for name in names if name is not None]
    return {profile.name: profile for profile in loaded}


def model_of(plan: Plan, model: str | None) -> str:
    """Return the model to load: ``model``, or the plan's base model if it is a folder on this machine."""
    from capplan.engine.models import builtin_models

    if model is not None:
        return model
    if Path(plan.base_model).is_dir():
        return plan.base_model
    known = " (built in: with random weights)" if plan.base_model in builtin_models() else ""
    raise InputError(f"is required: the plan names {plan.base_model}{known}", location="--model")


def instance_launcher(
    ray_address: str | None, instances: int, host: str, announce_host: str | None
) -> Launcher:
    """Return the launcher of a plan's instances: on this machine, or on a Ray cluster.

    On this machine they listen at `host` if they announce one, and at the loopback address otherwise.
    """
    if ray_address is None:
        from capplan.fleet import LocalLauncher

        return LocalLauncher(instances) if announce_host is None else LocalLauncher(instances, host)
    require_extra("ray", ("ray",))
    from capplan.fleet import RayLauncher

    return RayLauncher(ray_address)


def require_listening(ray_address: str | None, host: str, announce_host: str | None) -> None:
    """Raise an `InputError` if instances would announce a host at which they do not listen."""
    from capplan.server import is_loopback

    if announce_host is None:
        return
    if ray_address is not None:
        rule = "does not go with --ray-address: instances announce the addresses of their machines"
        raise InputError(rule, announce_host, "--announce-host")
    if is_loopback(host) and not is_loopback(announce_host):
        rule = f"requires a --host that other machines reach: instances would listen at {host}"
        raise InputError(rule, announce_host, "--announce-host")


def running_groups(plan: Plan, specs: Sequence[InstanceSpec]) -> list[Group]:
    """Return the groups of a plan that run, with the settings of their instances.

    These are the plan's settings, equal ones for re-balancing, and those of the command line. They are not
    checked again.
    """
    engines = {spec.group: spec.engine for spec in specs}
    documents = (("scheduler", Scheduler), ("cache", Cache), ("queues", Queues))
    running = []
    for group in plan.groups:
        if group.id not in engines:
            continue
        engine = engines[group.id]
        args = {name: engine[name] for name in EngineArgs.model_fields if name in engine}
        policies = {
            name: kind.model_validate(engine[name]) if engine.get(name) is not None else None
            for name, kind in documents
        }
        update = {"engine_args": group.engine_args.model_copy(update=args), **policies}
        running.append(group.model_copy(update=update))
    return running


def unverified_overrides(
    plan: Plan, router: str | None, rebalance: RebalanceSettings | None, running: Sequence[Group]
) -> tuple[str, ...]:
    """Return a line for each setting of the command line with which the plan was not verified.

    Parameters
    ----------
    plan
        The plan.
    router, rebalance
        Those of the command line.
    running
        Groups of the plan as they run, see `running_groups`.
    """
    replaced = []
    planned = plan.router or PLAN_ROUTER
    if router not in (None, planned):
        replaced.append(f"router {router} instead of {planned}")
    if rebalance is not None and rebalance != plan.rebalance:
        was = "none" if plan.rebalance is None else f"that of every {plan.rebalance.every_s:g} s"
        replaced.append(f"re-balancing every {rebalance.every_s:g} s instead of {was}")
    hint = "`capplan simulate WORKLOAD --plan PLAN` with the same options simulates it"
    lines = [f"{each}; {hint}" for each in replaced]
    lines += [f"{each}; `engine` of the workload plans with it" for each in _engine_overrides(plan, running)]
    return tuple(f"the plan was not verified with {line}" for line in lines)


def _engine_overrides(plan: Plan, running: Sequence[Group]) -> list[str]:
    """Return the settings of running groups that are not those of the plan, with the groups."""
    planned = {group.id: group for group in plan.groups}
    changes: dict[str, list[str]] = {}
    for group in running:
        before, now = planned[group.id], group.engine_args.model_dump()
        for name, was in before.engine_args.model_dump().items():
            if now[name] != was:
                changes.setdefault(f"{name} {now[name]} instead of {was}", []).append(group.id)
        for name in ("scheduler", "cache", "queues"):
            if getattr(group, name) != getattr(before, name):
                changes.setdefault(f"another {name}", []).append(group.id)
    return [f"{change} (group {', '.join(groups)})" for change, groups in changes.items()]


def plan_routing(
    router: str | None,
    state_period_s: float,
    file: str,
    plan: Plan,
    groups: Sequence[Group],
    profiles: PlanProfiles,
) -> RoutingSettings:
    """Return the router of groups of a plan: that of the command line, or else the plan's.

    Its models are fitted to the engine settings of the groups, which are those that run.

    Raises
    ------
    InputError
        If it cannot be fitted to the profiles of the groups, or the period is out of range.
    """
    from capplan.fleet import RoutingSettings

    require_state_period(state_period_s)
    name = router or plan.router or PLAN_ROUTER
    if name == PLAN_ROUTER:
        return RoutingSettings()
    from capplan.twin.cluster import MODELLED, served_rule

    names = {group.profile for group in groups} if name in MODELLED else set()
    try:
        rule = served_rule(plan, groups, name, profiles.require(names))
    except InputError as error:
        raise InputError(error.rule, error.value, f"{file}: router {name}: {error.location}") from None
    ranks = {adapter.name: adapter.rank for group in groups for adapter in group.adapters}
    return RoutingSettings(rule, ranks, state_period_s)


def plan_registry(registry: str, plan: Plan, groups: Sequence[Group], model_name: str) -> RegistrySettings:
    """Return the registry whose adapters the router of groups of a plan serves.

    Adapters of the plan's other groups are served elsewhere.
    """
    from capplan.fleet import RegistrySettings

    every, own = ({each.name for group in some for each in group.adapters} for some in (plan.groups, groups))
    excluded = frozenset({*(every - own), plan.base_model, model_name})
    return RegistrySettings(registry, plan.base_model, excluded, stores_everywhere(plan.router_options))


def pool_folder(lora_root: str | None, admin_api_key: str | None) -> Path | None:
    """Return the folder of the adapters of a plan's instances; None without a pool.

    Raises
    ------
    InputError
        If it is no folder, or there is no admin key.
    """
    if lora_root is None:
        return None
    if not Path(lora_root).is_dir():
        raise InputError("must be a folder", lora_root, "--lora-root")
    if admin_api_key is None:
        rule = "requires --admin-api-key: the key by which instances fetch adapters from each other"
        raise InputError(rule, location="--lora-root")
    return Path(lora_root).resolve()
