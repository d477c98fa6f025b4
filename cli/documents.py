"""`capplan profiles` and `capplan schema`: shipped profiles, and the JSON Schema of documents."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import typer

from capplan.cli.console import DASH, Table, number, percent, print_json, print_table
from capplan.cli.options import AsJson, command
from capplan.errors import InputError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from capplan.spec import Fit, FittedModel, Profile

_PARTS = ("step_latency", "memory", "loading", "host")

_PREFIX_CACHING: Final = MappingProxyType({True: "on", False: "off", None: "as in the rules"})


@dataclass(frozen=True, kw_only=True)
class ProfilesArgs:
    """Options of `capplan profiles`."""

    name: str | None = typer.Argument(
        None, metavar="[NAME]", help="Shipped name or path: show this one in full."
    )
    gpu: str | None = typer.Option(
        None, metavar="WORDS", help="List those of GPUs whose name contains this, such as h100."
    )
    model: str | None = typer.Option(
        None, metavar="WORDS", help="List those of models whose name contains this, such as qwen."
    )
    as_json: AsJson = False


@command
def profiles(args: ProfilesArgs) -> None:
    """List the shipped profiles, or show one with its coefficients, ranges and source."""
    from capplan.datasets import load_profile

    if args.name is not None:
        for option in ("gpu", "model"):
            if getattr(args, option) is not None:
                raise InputError("filters the list, without a NAME", getattr(args, option), f"--{option}")
        profile = load_profile(args.name)
        print_json(profile.model_dump(mode="json")) if args.as_json else _show(profile)
        return
    shipped = _matching(args.gpu, args.model)
    if args.as_json:
        print_json([_summary(each, profile) for each, profile in shipped.items()])
        return
    rows = [
        (
            each,
            profile.gpu.name,
            str(profile.tp),
            profile.model.name,
            f"{profile.engine.name} {profile.engine.version}",
            profile.provenance.kind,
            _error(profile.step_latency.fit, "error"),
            _error(profile.step_latency.fit, "cross_validated_error"),
        )
        for each, profile in shipped.items()
    ]
    head = ("profile", "GPU", "tp", "model", "engine", "provenance", "error of the fit", "left out")
    print_table(Table(head, rows, numbers_from=None))
    for formula in dict.fromkeys(each.step_latency.fit.error_formula for each in shipped.values()):
        typer.echo(f"error: {formula}")


def _matching(gpu: str | None, model: str | None) -> dict[str, Profile]:
    """Return the shipped profiles whose GPU and model contain these words, in any case."""
    from capplan.datasets import list_profiles, load_profile

    shipped = {each: load_profile(each) for each in list_profiles()}
    found = {
        name: profile
        for name, profile in shipped.items()
        if (gpu or "").lower() in f"{name.split('/')[0]} {profile.gpu.name}".lower()
        and (model or "").lower() in " ".join([profile.model.name, *profile.model.hf_ids]).lower()
    }
    if not found:
        option, words = ("--gpu", gpu) if gpu is not None else ("--model", model)
        known = sorted({name.split("/")[option == "--model"] for name in shipped})
        raise InputError(f"must match a shipped profile: {', '.join(known)}", words, option)
    return found


def _summary(name: str, profile: Profile) -> dict[str, object]:
    fit = profile.step_latency.fit
    return {
        "name": name,
        "gpu": profile.gpu.name,
        "tp": profile.tp,
        "model": profile.model.name,
        "engine": profile.engine.name,
        "engine_version": profile.engine.version,
        "rules": profile.engine.rules,
        "provenance": profile.provenance.kind,
        "fit_error": fit.error if fit.samples else None,
        "left_out_error": fit.cross_validated_error if fit.samples else None,
        "fit_error_formula": fit.error_formula,
    }


def _error(fit: Fit, which: str) -> str:
    value = getattr(fit, which)
    return "not fitted" if not fit.samples else DASH if value is None else f"{value:.2f} %"


def _show(profile: Profile) -> None:
    engine, origin = profile.engine, profile.provenance
    licence = f", {origin.license}" if origin.license else ""
    typer.echo(profile.name)
    memory_gib = profile.gpu.memory_bytes / 2**30
    typer.echo(f"  GPU         {profile.gpu.name}, {memory_gib:.1f} GiB, tp {profile.tp}")
    typer.echo(f"  model       {profile.model.name}: {', '.join(profile.model.hf_ids)}")
    typer.echo(f"  positions   {profile.model.max_positions or 'unknown'}")
    typer.echo(f"  engine      {engine.name} {engine.version}, rules {engine.rules}, kernel {engine.kernel}")
    typer.echo(f"  prefixes    prefix_caching {_PREFIX_CACHING[engine.prefix_caching]}")
    correlation = f"{profile.length_correlation:.3f} (prompt with output, normal scores)"
    typer.echo(f"  lengths     length_correlation {correlation}")
    typer.echo(f"  provenance  {origin.kind}: {origin.source}{licence}")
    typer.echo(f"  made by     {origin.command}")
    if origin.notes:
        typer.echo(f"  notes       {origin.notes}")
    for part in _PARTS:
        _show_part(part, getattr(profile, part))


def _show_part(part: str, model: FittedModel) -> None:
    fit = model.fit
    typer.echo(f"\n{part}: {model.form}")
    if fit.samples:
        typer.echo(f"  fitted on {fit.samples:,} samples of {fit.source}")
        errors = {"error": fit.error, "cross-validated": fit.cross_validated_error, "largest": fit.max_error}
        known = ", ".join(f"{name} {value:.3g}" for name, value in errors.items() if value is not None)
        typer.echo(f"  {known} ({fit.error_formula})")
    else:
        typer.echo(f"  not fitted: {fit.source}")
    if model.uncertainty is not None and model.uncertainty.scatter:
        typer.echo(f"  scatter between runs left out of the fit: {percent(model.uncertainty.scatter)}")
    if model.coefficients:
        rows = [
            (
                name,
                f"{coefficient.value:.6g}",
                DASH if coefficient.std_error is None else f"{coefficient.std_error:.2g}",
            )
            for name, coefficient in model.coefficients.items()
        ]
        print_table(Table(("coefficient", "value", "standard error"), rows))
    if model.tables:
        print_table(Table(("table", "axis", "points", "from", "to", "ms from", "ms to"), _table_rows(model)))
    if model.fitted_range:
        ranges = [
            (name, *(number(end, _decimals(end)) for end in ends))
            for name, ends in model.fitted_range.items()
        ]
        print_table(Table(("fitted over", "from", "to"), ranges))


def _table_rows(model: FittedModel) -> list[tuple[str, ...]]:
    """Return a row per axis of each step table, with the milliseconds at the ends of the table."""
    rows = []
    for name, table in model.tables.items():
        ends_ms = [f"{value:.4g}" for value in (table.values[0], table.values[-1])]
        for axis in table.axes:
            ends = [number(end, 0) for end in (axis.points[0], axis.points[-1])]
            rows.append((name, axis.name, str(len(axis.points)), *ends, *ends_ms))
            name, ends_ms = "", ["", ""]
    return rows


def _decimals(value: float) -> int:
    return 0 if float(value).is_integer() else 3


class Document(StrEnum):
    """A kind of document that capplan reads or writes."""

    PLAN = "plan"
    WORKLOAD = "workload"
    PROFILE = "profile"


@dataclass(frozen=True, kw_only=True)
class SchemaArgs:
    """Options of `capplan schema`."""

    document: Document = typer.Argument(..., metavar="plan|workload|profile", help="Which document.")


@command
def schema(args: SchemaArgs) -> None:
    """Print the JSON Schema of plan.json, workload.yaml or a profile."""
    from capplan.spec import Plan, Profile, WorkloadFile

    models: dict[Document, type[BaseModel]] = {
        Document.PLAN: Plan,
        Document.WORKLOAD: WorkloadFile,
        Document.PROFILE: Profile,
    }
    print_json(models[args.document].model_json_schema())
