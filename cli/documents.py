"""`capplan profiles` and `capplan schema`: shipped profiles, and the JSON Schema of documents."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import typer

from capplan.cli.options import AsJson, command
from capplan.errors import InputError
from capplan.reports import DASH, Table, number, percent, print_json, print_table
from capplan.spec import ProvenanceKind

if TYPE_CHECKING:
    from pydantic import BaseModel

    from capplan.spec import Fit, FittedModel, Profile

_PER_GPU: Final = re.compile(r" \(\S+ of the H100's\)")
_PARTS = ("step_latency", "memory", "loading", "host")

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_PREFIX_CACHING: Final = MappingProxyType({True: "on", False: "off", None: "as in the rules"})


@dataclass(frozen=True, kw_only=True)
class ProfilesArgs:
    """Options of `capplan profiles`."""

    name: str | None = typer.Argument(
        None, metavar="[NAME]", help="Shipped name or path: show this one in full."
    )
    gpu: str | None = typer.Option(
        None, metavar="WORDS", help="List those of GPUs with these whole words in their name, such as h100."
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
    composed = [each for each in shipped.values() if each.provenance.kind == ProvenanceKind.COMPOSED]
    told = (
        note for each in composed for note in sentences(each) if not note.startswith("Beyond the measured")
    )
    for note in dict.fromkeys(_PER_GPU.sub("", each) for each in told):
        typer.echo(f"composed: {note}")


def sentences(profile: Profile) -> list[str]:
    """Return the notes of a profile: what was fitted, left out of the fit, carried over or extrapolated."""
    return profile.provenance.notes.split(". ")


def _matching(gpu: str | None, model: str | None) -> dict[str, Profile]:
    """Return the shipped profiles of GPUs with these whole words and models with these, in any case."""
    from capplan.datasets import list_profiles, load_profile, other_gpu, other_model

    found = {each: load_profile(each) for each in list_profiles()}
    if gpu is not None:
        known = dict.fromkeys(name.split("/")[0] for name in found)
        whole = re.compile(rf"(?<![a-z0-9]){re.escape(gpu.lower())}(?![a-z0-9])")
        names = {each: f"{each.split('/')[0]} {profile.gpu.name}".lower() for each, profile in found.items()}
        found = {each: profile for each, profile in found.items() if gpu and whole.search(names[each])}
        if not found:
            near = difflib.get_close_matches(gpu.lower(), known, n=2)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            rule = f"must be a GPU of a shipped profile: {', '.join(known)}; {hint}{other_gpu(gpu)}"
            raise InputError(rule, gpu, "--gpu")
    if model is not None:
        known = dict.fromkeys(name.split("/")[1] for name in found)
        names = {each: " ".join((p.model.name, *p.model.hf_ids)).lower() for each, p in found.items()}
        found = {each: profile for each, profile in found.items() if model.lower() in names[each]}
        if not found:
            shipped = "a shipped profile" if gpu is None else f"a shipped profile of {gpu}"
            rule = f"must be in the name of a model of {shipped}: {', '.join(known)}; {other_model(gpu)}"
            raise InputError(rule, model, "--model")
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
        "notes": profile.provenance.notes,
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
    for note in filter(None, sentences(profile)):
        typer.echo(f"  note        {note}")
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
    found = models[args.document].model_json_schema()
    print_json({"$schema": _DIALECT, "$id": f"urn:capplan:schema:{args.document.value}:1", **found})
