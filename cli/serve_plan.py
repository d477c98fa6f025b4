"""Parts of a served plan: its model, the launcher of its instances, and their times of adapter loads."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from capplan.cli.options import require_extra
from capplan.errors import InputError
from capplan.spec import Plan

if TYPE_CHECKING:
    from capplan.engine.lora.load_times import LoadTimes
    from capplan.engine.router.launcher import Launcher


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
