"""The HTML report of `capplan simulate`: metrics against adapter slots and over time, by rank and adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from capplan.errors import InfeasibleError
from capplan.reports._console import DASH, Cell, Table, counted, number, percent
from capplan.reports.pages import _page as page
from capplan.reports.pages._figures import (
    COARSER,
    STATISTICS,
    Axis,
    Chart,
    Curve,
    bounds_of,
    course_charts,
    is_wide,
    line_chart,
)
from capplan.reports.tables._simulation import Details, Outcomes, bound_text
from capplan.spec import STARVED_BELOW

if TYPE_CHECKING:
    from capplan.spec import Cache, Profile, Scheduler, Workload
    from capplan.twin import DetailedResult
    from capplan.twin.instance import GroupMetrics

_TERMS: Final = {
    **page.terms("A_max", "throughput", "offered", "served", "starved", "TTFT", "E2E", "TPOT", "TPT", "ITL"),
    "slowdown": "E2E over the E2E of the same request alone on an idle engine with its adapter resident",
    "queueing": "time from arrival to the first step that computes a part of the request, less the wait for "
    "its own adapter",
    "wait for loads": "adapter loads before the first token: the wait for the request's own adapter, or "
    "loads inside its steps, which delay all requests of the step",
    "adapter was resident": "share of admissions that found the adapter in a GPU slot (hit rate)",
    "kept": "share of requests within a bound, of those that kept or broke it; a rejected request broke it, "
    "an unfinished one did if it already took longer",
    "p50, p90, p95, p99": "percentiles over completed requests, interpolated linearly; of ITL, exact to half "
    "a percent",
}

_POOL_TERMS: Final = {
    **{term: words for term, words in _TERMS.items() if term != "A_max"},
    "adapter was resident": "share of first admissions that found the adapter in GPU memory (hit rate)",
}
"""Terms where adapters and KV share the memory."""


@dataclass(frozen=True)
class NamedResults:
    """Results by number of slots; under a scheduler or a cache, which have none, there is one."""

    outcomes: Outcomes
    details: Details
    """Of the numbers of slots that fit."""
    pair: tuple[Scheduler, Cache] | None = None
    """Scheduler and cache; None: adapters are in slots."""

    @property
    def kind(self) -> str:
        """What tells the results apart."""
        return "A_max" if self.pair is None else "scheduler, cache"

    def name(self, slots: int) -> str:
        """Return the name of a result."""
        return str(slots) if self.pair is None else f"{self.pair[0].name}, {self.pair[1].policy}"


def simulation_page(
    path: str,
    workload: Workload,
    profile: Profile,
    settings: Mapping[str, Any],
    results: NamedResults,
    extrapolations: Sequence[str] = (),
) -> str:
    """Return the report as one HTML document.

    Parameters
    ----------
    path : str
        File or name of the workload.
    workload, profile, settings
        Input of the simulation.
    results
        Results and their names.
    extrapolations
        A line for each.
    """
    details = results.details
    rate = f"{len(workload.adapters)} adapters, {number(workload.total_rate_rps, 2)} requests/s"
    first = next(iter(details.values()))
    offered = (
        f"{number(first.result.submitted)} requests in {first.result.duration_s:g} s ask for "
        f"{number(first.result.offered_tok_s)} tokens/s, prompts and outputs together."
    )
    bucket_s = first.series.bucket_s
    course = (
        f"Means over the time that steps ran, in buckets of {bucket_s:g} s; a step counts where it ends. "
        f"Rates, arrivals and step durations are shown over {COARSER * bucket_s:g} s."
    )
    infeasible = [
        page.paragraph(f"{results.kind} {results.name(slots)}: {outcome}")
        for slots, outcome in results.outcomes.items()
        if isinstance(outcome, InfeasibleError)
    ]
    care = [page.paragraph(page.bad(line)) for line in extrapolations]
    origin = {"where the profile is from": f"{profile.provenance.kind.value}: {profile.provenance.source}"}
    rules = {} if settings.get("rules") else {"rules": profile.engine.rules}
    return page.page(
        f"Simulation of {path}",
        page.section("Summary", _summary_table(results), *infeasible, *care, intro=offered),
        *([_against_slots(workload, details)] if len(details) > 1 else []),
        page.section("Over time", page.charts(*course_charts(details)), intro=course),
        page.section("Latencies", _latency_table(results), intro="Requests completed within the horizon."),
        *([_slo_section(results)] if first.slo else []),
        page.section("By rank", _rank_table(results)),
        page.section("By adapter", *_adapter_tables(results)),
        page.section(
            "Settings", page.settings_table({**settings, "profile": profile.name, **rules, **origin})
        ),
        subtitle=f"{rate}; one {profile.gpu.name} with {profile.model.name}, profile {profile.name}",
        cards=_cards(workload, profile, results),
        terms=_TERMS if results.pair is None else _POOL_TERMS,
    )


def _cards(workload: Workload, profile: Profile, results: NamedResults) -> list[page.Card]:
    """Return the figures of the number of slots with the highest throughput."""
    details = results.details
    slots = max(details, key=lambda count: details[count].result.throughput_tok_s)
    result = details[slots].result
    bounds = workload.slo.latency_bounds()
    kind = profile.provenance.kind.value
    return [
        page.Card("A_max", str(slots), "highest throughput" if len(details) > 1 else "adapter slots")
        if results.pair is None
        else page.Card("Scheduler", results.pair[0].name, f"cache {results.pair[1].policy}"),
        page.Card(
            "Throughput",
            f"{number(result.throughput_tok_s)} tok/s",
            f"offered {number(result.offered_tok_s)}",
        ),
        page.served_card(result.served_fraction, starved=result.starved),
        page.latency_card("TTFT p99", "ttft_p99_s", result.ttft_s_p99, bounds),
        page.latency_card("TPOT p99", "tpot_p99_ms", result.tpot_ms_p99, bounds),
        page.Card(
            "Profile", page.bad(kind) if kind == "roofline" else kind, f"{result.duration_s:g} s simulated"
        ),
    ]


def _summary_table(results: NamedResults) -> Table:
    head = (
        *(results.kind, "tok/s", "served", "starved", "TTFT p50, s", "TTFT p99, s", "ITL mean, ms"),
        *("ITL p99, ms", "resident", "rejected", "preempted", "KV tokens"),
    )
    rows: list[tuple[Cell, ...]] = []
    for slots, outcome in results.outcomes.items():
        if isinstance(outcome, InfeasibleError):
            rows.append((results.name(slots), *[DASH] * (len(head) - 1)))
            continue
        rows.append(
            (
                results.name(slots),
                number(outcome.throughput_tok_s),
                percent(outcome.served_fraction),
                page.bad("yes") if outcome.starved else page.good("no"),
                number(outcome.ttft_s_p50, 3),
                number(outcome.ttft_s_p99, 3),
                number(outcome.itl_ms_mean, 2),
                number(outcome.itl_ms_p99, 2),
                percent(results.details[slots].overall.hit_rate),
                number(outcome.rejected),
                number(outcome.preemptions),
                number(outcome.kv_tokens),
            )
        )
    return Table(head, rows)


def _against_slots(workload: Workload, details: Details) -> page.Section:
    slots = sorted(details)
    results = [details[count].result for count in slots]
    spread = slots[-1] / slots[0]
    across = Axis("A_max, slots", log=spread >= 8, ticks=tuple(float(count) for count in slots))
    bounds = workload.slo.latency_bounds()

    def chart(title: str, unit: str, metrics: Mapping[str, str], limits: Mapping[str, float]) -> Chart:
        curves = [
            Curve(name, slots, [getattr(result, metric) for result in results], marked=True)
            for name, metric in metrics.items()
        ]
        log = unit in ("s", "ms") and is_wide([y for curve in curves for y in curve.y])
        return line_chart(title, curves, across, Axis(f"{title}, {unit}", log=log), bounds=limits)

    def latency(name: str, metric: str, unit: str) -> Chart:
        statistics = {s: f"{metric}_{unit}_{s}" for s in ("mean", "p50", "p90", "p99")}
        return chart(name, unit, statistics, bounds_of(bounds, metric))

    tokens = {"throughput": "throughput_tok_s", "offered": "offered_tok_s"}
    starved = {"starved below": STARVED_BELOW}
    hits = [Curve("", slots, [details[count].overall.hit_rate for count in slots], marked=True)]
    share_axis = Axis("share of admissions", low=0.0, high=1.0)
    return page.section(
        "Against A_max",
        page.charts(
            chart("Throughput", "tokens/s", tokens, {}),
            chart("Served fraction", "share of tokens", {"": "served_fraction"}, starved),
            latency("ITL", "itl", "ms"),
            latency("TTFT", "ttft", "s"),
            latency("TPOT", "tpot", "ms"),
            latency("E2E", "e2e", "s"),
            line_chart("Adapter was resident", hits, across, share_axis),
            chart("KV capacity", "tokens", {"": "kv_tokens"}, {}),
            chart("Running, mean while busy", "requests", {"": "running_mean"}, {}),
            chart("Waiting, mean while busy", "requests", {"": "waiting_mean"}, {}),
        ),
        intro="More slots let more adapters run at once, but each takes KV memory and time in every step.",
    )


_ADAPTERS: Final = 50  # rows of a table of adapters

_LATENCIES: Final = (
    ("TTFT, s", "ttft_s", 3),
    ("ITL, ms", "itl_ms", 2),
    ("TPOT, ms", "tpot_ms", 2),
    ("TPT, ms", "tpt_ms", 2),
    ("interruptions", "interruption_count", 1),
    ("interrupted share of E2E", "interruption_share", 3),
    ("E2E, s", "e2e_s", 2),
    ("slowdown", "slowdown", 2),
    ("queueing, s", "queue_s", 3),
    ("wait for loads, s", "load_wait_s", 3),
)


def _latency_table(results: NamedResults) -> Table:
    rows = [
        (
            name if at == 0 else "",
            results.name(slots),
            *(number(_statistic(detail, kind, s), decimals) for s in STATISTICS),
        )
        for name, kind, decimals in _LATENCIES
        for at, (slots, detail) in enumerate(results.details.items())
    ]
    return Table(("latency", results.kind, *STATISTICS), rows)


def _statistic(detail: DetailedResult, kind: str, statistic: str) -> float:
    flat = f"{kind}_{statistic}"
    has_flat = hasattr(detail.result, flat)
    value: float = (
        getattr(detail.result, flat) if has_flat else getattr(getattr(detail.overall, kind), statistic)
    )
    return value


def _slo_section(results: NamedResults) -> page.Section:
    rows = [
        (
            bound_text(bound.bound, bound.limit),
            results.name(slots),
            page.against_bound(bound.value, bound.limit, number(bound.value, 3)),
            percent(bound.share),
            *(number(count) for count in (bound.kept, bound.broken, bound.open)),
        )
        for slots, detail in results.details.items()
        for bound in detail.slo
    ]
    rows.sort(key=lambda row: str(row[0]))
    intro = (
        "The value is the statistic of the bound over completed requests. The share is that of single "
        "requests within the bound; it includes rejected requests and those that already wait too long."
    )
    head = ("bound", results.kind, "value", "requests that keep it", "kept", "broken", "open")
    return page.section("Service-level objectives", Table(head, rows), intro=intro)


_GROUP_HEAD: Final = (
    *("submitted", "finished", "served", "tok/s", "TTFT p50, s", "TTFT p99, s", "TPOT p50, ms"),
    *("TPOT p99, ms", "ITL mean, ms", "slowdown p50", "queueing p50, s", "loads", "resident"),
)


def _group_cells(group: GroupMetrics) -> tuple[Cell, ...]:
    served = percent(group.served_fraction)
    return (
        number(group.submitted),
        number(group.finished),
        page.bad(served) if group.starved else served,
        number(group.throughput_tok_s, 1),
        number(group.ttft_s.p50, 3),
        number(group.ttft_s.p99, 3),
        number(group.tpot_ms.p50, 2),
        number(group.tpot_ms.p99, 2),
        number(group.itl_ms_mean, 2),
        number(group.slowdown.p50, 2),
        number(group.queue_s.p50, 3),
        number(group.adapter_loads),
        percent(group.hit_rate),
    )


def _rank_table(results: NamedResults) -> Table:
    ranks = sorted({rank for detail in results.details.values() for rank in detail.by_rank})
    rows = [
        (str(rank), results.name(slots), *_group_cells(detail.by_rank[rank]))
        for rank in ranks
        for slots, detail in results.details.items()
        if rank in detail.by_rank
    ]
    return Table(("rank", results.kind, *_GROUP_HEAD), rows, numbers_from=0)


def _adapter_tables(results: NamedResults) -> list[page.Block]:
    """Return the metrics of each adapter, a table per number of slots, the worst served first."""
    return [
        page.folded(f"{results.kind} {results.name(slots)}", _adapter_table(detail), is_open=at == 0)
        for at, (slots, detail) in enumerate(results.details.items())
    ]


def _adapter_table(detail: DetailedResult) -> Table:
    groups = [group for group in detail.by_adapter.values() if group.submitted]
    groups.sort(key=lambda group: (group.served_fraction, -group.submitted))
    ranks = dict(zip(detail.requests.adapter.tolist(), detail.requests.rank.tolist(), strict=True))
    rank_of = {name: ranks.get(index) for index, name in enumerate(detail.requests.adapters)}
    rows = [(group.name, str(rank_of[group.name]), *_group_cells(group)) for group in groups[:_ADAPTERS]]
    shown = f"the {len(rows)} worst served of" if len(rows) < len(groups) else "all of the"
    caption = f"{shown} {counted(len(groups), 'adapter')} with requests; --requests-out writes every request"
    return Table(("adapter", "rank", *_GROUP_HEAD), rows, caption=caption)
