"""`capplan capacity`: the highest load within the SLO, or the fewest GPUs for the load."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import typer

from capplan.cli import options
from capplan.cli.progress import announce_compilation, progress_bars
from capplan.errors import InfeasibleError, InputError
from capplan.reports import Table, counted, number, print_json, print_table
from capplan.reports.tables import extrapolation_line, trace_lines
from capplan.spec import require_duration

if TYPE_CHECKING:
    from capplan.planner.verification import LoadCapacity, RelativeBound, SimulatedFleet
    from capplan.spec import Profile, Slo, Workload

_BOUND: Final = re.compile(r"([a-z0-9_]+)=([0-9.eE+-]+)(?:\*([a-z-]+))?")
_REPLICATED: Final = "least-loaded"
"""Router of instances with all adapters, which have no shares to follow."""
_MOST_SEEDS: Final = 1000


@dataclass(frozen=True, kw_only=True)
class CapacityArgs:
    """Options of `capplan capacity`."""

    workload: options.WorkloadFile
    plan: str | None = typer.Option(
        None, metavar="PLAN", help="Instances of a plan for this workload; default: equal ones."
    )
    instances: int | None = typer.Option(
        None, metavar="N", help="Without a plan: equal instances that hold every adapter."
    )
    fewest: bool = typer.Option(
        False, "--fewest", help="Without a plan: find the fewest instances for the workload's load."
    )
    max_loras: int | None = typer.Option(
        None, metavar="N", help="Without a plan: adapter slots of an instance; default: the workload's."
    )
    router: options.RouterOption = None
    slo: list[str] | None = typer.Option(
        None,
        metavar="BOUND",
        help="Bound instead of the workload's: METRIC=VALUE such as ttft_p95_s=10, or a multiple of a "
        "reference run, METRIC=FACTOR*unloaded or METRIC=FACTOR*no-lora. Repeatable.",
    )
    profile: options.ProfileName = None
    duration_s: float = typer.Option(
        600.0,
        "--duration",
        metavar="SECONDS",
        help="Simulated time; the trace of a workload is replayed as a whole.",
    )
    seed: options.Seed = 0
    seeds: int = typer.Option(
        5, metavar="N", min=1, max=_MOST_SEEDS, help="Seeds from --seed on; one for a trace."
    )
    precision: float = typer.Option(0.01, metavar="SHARE", help="Relative error of the load of a seed.")
    confidence: float = typer.Option(0.9, metavar="SHARE", help="Of the interval of the mean over seeds.")
    as_json: options.AsJson = False


@options.command
def capacity(args: CapacityArgs) -> None:
    """Find the highest load of a cluster within its SLO, or the fewest instances for its load.

    Loads are compared on common random numbers, seed by seed. Exit status 3: no load, or no number of
    instances, is within the SLO.
    """
    from capplan.planner.verification import capacity as highest
    from capplan.planner.verification import distinct_seeds, fewest_instances, with_bounds
    from capplan.spec import input_limits
    from capplan.workload import load_workload

    require_duration(args.duration_s)
    _check(args)
    absolute, relative = _bounds(args.slo or ())
    workload = load_workload(args.workload)
    fleet = _fleet(args, workload, args.instances or 1)
    announce_compilation(quiet=args.as_json)
    found = with_bounds(fleet, relative, args.seed, args.duration_s)
    slo = _slo(workload.slo, {**absolute, **found}, relative or absolute)
    seeds = distinct_seeds(workload, range(args.seed, args.seed + args.seeds))
    if args.fewest:
        most = input_limits().max_instances
        count = fewest_instances(lambda n: _fleet(args, workload, n), slo, seeds, args.duration_s, most)
        _print_fewest(count, slo, as_json=args.as_json)
        return
    with progress_bars(quiet=args.as_json) as on_progress:
        on_progress("seeds", 0, len(seeds))
        result = highest(
            fleet,
            slo,
            seeds,
            args.duration_s,
            precision=args.precision,
            confidence=args.confidence,
            answered=lambda done: on_progress("seeds", done, len(seeds)),
        )
    if result.mean == 0.0:
        raise InfeasibleError(f"no load is within the SLO: {'; '.join(result.binds)}", "slo")
    at_capacity = fleet.replay(seeds[0], args.duration_s, result.mean)
    found_beyond = [each.document() for each in fleet.extrapolations(at_capacity)]
    _print(fleet, slo, result, found_beyond, as_json=args.as_json)


def _check(args: CapacityArgs) -> None:
    """Check that options go together."""
    if args.plan is not None:
        for flag, value in (
            ("--instances", args.instances),
            ("--max-loras", args.max_loras),
            ("--fewest", args.fewest),
        ):
            if value:
                raise InputError("does not go with --plan", value, flag)
    for flag, share in (("--precision", args.precision), ("--confidence", args.confidence)):
        if not 0 < share < 1:
            raise InputError("must be above 0 and below 1", share, flag)
    if args.fewest and args.instances is not None:
        raise InputError("does not go with --fewest", args.instances, "--instances")
    if args.instances is not None and args.instances < 1:
        raise InputError("must be >= 1", args.instances, "--instances")


def _bounds(texts: list[str] | tuple[str, ...]) -> tuple[dict[str, float], list[RelativeBound]]:
    """Return absolute bounds, and those that are multiples of reference runs."""
    from capplan.planner.verification import REFERENCE_RUNS, ReferenceRun, RelativeBound
    from capplan.spec import Slo

    known = [name for name in Slo.model_fields if name.endswith(("_s", "_ms"))]
    absolute: dict[str, float] = {}
    relative = []
    for text in texts:
        match = _BOUND.fullmatch(text)
        if match is None:
            raise InputError("must be METRIC=VALUE or METRIC=FACTOR*RUN", text, "--slo")
        name, value, run = match.groups()
        if name not in known:
            raise InputError(f"must be one of {', '.join(known)}", name, "--slo")
        try:
            bound = float(value)
        except ValueError:
            raise InputError("must be a number", value, f"--slo {name}") from None
        if not 0 < bound < float("inf"):
            raise InputError("must be a finite number > 0", bound, f"--slo {name}")
        if run is None:
            absolute[name] = bound
        elif run in REFERENCE_RUNS:
            relative.append(RelativeBound(name, bound, cast("ReferenceRun", run)))
        else:
            raise InputError(f"must be one of {', '.join(REFERENCE_RUNS)}", run, f"--slo {name}")
    return absolute, relative


def _slo(own: Slo, bounds: dict[str, float], given: object) -> Slo:
    """Return the bounds: those of the command line, or else the workload's."""
    from capplan.spec import Slo

    if not given:
        return own
    return Slo(served_fraction=own.served_fraction, **cast("dict[str, Any]", bounds))


