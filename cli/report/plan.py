"""The report of a plan: one HTML page that works offline."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, TypeVar

from capplan.cli.console import DASH, counted, number, percent
from capplan.cli.explain import (
    CURVE_HEAD,
    MORE,
    OUTCOME_HEAD,
    binding,
    gpus_reason,
    point_cells,
    queue_rows,
    room_head,
    room_rows,
    times,
    verified,
    what_if_rows,
)
from capplan.cli.options import not_measured
from capplan.cli.plan import group_rate_rps, verdict
from capplan.cli.report import page
from capplan.cli.report.figures import Axis, Chart, Curve, bar_rows, is_wide, line_chart, plan_charts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from capplan.planner.explain import CurvePoint, Explanation, GroupExplanation, Headroom, SlotCurve
    from capplan.spec import Group, Plan, Slo

_OPEN: Final = 100
"""Adapters up to which their table is shown unfolded."""

_HEAD: Final = (
    *("group", "GPU", "instances", "adapters", "req/s", "A_max", "slot rank", "max num seqs", "KV tokens"),
    *("tok/s", "interval", "TTFT p99, s", "TPOT p99, ms", "served", "load / capacity", "verified"),
)

_MEANINGS: Final = {
    "A_max": "adapter slots in GPU memory (vLLM --max-loras); each takes memory that KV could use",
    "tok/s": "input and output tokens of completed requests per second, of one instance",
    "served": "tokens of completed over tokens of submitted requests, those in execution left out of both",
    "TTFT": "time from arrival to the first token",
    "TPOT": "(E2E - TTFT) / (output tokens - 1)",
    "E2E": "time from arrival to the last token",
    "ITL": "time between two tokens as a client sees it",
    "load / capacity": "planned load over the largest multiple of it that an instance holds",
    "lower bound": "no plan that keeps the bounds and the headroom uses fewer GPUs",
    "compute, at least": "share of the time that the load takes if requests are divisible and batches full",
    "holds": "the twin finds every bound of the workload kept",
}


def plan_page(path: str, plan: Plan, explanation: Explanation | None) -> str:
    """Return the report.

    Parameters
    ----------
    path
        Where the plan came from.
    plan
        What it says.
    explanation
        What the twin adds to it; None when it was not asked.
    """
    engine = plan.engine
    twin = [] if explanation is None else explanation_sections(explanation, plan.slo)
    return page.page(
        f"Plan {path}",
        _summary(plan, explanation),
        page.section("Groups", _groups_table(plan), page.charts(*plan_charts(plan))),
        _what_binds(plan),
        *twin,
        *_queues(plan.groups),
        _adapters(plan),
        *_moves(plan),
        page.section("Provenance", _provenance(plan)),
        page.section("Definitions", page.definitions(_MEANINGS)),
        subtitle=f"{plan.base_model} on {engine.name} {engine.version} (rules {engine.rules}); "
        f"made by {plan.created_by}",
        cards=_cards(plan),
    )


def _cards(plan: Plan) -> list[page.Card]:
    totals, check, bounds = plan.totals, plan.verification, plan.slo.latency_bounds()
    cards = [page.Card("GPUs", str(totals.gpus), f"lower bound {totals.lower_bound_gpus}")]
    if totals.usd_per_hour is not None:
        cards.append(page.Card("Cost", f"{totals.usd_per_hour:,.2f} USD/h", f"{totals.gpus} GPUs"))
    for label, key in (("Worst TTFT p99", "ttft_p99_s"), ("Worst TPOT p99", "tpot_p99_ms")):
        metric = f"{key.split('_')[0]}_{key.split('_')[2]}"
        known = [getattr(group.predicted, metric).p99 for group in plan.groups]
        worst = max((value for value in known if value is not None), default=None)
        cards.append(page.latency_card(label, key, worst, bounds))
    trust = page.good("verified") if check.ok else page.bad("NOT VERIFIED")
    note = f"{counted(len(check.seeds), 'seed')}, {percent(check.min_served_fraction)} served"
    if not_measured(plan.provenance):
        note += "; profile not measured"
    return [*cards, page.Card("Digital twin", trust, note if check.seeds else "not run")]


def _summary(plan: Plan, explanation: Explanation | None) -> page.Section:
    words = verdict(plan)
    price = plan.totals.usd_per_hour
    facts: dict[str, page.Cell] = {
        "GPUs": f"{gpus_reason(plan)}.",
        "verdict": page.good(words) if plan.verification.ok else page.bad(words),
        "objective": f"{plan.objective.value}; bounds: {_bounds(plan)}",
        "load": f"{counted(len(_places(plan)), 'adapter')} at "
        f"{number(sum(map(group_rate_rps, plan.groups)), 2)} req/s",
        **({} if price is None else {"price": f"{price:,.2f} USD per hour"}),
    }
    care = [page.paragraph(page.bad(line)) for line in not_measured(plan.provenance)]
    more = [] if explanation is not None else [page.paragraph(f"{MORE}.")]
    return page.section("Summary", *care, page.definitions(facts), *more)


def _bounds(plan: Plan) -> str:
    bounds = plan.slo.model_dump(mode="json", exclude_none=True)
    return ", ".join(f"{name} {value:g}" for name, value in bounds.items())


def _groups_table(plan: Plan) -> page.Block:
    checks = {check.id: check for check in plan.verification.groups}
    rows = []
    for group in plan.groups:
        predicted, args, check = group.predicted, group.engine_args, checks.get(group.id)
        rows.append(
            (
                group.id,
                _instance(group),
                number(group.replicas),
                number(len(group.adapters)),
                number(group_rate_rps(group), 2),
                number(args.max_loras),
                number(args.max_lora_rank),
                number(args.max_num_seqs),
                number(predicted.kv_tokens),
                number(predicted.throughput_tok_s),
                f"{number(predicted.low_tok_s)}..{number(predicted.high_tok_s)}",
                number(predicted.ttft_s.p99, 2),
                number(predicted.tpot_ms.p99, 1),
                percent(predicted.served_fraction),
                percent(predicted.load_over_capacity),
                DASH if check is None else page.good("yes") if check.ok else page.bad("FAILED"),
            )
        )
    return page.table(
        _HEAD, rows, caption="Latencies, throughput and KV tokens are those of one instance.", numbers_from=2
    )


def _instance(group: Group) -> str:
    gpus = f"{group.gpu} × {group.tp}" if group.tp > 1 else group.gpu
    return gpus if group.pool is None else f"{gpus}, pool {group.pool}"


def _what_binds(plan: Plan) -> page.Section:
    checks = {check.id: check for check in plan.verification.groups}
    rows = ((group.id, binding(group), verified(checks.get(group.id))) for group in plan.groups)
    return page.section("Bottlenecks", page.table(("group", "binds", "verdict"), rows, numbers_from=None))


def _queues(groups: Sequence[Group]) -> list[page.Section]:
    rows = [
        (group.id, *row) for group in groups if group.queues is not None for row in queue_rows(group.queues)
    ]
    if not rows:
        return []
    table = page.table(("group", "size of request", "quota, tokens", "share"), rows, numbers_from=2)
    return [page.section("Queues", table)]


def _places(plan: Plan) -> dict[str, list[tuple[Group, float]]]:
    """Return the groups of every adapter, with its share there."""
    places: dict[str, list[tuple[Group, float]]] = {}
    for group in plan.groups:
        for adapter in group.adapters:
            places.setdefault(adapter.name, []).append((group, adapter.share))
    return places


def _adapters(plan: Plan) -> page.Section:
    facts = {adapter.name: adapter for group in plan.groups for adapter in group.adapters}
    rows = [
        (
            name,
            ", ".join(g.id if share == 1.0 else f"{g.id} ({percent(share)})" for g, share in places),
            number(facts[name].rank),
            number(facts[name].rate_rps, 4),
        )
        for name, places in _places(plan).items()
    ]
    table = page.table(("adapter", "groups", "rank", "req/s"), rows, numbers_from=2)
    return page.section(
        "Adapters", page.folded(counted(len(rows), "adapter"), table, is_open=len(rows) <= _OPEN)
    )


def _moves(plan: Plan) -> list[page.Section]:
    if not plan.moves:
        return []
    rows = (
        (move.adapter, move.from_group or "newly placed", move.to_group or "taken away", percent(move.share))
        for move in plan.moves
    )
    table = page.table(("adapter", "from", "to", "share"), rows, numbers_from=3)
    return [page.section("Moves", page.folded(counted(len(plan.moves), "move"), table, is_open=True))]


def _provenance(plan: Plan) -> page.Block:
    return page.definitions({key: _compact(value) for key, value in plan.provenance.items()})


def _compact(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_T = TypeVar("_T")
_MOST_SHOWN: Final = 200.0
"""Where bars of what is in use end, in percent."""

_NAMED: Final = 12
"""Groups that a heading names."""


def explanation_sections(explanation: Explanation, slo: Slo) -> list[page.Section]:
    """Return the sections on slots, on what is in use, and on other numbers of GPUs."""
    groups = explanation.groups
    slots = [part for group in groups for part in _slots(group, slo.latency_bounds())]
    rooms = [part for group in groups for part in (page.heading(_names(group)), *_room(group.room))]
    alike = "Groups with adapters and settings alike are shown once."
    sections = [
        page.section(
            "Choice of A_max",
            *slots,
            intro="More slots let more adapters run at once, but each takes KV memory and time in every "
            f"step. The twin simulates one seed at {times(groups[0].curve.scale)}, which uses up the "
            f"headroom, as in the search. {alike}",
        ),
        page.section(
            "Utilization and headroom",
            *rooms,
            intro="Means while steps run, at the planned load and a little beyond the largest that holds. A "
            f"bound is in use by as much as its metric has of it. {alike}",
        ),
    ]
    if explanation.what_if:
        rows = (_words_second(row) for row in what_if_rows(explanation))
        table = page.table(_words_second(("", *OUTCOME_HEAD)), rows, numbers_from=2)
        words = (
            "Planned anew by the solver capplan and verified on one seed. One fewer keeps the objective; one "
            "more is placed for the shortest mean time to the last token: otherwise it would stay idle. "
            "Latencies are those of the instance where they are longest."
        )
        sections.append(page.section("One GPU fewer or more", table, intro=words))
    return sections


def _names(group: GroupExplanation) -> str:
    more = f" and {len(group.ids) - _NAMED} more" if len(group.ids) > _NAMED else ""
    return ", ".join(group.ids[:_NAMED]) + more


def _slots(group: GroupExplanation, bounds: Mapping[str, float]) -> list[page.Block]:
    curve = group.curve
    rows: list[tuple[page.Cell, ...]] = [
        (
            page.Mark(f"{cells[0]} (chosen)", "strong") if point.a_max == curve.chosen else cells[0],
            *cells[1:],
        )
        for point, cells in ((point, point_cells(point)) for point in curve.points)
    ]
    return [
        page.heading(_names(group)),
        page.paragraph(group.why_a_max),
        page.charts(*_curve_charts(curve, bounds)),
        page.table(_words_second(CURVE_HEAD), map(_words_second, rows), numbers_from=2),
    ]


def _curve_charts(curve: SlotCurve, bounds: Mapping[str, float]) -> list[Chart]:
    def chart(
        title: str, unit: str, value: Callable[[CurvePoint], float | None], limits: Mapping[str, float]
    ) -> Chart:
        known = [(point.a_max, at) for point in curve.points if (at := value(point)) is not None]
        heights = [at for _, at in known]
        return line_chart(
            title,
            [Curve("", [float(a_max) for a_max, _ in known], heights, marked=True)],
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
    slots = [float(point.a_max) for point in curve.points]
    return Axis(
        "A_max, slots", log=slots[-1] >= 8.0 * slots[0], low=slots[0], high=slots[-1], ticks=tuple(slots)
    )


def _out_of_memory(curve: SlotCurve) -> tuple[str, float] | None:
    if curve.most_slots is None:
        return None
    return f"no memory beyond {curve.most_slots}", float(max(1, curve.most_slots))


def _room(room: Headroom) -> list[page.Block]:
    shares = {"at the planned load": [_percent(use.now) for use in room.uses]}
    if room.fails_at is not None:
        shares[f"at {times(room.fails_at)}"] = [_percent(use.beyond) for use in room.uses]
    known = [share for each in shares.values() for share in each if share == share]
    high = min(_MOST_SHOWN, max([100.0, *known]))
    names = [use.name for use in room.uses]
    chart = bar_rows("In use, %", names, shares, Axis("", low=0.0, high=high), bounds={"full": 100.0})
    rows = map(_words_second, room_rows(room))
    return [
        page.paragraph(f"{room.words[:1].upper()}{room.words[1:]}."),
        page.charts(chart),
        page.table(_words_second(room_head(room)), rows, numbers_from=2),
    ]


def _words_second(row: Sequence[_T]) -> tuple[_T, ...]:
    """Return a row with its last cell, a sentence, before the numbers, so that these stay together."""
    return (row[0], row[-1], *row[1:-1])


def _percent(share: float | None) -> float:
    return float("nan") if share is None else 100.0 * share
