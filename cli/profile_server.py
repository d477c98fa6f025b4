"""`capplan profile server`: a running server, measured from outside, as tables for `capplan calibrate`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import typer

from capplan.cli import options
from capplan.cli.progress import progress_bars
from capplan.errors import InputError
from capplan.interrupt import INTERRUPTED
from capplan.reports import Table, counted, number, print_json, print_table
from capplan.spec import ENGINE_DEFAULTS, EngineConfig

if TYPE_CHECKING:
    from capplan.profiling import MeasurementFolder
    from capplan.profiling.server import ServerProfilingResult

_HIGHEST_RANK = 512
_LATE_MS = 5.0
"""Lag of the client from which a warning is printed."""


@dataclass(frozen=True, kw_only=True)
class ProfileServerArgs:
    """Options of `capplan profile server`."""

    url: str = typer.Argument(..., metavar="URL", help="Address of the server, with or without /v1.")
    output: str = typer.Option(
        ..., "--output", "-o", metavar="DIR", help="Folder of the tables; those of other starts are kept."
    )
    adapters: str | None = typer.Option(None, metavar="NAME[:RANK][,...]", help="Adapters to measure with.")
    workload: str | None = typer.Option(
        None, metavar="FILE", help="Adapters and typical lengths of a workload file."
    )
    model: str | None = typer.Option(
        None, metavar="NAME", help="Name of the base model; without it, adapters only."
    )
    rank: int = typer.Option(16, metavar="N", min=1, max=_HIGHEST_RANK, help="For adapters without :RANK.")
    max_loras: int | None = typer.Option(
        None, metavar="N", min=1, help="Adapter slots; default: as the server reports."
    )
    max_lora_rank: int | None = typer.Option(
        None, metavar="RANK", min=1, help="Rank of a slot; default: the smallest that holds every adapter."
    )
    engine: EngineConfig = options.engine_flags(
        without=("max_loras", "max_lora_rank", "max_cpu_loras", "gpu_memory_utilization"),
        least={"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 4},
        **ENGINE_DEFAULTS,
    )
    prompt_tokens: int | None = typer.Option(None, metavar="N", min=1, help="Typical prompt.")
    output_tokens: int | None = typer.Option(None, metavar="N", min=1, help="Typical output.")
    max_streams: int | None = typer.Option(None, metavar="N", min=1, help="Largest batch; default: up to 64.")
    budget_s: float = typer.Option(600.0, metavar="SECONDS", min=1.0, help="Time for operating points.")
    point_s: float = typer.Option(8.0, metavar="SECONDS", min=2.0, help="Time of each point.")
    passes: int = typer.Option(1, metavar="N", min=1, help="Passes over all points in that time.")
    api_key: options.ApiKey = None
    as_json: options.AsJson = False


@options.command
def server(args: ProfileServerArgs) -> None:
    """Measure a running OpenAI-compatible server from outside; it should be idle otherwise.

    Closed loops over batch, adapters, prompt and output lengths give a step table; idle responses and
    adapter switches give runs and loads; the server's metrics, if any, give its KV memory.
    """
    options.require_extra("bench", ("httptools",))
    from capplan.profiling import MeasurementFolder
    from capplan.profiling.load import Target
    from capplan.profiling.server import EngineSetting, ServerProfilingOptions, profile_server
    from capplan.spec import allowed_lora_rank

    ranks, lengths = _adapters(args.adapters, args.workload, args.rank)
    s_max = args.max_lora_rank or allowed_lora_rank(max(ranks.values(), default=1))
    setting = EngineSetting(args.max_loras, s_max, args.engine)
    wanted = options.fill(
        ServerProfilingOptions,
        args,
        prompt_tokens=args.prompt_tokens or lengths[0],
        output_tokens=args.output_tokens or lengths[1],
    )
    target = Target(args.url, args.api_key, args.model)
    folder = MeasurementFolder(args.output)
    with progress_bars(quiet=args.as_json) as on_progress:
        done = profile_server(target, ranks, setting, folder, wanted, on_progress)
    if args.as_json:
        print_json({"directory": args.output, **asdict(done)})
    else:
        _show(done, folder, args.output)
    if (done.late_ms_p95 or 0.0) > _LATE_MS:
        late = f"was {number(done.late_ms_p95, 1)} ms late for 5 % of the events"
        typer.echo(f"warning: this machine was busy; the client {late}, so steps are inexact", err=True)
    for line in done.failed:
        typer.echo(f"failed: {line}", err=True)
    if done.partial:
        raise typer.Exit(INTERRUPTED)
    if done.failed or not done.points + done.skipped:
        raise typer.Exit(options.FAILED)


def _adapters(
    adapters: str | None, workload: str | None, rank: int
) -> tuple[dict[str, int], tuple[int, int]]:
    from capplan.profiling.server import ServerProfilingOptions

    default = ServerProfilingOptions()
    lengths = (default.prompt_tokens, default.output_tokens)
    ranks: dict[str, int] = {}
    if workload is not None:
        from capplan.workload import load_workload

        loaded = load_workload(workload)
        ranks = {adapter.name: adapter.rank for adapter in loaded.adapters}
        means = (loaded.prompt_tokens.mean_tokens, loaded.output_tokens.mean_tokens)
        lengths = (max(1, round(means[0])), max(1, round(means[1])))
    for each in adapters.split(",") if adapters else ():
        name, colon, text = each.strip().rpartition(":")
        if not colon or not text.isdigit():
            name, text = each.strip(), str(rank)
        if not name or not 1 <= int(text) <= _HIGHEST_RANK:
            raise InputError(f"must be NAME or NAME:RANK, rank 1 to {_HIGHEST_RANK}", each, "--adapters")
        ranks[name] = int(text)
    return ranks, lengths


def _show(done: ServerProfilingResult, folder: MeasurementFolder, output: str) -> None:
    from capplan.profiling import FIRST_TOKENS, MEMORY, TABLES

    facts = {
        "engine setting": done.setting,
        "operating points": number(done.points),
        "measured before": number(done.skipped) if done.skipped else None,
        "left out, time was up": number(done.left_out) if done.left_out else None,
        "rows of the step table": number(done.step_rows),
        "adapter loads timed": number(done.loads),
        "KV tokens": number(done.kv_tokens),
    }
    rows = [(name, value) for name, value in facts.items() if value is not None]
    print_table(Table(("measured", "value"), rows))
    first = folder.table(FIRST_TOKENS)
    if first is not None and len(own := first[first["setting"] == done.setting]):
        idle = [
            (number(row["prompt_tokens"]), *(number(row[f"ttft_ms_{p}"], 2) for p in ("p50", "p25", "p75")))
            for row in own.to_dict("records")
        ]
        print_table(Table(("prompt tokens", "TTFT p50, ms", "p25", "p75"), idle, numbers_from=0))
    memory = folder.table(MEMORY)
    one_start = memory is not None and memory["a_max"].nunique() < 2  # no information on the cost of slots
    usable = [name for name in TABLES if not (name == MEMORY and one_start)]
    found = [name for name in usable if (folder.path / name).exists()]
    flags = " ".join(f"--{name.split('.')[0]} {output}/{name}" for name in found)
    typer.echo(f"{counted(len(found), 'table')} for capplan calibrate: {flags}")
