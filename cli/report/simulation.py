"""The HTML report of `capplan simulate`: metrics against adapter slots, their course, and who got what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from capplan.cli.console import DASH, counted, number, percent
from capplan.cli.report import page
from capplan.cli.report.figures import Axis, Chart, Curve, bounds_of, course_charts, is_wide, line_chart
from capplan.cli.simulate import Details, Outcomes, bound_text, share
from capplan.errors import InfeasibleError

if TYPE_CHECKING:
    from capplan.spec import Profile, Workload
    from capplan.twin import DetailedResult
    from capplan.twin.group_metrics import GroupMetrics

_COARSER: Final = 5  # buckets that make one point of a rate

MEANINGS: Final[Mapping[str, str]] = {
    "A_max": "adapter slots in GPU memory (vLLM --max-loras)",
    "throughput": "input and output tokens of requests completed within the horizon, per second",
    "offered": "input and output tokens of submitted requests, per second",
    "served": "tokens of completed over tokens of submitted requests; those in execution at the end are left "
    "out of both, those that wait or were rejected are not",
    "starved": "less than 90 % served",
    "TTFT": "time from arrival to the first token",
    "E2E": "time from arrival to the last token",
    "TPOT": "(E2E - TTFT) / (output tokens - 1), per request",
    "TPT": "E2E / output tokens, per request",
    "ITL": "gap between two tokens as a client sees it, every gap counting alike; its percentiles are over "
    "all requests and exact to half a percent",
    "slowdown": "E2E over the E2E of the same request alone on an idle engine with its adapter resident",
    "queueing": "time from arrival to the step that first computes something for the request, less the wait "
    "for its own adapter",
    "wait for loads": "adapter loads on the request's way to its first token: the wait for its own adapter, "
    "or loads inside its steps, which hold up all that is in them",
    "adapter was resident": "share of admissions that found the adapter in a GPU slot (hit rate)",
    "kept": "share of requests that kept a bound, of those that kept or broke it; a rejected request broke "
    "it, a request on its way did once it has taken longer",
    "p50, p90, p95, p99": "percentiles over completed requests, interpolated linearly",
}


def simulation_report(
    path: str,
    workload: Workload,
    profile: Profile,
    settings: Mapping[str, Any],
    outcomes: Outcomes,
    details: Details,
) -> str:
    """Return the report as one HTML document.

    Parameters
    ----------
    path : str
        Where the workload came from.
    workload, profile, settings
        What was simulated.
    outcomes, details
        Results by number of slots, and the details of those that fit.
    """
    rate = f"{len(workload.adapters)} adapters, {number(workload.total_rate_rps, 2)} requests/s"
    first = next(iter(details.values()))
    asked = (
        f"{number(first.result.submitted)} requests in {first.result.duration_s:g} s ask for "
        f"{number(first.result.offered_tok_s)} tokens/s, prompts and answers together."
    )
    bucket_s = first.series.bucket_s
    course = (
        f"Means over the time that steps ran, in buckets of {bucket_s:g} s; a step counts where it ends. "
        f"Rates, arrivals and step durations are shown over {_COARSER * bucket_s:g} s."
    )
    against = [_against_slots(workload, details)] if len(details) > 1 else []
    return page.page(
        f"Simulation of {path}",
        page.section("Summary", _summary_table(outcomes, details), *_infeasible(outcomes), intro=asked),
        *against,
        page.section("Over time", page.charts(*course_charts(details)), intro=course),
        page.section("Latencies", latency_table(details), intro="Requests completed within the horizon."),
        *([page.section("Service-level objectives", *slo_tables(details))] if first.slo else []),
        page.section("By rank", rank_table(details)),
        page.section("By adapter", *adapter_tables(details)),
        page.section("Definitions", page.definitions(MEANINGS)),
        page.section("Settings", settings_table(profile, settings)),
        subtitle=f"{rate}; one {profile.gpu.name} with {profile.model.name}, profile {profile.name}",
        cards=_cards(workload, profile, details),
    )


def _cards(workload: Workload, profile: Profile, details: Details) -> list[page.Card]:
    """Return the figures of the number of slots with the highest throughput."""
    slots = max(details, key=lambda count: details[count].result.throughput_tok_s)
    result = details[slots].result
    served = percent(result.served_fraction)
    bounds = workload.slo.latency_bounds()
    kind = profile.provenance.kind.value
    return [
        page.Card("A_max", str(slots), "highest throughput" if len(details) > 1 else "adapter slots"),
        page.Card(
            "Throughput",
            f"{number(result.throughput_tok_s)} tok/s",
            f"offered {number(result.offered_tok_s)}",
        ),
        page.Card("Tokens served", page.bad(served) if result.starved else page.good(served)),
        page.latency_card("TTFT p99", "ttft_p99_s", result.ttft_s_p99, bounds),
        page.latency_card("TPOT p99", "tpot_p99_ms", result.tpot_ms_p99, bounds),
        page.Card(
            "Profile", page.bad(kind) if kind == "roofline" else kind, f"{result.duration_s:g} s simulated"
        ),
    ]


def _summary_table(outcomes: Outcomes, details: Details) -> page.Block:
    head = ("A_max", "tok/s", "served", "starved", "TTFT p50, s", "TTFT p99, s")
    more = ("ITL mean, ms", "ITL p99, ms", "resident", "rejected", "preempted", "KV tokens")
    rows: list[tuple[page.Cell, ...]] = []
    for slots, outcome in outcomes.items():
        if isinstance(outcome, InfeasibleError):
            rows.append((str(slots), *[DASH] * (len(head) + len(more) - 1)))
            continue
        rows.append(
            (
                str(slots),
                number(outcome.throughput_tok_s),
                percent(outcome.served_fraction),
                page.bad("yes") if outcome.starved else page.good("no"),
                number(outcome.ttft_s_p50, 3),
                number(outcome.ttft_s_p99, 3),
                number(outcome.itl_ms_mean, 2),
                number(outcome.itl_ms_p99, 2),
                share(details[slots].overall.hit_rate),
                number(outcome.rejected),
                number(outcome.preemptions),
                number(outcome.kv_tokens),
            )
        )
    return page.table((*head, *more), rows)


def _infeasible(outcomes: Outcomes) -> list[page.Block]:
    return [
        page.paragraph(f"A_max {slots}: {outcome}")
        for slots, outcome in outcomes.items()
        if isinstance(outcome, InfeasibleError)
    ]


def _against_slots(workload: Workload, details: Details) -> page.Section:
    from capplan.spec import STARVED_BELOW

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

_STATISTICS: Final = ("mean", "p50", "p90", "p95", "p99")

_GOT: Final = (
    "submitted",
    "finished",
    "served",
    "tok/s",
    "TTFT p50, s",
    "TTFT p99, s",
    "TPOT p50, ms",
    "TPOT p99, ms",
    "ITL mean, ms",
    "slowdown p50",
    "queueing p50, s",
    "loads",
    "resident",
)


def latency_table(details: Details) -> page.Block:
    """Return mean and percentiles of every latency, by number of slots."""
    kinds = (
        ("TTFT, s", "ttft_s", 3),
        ("ITL, ms", "itl_ms", 2),
        ("TPOT, ms", "tpot_ms", 2),
        ("TPT, ms", "tpt_ms", 2),
        ("E2E, s", "e2e_s", 2),
        ("slowdown", "slowdown", 2),
        ("queueing, s", "queue_s", 3),
        ("wait for loads, s", "load_wait_s", 3),
    )
    rows = [
        (
            name if at == 0 else "",
            str(slots),
            *(number(_statistic(detail, kind, s), decimals) for s in _STATISTICS),
        )
        for name, kind, decimals in kinds
        for at, (slots, detail) in enumerate(details.items())
    ]
    return page.table(("latency", "A_max", *_STATISTICS), rows)


def _statistic(detail: DetailedResult, kind: str, statistic: str) -> float:
    flat = f"{kind}_{statistic}"
    known = detail.result if hasattr(detail.result, flat) else None
    value: float = (
        getattr(getattr(detail.overall, kind), statistic) if known is None else getattr(known, flat)
    )
    return value


def slo_tables(details: Details) -> list[page.Block]:
    """Return how each latency bound is kept, by number of slots."""
    rows = []
    for slots, detail in details.items():
        for bound in detail.slo:
            value = page.against_bound(bound.value, bound.limit, number(bound.value, 3))
            counts = (number(bound.kept), number(bound.broken), number(bound.open))
            rows.append(
                (bound_text(bound.bound, bound.limit), str(slots), value, share(bound.share), *counts)
            )
    rows.sort(key=lambda row: row[0])
    text = (
        "The value is the statistic that the bound is on, over completed requests. The share is that of "
        "single requests within the bound; it also counts those that were rejected or wait too long already."
    )
    head = ("bound", "A_max", "value", "requests that keep it", "kept", "broken", "open")
    return [page.paragraph(text), page.table(head, rows)]


def rank_table(details: Details) -> page.Block:
    """Return what the requests of each rank got, by number of slots."""
    rows = [
        (str(rank), str(slots), *_got(got))
        for slots, detail in details.items()
        for rank, got in detail.by_rank.items()
    ]
    rows.sort(key=lambda row: int(str(row[0])))
    return page.table(("rank", "A_max", *_GOT), rows, numbers_from=0)


def adapter_tables(details: Details) -> list[page.Block]:
    """Return what the requests of each adapter got, a table per number of slots, the worst served first."""
    return [
        page.folded(f"A_max {slots}", _adapter_table(detail), is_open=at == 0)
        for at, (slots, detail) in enumerate(details.items())
    ]


def _adapter_table(detail: DetailedResult) -> page.Block:
    asked = [got for got in detail.by_adapter.values() if got.submitted]
    asked.sort(key=lambda got: (got.served_fraction, -got.submitted))
    ranks = dict(zip(detail.requests.adapter.tolist(), detail.requests.rank.tolist(), strict=True))
    rank_of = {name: ranks.get(number) for number, name in enumerate(detail.requests.adapters)}
    rows = [(got.name, str(rank_of[got.name]), *_got(got)) for got in asked[:_ADAPTERS]]
    shown = f"the {len(rows)} worst served of" if len(rows) < len(asked) else "all of the"
    caption = f"{shown} {counted(len(asked), 'adapter')} with requests; --requests-out writes every request"
    return page.table(("adapter", "rank", *_GOT), rows, caption=caption)


def _got(got: GroupMetrics) -> tuple[page.Cell, ...]:
    served = percent(got.served_fraction)
    return (
        number(got.submitted),
        number(got.finished),
        page.bad(served) if got.starved else served,
        number(got.throughput_tok_s, 1),
        number(got.ttft_s.p50, 3),
        number(got.ttft_s.p99, 3),
        number(got.tpot_ms.p50, 2),
        number(got.tpot_ms.p99, 2),
        number(got.itl_ms_mean, 2),
        number(got.slowdown.p50, 2),
        number(got.queue_s.p50, 3),
        number(got.adapter_loads),
        share(got.hit_rate),
    )


def settings_table(profile: Profile, settings: Mapping[str, Any]) -> page.Block:
    """Return what was simulated: the settings that were given, and the profile's origin."""
    rows = [(name, str(value)) for name, value in settings.items() if value is not None]
    rows.append(("profile", profile.name))
    if settings.get("rules") is None:
        rows.append(("rules", profile.engine.rules))
    rows.append(
        ("where the profile is from", f"{profile.provenance.kind.value}: {profile.provenance.source}")
    )
    return page.table(("setting", "value"), rows, numbers_from=None)
