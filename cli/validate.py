"""`capplan validate`: a plan's engines under its workload, measured and predicted side by side."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from capplan.cli import options
from capplan.cli.output import require_writable_files, write_json
from capplan.cli.progress import announce_compilation, load_progress
from capplan.errors import InputError
from capplan.interrupt import INTERRUPTED
from capplan.reports import print_json, print_table
from capplan.reports.tables import group_table, group_verdict, heading, speed_note
from capplan.spec import EngineConfig

if TYPE_CHECKING:
    from capplan.profiling.validation import GroupValidation, Validation
    from capplan.spec import Plan, Profile, Workload


@dataclass(frozen=True, kw_only=True)
class ValidateArgs:
    """Options of `capplan validate`."""

    plan: options.PlanFile
    workload: str = typer.Option(..., metavar="FILE", help="Workload that the plan was made for.")
    profile: str | None = typer.Option(
        None, metavar="NAME", help="That the prediction rests on; default: the workload's, as in the plan."
    )
    url: list[str] | None = typer.Option(
        None, metavar="[GROUP=]URL", help="Running server of a group; repeatable."
    )
    duration_s: float = typer.Option(
        120.0, "--duration", metavar="SECONDS", help="Measured time of each group."
    )
    rate_scale: float = typer.Option(1.0, metavar="FACTOR", help="Multiplies every rate.")
    group: list[str] | None = typer.Option(None, metavar="ID", help="Validate this group only; repeatable.")
    model: str | None = typer.Option(
        None, metavar="MODEL", help="Of servers that are started, as for `serve`."
    )
    dtype: str = typer.Option("auto", metavar="NAME", help="Of servers that are started.")
    device: str = typer.Option("cpu", metavar="NAME", help="Of servers that are started.")
    threads: int = typer.Option(1, metavar="N", min=1, help="Of servers that are started, on a CPU.")
    lora_kernel: str | None = typer.Option(
        None, metavar="NAME", help="Of servers that are started; default: theirs."
    )
    cpu_affinity: str = typer.Option(
        "auto", metavar="CPUS", help="Of the engine cores of servers that are started."
    )
    engine: EngineConfig = options.engine_flags()
    prefix_caching: bool | None = typer.Option(
        None,
        "--prefix-caching/--no-prefix-caching",
        help="Whether KV of shared prompt beginnings is reused; default: as in the plan.",
    )
    rules: str | None = typer.Option(None, metavar="NAME", help="Serving rules instead of the profile's.")
    seed: int = typer.Option(0, metavar="N", min=0, help="Of arrivals and lengths, here and in the twin.")
    api_key: options.ApiKey = None
    throughput_tolerance: float = typer.Option(3.0, metavar="PERCENT", help="Largest SMAPE that agrees.")
    itl_tolerance: float = typer.Option(8.0, metavar="PERCENT", help="The same of the mean ITL.")
    output: options.ResultFile = None
    html: options.HtmlFile = None
    as_json: options.AsJson = False


@options.command
def validate(args: ValidateArgs) -> None:
    """Run one engine per group of a plan under the requests of the twin, and compare the two.

    Engine settings that are given replace the plan's, in the prediction and in servers that are started. A
    warning names what a running server reports otherwise.

    Exit status 1: throughput or mean ITL is off by more than its tolerance, a verdict on starvation is wrong,
    or the measurement is void.
    """
    options.require_extra("bench", ("httptools",))
    if not args.url:
        options.require_extra("engine", options.ENGINE)
    from capplan.planner.problem import planned_workload
    from capplan.profiling.validation import Tolerances, ValidationOptions
    from capplan.profiling.validation import validate as run
    from capplan.spec import write_text_atomic
    from capplan.workload import load_workload

    require_writable_files(args.output, args.html)
    document = options.read_any_plan(args.plan)
    workload = planned_workload(document, load_workload(args.workload), args.workload)
    wanted = options.fill(
        ValidationOptions,
        args,
        groups=tuple(args.group or ()),
        urls=_urls(args.url, document),
        engine_args=_engine_args(args),
        tolerances=Tolerances(args.throughput_tolerance, args.itl_tolerance),
    )
    announce_compilation(quiet=args.as_json)

    def on_group(group: str) -> None:
        if not args.as_json and len(document.groups) > 1:
            typer.echo(f"group {group}", err=True)

    profiles = _profiles(document, workload, args.profile)
    with load_progress(quiet=args.as_json) as on_tick:
        found = run(document, workload, profiles, wanted, on_group, on_tick)
    facts = validation_document(found)
    if args.output is not None:
        write_json(args.output, facts)
    if args.html is not None:
        from capplan.reports.pages import validation_page

        write_text_atomic(args.html, validation_page(args.plan, found))
    if args.as_json:
        print_json(facts)
    else:
        show(found)
    for each in (each for group in found.groups for each in group.mismatches):
        typer.echo(f"warning: {each}", err=True)
    if found.partial:
        raise typer.Exit(INTERRUPTED)
    if not found.agrees:
        raise typer.Exit(options.FAILED)


def validation_document(found: Validation) -> dict[str, Any]:
    """Return a validation as JSON data."""
    from capplan.models.calibration import SMAPE_FORMULA

    return {
        "agrees": found.agrees,
        "partial": found.partial,
        "error_formula": SMAPE_FORMULA,
        "groups": [_group_document(group) for group in found.groups],
        "measured": {name: result.model_dump(mode="json") for name, result in found.results.items()},
    }


def _group_document(group: GroupValidation) -> dict[str, Any]:
    facts = asdict(group) | {"agrees": group.agrees, "verdict": group_verdict(group)}
    facts["comparisons"] = [
        asdict(each)
        | {
            "error": each.error,
            "as_profiled_error": each.as_profiled_error,
            "constant_step_error": each.constant_step_error,
            "offered_load_error": each.offered_load_error,
            "agrees": each.agrees,
        }
        for each in group.comparisons
    ]
    return facts


def _engine_args(args: ValidateArgs) -> dict[str, Any]:
    """Return the engine settings that are given, by their names in a plan."""
    prefixes = {} if args.prefix_caching is None else {"enable_prefix_caching": args.prefix_caching}
    return args.engine.given | prefixes


def _urls(given: list[str] | None, plan: Plan) -> dict[str, str]:
    """Return running servers by group; an address without a name is that of the only group."""
    urls = {}
    for each in given or ():
        name, equals, address = each.partition("=")
        if not equals or "/" in name:
            if len(plan.groups) != 1:
                raise InputError("must be GROUP=URL for a plan of several groups", each, "--url")
            name, address = plan.groups[0].id, each
        urls[name] = address
    return urls


def _profiles(plan: Plan, workload: Workload, name: str | None) -> dict[str, Profile]:
    """Return the profiles of the groups: the given one, the workload's by their names, or shipped ones."""
    from capplan.datasets import load_profile

    names = {group.profile for group in plan.groups}
    if name is None:
        files = [workload.profile, *(pool.profile for pool in workload.pools)]
        own = {profile.name: profile for profile in map(load_profile, filter(None, files))}
        return {each: own.get(each) or load_profile(each) for each in names}
    if len(names) > 1:
        raise InputError("must be left out where groups have several profiles", name, "--profile")
    used = load_profile(name)
    used.require_model(plan.base_model)
    return dict.fromkeys(names, used)


def show(found: Validation) -> None:
    """Print a table per group."""
    for group in found.groups:
        typer.echo(heading(group))
        print_table(group_table(group))
        typer.echo(group_verdict(group))
        if note := speed_note(group):
            typer.echo(note)
