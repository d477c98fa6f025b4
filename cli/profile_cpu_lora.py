"""`capplan profile cpu-lora`: the CPU cores of this machine that can assist the loading of adapters."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from capplan.cli.options import AsJson, Quiet, command, command_line, require_extra
from capplan.cli.output import require_writable_files, write_json
from capplan.errors import InputError
from capplan.reports import print_json

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class CpuLoraArgs:
    """Options of `capplan profile cpu-lora`."""

    profile: str = typer.Option(
        ..., metavar="NAME|FILE", help="Shipped profile or path of a profile JSON, whose model is served."
    )
    output: str = typer.Option(
        ..., "--output", "-o", metavar="FILE", help="Profile JSON to write: the same with cpu_lora."
    )
    rank: int = typer.Option(64, metavar="N", min=1, max=512, help="Rank of the largest adapter.")
    workers: int | None = typer.Option(
        None, metavar="N", min=1, help="Cores; default: one on each CPU but the first."
    )
    dtype: str = typer.Option("float32", metavar="NAME", help="float32, bfloat16 or float16.")
    device: str = typer.Option(
        "cpu", metavar="NAME", help="Device whose layers a task is compared with: cpu, cuda."
    )
    as_json: AsJson = False
    quiet: Quiet = False


@command
def cpu_lora(args: CpuLoraArgs) -> None:
    """Measure the CPU cores that can assist the loading of adapters, into a profile.

    Measures how long a core takes for some tokens, how many it computes in the time of the base model's
    layer, and a call through shared memory and through a domain socket.
    """
    require_extra("engine", ["torch"])
    from capplan.datasets import load_profile
    from capplan.profiling.kernels import measure_cpu_lora

    if args.dtype not in _DTYPES:
        raise InputError(f"must be one of {', '.join(_DTYPES)}", args.dtype, "--dtype")
    profile = load_profile(args.profile)
    require_writable_files(args.output)
    found = measure_cpu_lora(profile, args.rank, args.workers, args.dtype, args.device)
    if not found.times.cores:
        raise InputError("must leave a CPU beside that of the engine", found.times.cores, "--workers")
    section = found.section(command_line("capplan profile cpu-lora", args))
    write_json(args.output, profile.replace(cpu_lora=section).model_dump(mode="json"))
    if args.as_json:
        print_json(found.document() | {"cpu_lora": section.model_dump(mode="json")})
    elif not args.quiet:
        from capplan.reports import print_table
        from capplan.reports.tables import invocation_table

        times, signal_ms = found.times, section.signal_ms
        typer.echo(
            f"{times.cores} cores: a task of n tokens at rank r takes {times.task_base_ms:.3f} ms and "
            f"{times.ms_per_mmac:.4f} ms per million of n x r x (inputs + outputs)"
        )
        typer.echo(
            f"at most {times.tokens_per_task} tokens per task; {signal_ms:.3f} ms of signals per layer"
        )
        print_table(invocation_table(found.invocations))
        typer.echo(f"written to {args.output}")
