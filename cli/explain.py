"""`capplan explain` and `capplan report`: the reasons for a plan, as text and as an HTML page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from capplan.cli.options import AsJson, PlanFile, command
from capplan.cli.output import require_writable_files
from capplan.cli.plan import base_rate_rps, binding, group_rate_rps, throughput, verdict
from capplan.cli.progress import announce_compilation, progress_bars
from capplan.errors import InputError
from capplan.reports.console import DASH, Table, counted, number, percent, print_json, print_table
from capplan.reports.tables.notes import plan_notes
from capplan.reports.tables.scheduling import queues_table, scheduling_words, sizes_table
from capplan.spec.slo import describe_latency

if TYPE_CHECKING:
    from capplan.planner.explain import Explanation, Headroom, PlanOutcome, SettingCurve
    from capplan.spec import Group, GroupVerification, Plan

PlannedWorkload: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Workload that the plan was made for, to simulate."),
]

PlannedProfile: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Profile that the plan rests on; default: the plan's."),
]

MORE: Final = (
    "--workload FILE also explains the numbers of slots, utilization and headroom, and one GPU fewer or more"
)

_RESOURCES = {
    "kv": "KV-cache memory",
    "slots": "adapter slots",
    "compute": "compute",
    "slo": "a latency objective",
}


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
        print_table(what_if_table(explanation))
    if document.provenance:
        print_table(Table(("where it comes from", ""), list(provenance(document).items()), numbers_from=None))
    if explanation is None:
        typer.echo(MORE)


def explained(
    plan: Plan, workload: str | None, profile: str | None, groups: Sequence[Group] = ()
) -> Explanation | None:
    """Return the explanation of a plan by the twin; None without a workload.

    Raises
    ------
    InputError
        When a file cannot be read or is not that of the plan.
    """
    if workload is None:
        if profile is not None:
            raise InputError("goes with --workload, which says what to simulate", profile, "--profile")
        return None
    from capplan.datasets import load_profile
    from capplan.spec import load_workload

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
    typer.echo(f"{plan.base_model} on {engine.name} {engine.version} (rules {engine.rules})")
    typer.echo(f"  {gpus_reason(plan)}")
    typer.echo(f"  {verdict(plan)}")
    for line in plan_notes(plan):
        typer.echo(f"  {line}")


def _print_group(plan: Plan, group: Group, *, changed: bool) -> None:
    verdicts = {check.id: check for check in plan.verification.groups}
    typer.echo(f"\n{group.id}: {size(group)}")
    typer.echo(f"  {binding(plan, group)}")
    typer.echo(f"  {verified(verdicts.get(group.id), changed=changed)}")
    print_table(_predicted_table(group))
    if words := scheduling_words(group):
        typer.echo(f"  {words}")
    if (sizes := sizes_table(group)) is not None:
        print_table(sizes)
    if group.queues is not None:
        print_table(queues_table(group.queues))


def _print_explained(group: Group, explanation: Explanation | None) -> None:
    for each in () if explanation is None else explanation.groups:
        if group.id == each.ids[0]:
            typer.echo(f"  {each.why_a_max}")
            if each.has_slots:
                print_table(curve_table(each.curve))
            for curve in each.knobs:
                print_table(curve_table(curve))
            typer.echo(f"  {each.room.words}")
            print_table(room_table(each.room))
        elif group.id in each.ids:
            typer.echo(f"  adapters and settings alike, so slots and what is in use as on {each.ids[0]}")


def gpus_reason(plan: Plan) -> str:
    """Return in words why the plan uses its number of GPUs, against the lower bound."""
    used, least = plan.totals.gpus, plan.totals.lower_bound_gpus
    if used <= least:
        return f"{counted(used, 'GPU')}: no plan can use fewer"
    binds = {
        name: [group.id for group in plan.groups if group.binds is not None and group.binds.resource == key]
        for key, name in _RESOURCES.items()
    }
    filled = "; ".join(f"{name} on {', '.join(ids)}" for name, ids in binds.items() if ids)
    parts = [
        f"{counted(used, 'GPU')}, {used - least} above the lower bound of {least}, "
        "which no plan can beat but which may be out of reach",
        f"what fills them: {filled}" if filled else "no group is full",
    ]
    loads = [g.predicted.load_over_capacity for g in plan.groups for _ in range(g.replicas)]
    known = [load for load in loads if load is not None]
    if known:
        parts.append(f"on average a GPU carries {percent(sum(known) / len(known))} of what it sustains")
    if plan.objective != "min_gpus":
        parts.append(f"the objective is {plan.objective.value}, not the fewest GPUs")
    return "; ".join(parts)


def size(group: Group) -> str:
    """Return how large a group is, and what it serves with which slots."""
    instances = f"{counted(group.replicas, 'instance')} of {counted(group.tp, 'GPU')} ({group.gpu})"
    load = f"{counted(len(group.placed), 'adapter')} at {number(group_rate_rps(group), 2)} req/s"
    if group.base is not None:
        load += f" ({number(base_rate_rps(group), 2)} of the base model)"
    slots = f"{group.engine_args.max_loras} slots of rank {group.engine_args.max_lora_rank}"
    if group.engine_args.max_loras == 0:
        slots = "no slots"
    elif group.scheduling is not None:
        slots = "adapters and KV in one memory"
    return f"{instances}, {load}, {slots}, profile {group.profile}"


def verified(check: GroupVerification | None, *, changed: bool) -> str:
    """Return the verdict of the twin on a group, of a plan that was perhaps `changed` since."""
    if check is None:
        return "not verified"
    before = " at planning" if changed else ""
    note = f": {check.note}" if check.note else ""
    return (
        f"{'verified' if check.ok else 'FAILED'}{before}{note}; {percent(check.served_fraction)} served, "
        f"{number(check.throughput_tok_s)} tok/s, TTFT p99 {number(check.ttft_p99_s, 2)} s on the worst seed"
    )


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
    rows.append(("tok/s", " ".join(throughput(predicted))))
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
        "gpus": gpus_reason(plan),
        "totals": whole["totals"],
        "verdict": verdict(plan),
        "verified": plan.is_verified,
        "verification": whole["verification"],
        "groups": [
            {
                "id": group.id,
                "binding": binding(plan, group),
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


def provenance(plan: Plan) -> dict[str, str]:
    """Return the provenance of a plan without extrapolations, with values other than texts as JSON."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in plan.provenance.items()
        if key != "extrapolations"
    }


