"""`capplan profile engine`: the reference engine, measured into tables for `capplan calibrate`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from capplan.cli.console import number, print_json, print_table, table
from capplan.cli.options import ENGINE, AsJson, command, require_extra
from capplan.cli.profile_kernels import fits_document, show_fits
from capplan.cli.progress import progress_bars
from capplan.errors import InputError

if TYPE_CHECKING:
    from capplan.models.kernel_fits import KernelReport
    from capplan.profiling.engine.profiler import EngineProfilingResult

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class ProfileEngineArgs:
    """Options of `capplan profile engine`."""

    output: str = typer.Option(
        ..., "--output", "-o", metavar="DIR", help="Where tables go; measuring goes on where it was."
    )
    model: str = typer.Option("tiny-llama", metavar="MODEL", help="As `capplan serve` takes it.")
    device: str = typer.Option("cpu", metavar="NAME", help="cpu, cuda, cuda:1 ...")
    dtype: str = typer.Option("auto", metavar="NAME", help="auto, float32, float16 or bfloat16.")
    rules: str = typer.Option("capplan", metavar="NAME", help="Serving rules.")
    lora_kernel: str | None = typer.Option(None, metavar="NAME", help="Default: the engine's.")
    a_max: str = typer.Option("8", metavar="N[,N...]", help="Adapter slots.")
    s_max: str | None = typer.Option(
        None, metavar="RANK[,RANK...]", help="Of a slot; default: the largest rank."
    )
    ranks: str = typer.Option("8,16,32", "--ranks", metavar="RANK[,RANK...]", help="Of the adapters.")
    max_num_seqs: int = typer.Option(32, metavar="N", min=2)
    max_num_batched_tokens: int = typer.Option(2048, metavar="N", min=32)
    max_model_len: int = typer.Option(2048, metavar="N", min=64)
    memory_gib: float | None = typer.Option(
        None, metavar="N", help="On a CPU: what the engine may take for everything."
    )
    gpu_memory_utilization: float = typer.Option(0.9, metavar="SHARE")
    threads: int = typer.Option(1, metavar="N", min=1, help="Threads of PyTorch on a CPU.")
    stages: str = typer.Option(
        "memory,loads,steps,iterations,served",
        "--stages",
        metavar="NAME[,NAME...]",
        help="memory, loads, steps, iterations, served.",
    )
    budget_s: float = typer.Option(600.0, metavar="SECONDS", min=0.0, help="0: only fit what is there.")
    point_s: float = typer.Option(6.0, metavar="SECONDS", min=1.0, help="Time of each state of a server.")
    tolerance: float = typer.Option(
        0.02, metavar="SHARE", min=0.0, help="Error on left-out states to stop at."
    )
    seed: int = typer.Option(0, metavar="N", min=0, help="Of weights and states.")
    as_json: AsJson = False
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Print nothing but errors.")


@command
def engine(args: ProfileEngineArgs) -> None:
    """Measure the reference engine: KV memory, adapter loads, steps, and its server.

    States of steps are chosen so that each tells most, until left-out ones are predicted well enough or the
    time is up. `capplan calibrate DIR -o profile.json` makes a profile of the tables.
    """
    require_extra("engine", ENGINE)
    from capplan.profiling.engine.options import EngineProfilingOptions
    from capplan.profiling.engine.profiler import profile_engine

    known_ranks = _numbers(args.ranks, "--ranks")
    if args.memory_gib is not None and not 0.0 < args.memory_gib < float("inf"):
        raise InputError("must be a finite number above 0", args.memory_gib, "--memory-gib")
    options = EngineProfilingOptions(
        model=args.model,
        device=args.device,
        dtype=args.dtype,
        rules=args.rules,
        lora_kernel=args.lora_kernel,
        a_max=_numbers(args.a_max, "--a-max"),
        s_max=(_slot_rank(max(known_ranks)),) if args.s_max is None else _numbers(args.s_max, "--s-max"),
        ranks=known_ranks,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        memory_bytes=None if args.memory_gib is None else round(args.memory_gib * _GIB),
        gpu_memory_utilization=args.gpu_memory_utilization,
        threads=args.threads,
        stages=tuple(name.strip() for name in args.stages.split(",") if name.strip()),
        budget_s=args.budget_s,
        point_s=args.point_s,
        tolerance=args.tolerance,
        seed=args.seed,
    )
    with progress_bars(quiet=args.quiet) as on_progress:
        outcome = profile_engine(args.output, options, on_progress)
    reports = _iterations(args.output)
    if args.as_json:
        print_json({"directory": args.output, **asdict(outcome), "iterations": fits_document(reports)})
    elif not args.quiet:
        _show(outcome, args.output)
        if reports:
            show_fits(reports)
    for line in outcome.failed:
        typer.echo(f"failed: {line}", err=True)


def _slot_rank(rank: int) -> int:
    from capplan.spec import allowed_lora_rank

    return allowed_lora_rank(rank)


def _iterations(output: str) -> list[KernelReport]:
    """Fit Toppings' models to whole iterations, where some were measured, and write the fits beside them."""
    import json

    from capplan.cli.console import finite
    from capplan.models.kernel_fits import explain_kernels, read_kernel_table
    from capplan.profiling.tables import ITERATIONS
    from capplan.spec import write_text_atomic

    file = Path(output) / ITERATIONS
    if not file.is_file():
        return []
    reports = explain_kernels(read_kernel_table(file))
    found = json.dumps(finite(fits_document(reports)), indent=2)
    write_text_atomic(Path(output) / "iterations.json", found + "\n")
    return reports


def _show(outcome: EngineProfilingResult, output: str) -> None:
    shown = table("table", "rows", numbers_from=1)
    for name, rows in outcome.rows.items():
        shown.add_row(name, number(rows))
    print_table(shown)
    typer.echo(f"steps of left-out states: SMAPE {number(outcome.step_error, 2)} %")
    more = "" if outcome.is_complete else "; the same command goes on"
    typer.echo(f"written to {output}{more}; capplan calibrate {output} -o profile.json makes a profile")


def _numbers(text: str, flag: str) -> tuple[int, ...]:
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise InputError("must be whole numbers separated by commas", text, flag) from None
    if min(found) < 1:
        raise InputError("must be >= 1", min(found), flag)
    return found
