"""What a load test says, as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from capplan.cli.console import counted, number, percent, print_table, table

if TYPE_CHECKING:
    from capplan.profiling.load.result import BenchResult, LoadMetrics

STATISTICS: Final = ("mean", "p50", "p90", "p95", "p99")
LATENCIES: Final = (
    ("TTFT from due, s", "ttft_s", 3),
    ("TTFT from sent, s", "ttft_sent_s", 3),
    ("ITL, ms", "itl_ms", 2),
    ("TPOT, ms", "tpot_ms", 2),
    ("TPT, ms", "tpt_ms", 2),
    ("E2E, s", "e2e_s", 2),
)
_ADAPTERS: Final = 20


def show(result: BenchResult) -> None:
    """Print a result."""
    overall = result.overall
    rows = table("metric", "value", numbers_from=1)
    for name, value in facts(overall).items():
        rows.add_row(name, value)
    print_table(rows)
    latencies = table("latency", *STATISTICS, numbers_from=1)
    for name, field, decimals in LATENCIES:
        stats = getattr(overall, field)
        latencies.add_row(name, *(number(getattr(stats, s), decimals) for s in STATISTICS))
    lag = result.client.lag_ms
    latencies.add_row("client lag, ms", *(number(getattr(lag, s), 2) for s in STATISTICS))
    print_table(latencies)
    if 1 < len(result.adapters) <= _ADAPTERS:
        adapters = table(*ADAPTER_HEAD, numbers_from=1)
        for each in result.adapters:
            adapters.add_row(each.name or "(base model)", *adapter_cells(each))
        print_table(adapters)


ADAPTER_HEAD: Final = ("adapter", "submitted", "completed", "served", "tok/s", "TTFT p50, s", "ITL mean, ms")


def adapter_cells(each: LoadMetrics) -> tuple[str, ...]:
    """Return the row of an adapter, its name left out."""
    return (
        number(each.submitted),
        number(each.completed),
        percent(each.served_fraction),
        number(each.throughput_tok_s, 1),
        number(each.ttft_s.p50, 3),
        number(each.itl_ms.mean, 2),
    )


def facts(overall: LoadMetrics) -> dict[str, str]:
    """Return the numbers that are no latencies, in words."""
    return {
        "throughput, tok/s": number(overall.throughput_tok_s, 1),
        "offered, tok/s": number(overall.offered_tok_s, 1),
        "input, tok/s": number(overall.input_tok_s, 1),
        "output, tok/s": number(overall.output_tok_s, 1),
        "completed in the window": number(overall.completed),
        "submitted": number(overall.submitted),
        "failed": number(overall.failed),
        "rejected": number(overall.rejected),
        "executing at the end": number(overall.executing),
        "waiting at the end": number(overall.waiting),
        "served": percent(overall.served_fraction),
        "starved": "yes" if overall.starved else "no",
        "mean time between tokens, ms": number(overall.token_gap_ms_mean, 2),
    }


def warnings(result: BenchResult) -> list[str]:
    """Return what speaks against the result, a line each."""
    lines = []
    for each in result.failures:
        told = f": {' '.join(each.message.split())}" if each.message else ""
        lines.append(f"failed: {counted(each.requests, 'request')} with {each.kind}{told}")
    overall, client = result.overall, result.client
    if overall.completed == 0:
        lines.append("failed: no request was answered within the window")
    if client.kept_up is False:
        lag = f"median {number(client.lag_ms.p50, 1)} ms, 99 % within {number(client.lag_ms.p99, 1)} ms"
        lines.append(
            f"this client could not keep up: requests went out late ({lag}), its loop by "
            f"{number(client.loop_lag_ms_p99, 1)} ms; latencies are its own in part"
        )
    return lines
