"""`capplan plan`: from a workload file to a verified plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from capplan.cli import options
from capplan.cli.output import require_writable_files
from capplan.cli.progress import announce_compilation, progress_bars
from capplan.errors import InputError
from capplan.planner import SOLVERS
from capplan.reports import counted, print_table, tables
from capplan.spec import completed

if TYPE_CHECKING:
    from capplan.spec import Plan, Workload

_PRINTING = ("output", "as_json", "quiet")


@dataclass(frozen=True, kw_only=True)
class PlanArgs:
    """Options of `capplan plan`."""

    workload: options.WorkloadFile
    output: str | None = typer.Option(
        None, "--output", "-o", metavar="FILE", help="Write the plan here: all of it or nothing."
    )
    profile: options.ProfileName = None
    gpus: int | None = typer.Option(
        None, metavar="N", help="GPUs the plan may use; default: the workload's, or as needed."
    )
    solver: str = typer.Option("capplan", metavar="NAME", help=f"How to place: {', '.join(SOLVERS)}.")
    seed: options.Seed = 0
    seeds: int = typer.Option(5, metavar="K", help="Fresh seeds that every group is verified on.")
    time_limit: float | None = typer.Option(
        None,
        metavar="SECONDS",
        help="Limit of search and verification together; default: none, but the search begins nothing new "
        "after 60 s.",
    )
    duration: float | None = typer.Option(
        None,
        metavar="SECONDS",
        help="Simulated seconds per seed; default: an hour, or as long as slow arrivals take to show. Not "
        "for a trace, which is replayed.",
    )
    previous: str | None = typer.Option(
        None, metavar="PLAN", help="Plan in force, to keep adapters where they are."
    )
    knobs: str = typer.Option(
        "fitted",
        metavar="VALUES",
        help="Token budgets and running requests to choose from where the workload leaves them open and "
        "bounds a latency: fitted (inside the profile's fitted range), any, or default (no choice).",
    )
    move_cost: float | None = typer.Option(
        None,
        metavar="GPUS",
        min=0.0,
        help="Cost of moving an adapter of the plan in force; USD per hour for min_cost.",
    )
    verify: bool = typer.Option(True, "--verify/--no-verify", help="Verify every group with the twin.")
    scheduler: options.SchedulerName = None
    cache: options.CacheName = None
    queues: bool = typer.Option(
        False, "--queues", help="Plan queues by request size: --scheduler chameleon with every default."
    )
    router: options.RouterOption = None
    robust: float | None = typer.Option(
        None, metavar="QUANTILE", help="Bounds must hold at this quantile of the step times, such as 0.9."
    )
    gpus_per_link: int = typer.Option(
        1,
        metavar="N",
        min=1,
        help="GPUs that share a link to host memory, in the order of the plan; it copies one adapter at a "
        "time.",
    )
    strict: tables.Strict = False
    as_json: options.AsJson = False
    quiet: options.Quiet = False


@options.command
def plan(args: PlanArgs) -> None:
    """Plan which adapters share which GPUs, with which engine settings, and verify it with the twin."""
    from capplan.workload import load_workload

    require_writable_files(args.output)
    workload = _with_scheduling(load_workload(args.workload), args)
    if args.previous is not None:
        workload = workload.replace(previous_plan=args.previous)
    if args.router is not None:
        workload = workload.replace(router=args.router)
    if args.move_cost is not None:
        workload = workload.replace(move_cost=args.move_cost)
    chosen = options.chosen_profile(workload, args.profile)
    announce_compilation(quiet=args.quiet)
    from capplan import planner

    with progress_bars(quiet=args.quiet) as on_progress:
        result = planner.plan(
            workload,
            gpus=args.gpus,
            profile=chosen,
            solver=args.solver,
            seed=args.seed,
            verify=args.verify,
            seeds=args.seeds,
            time_limit_s=args.time_limit,
            duration_s=args.duration,
            knobs=args.knobs,
            robust=args.robust,
            gpus_per_link=args.gpus_per_link,
            progress=on_progress,
        )
    recorded = options.command_line("capplan plan", args, without=_PRINTING)  # equal plans are equal files
    result = result.replace(provenance={**result.provenance, "command": recorded})
    if args.output is not None:
        result.to_json(args.output)
    if args.as_json:
        typer.echo(result.to_json(), nl=False)
    elif not args.quiet:
        typer.echo(tables.answer(result))
        print_table(tables.groups_table(result))
        for line in tables.bottleneck_lines(result):
            typer.echo(line)
        typer.echo(_summary(result, args.output))
        for line in (
            *tables.choice_lines(result),
            *tables.plan_notes(result),
            *tables.folder_lines(workload),
        ):
            typer.echo(line)
    if args.strict:
        tables.require_no_extrapolation(tables.extrapolation_lines(result.provenance))
    if args.verify and not result.verification.ok:
        raise typer.Exit(options.FAILED)


def _with_scheduling(workload: Workload, args: PlanArgs) -> Workload:
    """Return the workload with the scheduler and the cache of the command line."""
    from capplan.spec import QueueConfig

    if args.queues and args.scheduler is not None:
        raise InputError("does not go with --scheduler", location="--queues")
    changes: dict[str, Any] = {}
    if args.scheduler is not None:
        changes |= {"scheduler": options.read_scheduler(args.scheduler), "queues": None}
    elif args.queues and not (workload.scheduler is not None and workload.scheduler.policy == "chameleon"):
        changes["queues"] = workload.queues or QueueConfig()
    if args.cache is not None:
        changes["cache"] = options.read_cache(args.cache)
    scheduler, cache = (changes.get(name, getattr(workload, name)) for name in ("scheduler", "cache"))
    completed(scheduler, cache, options.scheduling_flags(args.scheduler, args.cache))
    return workload.replace(**changes) if changes else workload


def _summary(plan: Plan, output: str | None) -> str:
    totals = plan.totals
    price = tables.price_words(totals.usd_per_hour)
    moved = tables.move_words(plan)
    moves = f"; {moved}" if moved else ""
    written = "not written (-o FILE writes it)" if output is None else f"written to {output}"
    gpus = f"{counted(totals.gpus, 'GPU')} (lower bound {totals.lower_bound_gpus})"
    cut = "; the time limit ended the search, a longer --time-limit may find a better plan"
    search = cut if plan.provenance.get("search") == "time_limit" else ""
    return f"{gpus}{price}; {tables.verdict(plan)}{search}{moves}; {written}"
