"""Extrapolations in the output of commands, and the option that refuses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import typer

from capplan.errors import InfeasibleError

Strict: TypeAlias = Annotated[
    bool, typer.Option("--strict", help="Exit with 3 if there are extrapolations beyond the fitted ranges.")
]


def extrapolation_lines(provenance: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a line for each extrapolation of a plan, by its provenance.

    Plans of earlier versions list none; a line then names each analytic profile.
    """
    found = provenance.get("extrapolations")
    if isinstance(found, list):
        return tuple(extrapolation_line(each) for each in found if isinstance(each, Mapping))
    pools = provenance.get("pools")
    told = list(pools.values()) if isinstance(pools, Mapping) else [provenance]
    names = (each.get("profile") for each in told if each.get("profile_kind") == "roofline")
    return tuple(f"profile {name} is an analytic roofline, not measured" for name in dict.fromkeys(names))


def extrapolation_line(record: Mapping[str, Any]) -> str:
    """Return an extrapolation in words, with its groups unless the whole profile is meant."""
    if record.get("quantity") is None:
        return str(record.get("note"))
    groups = ", ".join(map(str, record.get("groups") or ()))
    return f"extrapolation: {record.get('note')}" + (f" ({groups})" if groups else "")


def require_no_extrapolation(lines: Sequence[str]) -> None:
    """End the command with exit code 3 if there are extrapolations; the lines go to the standard error."""
    if not lines:
        return
    for line in lines:
        typer.echo(f"--strict: {line}", err=True)
    raise typer.Exit(InfeasibleError.exit_code)
