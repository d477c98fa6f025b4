"""`capplan profile engine`: the reference engine, measured into tables for `capplan calibrate`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from capplan.cli import options
from capplan.cli.output import write_json
from capplan.cli.profile_kernels import fits_document, show_fits
from capplan.cli.progress import progress_bars
from capplan.reports import Table, number, print_json, print_table
from capplan.spec import EngineConfig

if TYPE_CHECKING:
    from capplan.models import KernelReport
    from capplan.profiling.engine import EngineProfilingResult


@dataclass(frozen=True, kw_only=True)
class ProfileEngineArgs:
    """Options of `capplan profile engine`."""

    output: str = typer.Option(
        ..., "--output", "-o", metavar="DIR", help="Folder of the tables; an earlier run there is continued."
    )
    model: str = typer.Option("tiny-llama", metavar="MODEL", help="As `capplan serve` takes it.")
    device: str = typer.Option("cpu", metavar="NAME", help="cpu, cuda, cuda:1 ...")
    dtype: str = typer.Option("auto", metavar="NAME", help="auto, float32, float16 or bfloat16.")
    rules: str = typer.Option("capplan", metavar="NAME", help="Serving rules.")
    lora_kernel: str | None = typer.Option(None, metavar="NAME", help="Default: the engine's.")
    max_loras: str = typer.Option("8", metavar="N[,N...]", help="Adapter slots.")
    max_lora_rank: str | None = typer.Option(
        None, metavar="RANK[,RANK...]", help="Of a slot; default: the largest rank."
    )
    ranks: str = typer.Option("8,16,32", "--ranks", metavar="RANK[,RANK...]", help="Of the adapters.")
    engine: EngineConfig = options.engine_flags(
        without=("max_loras", "max_lora_rank", "max_cpu_loras"),
        least={"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 64},
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        max_model_len=2048,
        gpu_memory_utilization=0.9,
    )
    memory_gib: float | None = typer.Option(
        None, metavar="N", help="On a CPU: what the engine may take for everything."
    )
    threads: int = typer.Option(1, metavar="N", min=1, help="Threads of PyTorch on a CPU.")
    cpu_affinity: str = typer.Option("auto", metavar="CPUS", help="Of the engine core, as for `serve`.")
    stages: str = typer.Option(
        "memory,loads,steps,iterations,served",
        "--stages",
        metavar="NAME[,NAME...]",
        help="memory, loads, steps, iterations, served.",
    )
    budget_s: float = typer.Option(600.0, metavar="SECONDS", min=0.0, help="0: only fit what is there.")
    point_s: float = typer.Option(2.0, metavar="SECONDS", min=1.0, help="Time of each state of a server.")
    tolerance: float = typer.Option(
        0.02, metavar="SHARE", min=0.0, help="Error on left-out states to stop at."
    )
    seed: int = typer.Option(0, metavar="N", min=0, help="Of weights and states.")
    as_json: options.AsJson = False
    quiet: options.Quiet = False


@options.command
def engine(args: ProfileEngineArgs) -> None:
    """Measure the reference engine: KV memory, adapter loads, steps, and its server.

    Each step state is the most informative next one, until left-out ones are predicted within the tolerance
    or the time is up. `capplan calibrate DIR -o profile.json` makes a profile of the tables.
    """
    options.require_extra("engine", options.ENGINE)
    from capplan.profiling.engine import EngineProfilingOptions, profile_engine
    from capplan.spec import allowed_lora_rank

    ranks = options.numbers(args.ranks, "--ranks", least=1)
    s_max = str(allowed_lora_rank(max(ranks))) if args.max_lora_rank is None else args.max_lora_rank
    memory = None if args.memory_gib is None else options.gib_in_bytes(args.memory_gib, "--memory-gib")
    wanted = options.fill(
        EngineProfilingOptions,
        args,
        a_max=options.numbers(args.max_loras, "--max-loras", least=1),
        s_max=options.numbers(s_max, "--max-lora-rank", least=1),
        ranks=ranks,
        memory_bytes=memory,
        stages=options.names(args.stages, "--stages"),
    )
    with progress_bars(quiet=args.quiet) as on_progress:
        outcome = profile_engine(args.output, wanted, on_progress)
    reports = _iterations(args.output)
    if args.as_json:
        print_json({"directory": args.output, **asdict(outcome), "iterations": fits_document(reports)})
    elif not args.quiet:
        _show(outcome, args.output)
        if reports:
            show_fits(reports)
    for line in outcome.failed:
        typer.echo(f"failed: {line}", err=True)


def _iterations(output: str) -> list[KernelReport]:
    """Fit Toppings' models to whole iterations if some were measured, and write the fits beside them."""
    from capplan.models import explain_kernels, read_kernel_table
    from capplan.profiling import ITERATIONS

    file = Path(output) / ITERATIONS
    if not file.is_file():
        return []
    reports = explain_kernels(read_kernel_table(file))
    write_json(Path(output) / "iterations.json", fits_document(reports))
    return reports


def _show(outcome: EngineProfilingResult, output: str) -> None:
    print_table(Table(("table", "rows"), [(name, number(rows)) for name, rows in outcome.rows.items()]))
    typer.echo(f"steps of left-out states: SMAPE {number(outcome.step_error, 2)} %")
    more = "" if outcome.is_complete else "; the same command goes on"
    typer.echo(f"written to {output}{more}; capplan calibrate {output} -o profile.json makes a profile")
