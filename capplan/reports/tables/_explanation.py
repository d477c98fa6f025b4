"""Tables and words that explain a plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from capplan.reports._console import DASH, Table, counted, number, percent
from capplan.reports.tables._plan import base_rate_rps, group_rate_rps

if TYPE_CHECKING:
    from capplan.planner.explain import (
        Explanation,
        Headroom,
        LoadingPoint,
        PlanOutcome,
        SettingCurve,
        SizeGain,
    )
    from capplan.spec import Group, GroupVerification, Plan


MORE: Final = (
    "--workload FILE also explains the numbers of slots, utilization and headroom, and one GPU fewer or more"
)


_RESOURCES = {
    "kv": "KV-cache memory",
    "slots": "adapter slots",
    "compute": "compute",
    "slo": "a latency objective",
}


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


def loading_table(points: Sequence[LoadingPoint], chosen: str = " ◀ chosen") -> Table:
    """Return one row per loading policy, the plan's marked."""
    rows = [
        (
            f"{point.loading}{'' if at else chosen}",
            number(point.ttft_mean_s, 3),
            number(point.tpt_mean_ms, 2),
            percent(point.interruption_mean_share),
            "; ".join(point.broken) or "holds",
        )
        for at, point in enumerate(points)
    ]
    head = ("loading at the planned load", "TTFT mean, s", "TPT mean, ms", "paused, of E2E", "verdict")
    return Table(head, rows, text_last=True)


def gains_table(gains: Sequence[SizeGain]) -> Table:
    """Return one row per size class: TTFT p99 with queues and in order of arrival."""
    rows = [
        (each.size, *(number(value, 2) for value in (*each.planned_s, *each.overloaded_s))) for each in gains
    ]
    overloaded = f"at {times(gains[0].overload)}"
    head = (
        "TTFT p99, s, by size",
        "with queues",
        "in order of arrival",
        f"with queues\n{overloaded}",
        f"in order\n{overloaded}",
    )
    return Table(head, rows)


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