def _fleet(args: CapacityArgs, workload: Workload, count: int) -> SimulatedFleet:
    """Return the instances of the plan, or equal ones with all adapters."""
    from capplan.planner.verification import SimulatedFleet, fleet_of_plan

    if args.plan is not None:
        plan = options.read_any_plan(args.plan)
        chosen = None if args.profile is None else options.chosen_profile(workload, args.profile)
        return fleet_of_plan(plan, workload, chosen, args.workload, args.router)
    profile = options.one_profile(workload, args.profile)
    instance = _instance(args, workload, profile)
    names = tuple(f"i{number}" for number in range(1, count + 1))
    router = args.router or workload.router or _REPLICATED
    return SimulatedFleet(workload, (instance,) * count, names, router, workload.router_options)


def _instance(args: CapacityArgs, workload: Workload, profile: Profile) -> Any:
    """Return an instance that holds every adapter, with the workload's engine settings."""
    from capplan.spec import allowed_lora_rank
    from capplan.twin.cluster import Instance

    engine = workload.engine
    slots = args.max_loras if args.max_loras is not None else engine.max_loras
    pair = workload.scheduling
    if slots is None and (pair is not None or not workload.adapters):
        slots = len(workload.adapters)
    if slots is None:
        raise InputError("is required, unless the workload fixes engine.max_loras", location="--max-loras")
    rank = engine.max_lora_rank or allowed_lora_rank(max((a.rank for a in workload.adapters), default=1))
    given: dict[str, Any] = engine.given
    for name in ("max_loras", "max_lora_rank"):
        given.pop(name, None)
    scheduler, cache = pair or (None, None)
    s_max = rank if workload.adapters else 0
    return Instance(profile, slots, s_max, scheduler=scheduler, cache=cache, **given)


def _print_fewest(count: int, slo: Slo, *, as_json: bool) -> None:
    if as_json:
        print_json({"instances": count, "slo": slo.latency_bounds()})
    else:
        typer.echo(f"{counted(count, 'instance')} for the workload within {_words(slo)} on every seed")


def _print(
    fleet: SimulatedFleet,
    slo: Slo,
    result: LoadCapacity,
    beyond: Sequence[Mapping[str, Any]],
    *,
    as_json: bool,
) -> None:
    """Print the highest load and what its simulation used beyond the fitted ranges of the profiles."""
    rate = fleet.workload.total_rate_rps
    if as_json:
        facts = {"router": fleet.router, "instances": len(fleet.instances), "slo": slo.latency_bounds()}
        print_json({**facts, "rate_rps": rate, **asdict(result), "extrapolations": beyond})
        return
    above = "above " if result.above_limit else ""
    loads, head = [result.mean], ["mean"]
    if result.low is not None and result.high is not None:
        loads += [result.low, result.high]
        head += [f"{100.0 * result.confidence:g} % from", "to"]
    columns = (
        ("load, x workload", *(above + number(load, 3) for load in loads)),
        ("req/s", *(above + number(rate * load, 2) for load in loads)),
    )
    print_table(Table((f"{counted(len(fleet.instances), 'instance')}, {fleet.router}", *head), columns))
    trace = fleet.workload.trace
    simulated = counted(len(result.loads), "seed")
    if trace is not None:
        simulated = f"the trace of {trace.duration_s:g} s as a whole"
    typer.echo(f"bounds: {_words(slo)}; {simulated}")
    if result.binds:
        typer.echo(f"just above: {'; '.join(result.binds)}")
    replayed = () if trace is None else trace_lines(trace.speed * result.mean, trace.notes)
    for line in (*map(extrapolation_line, beyond), *replayed):
        typer.echo(line)


def _words(slo: Slo) -> str:
    bounds = [f"{name} {value:.4g}" for name, value in slo.latency_bounds().items()]
    return ", ".join([*bounds, f"served_fraction {slo.served_fraction:g}"])
