"""`capplan explain` and `capplan report`: the reasons for a plan, as text and as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from capplan.cli.options import AsJson, PlanFile, command
from capplan.cli.output import require_writable_files
from capplan.cli.progress import announce_compilation, progress_bars
from capplan.errors import InputError
from capplan.reports import DASH, Table, number, percent, print_json, print_table, tables
from capplan.spec import describe_latency

if TYPE_CHECKING:
    from capplan.planner.explain import Explanation
    from capplan.spec import Group, Plan

PlannedWorkload: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Workload that the plan was made for, to simulate."),
]

PlannedProfile: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Profile that the plan rests on; default: the plan's."),
]


@dataclass(frozen=True, kw_only=True)
class ExplainArgs:
    """Options of `capplan explain`."""

    plan: PlanFile
    workload: PlannedWorkload = None
    group: list[str] | None = typer.Option(
        None, metavar="ID", help="Only this group; can be given more than once."
    )
    profile: PlannedProfile = None
    as_json: AsJson = False


@command
def explain(args: ExplainArgs) -> None:
    """Explain a plan: bottleneck of each group, predictions, verification, and the number of GPUs.

    With the workload, also the choice of A_max of every group, utilization and headroom, and the effect of
    one GPU fewer or more.
    """
    from capplan.spec import Plan

    document = Plan.from_json(args.plan)
    wanted = _chosen(document, args.group or ())
    explanation = explained(document, args.workload, args.profile, wanted)
    shown = wanted or document.groups
    if args.as_json:
        print_json(_document(document, explanation, shown))
        return
    _print_plan(document)
    changed = bool(document.changed_after_verification())
    for each in shown:
        _print_group(document, each, changed=changed)
        _print_explained(each, explanation)
    if explanation is not None and explanation.what_if:
        typer.echo("\none GPU fewer or more")
        print_table(tables.what_if_table(explanation))
    if document.provenance:
        print_table(
            Table(("where it comes from", ""), list(tables.provenance(document).items()), numbers_from=None)
        )
    if explanation is None:
        typer.echo(tables.MORE)


def explained(
    plan: Plan, workload: str | None, profile: str | None, groups: Sequence[Group] = ()
) -> Explanation | None:
    """Return the explanation of a plan by the twin; None without a workload."""
    if workload is None:
        if profile is not None:
            raise InputError("goes with --workload, which says what to simulate", profile, "--profile")
        return None
    from capplan.datasets import load_profile
    from capplan.workload import load_workload

    made_for = load_workload(workload)
    used = None if profile is None else load_profile(profile)
    announce_compilation()
    from capplan.planner.explain import explain as explain_plan

    with progress_bars() as on_progress:
        return explain_plan(
            plan, made_for, profile=used, groups=groups, source=workload, progress=on_progress
        )


def _chosen(plan: Plan, ids: Sequence[str]) -> tuple[Group, ...]:
    known = [group.id for group in plan.groups]
    for name in ids:
        if name not in known:
            shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
            raise InputError(f"must be a group of the plan: {shown}", name, "--group")
    return tuple(group for group in plan.groups if group.id in ids)


def _print_plan(plan: Plan) -> None:
    engine = plan.engine
    typer.echo(tables.answer(plan))
    typer.echo(f"{plan.base_model} on {engine.name} {engine.version} (rules {engine.rules})")
    typer.echo(f"  {tables.gpus_reason(plan)}")
    typer.echo(f"  {tables.verdict(plan)}")
    for line in tables.plan_notes(plan):
        typer.echo(f"  {line}")


def _print_group(plan: Plan, group: Group, *, changed: bool) -> None:
    verdicts = {check.id: check for check in plan.verification.groups}
    typer.echo(f"\n{group.id}: {tables.size(group)}")
    typer.echo(f"  {tables.binding(plan, group)}")
    typer.echo(f"  {tables.verified(verdicts.get(group.id), changed=changed)}")
    print_table(_predicted_table(group))
    if words := tables.scheduling_words(group):
        typer.echo(f"  {words}")
    if (sizes := tables.sizes_table(group)) is not None:
        print_table(sizes)
    if group.queues is not None:
        print_table(tables.queues_table(group.queues))


def _print_explained(group: Group, explanation: Explanation | None) -> None:
    for each in () if explanation is None else explanation.groups:
        if group.id == each.ids[0]:
            typer.echo(f"  {each.why_a_max}")
            if each.has_slots:
                print_table(tables.curve_table(each.curve))
            for curve in each.knobs:
                print_table(tables.curve_table(curve))
            if len(each.loading) > 1:
                print_table(tables.loading_table(each.loading))
            if each.queues:
                print_table(tables.gains_table(each.queues))
            typer.echo(f"  {each.room.words}")
            print_table(tables.room_table(each.room))
        elif group.id in each.ids:
            typer.echo(f"  adapters and settings alike, so slots and what is in use as on {each.ids[0]}")


def _predicted_table(group: Group) -> Table:
    predicted = group.predicted
    rows: list[tuple[str, ...]] = [
        (label, *(number(value, decimals) for _, value in values))
        for label, values, decimals in (("TTFT, s", predicted.ttft_s, 3), ("TPOT, ms", predicted.tpot_ms, 2))
    ]
    for metric, unit, decimals in (("ttft", "s", 3), ("tpot", "ms", 2)):
        names = [f"{metric}_{statistic}_{unit}" for statistic in type(predicted.ttft_s).model_fields]
        if any(name in predicted.intervals for name in names):
            cells = (_interval(predicted.intervals.get(name), decimals) for name in names)
            rows.append((f"{metric.upper()}, {unit}, 90 %", *cells))
    for name, value in predicted.bounded.items():
        if not name.startswith(("ttft", "tpot")):
            rows.append((", ".join(describe_latency(name)), number(value, 3)))
    rows.append(("tok/s", " ".join(tables.throughput(predicted))))
    rows.append(("served", percent(predicted.served_fraction)))
    rows.append(("KV capacity, tokens", number(predicted.kv_tokens)))
    head = (f"predicted for one instance ({predicted.source})", *type(predicted.ttft_s).model_fields)
    return Table(head, rows)


def _interval(ends: tuple[float, float] | None, decimals: int) -> str:
    return DASH if ends is None else "..".join(number(end, decimals) for end in ends)


def _document(plan: Plan, explanation: Explanation | None, shown: Sequence[Group]) -> dict[str, Any]:
    whole = plan.model_dump(mode="json")
    verdicts = {check["id"]: check for check in whole["verification"]["groups"]}
    document = {
        "answer": tables.answer(plan),
        "gpus": tables.gpus_reason(plan),
        "totals": whole["totals"],
        "verdict": tables.verdict(plan),
        "verified": plan.is_verified,
        "verification": whole["verification"],
        "groups": [
            {
                "id": group.id,
                "binding": tables.binding(plan, group),
                **group.model_dump(
                    mode="json", include={"binds", "predicted", "queues", "scheduler", "cache"}
                ),
                "verification": verdicts.get(group.id),
            }
            for group in shown
        ],
        "provenance": whole["provenance"],
    }
    return document if explanation is None else document | {"explanation": _explanation(explanation)}


def _explanation(explanation: Explanation) -> dict[str, Any]:
    """Return an explanation as JSON; the values of the curve over slots have their earlier name as well."""
    document = asdict(explanation)
    for group in document["groups"]:
        for point in group["curve"]["points"]:
            point["a_max"] = point["value"]
    return document


@dataclass(frozen=True, kw_only=True)
class ReportArgs:
    """Options of `capplan report`."""

    plan: PlanFile
    output: str = typer.Option(
        ..., "--output", "-o", metavar="FILE", help="Write the page here: all of it or nothing."
    )
    workload: PlannedWorkload = None
    profile: PlannedProfile = None


@command
def report(args: ReportArgs) -> None:
    """Write a plan as one HTML page that works offline: groups, predictions, bottlenecks, adapters.

    With the workload, also curves over the number of slots, utilization and headroom, and the effect of one
    GPU fewer or more.
    """
    from capplan.reports.pages import plan_page
    from capplan.spec import Plan, write_text_atomic

    require_writable_files(args.output)
    document = Plan.from_json(args.plan)
    explanation = explained(document, args.workload, args.profile)
    write_text_atomic(args.output, plan_page(args.plan, document, explanation))
    typer.echo(f"written to {args.output}" + ("" if explanation else f"; {tables.MORE}"))
