"""`capplan export`: from a plan to the files a deployer consumes."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from capplan.cli.options import PlanFile, Unverified, command, read_plan
from capplan.cli.output import require_writable_folder, write_folder
from capplan.cli.progress import announce_compilation, progress_bars
from capplan.deploy import DEFAULT_PORT, EXPORTERS, Exporter, find_exporter
from capplan.deploy import export as export_files
from capplan.errors import InputError
from capplan.reports import counted
from capplan.spec import Group, Plan


@dataclass(frozen=True, kw_only=True)
class ExportArgs:
    """Options of `capplan export`."""

    plan: PlanFile
    target: str = typer.Option(..., metavar="NAME", help=f"Deployment target: {', '.join(EXPORTERS)}.")
    output: str = typer.Option(
        ..., "--output", "-o", metavar="DIR", help="Directory to make: all of it or nothing."
    )
    port: int = typer.Option(
        DEFAULT_PORT, metavar="N", help="Port of the first server; each next one adds 1."
    )
    runtime_updates: bool = typer.Option(
        False, "--runtime-updates", help="Let clients load and unload adapters at run time."
    )
    workload: str | None = typer.Option(
        None,
        metavar="FILE",
        help="Workload that the plan was made for: a plan with a scheduler or a cache, which the target does "
        "not have, is verified again without them.",
    )
    profile: str | None = typer.Option(
        None, metavar="NAME", help="Profile that the plan rests on, beside --workload; default: the plan's."
    )
    unverified: Unverified = False
    force: bool = typer.Option(False, "--force", help="Replace the directory of an earlier export.")


@command
def export(args: ExportArgs) -> None:
    """Write what a target deploys: for vllm a script per server, routing.json and plan.json."""
    exporter = find_exporter(args.target)
    require_writable_folder(args.output, exporter.top_names, force=args.force)
    plan, verdict = _exported_plan(args, exporter)
    files = export_files(plan, args.target, port=args.port, runtime_updates=args.runtime_updates)
    scripts = frozenset(name for name in files if name.endswith(".sh"))
    write_folder(args.output, files, scripts)
    if verdict:
        typer.echo(verdict)
    for line in exporter.notes(plan):
        typer.echo(line, err=True)
    written = [counted(len(scripts), "launch script")] if scripts else []
    written += [name for name in files if name not in scripts]
    *most, last = written
    names = f"{', '.join(most)} and {last}" if most else last
    typer.echo(f"{names} written to {args.output}")


def _exported_plan(args: ExportArgs, exporter: Exporter) -> tuple[Plan, str]:
    """Return the plan to export, and the verdict of another verification; empty without one.

    Raises
    ------
    InputError
        If the plan is not verified as the target serves it, unless that is not asked for.
    """
    plan = Plan.from_json(args.plan)
    left_out = _left_out(plan) if exporter.serves else ""
    if args.unverified or not left_out:
        _require_unused(args)
        return read_plan(args.plan, unverified=args.unverified), ""
    if args.workload is None:
        read_plan(args.plan, unverified=False)
        rule = f"is required to verify the plan without its {left_out}, which {args.target} does not have"
        raise InputError(f"{rule}; --unverified exports it as it is", location="--workload")
    again = _verified_again(plan, args.workload, args.profile)
    check = again.verification
    if not check.ok:
        failed = next(each for each in check.groups if not each.ok)
        rule = f"must hold without its {left_out}, which {args.target} does not have"
        hint = "--unverified exports it as it is"
        raise InputError(f"{rule} (group {failed.id}: {failed.note}); {hint}", location=args.plan)
    seeds = counted(len(check.seeds), "seed")
    slots = ", ".join(dict.fromkeys(str(group.engine_args.max_loras) for group in again.groups))
    return again, (
        f"verified again without {left_out}, which {args.target} does not have: ok on {seeds} of "
        f"{check.duration_s:g} s, with {slots} adapter slots"
    )


def _require_unused(args: ExportArgs) -> None:
    """Check that the options of another verification are not given where there is none."""
    reason = "--unverified" if args.unverified else "a plan without scheduler, cache and re-balancing"
    for name, value in (("--workload", args.workload), ("--profile", args.profile)):
        if value is not None:
            raise InputError(f"does not go with {reason}: nothing is verified again", value, name)


def _left_out(plan: Plan) -> str:
    """Return the scheduler, the cache and the re-balancing of a plan, as text; empty without any."""
    pairs = dict.fromkeys(pair for group in plan.groups if (pair := _names(group)) is not None)
    words = [f"scheduler {scheduler} and cache {cache}" for scheduler, cache in pairs]
    return " and ".join(words if plan.rebalance is None else [*words, "re-balancing"])


def _names(group: Group) -> tuple[str, str] | None:
    pair = group.scheduling
    return None if pair is None else (pair[0].policy, pair[1].policy)


def _verified_again(plan: Plan, workload: str, profile: str | None) -> Plan:
    from capplan.datasets import load_profile
    from capplan.workload import load_workload

    made_for = load_workload(workload)
    used = None if profile is None else load_profile(profile)
    announce_compilation()
    from capplan.planner import verify_without_scheduling

    with progress_bars() as on_progress:
        return verify_without_scheduling(plan, made_for, profile=used, source=workload, progress=on_progress)
