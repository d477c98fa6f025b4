"""The report of a plan: one HTML page that works offline."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from capplan.cli import html
from capplan.cli.bar_rows import bar_rows
from capplan.cli.charts import Axis
from capplan.cli.console import DASH, counted, number, percent
from capplan.cli.explain import MORE, binding, gpus_reason, verified
from capplan.cli.plan import group_rate_rps, verdict
from capplan.cli.plan_page_twin import explanation_sections
from capplan.cli.provenance import not_measured
from capplan.cli.queue_table import queue_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from capplan.planner.explaining import Explanation
    from capplan.spec import Group, Plan

_MOST_BARS: Final = 40
_OPEN: Final = 100
"""Adapters up to which their table is shown unfolded."""

_HEAD: Final = (
    *("group", "instances", "GPU", "adapters", "req/s", "A_max", "slot rank", "max_num_seqs", "KV tokens"),
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
    return html.page(
        f"Plan {path}",
        _summary(plan, explanation),
        html.section("Groups", _groups_table(plan), _group_charts(plan.groups)),
        _what_binds(plan),
        *twin,
        *_queues(plan.groups),
        _adapters(plan),
        *_moves(plan),
        html.section("Where it comes from", _provenance(plan)),
        html.section("What the terms mean", html.definitions(_MEANINGS)),
        subtitle=f"{plan.base_model} on {engine.name} {engine.version} (rules {engine.rules}); "
        f"made by {plan.created_by}",
    )


def _summary(plan: Plan, explanation: Explanation | None) -> html.Section:
    words = verdict(plan)
    price = plan.totals.usd_per_hour
    facts = {
        "GPUs": f"{gpus_reason(plan)}.",
        "verdict": html.good(words) if plan.verification.ok else html.bad(words),
        "objective": f"{plan.objective.value}; bounds: {_bounds(plan)}",
        "load": f"{counted(len(_places(plan)), 'adapter')} at "
        f"{number(sum(map(group_rate_rps, plan.groups)), 2)} req/s",
        **({} if price is None else {"price": f"{price:,.2f} USD per hour"}),
    }
    care = [html.paragraph(html.bad(line)) for line in not_measured(plan.provenance)]
    more = [] if explanation is not None else [html.paragraph(f"{MORE}.")]
    return html.section("Summary", *care, html.definitions(facts), *more)


def _bounds(plan: Plan) -> str:
    bounds = plan.slo.model_dump(mode="json", exclude_none=True)
    return ", ".join(f"{name} {value:g}" for name, value in bounds.items())


def _groups_table(plan: Plan) -> html.Html:
    checks = {check.id: check for check in plan.verification.groups}
    rows = []
    for group in plan.groups:
        predicted, args, check = group.predicted, group.engine_args, checks.get(group.id)
        rows.append(
            (
                group.id,
                number(group.replicas),
                _instance(group),
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
                DASH if check is None else html.good("yes") if check.ok else html.bad("FAILED"),
            )
        )
    return html.table(_HEAD, rows, caption="Latencies, throughput and KV tokens are those of one instance.")


def _instance(group: Group) -> str:
    gpus = f"{group.gpu} × {group.tp}" if group.tp > 1 else group.gpu
    return gpus if group.pool is None else f"{gpus}, pool {group.pool}"


def _group_charts(groups: Sequence[Group]) -> html.Html:
    shown = groups[:_MOST_BARS]
    names = [group.id for group in shown]
    note = f"the first {_MOST_BARS} groups" if len(groups) > len(shown) else ""
    loads = [100.0 * _or_nan(group.predicted.load_over_capacity) for group in shown]
    waits = [_or_nan(group.predicted.ttft_s.p99) for group in shown]
    gaps = [_or_nan(group.predicted.tpot_ms.p99) for group in shown]
    rates = [group.predicted.throughput_tok_s for group in shown]
    return html.charts(
        bar_rows("Load over capacity", names, {"": loads}, Axis("%"), bounds={"full": 100.0}, note=note),
        bar_rows("Throughput", names, {"": rates}, Axis("tok/s"), note=note),
        bar_rows("Time to first token", names, {"": waits}, Axis("TTFT p99, s"), note=note),
        bar_rows("Time per output token", names, {"": gaps}, Axis("TPOT p99, ms"), note=note),
    )


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _what_binds(plan: Plan) -> html.Section:
    checks = {check.id: check for check in plan.verification.groups}
    rows = ((group.id, binding(group), verified(checks.get(group.id))) for group in plan.groups)
    return html.section("What binds", html.table(("group", "binds", "verdict"), rows, numbers_from=None))


def _queues(groups: Sequence[Group]) -> list[html.Section]:
    rows = [
        (group.id, *row) for group in groups if group.queues is not None for row in queue_rows(group.queues)
    ]
    if not rows:
        return []
    table = html.table(("group", "size of request", "quota, tokens", "share"), rows, numbers_from=2)
    return [html.section("Queues", table)]


def _places(plan: Plan) -> dict[str, list[tuple[Group, float]]]:
    """Return the groups of every adapter, with its share there."""
    places: dict[str, list[tuple[Group, float]]] = {}
    for group in plan.groups:
        for adapter in group.adapters:
            places.setdefault(adapter.name, []).append((group, adapter.share))
    return places


def _adapters(plan: Plan) -> html.Section:
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
    table = html.table(("adapter", "groups", "rank", "req/s"), rows, numbers_from=2)
    return html.section(
        "Adapters", html.folded(counted(len(rows), "adapter"), table, is_open=len(rows) <= _OPEN)
    )


def _moves(plan: Plan) -> list[html.Section]:
    if not plan.moves:
        return []
    rows = (
        (move.adapter, move.from_group or "newly placed", move.to_group or "taken away", percent(move.share))
        for move in plan.moves
    )
    table = html.table(("adapter", "from", "to", "share"), rows, numbers_from=3)
    return [html.section("Moves", html.folded(counted(len(plan.moves), "move"), table, is_open=True))]


def _provenance(plan: Plan) -> html.Html:
    return html.definitions({key: _compact(value) for key, value in plan.provenance.items()})


def _compact(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
