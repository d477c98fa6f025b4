"""`capplan profile for`: the best profile of a GPU and a model, and its error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from capplan.cli.options import AsJson, Quiet, command
from capplan.cli.output import require_writable_files, write_json
from capplan.reports import print_json

if TYPE_CHECKING:
    from capplan.models import ProfileRoute


@dataclass(frozen=True, kw_only=True)
class ProfileForArgs:
    """Options of `capplan profile for`."""

    gpu: str = typer.Argument(..., metavar="GPU", help="Such as h100-80g or l40s.")
    model: str = typer.Argument(..., metavar="MODEL", help="Short name or Hugging Face id, as llama-3.1-8b.")
    tp: int = typer.Option(1, metavar="N", min=1, help="GPUs per copy of the model.")
    dtype: str | None = typer.Option(
        None, metavar="NAME", help="bfloat16, float16, fp8, fp8_block or int4; default: that of config.json."
    )
    output: str | None = typer.Option(
        None, "--output", "-o", metavar="FILE", help="Write the profile here: all of it or nothing."
    )
    as_json: AsJson = False
    quiet: Quiet = False


@command
def for_(args: ProfileForArgs) -> None:
    """Name the best profile of a GPU and a model, its error, and the command that makes it.

    Best first: measured, published, composed from measured operators, computed from a data sheet.
    """
    from capplan.models import best_profile

    require_writable_files(args.output)
    route = best_profile(args.gpu, args.model, args.tp, args.dtype)
    if args.output is not None:
        write_json(args.output, route.profile.model_dump(mode="json"))
    if args.as_json:
        print_json(_document(route))
    elif not args.quiet:
        for line in _lines(route, args.output):
            typer.echo(line)


def _lines(route: ProfileRoute, output: str | None) -> list[str]:
    """Return kind, source and error of a profile, and how to get it."""
    profile = route.profile
    without = f" ({route.without})" if route.without else ""
    state = "shipped" if route.is_shipped else "not shipped"
    lines = [
        f"{profile.name}: {profile.provenance.kind}, {state}{without}; source: {profile.provenance.source}",
        f"error: {route.error}",
    ]
    if output is not None:
        lines.append(f"written to {output}")
    elif not route.is_shipped:
        lines.append(f"make it: {route.command}")
    return lines


def _document(route: ProfileRoute) -> dict[str, object]:
    """Return the route as JSON data."""
    profile = route.profile
    return {
        "profile": profile.name,
        "kind": profile.provenance.kind,
        "shipped": route.is_shipped,
        "source": profile.provenance.source,
        "error": route.error,
        "command": route.command or None,
        "without": route.without or None,
    }
