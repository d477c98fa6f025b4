"""`capplan workload predictor`: a learned predictor of output lengths."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from capplan.cli.options import AsJson, Quiet, Seed, WorkloadFile, command
from capplan.cli.output import require_writable_files
from capplan.reports.console import Table, percent, print_json, print_table


@dataclass(frozen=True, kw_only=True)
class PredictorArgs:
    """Options of `capplan workload predictor`."""

    workload: WorkloadFile
    output: str = typer.Option(..., "--output", "-o", metavar="FILE", help="Predictor to write (JSON).")
    duration_s: float = typer.Option(
        3600.0, "--duration", metavar="SECONDS", help="Requests of so much time: of the trace, or drawn."
    )
    held_out: float = typer.Option(
        0.2, metavar="SHARE", help="Share of the requests, the latest, for the test."
    )
    seed: Seed = 0
    as_json: AsJson = False
    quiet: Quiet = False


@command
def predictor(args: PredictorArgs) -> None:
    """Train a predictor of output lengths, and report its accuracy.

    It reads the prompt length, the adapter and the hour of day of a request. Use it with `scheduler:
    {predictor: {kind: learned, file: FILE}}`; adapters are found by their names.
    """
    from capplan.models.training.length_predictor import PredictorOptions, train_predictor
    from capplan.spec import write_bytes_atomic
    from capplan.spec.engine_args import DEFAULT_MAX_MODEL_LEN
    from capplan.spec.limits import require_duration
    from capplan.workload import draw_requests, load_workload

    require_duration(args.duration_s)
    require_writable_files(args.output)
    options = PredictorOptions(held_out=args.held_out, seed=args.seed)
    workload = load_workload(args.workload)
    requests = draw_requests(workload, args.duration_s, args.seed, DEFAULT_MAX_MODEL_LEN)
    trained = train_predictor(requests, [adapter.name for adapter in workload.adapters], options)
    write_bytes_atomic(args.output, trained.content)
    if args.as_json:
        print_json(
            {
                "file": args.output,
                "class_tokens": trained.class_tokens,
                "trained": trained.trained,
                "held_out": trained.held_out,
                "accuracy": trained.accuracy,
                "baseline": trained.baseline,
            }
        )
    elif not args.quiet:
        rows = [
            ("requests trained on", f"{trained.trained:,}"),
            ("requests held out", f"{trained.held_out:,}"),
            ("right class, held out", percent(trained.accuracy)),
            ("the most frequent class alone", percent(trained.baseline)),
            ("predicted tokens by class", ", ".join(map(str, trained.class_tokens))),
        ]
        print_table(Table(("predictor", "value"), rows))
        typer.echo(f"written to {args.output}")
