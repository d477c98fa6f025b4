"""Parts of a served plan: model, router, launcher of the instances, folder and load times of adapters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from capplan.cli.options import require_extra
from capplan.errors import InputError
from capplan.spec import Group, Plan
from capplan.spec.routing import PLAN_ROUTER

if TYPE_CHECKING:
    from capplan.engine.lora.load_times import LoadTimes
    from capplan.engine.router.launcher import Launcher
    from capplan.engine.router.routing import RoutingSettings


def load_times(plan: Plan) -> dict[str, LoadTimes]:
    """Return the times of adapter loads by profile, as far as the plan's profiles are on this machine."""
    from capplan.datasets import load_profile
    from capplan.engine.lora.load_times import LoadTimes

    found = {}
    for name in dict.fromkeys(group.profile for group in plan.groups if group.scheduling is not None):
        with suppress(InputError):
            found[name] = LoadTimes.of_profile(load_profile(name).loading)
    return found


def model_of(plan: Plan, model: str | None) -> str:
    """Return the model to load: ``model``, or the plan's base model if it is a folder on this machine."""
    from capplan.engine.models import builtin_models

    if model is not None:
        return model
    if Path(plan.base_model).is_dir():
        return plan.base_model
    known = " (built in: with random weights)" if plan.base_model in builtin_models() else ""
    raise InputError(f"is required: the plan names {plan.base_model}{known}", location="--model")


def instance_launcher(ray_address: str | None, instances: int) -> Launcher:
    """Return the launcher of a plan's instances: on this machine, or on a Ray cluster."""
    if ray_address is None:
        from capplan.engine.router.launcher import LocalLauncher

        return LocalLauncher(instances)
    require_extra("ray", ("ray",))
    from capplan.engine.router.launcher import RayLauncher

    return RayLauncher(ray_address)


def plan_routing(
    router: str | None, state_period_s: float, file: str, plan: Plan, groups: Sequence[Group]
) -> RoutingSettings:
    """Return the router of groups of a plan: that of the command line, or else the plan's.

    Raises
    ------
    InputError
        If it cannot be fitted to the profiles of the groups, or the period is out of range.
    """
    from capplan.engine.router.routing import RoutingSettings

    if not 0.01 <= state_period_s <= 60.0:
        raise InputError("must be from 0.01 to 60", state_period_s, "--state-period-s")
    name = router or plan.router or PLAN_ROUTER
    if name == PLAN_ROUTER:
        return RoutingSettings()
    from capplan.datasets import load_profile
    from capplan.twin.cluster.plans import served_rule
    from capplan.twin.cluster.routers import MODELLED

    names = {group.profile for group in groups} if name in MODELLED else set()
    try:
        profiles = {each: load_profile(each) for each in names}
        rule = served_rule(plan, groups, name, profiles)
    except InputError as error:
        raise InputError(error.rule, error.value, f"{file}: router {name}: {error.location}") from None
    ranks = {adapter.name: adapter.rank for group in groups for adapter in group.adapters}
    return RoutingSettings(rule, ranks, state_period_s)


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
