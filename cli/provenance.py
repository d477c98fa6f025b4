"""What must be said of profiles whose numbers nobody measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capplan.spec import Profile


def not_measured(provenance: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a line for each analytic profile that a plan rests on, by the plan's provenance."""
    pools = provenance.get("pools")
    told = list(pools.values()) if isinstance(pools, Mapping) else [provenance]
    names = (each.get("profile") for each in told if each.get("profile_kind") == "roofline")
    return tuple(dict.fromkeys(_line(str(name)) for name in names))


def profile_not_measured(profile: Profile) -> tuple[str, ...]:
    """Return the line for one profile; nothing if it was measured, by whomever."""
    return not_measured({"profile": profile.name, "profile_kind": profile.provenance.kind.value})


def _line(name: str) -> str:
    return f"profile {name} is an analytic roofline, not measured"
