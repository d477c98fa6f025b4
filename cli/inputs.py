"""What commands read: the profile a workload is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from capplan.errors import InputError

if TYPE_CHECKING:
    from capplan.spec import Profile, Workload

WorkloadFile: TypeAlias = Annotated[str, typer.Argument(metavar="WORKLOAD", help="Workload file (YAML).")]
PlanFile: TypeAlias = Annotated[str, typer.Argument(metavar="PLAN", help="Plan file (JSON).")]
ProfileName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME",
        help="Shipped profile or path of a profile JSON; default: the workload's.",
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def chosen_profile(workload: Workload, name: str | None) -> Profile | None:
    """Return the profile of the command line, or else of the workload; None when the workload names pools.

    Raises
    ------
    InputError
        When it cannot be read, is not for the workload's base model, or neither names one.
    """
    from capplan.datasets import load_profile

    if name is None and workload.pools:
        return None
    wanted = workload.profile if name is None else name
    if wanted is None:
        raise InputError("is required: name one in the workload or with --profile", location="profile")
    profile = load_profile(wanted)
    profile.require_model(workload.base_model)
    return profile
