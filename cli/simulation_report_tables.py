"""The tables of the report of `capplan simulate`: latencies, objectives, ranks, adapters, settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from capplan.cli import html
from capplan.cli.console import counted, number, percent
from capplan.cli.simulation_tables import Details, bound_text, share

if TYPE_CHECKING:
    from capplan.spec import Profile
    from capplan.twin import DetailedResult
    from capplan.twin.groups import GroupMetrics

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


def latency_table(details: Details) -> html.Html:
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
    return html.table(("latency", "A_max", *_STATISTICS), rows)


def _statistic(detail: DetailedResult, kind: str, statistic: str) -> float:
    flat = f"{kind}_{statistic}"
    known = detail.result if hasattr(detail.result, flat) else None
    value: float = (
        getattr(getattr(detail.overall, kind), statistic) if known is None else getattr(known, flat)
    )
    return value


def slo_tables(details: Details) -> list[html.Html]:
    """Return how each latency bound is kept, by number of slots."""
    rows = []
    for slots, detail in details.items():
        for bound in detail.slo:
            value = number(bound.value, 3)
            if bound.value > bound.limit:
                value = html.bad(value)
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
    return [html.paragraph(text), html.table(head, rows)]


def rank_table(details: Details) -> html.Html:
    """Return what the requests of each rank got, by number of slots."""
    rows = [
        (str(rank), str(slots), *_got(got))
        for slots, detail in details.items()
        for rank, got in detail.by_rank.items()
    ]
    rows.sort(key=lambda row: int(row[0]))
    return html.table(("rank", "A_max", *_GOT), rows, numbers_from=0)


def adapter_tables(details: Details) -> list[html.Html]:
    """Return what the requests of each adapter got, a table per number of slots, the worst served first."""
    return [
        html.folded(f"A_max {slots}", _adapter_table(detail), is_open=at == 0)
        for at, (slots, detail) in enumerate(details.items())
    ]


def _adapter_table(detail: DetailedResult) -> html.Html:
    asked = [got for got in detail.by_adapter.values() if got.submitted]
    asked.sort(key=lambda got: (got.served_fraction, -got.submitted))
    ranks = dict(zip(detail.requests.adapter.tolist(), detail.requests.rank.tolist(), strict=True))
    rank_of = {name: ranks.get(number) for number, name in enumerate(detail.requests.adapters)}
    rows = [(got.name, str(rank_of[got.name]), *_got(got)) for got in asked[:_ADAPTERS]]
    shown = f"the {len(rows)} worst served of" if len(rows) < len(asked) else "all of the"
    caption = f"{shown} {counted(len(asked), 'adapter')} with requests; --requests-out writes every request"
    return html.table(("adapter", "rank", *_GOT), rows, caption=caption)


def _got(got: GroupMetrics) -> tuple[str, ...]:
    served = percent(got.served_fraction)
    return (
        number(got.submitted),
        number(got.finished),
        html.bad(served) if got.starved else served,
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


def settings_table(profile: Profile, settings: Mapping[str, Any]) -> html.Html:
    """Return what was simulated: the settings that were given, and the profile's origin."""
    rows = [(name, str(value)) for name, value in settings.items() if value is not None]
    rows.append(("profile", profile.name))
    if settings.get("rules") is None:
        rows.append(("rules", profile.engine.rules))
    rows.append(
        ("where the profile is from", f"{profile.provenance.kind.value}: {profile.provenance.source}")
    )
    return html.table(("setting", "value"), rows, numbers_from=None)
