"""`capplan export`: from a plan to the files a deployer consumes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import typer

from capplan.cli.options import FAILED, PlanFile, Unverified, command, read_plan
from capplan.cli.output import require_writable_folder, write_folder
from capplan.cli.progress import announce_compilation, progress_bars
from capplan.deploy import DEFAULT_PORT, EXPORTERS, Exporter, Loss, diff_files, diff_server, find_exporter
from capplan.deploy import export as export_files
from capplan.errors import InputError
from capplan.reports import counted
from capplan.spec import PLAN_ROUTER, Group, Plan

_SHARE_DIGITS: Final = 6
"""Digits to which shares of a plan sum to 1."""


@dataclass(frozen=True, kw_only=True)
class ExportArgs:
    """Options of `capplan export`."""

    plan: PlanFile
    target: str = typer.Option(..., metavar="NAME", help=f"Deployment target: {', '.join(EXPORTERS)}.")
    output: str | None = typer.Option(
        None, "--output", "-o", metavar="DIR", help="Directory to make: all of it or nothing."
    )
    check: list[str] | None = typer.Option(
        None,
        metavar="PATH",
        help="Check the files as `capplan lint --schemas PATH` does, and write none that have an error; "
        "repeatable.",
    )
    diff: list[str] | None = typer.Option(
        None,
        metavar="DIR|URL",
        help="Show what changes from an earlier export or a running server, and write nothing; repeatable. "
        "Exit status: 0 if nothing changes, 1 otherwise.",
    )
    port: int = typer.Option(
        DEFAULT_PORT, metavar="N", help="Port of the gateway, or of the first server; each next one adds 1."
    )
    runtime_updates: bool = typer.Option(
        False, "--runtime-updates", help="Let clients load and unload adapters at run time."
    )
    settings: list[str] | None = typer.Option(
        None, "--set", metavar="NAME=VALUE", help="A setting of the target; repeatable."
    )
    workload: str | None = typer.Option(
        None,
        metavar="FILE",
        help="Workload that the plan was made for: a plan that the target serves otherwise, such as without "
        "its scheduler and cache or by another router, is verified again as it is served.",
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
    if args.output is not None:
        require_writable_folder(args.output, exporter.top_names, force=args.force)
    elif not (args.check or args.diff):
        raise InputError("is required, or --check or --diff", location="--output")
    settings = _settings(args.settings)
    planned = Plan.from_json(args.plan)
    _files(planned, args, settings)  # what is wrong shows before minutes of verification
    plan, verdict = _exported_plan(args, planned, exporter)
    files = _files(plan, args, settings)
    if args.check:
        _check(files, args.check)
    if args.diff:
        _show_differences(plan, files, args.diff)
        return
    if verdict:
        typer.echo(verdict)
    if args.output is None:
        return
    scripts = frozenset(name for name in files if name.endswith(".sh"))
    write_folder(args.output, files, scripts)
    for line in exporter.notes(plan):
        typer.echo(line, err=True)
    for loss in exporter.losses(planned):
        typer.echo(f"loss: {loss.text}", err=True)
    written = [counted(len(scripts), "launch script")] if scripts else []
    written += [name for name in files if name not in scripts]
    *most, last = written
    names = f"{', '.join(most)} and {last}" if most else last
    typer.echo(f"{names} written to {args.output}")


def _check(files: Mapping[str, str], schemas: Sequence[str]) -> None:
    """Print what the rules of `capplan lint` find in files, and exit if one of them is an error."""
    from capplan.deploy.lint import FORMATS, lint

    with tempfile.TemporaryDirectory() as folder:
        write_folder(f"{folder}/export", files, frozenset())
        found = lint(f"{folder}/export", schemas=schemas)
        found = tuple(replace(each, file=each.file.removeprefix(f"{folder}/export/")) for each in found)
    if text := FORMATS["text"](found):
        typer.echo(text)
    errors = sum(each.level == "error" for each in found)
    typer.echo(f"{counted(errors, 'error')} in {counted(len(files), 'file')}", err=True)
    if errors:
        raise typer.Exit(FAILED)


def _show_differences(plan: Plan, files: Mapping[str, str], deployed: Sequence[str]) -> None:
    """Print what changes from what is deployed, and exit with 1 if anything does."""
    is_equal = True
    for each in deployed:
        is_url = each.startswith(("http://", "https://"))
        text = "\n".join(diff_server(plan, each)) if is_url else diff_files(files, each).rstrip("\n")
        is_equal &= not text
        typer.echo(text or f"{each}: as planned")
    if not is_equal:
        raise typer.Exit(FAILED)


def _settings(given: Sequence[str] | None) -> dict[str, str]:
    """Return the values of ``--set`` by name; the last one of a name counts."""
    settings = {}
    for each in given or ():
        name, equals, value = each.partition("=")
        if not (name and equals):
            raise InputError("must be NAME=VALUE", each, "--set")
        settings[name] = value
    return settings


def _files(plan: Plan, args: ExportArgs, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the files of a plan; errors of settings name the flag."""
    port, updates = args.port, args.runtime_updates
    try:
        return export_files(plan, args.target, port=port, runtime_updates=updates, settings=settings)
    except InputError as error:
        if error.location.partition(":")[0] != "set":
            raise
        raise InputError(error.rule, error.value, f"--{error.location}") from None


