"""`capplan simulate`: one GPU under a workload, for one or several numbers of adapter slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from capplan.cli.console import print_json, print_table
from capplan.cli.inputs import AsJson, ProfileName, WorkloadFile, chosen_profile
from capplan.cli.output import require_writable_file
from capplan.cli.progress import announce_compilation, progress_bars
from capplan.cli.provenance import profile_not_measured
from capplan.cli.simulation_tables import (
    Details,
    Outcomes,
    documents,
    metrics_table,
    ranks_table,
    slo_table,
)
from capplan.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from capplan.spec import Workload
    from capplan.twin.simulate import Settings
    from capplan.twin.sweep import Job


def simulate(
    workload: WorkloadFile,
    a_max: Annotated[
        str | None,
        typer.Option("--a-max", metavar="N[,N...]", help="Adapter slots; several are compared side by side."),
    ] = None,
    s_max: Annotated[
        int | None,
        typer.Option("--s-max", metavar="RANK", help="Rank of a slot; default: the least that fits."),
    ] = None,
    profile: ProfileName = None,
    duration_s: Annotated[
        float, typer.Option("--duration", metavar="SECONDS", help="Simulated time.")
    ] = 3600.0,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Same seed, same result.")] = 0,
    max_num_seqs: Annotated[int | None, typer.Option("--max-num-seqs", metavar="N")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option("--max-num-batched-tokens", metavar="N")
    ] = None,
    max_cpu_loras: Annotated[int | None, typer.Option("--max-cpu-loras", metavar="N")] = None,
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", metavar="N")] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option("--gpu-memory-utilization", metavar="SHARE")
    ] = None,
    max_in_flight: Annotated[
        int | None,
        typer.Option("--max-in-flight", metavar="N", help="Reject arrivals beyond this many requests."),
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option("--rules", metavar="NAME", help="Serving rules instead of the profile's."),
    ] = None,
    prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="Whether KV of shared prompt beginnings is used again; default: as in the profile.",
        ),
    ] = None,
    detail: Annotated[
        bool,
        typer.Option("--detail", help="Also slowdown, waits, hit rate, metrics per rank, SLO attainment."),
    ] = False,
    report: Annotated[
        str | None,
        typer.Option("--report", metavar="FILE", help="Write an HTML report with charts, readable offline."),
    ] = None,
    requests_out: Annotated[
        str | None,
        typer.Option("--requests-out", metavar="FILE", help="Write every request as Parquet, one row each."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", metavar="N", help="Processes; default: one per core.")
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option("--ray-address", metavar="ADDRESS", help="Simulate on this Ray cluster instead."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate one GPU that serves the whole workload.

    Engine settings that are not given come from the workload file, then from the twin's defaults.
    """
    from capplan.spec import load_workload, write_text_atomic

    for path in (report, requests_out):
        if path is not None:
            require_writable_file(path)
    wishes = load_workload(workload)
    slots = _slots(a_max, wishes)
    used = chosen_profile(wishes, profile)
    if used is None:
        raise InputError("is required, because the workload names pools", location="--profile")
    settings = {
        "s_max": _slot_rank(s_max, wishes),
        "duration_s": duration_s,
        "seed": seed,
        "max_in_flight": max_in_flight,
        "rules": rules,
        "prefix_caching": prefix_caching,
        **_engine_settings(
            wishes,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_cpu_loras=max_cpu_loras,
            max_model_len=max_model_len,
            gpu_memory_utilization=gpu_memory_utilization,
        ),
    }
    announce_compilation()
    from capplan.twin.sweep import Job

    jobs = [Job(wishes, used, cast("Settings", {"a_max": count, **settings})) for count in slots]
    in_detail = detail or report is not None or requests_out is not None
    outcomes, details = _simulated(jobs, in_detail=in_detail, workers=workers, ray_address=ray_address)
    if requests_out is not None:
        _write_requests(requests_out, details)
    if report is not None:
        from capplan.cli.simulation_report import simulation_report

        write_text_atomic(report, simulation_report(workload, wishes, used, settings, outcomes, details))
    shown = details if detail else {}
    if as_json:
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
    from capplan.twin.request_table import several_tables, write_parquet

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
