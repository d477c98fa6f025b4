"""`capplan simulate`: one GPU under a workload, for one or several numbers of adapter slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from capplan.cli.console import DASH, number, percent, print_json, print_table, table
from capplan.cli.inputs import AsJson, ProfileName, WorkloadFile, chosen_profile
from capplan.cli.progress import announce_compilation, progress_bars
from capplan.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from rich.table import Table

    from capplan.spec import Workload
    from capplan.twin import SimulationResult

    Outcome = SimulationResult | InfeasibleError

_ROWS = (  # metric of the result, its name with unit, decimals
    ("throughput_tok_s", "throughput, tok/s", 0),
    ("offered_tok_s", "offered, tok/s", 0),
    ("input_tok_s", "input, tok/s", 0),
    ("output_tok_s", "output, tok/s", 0),
    ("ttft_s_mean", "TTFT mean, s", 3),
    ("ttft_s_p50", "TTFT p50, s", 3),
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
    as_json: AsJson = False,
) -> None:
    """Simulate one GPU that serves the whole workload.

    Engine settings that are not given come from the workload file, then from the twin's defaults.
    """
    from capplan.spec import load_workload

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
    from capplan import twin

    outcomes: dict[int, Outcome] = {}
    with progress_bars() as on_progress:
        for done, count in enumerate(slots):
            on_progress("simulate", done, len(slots))
            try:
                outcomes[count] = twin.simulate(wishes, used, a_max=count, **settings)
            except InfeasibleError as error:
                outcomes[count] = error
    if all(isinstance(outcome, InfeasibleError) for outcome in outcomes.values()):
        raise next(outcome for outcome in outcomes.values() if isinstance(outcome, InfeasibleError))
    if as_json:
        print_json({"profile": used.name, "settings": settings, "results": _documents(outcomes)})
    else:
        print_table(_metrics_table(outcomes))
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


def _documents(outcomes: dict[int, Outcome]) -> list[dict[str, Any]]:
    from dataclasses import asdict

    return [
        {"a_max": slots, "infeasible": str(outcome)}
        if isinstance(outcome, InfeasibleError)
        else {"a_max": slots, **asdict(outcome)}
        for slots, outcome in outcomes.items()
    ]


def _metrics_table(outcomes: dict[int, Outcome]) -> Table:
    rows = table("metric", *(f"a_max {slots}" for slots in outcomes), numbers_from=1)

    def add(name: str, cell: Any) -> None:
        cells = (DASH if isinstance(each, InfeasibleError) else cell(each) for each in outcomes.values())
        rows.add_row(name, *cells)

    for metric, name, decimals in _ROWS:
        add(name, lambda result, m=metric, d=decimals: number(getattr(result, m), d))
    add("served", lambda result: percent(result.served_fraction))
    add("starved", lambda result: "yes" if result.starved else "no")
    return rows