@dataclass(frozen=True)
class _ServedOtherwise:
    """What of a plan servers do otherwise, as far as the twin shows it."""

    left_out: str = ""
    """Scheduler, cache and re-balancing of the plan, as text."""
    router: str | None = None
    """Router that replaces the plan's."""
    everywhere: bool = False
    """Whether every server loads every adapter."""

    @property
    def words(self) -> str:
        """As text that follows *verified* or *served*."""
        parts = [f"without {self.left_out}"] if self.left_out else []
        parts += [f"by router {self.router}"] if self.router else []
        parts += ["with every adapter on every server"] if self.everywhere else []
        return " and ".join(parts)


def _served_otherwise(plan: Plan, exporter: Exporter) -> _ServedOtherwise | None:
    """Return what the servers of a target do otherwise than the plan says; None if nothing that matters."""
    if not exporter.serves:
        return None
    losses = exporter.losses(plan)
    everywhere = any(loss.everywhere for loss in losses) and not _is_even(plan)
    router = _other_router(plan, losses) if everywhere or _is_routed(plan) else None
    otherwise = _ServedOtherwise(_left_out(plan), router, everywhere)
    return None if otherwise == _ServedOtherwise() else otherwise


def _other_router(plan: Plan, losses: Sequence[Loss]) -> str | None:
    """Return the router of a target, the first of several: the twin has one. None if it is the plan's."""
    router = next((loss.router for loss in losses if loss.router is not None), None)
    return None if router == (plan.router or PLAN_ROUTER) else router


def _is_even(plan: Plan) -> bool:
    """Tell whether every server has every adapter and an equal part of all traffic already."""
    first, *others = (
        {name: round(share / group.replicas, _SHARE_DIGITS) for name, share in plan.shares_of(group).items()}
        for group in plan.groups
    )
    return all(parts == first for parts in others)


def _is_routed(plan: Plan) -> bool:
    """Tell whether a router has anything to choose.

    It has nothing if every group has one replica, and no adapter and no base traffic is in several groups:
    then each request has one server, whatever the router.
    """
    names = [name for group in plan.groups for name in plan.shares_of(group)]
    return any(group.replicas > 1 for group in plan.groups) or len(names) > len(set(names))


def _exported_plan(args: ExportArgs, plan: Plan, exporter: Exporter) -> tuple[Plan, str]:
    """Return the plan to export, and the verdict of another verification; empty without one.

    A plan that is not verified as the target serves it is an error, unless ``--unverified`` exports it.
    """
    otherwise = _served_otherwise(plan, exporter)
    if args.unverified or otherwise is None:
        _require_unused(args)
        return read_plan(args.plan, unverified=args.unverified), ""
    as_served = f"as {args.target} serves it, {otherwise.words}"
    hint = "--unverified exports it as it is"
    if args.workload is None:
        read_plan(args.plan, unverified=False)
        raise InputError(f"is required to verify the plan {as_served}; {hint}", location="--workload")
    again = _verified_again(plan, otherwise, args.workload, args.profile)
    check = again.verification
    if not check.ok:
        failed = next((each for each in check.groups if not each.ok), None)
        why = check.reason if failed is None else f"group {failed.id}: {failed.note}"
        raise InputError(f"must hold {as_served} ({why}); {hint}", location=args.plan)
    seeds = counted(len(check.seeds), "seed")
    slots = ", ".join(dict.fromkeys(str(group.engine_args.max_loras) for group in again.groups))
    return again, (
        f"verified again {as_served}: ok on {seeds} of {check.duration_s:g} s, with {slots} adapter slots"
    )


def _require_unused(args: ExportArgs) -> None:
    """Check that the options of another verification are not given where there is none."""
    reason = "--unverified" if args.unverified else f"a plan that {args.target} serves as it is"
    for name, value in (("--workload", args.workload), ("--profile", args.profile)):
        if value is not None:
            raise InputError(f"does not go with {reason}: nothing is verified again", value, name)


def _left_out(plan: Plan) -> str:
    """Return the scheduler, the cache and the re-balancing of a plan, as text; empty without any."""
    pairs = dict.fromkeys(pair for group in plan.groups if (pair := _policies(group)) is not None)
    words = [f"scheduler {scheduler} and cache {cache}" for scheduler, cache in pairs]
    return " and ".join(words if plan.rebalance is None else [*words, "re-balancing"])


def _policies(group: Group) -> tuple[str, str] | None:
    pair = group.scheduling
    return None if pair is None else (pair[0].policy, pair[1].policy)


def _verified_again(plan: Plan, otherwise: _ServedOtherwise, workload: str, profile: str | None) -> Plan:
    from capplan.datasets import load_profile
    from capplan.workload import load_workload

    made_for = load_workload(workload)
    used = None if profile is None else load_profile(profile)
    announce_compilation()
    from capplan.planner import verify_as_served

    with progress_bars() as on_progress:
        return verify_as_served(
            plan,
            made_for,
            router=otherwise.router,
            everywhere=otherwise.everywhere,
            profile=used,
            source=workload,
            progress=on_progress,
        )
