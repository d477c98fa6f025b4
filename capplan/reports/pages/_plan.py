"""The report of a plan: one HTML page that works offline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from capplan.reports._console import DASH, Cell, Table, counted, number, percent
from capplan.reports.pages import _page as page
from capplan.reports.pages._figures import (
    Axis,
    Chart,
    Curve,
    bar_rows,
    is_wide,
    line_chart,
    or_nan,
    plan_charts,
)
from capplan.reports.tables import _plan as tables
from capplan.reports.tables._scheduling import SIZES_HEAD, queues_table, scheduling_words, sizes_table
from capplan.spec import describe_latency

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from capplan.planner.explain import CurvePoint, Explanation, GroupExplanation, Headroom, SlotCurve
    from capplan.spec import Group, Plan, Slo

_OPEN: Final = 100
"""Adapters up to which their table is shown unfolded."""

_HEAD: Final = (
    *("group", "GPU", "instances", "GPUs", "adapters", "req/s", "A_max", "slot rank", "max num seqs"),
    *("KV tokens", "tok/s", "interval"),
)
_LAST: Final = ("served", "load / capacity", "verified")

_TERMS: Final = {
    **page.terms("A_max"),
    "tok/s": "input and output tokens of completed requests per second, of one instance",
    **page.terms("served", "TTFT", "TPOT", "E2E", "ITL"),
    "load / capacity": "planned load over the largest multiple of it that an instance sustains",
    **page.terms("lower bound"),
    "compute, at least": "share of the time that the load takes with divisible requests and full batches",
    "holds": "every bound of the workload holds in the simulation",
}


def plan_page(path: str, plan: Plan, explanation: Explanation | None) -> str:
    """Return the report.

    Parameters
    ----------
    path
        File or name of the plan.
    plan
        The plan.
    explanation
        Its explanation by the twin; None without a workload.
    """
    engine = plan.engine
    twin = [] if explanation is None else explanation_sections(explanation, plan.slo)
    return page.page(
        f"Plan {path}",
        _summary(plan, explanation),
        page.section("Groups", _groups_table(plan), page.charts(*plan_charts(plan))),
        _what_binds(plan),
        *twin,
        *_scheduling(plan.groups),
        *_queues(plan.groups),
        _adapters(plan),
        *_moves(plan),
        page.section("Provenance", page.definitions(tables.provenance(plan))),
        subtitle=f"{plan.base_model} on {engine.name} {engine.version} (rules {engine.rules}); "
        f"made by {plan.created_by}",
        cards=_cards(plan),
        terms=_TERMS,
    )


def _cards(plan: Plan) -> list[page.Card]:
    totals, check, bounds = plan.totals, plan.verification, plan.slo.latency_bounds()
    cards = [page.Card("GPUs", str(totals.gpus), f"lower bound {totals.lower_bound_gpus}")]
    if totals.usd_per_hour is not None:
        cards.append(page.Card("Cost", f"{totals.usd_per_hour:,.2f} USD/h", f"{totals.gpus} GPUs"))
    for key in tables.shown_latencies(plan):
        label = f"Worst {describe_latency(key)[0]}"
        cards.append(page.latency_card(label, key, tables.worst_latency(plan, key), bounds))
    trust = page.good("verified") if plan.is_verified else page.bad("NOT VERIFIED")
    note = f"{counted(len(check.seeds), 'seed')}, {percent(check.min_served_fraction)} served"
    if lines := tables.extrapolation_lines(plan.provenance):
        note += f"; {counted(len(lines), 'extrapolation')}"
    return [*cards, page.Card("Digital twin", trust, note if check.seeds else "not run")]


def _summary(plan: Plan, explanation: Explanation | None) -> page.Section:
    words = tables.verdict(plan)
    price = plan.totals.usd_per_hour
    facts: dict[str, Cell] = {
        "GPUs": f"{tables.gpus_reason(plan)}.",
        "verdict": page.good(words) if plan.is_verified else page.bad(words),
        "objective": f"{plan.objective.value}; bounds: {_bounds(plan)}",
        "load": f"{counted(len(_places(plan)), 'adapter')} at "
        f"{number(sum(map(tables.group_rate_rps, plan.groups)), 2)} req/s",
        **({} if price is None else {"price": f"{price:,.2f} USD per hour"}),
    }
    care = [page.paragraph(page.bad(line)) for line in tables.plan_notes(plan)]
    more = [] if explanation is not None else [page.paragraph(f"{tables.MORE}.")]
    return page.section("Summary", *care, page.definitions(facts), *more)


def _bounds(plan: Plan) -> str:
    bounds = plan.slo.model_dump(mode="json", exclude_none=True, exclude={"stable"})
    words = [f"{name} {value:g}" for name, value in bounds.items()]
    return ", ".join([*words, *(["stable queues"] if plan.slo.stable else [])])


def _groups_table(plan: Plan) -> Table:
    checks = {check.id: check for check in plan.verification.groups}
    passed = page.bad("at planning") if plan.changed_after_verification() else page.good("yes")
    rows = []
    for group in plan.groups:
        predicted, args, check = group.predicted, group.engine_args, checks.get(group.id)
        rows.append(
            (
                group.id,
                _instance(group),
                number(group.replicas),
                number(group.replicas * group.tp),
                number(len(group.placed)),
                number(tables.group_rate_rps(group), 2),
                number(args.max_loras) if group.scheduling is None else DASH,
                number(args.max_lora_rank),
                number(args.max_num_seqs),
                number(predicted.kv_tokens),
                number(predicted.throughput_tok_s),
                DASH if len(shown := tables.throughput(predicted)) == 1 else shown[1].strip("()"),
                *tables.latency_cells(plan, group),
                percent(predicted.served_fraction),
                percent(predicted.load_over_capacity),
                DASH if check is None else passed if check.ok else page.bad("FAILED"),
            )
        )
    head = (*_HEAD, *tables.latency_heads(plan, ", "), *_LAST)
    return Table(head, rows, 2, "Latencies, throughput and KV tokens are those of one instance.")


def _instance(group: Group) -> str:
    gpus = f"{group.gpu} × {group.tp}" if group.tp > 1 else group.gpu
    return gpus if group.pool is None else f"{gpus}, pool {group.pool}"


def _what_binds(plan: Plan) -> page.Section:
    checks = {check.id: check for check in plan.verification.groups}
    changed = bool(plan.changed_after_verification())
    rows = [
        (group.id, tables.binding(plan, group), tables.verified(checks.get(group.id), changed=changed))
        for group in plan.groups
    ]
    return page.section("Bottlenecks", Table(("group", "binds", "verdict"), rows, numbers_from=None))


def _scheduling(groups: Sequence[Group]) -> list[page.Section]:
    facts: dict[str, Cell] = {group.id: words for group in groups if (words := scheduling_words(group))}
    if not facts:
        return []
    rows = [(group.id, *row) for group in groups if (table := sizes_table(group)) for row in table.rows]
    sizes = [Table(("group", *SIZES_HEAD), rows, numbers_from=2)] if rows else []
    return [page.section("Scheduler and cache", page.definitions(facts), *sizes)]


def _queues(groups: Sequence[Group]) -> list[page.Section]:
    rows = [
        (group.id, *row)
        for group in groups
        if group.queues is not None
        for row in queues_table(group.queues).rows
    ]
    if not rows:
        return []
    table = Table(("group", "size of request", "quota, tokens", "share"), rows, numbers_from=2)
    return [page.section("Queues", table)]


def _places(plan: Plan) -> dict[str, list[tuple[Group, float]]]:
    """Return the groups of every adapter, with its share there."""
    places: dict[str, list[tuple[Group, float]]] = {}
    for group in plan.groups:
        for adapter in group.placed:
            places.setdefault(adapter.name, []).append((group, adapter.share))
    return places


def _adapters(plan: Plan) -> page.Section:
    facts = plan.adapters
    rows = [
        (
            name,
            ", ".join(g.id if share == 1.0 else f"{g.id} ({percent(share)})" for g, share in places),
            number(facts[name].rank),
            number(facts[name].rate_rps, 4),
        )
        for name, places in _places(plan).items()
    ]
    based = [(group, group.base) for group in plan.groups if group.base is not None]
    if based:
        at = ", ".join(f"{g.id} ({percent(base.share)})" if base.share < 1 else g.id for g, base in based)
        rows.insert(0, (f"{plan.base_model} (base model)", at, DASH, number(based[0][1].rate_rps, 4)))
    table = Table(("adapter", "groups", "rank", "req/s"), rows, numbers_from=2)
    return page.section(
        "Adapters", page.folded(counted(len(facts), "adapter"), table, is_open=len(rows) <= _OPEN)
    )


def _moves(plan: Plan) -> list[page.Section]:
    if not plan.moves:
        return []
    rows = [
        (move.adapter, move.from_group or "newly placed", move.to_group or "taken away", percent(move.share))
        for move in plan.moves
    ]
    table = Table(("adapter", "from", "to", "share"), rows, numbers_from=3)
    return [page.section("Moves", page.folded(counted(len(plan.moves), "move"), table, is_open=True))]


_MOST_SHOWN: Final = 200.0
"""Largest utilization shown, in percent."""

_NAMED: Final = 12
"""Groups that a heading names."""


def explanation_sections(explanation: Explanation, slo: Slo) -> list[page.Section]:
    """Return the sections on slots, on utilization and headroom, and on other numbers of GPUs."""
    groups = explanation.groups
    slots = [part for group in groups for part in _slots(group, slo.latency_bounds())]
    rooms = [part for group in groups for part in (page.heading(_names(group)), *_room(group.room))]
    alike = "Groups with adapters and settings alike are shown once."
    has_slots = any(group.has_slots for group in groups)
    more = "More slots let more adapters run at once, but each takes KV memory and time in every step. "
    sections = [
        page.section(
            "Choice of A_max" if has_slots else "Choice of settings",
            *slots,
            intro=f"{more if has_slots else ''}The twin simulates one seed at "
            f"{tables.curve_load(groups[0].curve)}, the load without headroom, as in the search. {alike}",
        ),
        page.section(
            "Utilization and headroom",
            *rooms,
            intro="Means while steps run, at the planned load and slightly beyond the largest that holds. "
            f"Utilization of a bound is its metric over the bound. {alike}",
        ),
    ]
    if explanation.what_if:
        intro = (
            "Planned again by the solver capplan and verified on one seed. One fewer keeps the objective; "
            "one more is placed for the shortest mean E2E, because it would stay idle otherwise. Latencies "
            "are those of the slowest instance."
        )
        table = tables.what_if_table(explanation).text_second()
        sections.append(page.section("One GPU fewer or more", table, intro=intro))
    return sections


def _names(group: GroupExplanation) -> str:
    more = f" and {len(group.ids) - _NAMED} more" if len(group.ids) > _NAMED else ""
    return ", ".join(group.ids[:_NAMED]) + more


def _slots(group: GroupExplanation, bounds: Mapping[str, float]) -> list[page.Block | Table]:
    blocks: list[page.Block | Table] = [page.heading(_names(group)), page.paragraph(group.why_a_max)]
    if group.has_slots:
        blocks.append(page.charts(*_curve_charts(group.curve, bounds)))
        blocks.append(tables.curve_table(group.curve, " (chosen)").text_second())
    blocks += [tables.curve_table(curve, " (chosen)").text_second() for curve in group.knobs]
    if len(group.loading) > 1:
        blocks.append(tables.loading_table(group.loading, " (chosen)").text_second())
    if group.queues:
        blocks.append(tables.gains_table(group.queues))
    return blocks


def _curve_charts(curve: SlotCurve, bounds: Mapping[str, float]) -> list[Chart]:
    def chart(
        title: str, unit: str, height: Callable[[CurvePoint], float | None], limits: Mapping[str, float]
    ) -> Chart:
        known = [(point.value, at) for point in curve.points if (at := height(point)) is not None]
        heights = [at for _, at in known]
        return line_chart(
            title,
            [Curve("", [float(value) for value, _ in known], heights, marked=True)],
            _across(curve),
            Axis(f"{title}, {unit}", log=is_wide(heights)),
            bounds=limits,
            marks={f"chosen: {curve.chosen}": float(curve.chosen)},
            beyond=_out_of_memory(curve),
        )

    def kept(name: str) -> dict[str, float]:
        return {f"bound: {name} {bounds[name]:g}": bounds[name]} if name in bounds else {}

    offered = {"offered": curve.offered_tok_s}
    return [
        chart("Throughput", "tok/s", lambda point: point.throughput_tok_s, offered),
        chart("TTFT p99", "s", lambda point: point.ttft_p99_s, kept("ttft_p99_s")),
        chart("E2E mean", "s", lambda point: point.e2e_mean_s, kept("e2e_mean_s")),
        chart("Adapter loads", "per minute", lambda point: point.loads_per_min, {}),
    ]


def _across(curve: SlotCurve) -> Axis:
    """Return the axis of the slots, to the first number that does not fit."""
    slots = [float(point.value) for point in curve.points]
    return Axis(
        "A_max, slots", log=slots[-1] >= 8.0 * slots[0], low=slots[0], high=slots[-1], ticks=tuple(slots)
    )


def _out_of_memory(curve: SlotCurve) -> tuple[str, float] | None:
    if curve.most_slots is None:
        return None
    return f"no memory beyond {curve.most_slots}", float(max(1, curve.most_slots))


def _room(room: Headroom) -> list[page.Block | Table]:
    shares = {"at the planned load": [100.0 * or_nan(use.now) for use in room.uses]}
    if room.fails_at is not None:
        shares[f"at {tables.times(room.fails_at)}"] = [100.0 * or_nan(use.beyond) for use in room.uses]
    known = [share for each in shares.values() for share in each if share == share]
    high = min(_MOST_SHOWN, max([100.0, *known]))
    names = [use.name for use in room.uses]
    chart = bar_rows("In use, %", names, shares, Axis("", low=0.0, high=high), bounds={"full": 100.0})
    return [
        page.paragraph(f"{room.words[:1].upper()}{room.words[1:]}."),
        page.charts(chart),
        tables.room_table(room).text_second(),
    ]
