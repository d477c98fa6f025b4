"""`capplan tune`: scheduler and cache settings for the requests of a workload."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from capplan.cli.options import AsJson, ProfileName, Quiet, Seed, WorkloadFile, command, one_profile
from capplan.cli.output import require_writable_files
from capplan.cli.progress import announce_compilation, progress_bars
from capplan.reports import Table, number, print_json, print_table

if TYPE_CHECKING:
    from capplan.planner import Settings, TuningResult


@dataclass(frozen=True, kw_only=True)
class TuneArgs:
    """Options of `capplan tune`."""

    workload: WorkloadFile
    output: str | None = typer.Option(
        None, "--output", "-o", metavar="FILE", help="Write scheduler and cache as part of a workload file."
    )
    profile: ProfileName = None
    duration_s: float = typer.Option(
        3600.0, "--duration", metavar="SECONDS", help="Requests of so much time: of the trace, or drawn."
    )
    windows: int = typer.Option(
        4, metavar="N", min=2, help="Windows of equal length; every second one is held out."
    )
    trials: int = typer.Option(40, metavar="N", min=1, help="Settings to try.")
    time_limit: float | None = typer.Option(
        None, metavar="SECONDS", help="Start no further trial after this time."
    )
    seed: Seed = 0
    as_json: AsJson = False
    quiet: Quiet = False


@command
def tune(args: TuneArgs) -> None:
    """Search settings of Chameleon's scheduler and cache, and compare them on held-out windows.

    Searched: weight of the prompt in request sizes, number of queues, refresh period, and weights of the
    cache score. The P99 TTFT of one GPU that serves the whole workload is minimized.
    """
    import yaml

    from capplan.planner import TuneOptions, fragment
    from capplan.planner import tune as search
    from capplan.spec import require_duration, write_text_atomic
    from capplan.workload import load_workload

    require_duration(args.duration_s)
    require_writable_files(args.output)
    options = TuneOptions(args.duration_s, args.windows, args.trials, args.time_limit, args.seed)
    workload = load_workload(args.workload)
    profile = one_profile(workload, args.profile)
    announce_compilation()
    with progress_bars(quiet=args.quiet) as on_progress:
        tuned = search(workload, profile, options, lambda done, total: on_progress("trials", done, total))
    if args.output is not None:
        settings = fragment(tuned.found, Path(args.workload).parent)
        write_text_atomic(args.output, yaml.safe_dump(settings, sort_keys=False))
    if args.as_json:
        print_json(
            {
                **{name: _document(getattr(tuned, name)) for name in ("found", "before")},
                "trials": tuned.trials,
                "windows": tuned.windows,
                "window_s": tuned.window_s,
            }
        )
    elif not args.quiet:
        _print(tuned, args.output)


def _document(settings: Settings) -> dict[str, Any]:
    return {
        "scheduler": settings.scheduler.model_dump(mode="json"),
        "cache": settings.cache.model_dump(mode="json"),
        "search_ttft_p99_s": settings.search_p99_s,
        "held_out_ttft_p99_s": settings.held_out_p99_s,
    }


def _print(tuned: TuningResult, output: str | None) -> None:
    before, found = _facts(tuned.before), _facts(tuned.found)
    rows = [(name, before[name], found[name]) for name in before]
    print_table(Table(("setting", "before", "found"), rows))
    typer.echo(
        f"{tuned.trials} trials; {tuned.windows} windows of {tuned.window_s:g} s, every second one held out"
    )
    if tuned.found.held_out_p99_s > tuned.before.held_out_p99_s:
        typer.echo("the settings found are worse than those before on the held-out windows")
    if output is not None:
        typer.echo(f"written to {output}")


def _facts(settings: Settings) -> dict[str, str]:
    queues, weights = settings.scheduler.queues, settings.cache.score_weights
    return {
        "prompt weight": f"{queues.prompt_weight:g}",
        "queues": str(queues.max_queues) if queues.clusters == "wcss" else f"by {queues.clusters}",
        "refresh s": f"{settings.scheduler.refresh_s:g}",
        "frequency, recency, size": ", ".join(f"{weight:g}" for weight in weights),
        "P99 TTFT s, search": number(settings.search_p99_s, 2),
        "P99 TTFT s, held out": number(settings.held_out_p99_s, 2),
    }
