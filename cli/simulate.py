"""`capplan simulate`: one GPU under a workload, for one or several numbers of adapter slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import typer

from capplan.cli.console import DASH, number, percent, print_json, print_table, table
from capplan.cli.options import (
    AsJson,
    ProfileName,
    WorkloadFile,
    chosen_profile,
    command,
    profile_not_measured,
)
from capplan.cli.output import require_writable_file
from capplan.cli.progress import announce_compilation, progress_bars
from capplan.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from rich.table import Table

    from capplan.spec import Workload
    from capplan.twin import DetailedResult, SimulationResult
    from capplan.twin.simulate import SimulateSettings
    from capplan.twin.sweep import Job


@dataclass(frozen=True, kw_only=True)
class SimulateArgs:
    """Options of `capplan simulate`."""

    workload: WorkloadFile
    a_max: str | None = typer.Option(
        None, metavar="N[,N...]", help="Adapter slots; several are compared side by side."
    )
    s_max: int | None = typer.Option(
        None, metavar="RANK", help="Rank of a slot; default: the least that fits."
    )
    profile: ProfileName = None
    duration_s: float = typer.Option(3600.0, "--duration", metavar="SECONDS", help="Simulated time.")
    seed: int = typer.Option(0, metavar="N", help="Same seed, same result.")
    max_num_seqs: int | None = typer.Option(None, metavar="N")
    max_num_batched_tokens: int | None = typer.Option(None, metavar="N")
    max_cpu_loras: int | None = typer.Option(None, metavar="N")
    max_model_len: int | None = typer.Option(None, metavar="N")
    gpu_memory_utilization: float | None = typer.Option(None, metavar="SHARE")
    max_in_flight: int | None = typer.Option(
        None, metavar="N", help="Reject arrivals beyond this many requests."
    )
    rules: str | None = typer.Option(None, metavar="NAME", help="Serving rules instead of the profile's.")
    prefix_caching: bool | None = typer.Option(
        None,
        "--prefix-caching/--no-prefix-caching",
        help="Whether KV of shared prompt beginnings is used again; default: as in the profile.",
    )
    detail: bool = typer.Option(
        False, "--detail", help="Also slowdown, waits, hit rate, metrics per rank, SLO attainment."
    )
    report: str | None = typer.Option(
        None, metavar="FILE", help="Write an HTML report with charts, readable offline."
    )
    requests_out: str | None = typer.Option(
        None, metavar="FILE", help="Write every request as Parquet, one row each."
    )
    workers: int | None = typer.Option(None, metavar="N", help="Processes; default: one per core.")
    ray_address: str | None = typer.Option(
        None, metavar="ADDRESS", help="Simulate on this Ray cluster instead."
    )
    as_json: AsJson = False


@command
def simulate(args: SimulateArgs) -> None:
    """Simulate one GPU that serves the whole workload.

    Engine settings that are not given come from the workload file, then from the twin's defaults.
    """
    from capplan.spec import load_workload, write_text_atomic

    for path in (args.report, args.requests_out):
        if path is not None:
            require_writable_file(path)
    wishes = load_workload(args.workload)
    slots = _slots(args.a_max, wishes)
    used = chosen_profile(wishes, args.profile)
    if used is None:
        raise InputError("is required, because the workload names pools", location="--profile")
    settings = {
        "s_max": _slot_rank(args.s_max, wishes),
        "duration_s": args.duration_s,
        "seed": args.seed,
        "max_in_flight": args.max_in_flight,
        "rules": args.rules,
        "prefix_caching": args.prefix_caching,
        **_engine_settings(
            wishes,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_cpu_loras=args.max_cpu_loras,
            max_model_len=args.max_model_len,
            gpu_memory_utilization=args.gpu_memory_utilization,
        ),
    }
    announce_compilation()
    from capplan.twin.sweep import Job

    jobs = [Job(wishes, used, cast("SimulateSettings", {"a_max": count, **settings})) for count in slots]
    in_detail = args.detail or args.report is not None or args.requests_out is not None
    outcomes, details = _simulated(
        jobs, in_detail=in_detail, workers=args.workers, ray_address=args.ray_address
    )
    if args.requests_out is not None:
        _write_requests(args.requests_out, details)
    if args.report is not None:
        from capplan.cli.report.simulation import simulation_report

        write_text_atomic(
            args.report, simulation_report(args.workload, wishes, used, settings, outcomes, details)
        )
    shown = details if args.detail else {}
    if args.as_json:
        print_json({"profile": used.name, "settings": settings, "results": documents(outcomes, shown)})
    else:
        _print(outcomes, shown)
        for line in profile_not_measured(used):
            typer.echo(line)


def _simulated(
    jobs: list[Job], *, in_detail: bool, workers: int | None, ray_address: str | None
) -> tuple[Outcomes, Details]:
    """Return the results by number of slots, and the details where they are asked for.

    Raises
    ------
    InfeasibleError
        When no number of slots fits.
    """
    from capplan.twin import DetailedResult
    from capplan.twin.sweep import sweep, sweep_detailed

    run = sweep_detailed if in_detail else sweep
    slots = [job.settings["a_max"] for job in jobs]
    with progress_bars() as on_progress:
        on_progress("simulate", 0, len(jobs))
        answers = run(
            jobs,
            workers=workers,
            ray_address=ray_address,
            progress=lambda done, total: on_progress("simulate", done, total),
        )
    if all(isinstance(answer, InfeasibleError) for answer in answers):
        raise next(answer for answer in answers if isinstance(answer, InfeasibleError))
    found = dict(zip(slots, answers, strict=True))
    details = {count: each for count, each in found.items() if isinstance(each, DetailedResult)}
    outcomes = {c: each.result if isinstance(each, DetailedResult) else each for c, each in found.items()}
    return outcomes, details


def _write_requests(path: str, details: Details) -> None:
    from capplan.twin.per_request import several_tables, write_parquet

    tables = {count: detail.requests for count, detail in details.items()}
    write_parquet(path, several_tables(tables, by="a_max"))


def _print(outcomes: Outcomes, details: Details) -> None:
    print_table(metrics_table(outcomes, details))
    if details:
        print_table(ranks_table(details))
        kept = slo_table(details)
        if kept is not None:
            print_table(kept)
    for count, outcome in outcomes.items():
        if isinstance(outcome, InfeasibleError):
            typer.echo(f"a_max {count}: {outcome}")


def _slots(given: str | None, workload: Workload) -> tuple[int, ...]:
    """Return the numbers of slots asked for, each once, in the order given."""
    if given is None:
        if workload.engine.max_loras is None:
            raise InputError("is required, unless the workload fixes engine.max_loras", location="--a-max")
        return (workload.engine.max_loras,)
    try:
        return tuple(dict.fromkeys(int(part) for part in given.split(",")))
    except ValueError:
        raise InputError("must be whole numbers separated by commas", given, "--a-max") from None


def _slot_rank(given: int | None, workload: Workload) -> int:
    from capplan.spec import allowed_lora_rank

    if given is not None:
        return given
    return workload.engine.max_lora_rank or allowed_lora_rank(max(a.rank for a in workload.adapters))


def _engine_settings(workload: Workload, **given: float | None) -> dict[str, Any]:
    """Return the settings that the command line or else the workload gives; the twin has the defaults."""
    merged = {key: getattr(workload.engine, key) if value is None else value for key, value in given.items()}
    return {key: value for key, value in merged.items() if value is not None}


Outcomes: TypeAlias = "Mapping[int, SimulationResult | InfeasibleError]"
"""What came of each number of slots."""

Details: TypeAlias = "Mapping[int, DetailedResult]"
"""Details of each number of slots that fits."""

_ROWS: Final = (  # metric of the result, its name with unit, decimals
    ("throughput_tok_s", "throughput, tok/s", 0),
    ("offered_tok_s", "offered, tok/s", 0),
    ("input_tok_s", "input, tok/s", 0),
    ("output_tok_s", "output, tok/s", 0),
    ("ttft_s_mean", "TTFT mean, s", 3),
    ("ttft_s_p50", "TTFT p50, s", 3),
    ("ttft_s_p90", "TTFT p90, s", 3),
    ("ttft_s_p99", "TTFT p99, s", 3),
    ("tpot_ms_mean", "TPOT mean, ms", 2),
    ("tpot_ms_p99", "TPOT p99, ms", 2),
    ("itl_ms_mean", "ITL mean, ms", 2),
    ("itl_ms_p99", "ITL p99, ms", 2),
    ("e2e_s_p99", "E2E p99, s", 2),
    ("completed", "completed requests", 0),
    ("submitted", "submitted requests", 0),
    ("rejected", "rejected requests", 0),
    ("preemptions", "preemptions", 0),
    ("adapter_loads", "adapter loads", 0),
    ("running_mean", "running, mean", 1),
    ("waiting_mean", "waiting, mean", 1),
    ("kv_tokens", "KV capacity, tokens", 0),
)


def metrics_table(outcomes: Outcomes, details: Details) -> Table:
    """Return the metrics, one column per number of slots; those of the details last, where there are any."""
    rows = table("metric", *(f"a_max {slots}" for slots in outcomes), numbers_from=1)

    def add(name: str, cell: Callable[[SimulationResult], str]) -> None:
        cells = (DASH if isinstance(each, InfeasibleError) else cell(each) for each in outcomes.values())
        rows.add_row(name, *cells)

    def add_detail(name: str, cell: Callable[[DetailedResult], str]) -> None:
        rows.add_row(name, *(cell(details[slots]) if slots in details else DASH for slots in outcomes))

    for metric, name, decimals in _ROWS:
        add(name, lambda result, m=metric, d=decimals: number(getattr(result, m), d))  # type: ignore[misc]
    add("served", lambda result: percent(result.served_fraction))
    add("starved", lambda result: "yes" if result.starved else "no")
    if details:
        add_detail("slowdown p50", lambda each: number(each.overall.slowdown.p50, 2))
        add_detail("slowdown p99", lambda each: number(each.overall.slowdown.p99, 2))
        add_detail("queueing p99, s", lambda each: number(each.overall.queue_s.p99, 3))
        add_detail("wait for loads p99, s", lambda each: number(each.overall.load_wait_s.p99, 3))
        add_detail("adapter was resident", lambda each: share(each.overall.hit_rate))
    return rows


def ranks_table(details: Details) -> Table:
    """Return what the requests of each rank got."""
    names = ("finished", "served", "tok/s", "TTFT p50, s", "TTFT p99, s", "TPOT p50, ms", "slowdown p50")
    rows = table("a_max", "rank", *names, "resident", numbers_from=0)
    for slots, detail in details.items():
        for rank, got in detail.by_rank.items():
            rows.add_row(
                str(slots),
                str(rank),
                number(got.finished),
                percent(got.served_fraction),
                number(got.throughput_tok_s),
                number(got.ttft_s.p50, 3),
                number(got.ttft_s.p99, 3),
                number(got.tpot_ms.p50, 2),
                number(got.slowdown.p50, 2),
                share(got.hit_rate),
            )
    return rows


def slo_table(details: Details) -> Table | None:
    """Return which share of requests kept each latency bound; None without bounds."""
    bounds = next(iter(details.values())).slo
    if not bounds:
        return None
    rows = table("requests that keep", *(f"a_max {slots}" for slots in details), numbers_from=1)
    for at, bound in enumerate(bounds):
        rows.add_row(
            bound_text(bound.bound, bound.limit), *(share(d.slo[at].share) for d in details.values())
        )
    return rows


def bound_text(bound: str, limit: float) -> str:
    """Return a bound of the SLO in words."""
    if bound == "all":
        return "all of these"
    if bound == "tpt_over_base":
        return f"tpt_over_base: TPT <= {limit:.4g} ms"
    kind, _, unit = bound.split("_")
    return f"{bound}: {kind.upper()} <= {limit:g} {unit}"


def share(fraction: float) -> str:
    """Return a share as a percentage, a dash when there is none."""
    return percent(None if fraction != fraction else fraction)


def documents(outcomes: Outcomes, details: Details) -> list[dict[str, Any]]:
    """Return everything as JSON data, one document per number of slots."""
    found = []
    for slots, outcome in outcomes.items():
        if isinstance(outcome, InfeasibleError):
            found.append({"a_max": slots, "infeasible": str(outcome)})
        else:
            found.append({"a_max": slots, **asdict(outcome), **_detail(details.get(slots))})
    return found


def _detail(detail: DetailedResult | None) -> dict[str, Any]:
    if detail is None:
        return {}
    series = {field.name: getattr(detail.series, field.name) for field in fields(detail.series)}
    return {
        "overall": asdict(detail.overall),
        "by_rank": {str(rank): asdict(got) for rank, got in detail.by_rank.items()},
        "by_adapter": {name: asdict(got) for name, got in detail.by_adapter.items()},
        "slo": [{**asdict(bound), "share": bound.share} for bound in detail.slo],
        "series": {name: v if isinstance(v, float) else v.tolist() for name, v in series.items()},
    }