_SLOT_COLUMNS: Final = (
    "KV tokens",
    "tok/s",
    "served",
    "TTFT p99, s",
    "E2E mean, s",
    "ITL mean, ms",
    "loads/min",
)
_KNOB_COLUMNS: Final = ("tok/s", "served", "TTFT p99, s", "TPOT p99, ms", "ITL p99, ms")


def curve_table(curve: SettingCurve, chosen: str = " ◀ chosen") -> Table:
    """Return one row per value of an engine setting, the chosen one marked."""
    of_slots = curve.setting == "a_max"
    name, columns = ("A_max", _SLOT_COLUMNS) if of_slots else (curve.setting, _KNOB_COLUMNS)
    rows = []
    for point in curve.points:
        cells = {
            "KV tokens": number(point.kv_tokens),
            "tok/s": number(point.throughput_tok_s),
            "served": percent(point.served_fraction),
            "TTFT p99, s": number(point.ttft_p99_s, 2),
            "TPOT p99, ms": number(point.tpot_p99_ms, 1),
            "E2E mean, s": number(point.e2e_mean_s, 2),
            "ITL mean, ms": number(point.itl_mean_ms, 1),
            "ITL p99, ms": number(point.itl_p99_ms, 1),
            "loads/min": number(point.loads_per_min, 1),
        }
        value = f"{point.value}{chosen if point.value == curve.chosen else ''}"
        holds = ("; ".join(point.broken) or "holds") if point.fits else "does not fit in memory"
        rows.append((value, *(cells[column] for column in columns), holds))
    return Table((f"{name} at {curve_load(curve)}", *columns, "verdict"), rows, text_last=True)


def curve_load(curve: SettingCurve) -> str:
    """Return the load and the step times of a curve, as text."""
    slow = "" if curve.robust is None else f", step times at quantile {curve.robust:g}"
    return f"{times(curve.scale)}{slow}"


def room_table(room: Headroom) -> Table:
    """Return one row per resource and bound, at the planned load and where the instance fails."""
    loads = ["at the planned load"]
    if room.fails_at is not None:
        loads.append(f"at {times(room.fails_at)}")
    rows = [(use.name, *map(percent, (use.now, use.beyond)[: len(loads)]), use.detail) for use in room.uses]
    return Table(("in use", *loads, ""), rows, text_last=True)


def what_if_table(explanation: Explanation) -> Table:
    """Return one row for the plan, and one for each other number of GPUs."""
    plan = explanation.outcome
    cases: list[tuple[int, str, PlanOutcome | None, str]] = [(plan.gpus, "this plan", plan, DASH)]
    cases += [(each.gpus, each.change, each.outcome, each.words) for each in explanation.what_if]
    rows = [
        (name, *_outcome_cells(gpus, outcome), words)
        for gpus, name, outcome, words in sorted(cases, key=lambda case: case[0])
    ]
    head = ("", "GPUs", "USD/h", "TTFT p99, s", "TPOT mean, ms", "tok/s", "holds up to", "what follows")
    return Table(head, rows, text_last=True)


def _outcome_cells(gpus: int, outcome: PlanOutcome | None) -> tuple[str, ...]:
    if outcome is None:
        return (number(gpus), *[DASH] * 5)
    held = DASH if outcome.holds_until is None else times(outcome.holds_until)
    return (
        number(gpus),
        number(outcome.usd_per_hour, 2),
        number(outcome.ttft_p99_s, 2),
        number(outcome.tpot_mean_ms, 1),
        number(outcome.throughput_tok_s),
        held if outcome.fails or outcome.holds_until is None else f"{held} or more",
    )


def times(scale: float) -> str:
    """Return a multiple of the planned load."""
    return f"{scale:.2f} × load"


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
    from capplan.reports.pages.plan import plan_page
    from capplan.spec import Plan, write_text_atomic

    require_writable_files(args.output)
    document = Plan.from_json(args.plan)
    explanation = explained(document, args.workload, args.profile)
    write_text_atomic(args.output, plan_page(args.plan, document, explanation))
    typer.echo(f"written to {args.output}" + ("" if explanation else f"; {MORE}"))
