"""Lines below the tables of plans and simulations: extrapolations, compressed traces, hints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from capplan.errors import InfeasibleError

if TYPE_CHECKING:
    from capplan.spec import Plan, Workload

_LONG_WAIT_S: Final = 10.0
"""TTFT p99 from which a plan without latency bounds has a hint."""
_SAME_SPEED: Final = 0.005

Strict: TypeAlias = Annotated[
    bool, typer.Option("--strict", help="Exit with 3 if there are extrapolations beyond the fitted ranges.")
]


def plan_notes(plan: Plan) -> tuple[str, ...]:
    """Return the lines below the table of a plan."""
    return (
        *extrapolation_lines(plan.provenance),
        *trace_lines(plan.provenance.get("trace_speed"), plan.provenance.get("trace_notes")),
        *_missing_quotas(plan),
        *_hints(plan),
    )


def _missing_quotas(plan: Plan) -> tuple[str, ...]:
    """Return a line per group whose queues have less than their minimum quotas."""
    return tuple(
        f"{group.id}: the minimum quotas for the bound on E2E need {group.queues.missing_tokens:,} more "
        "tokens than its KV memory has, by a queueing model; they are scaled down, and the twin decides"
        for group in plan.groups
        if group.queues is not None and group.queues.missing_tokens
    )


def folder_lines(workload: Workload) -> tuple[str, ...]:
    """Return lines on adapters that are planned as stated, and on base models that go by another name."""
    from capplan.spec import PeftFiles, local_folder, path_kind

    absent: list[str] = []
    named: dict[str, list[str]] = {}
    for adapter in workload.adapters:
        folder = local_folder(adapter.path)
        if folder is not None:
            base_model = PeftFiles.of(folder).describe().base_model or workload.base_model
            if base_model != workload.base_model:
                named.setdefault(base_model, []).append(adapter.name)
        elif adapter.path is not None and path_kind(adapter.path) == "folder":
            absent.append(adapter.name)
    lines = [
        f"base_model_name_or_path of {_some(names)} is {base_model}, which is taken for {workload.base_model}"
        for base_model, names in named.items()
    ]
    if absent:
        lines.append(f"the folder of {_some(absent)} is not on this machine: rank and layers are as stated")
    return tuple(lines)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    return f"adapter {names[0]}{more}"


def trace_lines(speed: object, notes: object = ()) -> tuple[str, ...]:
    """Return the notes of a trace, and a line if it is replayed faster or slower than it was recorded."""
    lines = tuple(f"trace: {note}" for note in notes) if isinstance(notes, tuple | list) else ()
    if not isinstance(speed, float) or abs(speed - 1.0) <= _SAME_SPEED:
        return lines
    change = "compressed" if speed > 1.0 else "stretched"
    return (
        *lines,
        f"trace at {speed:.3g} times its recorded rate: time is {change}, bursts and pauses included",
    )


def _hints(plan: Plan) -> tuple[str, ...]:
    """Return a hint if waits are long and no latency is bounded."""
    waits_s = [(g.predicted.ttft_s.p99, g.id) for g in plan.groups if g.predicted.ttft_s.p99 is not None]
    longest_s, group = max(waits_s, default=(0.0, ""))
    if plan.slo.latency_bounds() or longest_s < _LONG_WAIT_S:
        return ()
    return (
        f"hint: TTFT p99 of {group} is {longest_s:,.1f} s, and no latency is bounded; set slo.ttft_p99_s in "
        "the workload to plan for one",
    )


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
