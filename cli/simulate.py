"""`capplan simulate`: one GPU under a workload, for numbers of adapter slots, or the instances of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, cast

import typer

from capplan.cli import options
from capplan.cli.output import require_writable_files
from capplan.cli.progress import announce_compilation, progress_bars
from capplan.errors import InfeasibleError, InputError
from capplan.reports import Table, number, percent, print_json, print_table, tables
from capplan.spec import EngineConfig, completed, require_seed_count

if TYPE_CHECKING:
    import pyarrow as pa

    from capplan.planner.verification import (
        DegradedFleet,
        DegradedResult,
        RankMetrics,
        SimulatedFleet,
        StoredAdapters,
    )
    from capplan.spec import Cache, Profile, Scheduler, Workload
    from capplan.twin import DetailedResult, Job, SimulationResult
    from capplan.twin.cluster import ClusterResult
    from capplan.twin.instance import PairedOrder, SimulateSettings


_METRICS: Final = (  # metric of the result, its name with unit, decimals, whether the largest is best
    ("throughput_tok_s", "throughput, tok/s", 0, True),
    ("ttft_s_mean_charged", "TTFT mean, charged, s", 3, False),
    ("itl_ms_mean", "ITL mean, ms", 2, False),
)
ONE_SEED: Final = "one seed does not order numbers of slots; --seeds 5 compares paired runs"
LEGEND: Final = "~: undecided, the difference is within two standard errors, or there are fewer than 5 seeds"


@dataclass(frozen=True)
class PairedMetric:
    """One metric of several numbers of slots."""

    metric: str
    title: str
    decimals: int
    values: Mapping[int, tuple[float, ...]]
    """By number of slots, one per seed."""
    order: PairedOrder


def require_seeds(count: int, workload: Workload) -> None:
    """Check the number of paired seeds: a trace has one."""
    require_seed_count(count, "--seeds")
    if count > 1 and workload.trace is not None:
        raise InputError("must be 1 for a trace, which every seed replays alike", count, "--seeds")


def further_jobs(jobs: Sequence[Job], seeds: int) -> list[Job]:
    """Return the jobs of the further seeds, job by job."""
    further = []
    for job in jobs:
        for step in range(1, seeds):
            settings = {**job.settings, "seed": job.settings.get("seed", 0) + step}
            further.append(replace(job, settings=cast("SimulateSettings", settings)))
    return further


def paired_metrics(
    first: Mapping[int, SimulationResult], further: Sequence[SimulationResult | InfeasibleError]
) -> tuple[PairedMetric, ...]:
    """Return the metrics of numbers of slots.

    `first` are the results of the first seed, and `further` those of `further_jobs` of the same numbers.
    """
    from capplan.twin.instance import paired_order

    each = len(further) // len(first)
    runs = {
        slots: (result, *(r for r in further[at * each : (at + 1) * each]))
        for at, (slots, result) in enumerate(first.items())
    }
    found = []
    for metric, title, decimals, largest_first in _METRICS:
        values = {slots: tuple(float(getattr(r, metric)) for r in results) for slots, results in runs.items()}
        order = paired_order(values, largest_first=largest_first)
        found.append(PairedMetric(metric, title, decimals, values, order))
    return tuple(found)


def paired_table(metrics: Sequence[PairedMetric], names: Mapping[int, str]) -> Table:
    """Return means with standard errors, one column per number of slots with its name, and the order."""
    from capplan.twin.instance import mean_with_error

    def cell(values: Sequence[float], decimals: int) -> str:
        found = mean_with_error(values)
        return f"{number(found.mean, decimals)} ± {number(found.std_error, decimals)}"

    slots = list(metrics[0].values)
    seeds = len(metrics[0].values[slots[0]])
    rows = [
        (each.title, *(cell(each.values[n], each.decimals) for n in slots), str(each.order))
        for each in metrics
    ]
    return Table((f"mean of {seeds} paired seeds", *(names[n] for n in slots), "best first"), rows)


def paired_documents(metrics: Sequence[PairedMetric]) -> list[dict[str, Any]]:
    """Return the comparison as JSON data."""
    return [
        {
            "metric": each.metric,
            "values": {str(slots): list(values) for slots, values in each.values.items()},
            "order": asdict(each.order),
        }
        for each in metrics
    ]


_SLOTS: Final = ("max_loras", "max_lora_rank")
"""Engine settings beside `SimulateArgs.engine`: several numbers of slots may be given, at one rank."""


@dataclass(frozen=True, kw_only=True)
class SimulateArgs:
    """Options of `capplan simulate`."""

    workload: options.WorkloadFile
    max_loras: str | None = typer.Option(
        None,
        metavar="N[,N...]",
        help="Adapter slots; several are compared side by side; 0 without adapters.",
    )
    max_lora_rank: int | None = typer.Option(
        None, metavar="RANK", help="Rank of a slot; default: the smallest that holds every adapter."
    )
    plan: str | None = typer.Option(
        None, metavar="PLAN", help="Simulate the instances of this plan for the workload, behind its router."
    )
    failed: list[str] | None = typer.Option(
        None,
        "--fail",
        metavar="GROUP[:REPLICA]",
        help="With --plan: without these instances, whose adapters the others serve if they hold them. "
        "Repeatable.",
    )
    router: options.RouterOption = None
    state_period_s: options.StatePeriod = None
    rebalance_s: options.RebalancePeriod = None
    forecast: options.ForecastName = None
    rebalance_solver: options.RebalanceSolverName = None
    profile: options.ProfileName = None
    duration_s: options.SimulatedTime = None
    seed: options.Seed = 0
    seeds: int = typer.Option(
        1, metavar="N", help="Paired seeds from --seed on, which order several numbers of slots."
    )
    engine: EngineConfig = options.engine_flags(without=_SLOTS)
    max_in_flight: int | None = typer.Option(
        None, metavar="N", help="Reject arrivals beyond this many requests."
    )
    rules: str | None = typer.Option(None, metavar="NAME", help="Serving rules instead of the profile's.")
    scheduler: options.SchedulerName = None
    cache: options.CacheName = None
    gpus_per_link: int | None = typer.Option(
        None,
        metavar="N",
        min=1,
        help="GPUs of the instance that share a link to host memory, which copies one adapter at a time; "
        "default: 1.",
    )
    prefix_caching: bool | None = typer.Option(
        None,
        "--prefix-caching/--no-prefix-caching",
        help="Whether KV of shared prompt beginnings is reused; default: as in the profile.",
    )
    detail: bool = typer.Option(
        False, "--detail", help="Also slowdown, waits, hit rate, metrics per rank, SLO attainment."
    )
    html: options.HtmlFile = None
    requests_out: options.RequestsFile = None
    workers: options.Workers = None
    ray_address: options.RayAddress = None
    strict: tables.Strict = False
    as_json: options.AsJson = False


@options.command
def simulate(args: SimulateArgs) -> None:
    """Simulate one GPU that serves the whole workload, or the instances of a plan.

    Engine settings that are not given come from the workload file, then from the twin's defaults.
    """
    from capplan.spec import write_text_atomic
    from capplan.workload import load_workload

    require_writable_files(args.html, args.requests_out)
    rebalance = options.RebalanceOptions(args.rebalance_s, args.forecast, args.rebalance_solver)
    if args.plan is not None:
        _require_options_of_plans(args)
        _simulate_plan(args, args.plan, rebalance)
        return
    _require_plan(args, rebalance)
    workload = load_workload(args.workload)
    args = replace(args, duration_s=options.simulated_s(workload, args.duration_s))
    pair = _scheduling(args, workload)
    slots = _slots(args, workload, pair)
    require_seeds(args.seeds, workload)
    profile = options.one_profile(workload, args.profile)
    settings = _settings(args, workload)
    announce_compilation()
    from capplan.twin import Job

    jobs = [Job(workload, profile, cast("SimulateSettings", {"a_max": count, **settings})) for count in slots]
    outcomes, details = _simulated(jobs, args)
    paired = _paired(jobs, outcomes, args)
    found = found_extrapolations(workload, profile, settings, outcomes)
    speed = None if workload.trace is None else workload.trace.speed
    beyond = tuple(map(tables.extrapolation_line, found))
    notes = () if workload.trace is None else workload.trace.notes
    lines = (*beyond, *tables.trace_lines(speed, notes))
    if args.requests_out is not None:
        from capplan.twin.instance import several_tables, write_parquet

        requests = {count: detail.requests for count, detail in details.items()}
        write_parquet(args.requests_out, several_tables(requests, by="a_max"))
    if args.html is not None:
        from capplan.reports.pages import NamedResults, simulation_page

        results = NamedResults(outcomes, details, pair)
        page = simulation_page(args.workload, workload, profile, settings, results, lines)
        write_text_atomic(args.html, page)
    shown = details if args.detail else {}
    if args.as_json:
        document = {
            "profile": profile.name,
            "settings": settings,
            "results": documents(outcomes, shown),
            "extrapolations": found,
        }
        pairs = {"paired": paired_documents(paired)} if paired else {}
        trace = {} if speed is None else {"trace_speed": speed, "trace_notes": notes}
        print_json({**document, **pairs, **trace})
    else:
        names = column_names(slots, pair)
        _print(outcomes, shown, names, pair)
        _print_order(paired, len(outcomes), names)
        for line in lines:
            typer.echo(line)
    if args.strict:
        tables.require_no_extrapolation(beyond)


_OF_ONE_GPU: Final = (
    *_SLOTS,
    "max_in_flight",
    "rules",
    "scheduler",
    "cache",
    "gpus_per_link",
    "prefix_caching",
    "html",
    "workers",
    "ray_address",
)
"""Options that do not go with a plan, as the other engine settings do not."""


def _require_options_of_plans(args: SimulateArgs) -> None:
    """Check that no option of the simulation of one GPU is given beside a plan."""
    given: dict[str, Any] = {name: each for name in _OF_ONE_GPU if (each := getattr(args, name)) is not None}
    given |= args.engine.given | ({"seeds": args.seeds} if args.seeds != 1 else {})
    given |= {"detail": True} if args.detail else {}
    for name, value in given.items():
        raise InputError("does not go with --plan", value, f"--{name.replace('_', '-')}")


def _require_plan(args: SimulateArgs, rebalance: options.RebalanceOptions) -> None:
    """Check that no option of a plan is given without one."""
    failed = args.failed[0] if args.failed else None
    given = {"--router": args.router, "--state-period-s": args.state_period_s, "--fail": failed}
    for flag, value in given.items():
        if value is not None:
            raise InputError("goes with --plan", value, flag)
    rebalance.require_plan()


def found_extrapolations(
    workload: Workload, profile: Profile, settings: Mapping[str, Any], outcomes: tables.Outcomes
) -> list[dict[str, Any]]:
    """Return the extrapolations of all simulations as JSON data; groups are the numbers of slots."""
    from capplan.twin.instance import engine_args, extrapolations, merged, values_of

    names = ("s_max", *EngineConfig.model_fields)
    known = {name: value for name, value in settings.items() if name in names}
    found = []
    for slots, outcome in outcomes.items():
        if not isinstance(outcome, InfeasibleError):
            args = engine_args(workload, cast("SimulateSettings", {"a_max": slots, **known}), profile)
            values = values_of(workload, args, profile.tp, [outcome])
            name = f"max_loras {slots}" if outcome.pool is None else "scheduler and cache"
            found += [(name, each) for each in extrapolations(profile, values)]
    return [each.document() for each in merged(found)]


def _slots(args: SimulateArgs, workload: Workload, pair: tuple[Scheduler, Cache] | None) -> tuple[int, ...]:
    """Return the numbers of slots to simulate, each once, in the order given."""
    if pair is not None:
        if args.max_loras is not None:
            rule = "does not go with a scheduler or a cache: adapters and KV share the memory"
            raise InputError(rule, args.max_loras, "--max-loras")
        return (len(workload.adapters),)
    if args.max_loras is not None:
        return options.numbers(args.max_loras, "--max-loras")
    if workload.engine.max_loras is None and not workload.adapters:
        return (0,)
    if workload.engine.max_loras is None:
        raise InputError("is required, unless the workload fixes engine.max_loras", location="--max-loras")
    return (workload.engine.max_loras,)


def _scheduling(args: SimulateArgs, workload: Workload) -> tuple[Scheduler, Cache] | None:
    """Return scheduler and cache of the command line, or else of the workload; None: those of the rules."""
    own = workload.scheduling if args.rules is None else None
    scheduler, cache = options.read_scheduler(args.scheduler), options.read_cache(args.cache)
    if args.rules is not None and (scheduler is not None or cache is not None):
        flag = "--scheduler" if scheduler is not None else "--cache"
        raise InputError(f"does not go with {flag}", args.rules, "--rules")
    if own is not None:
        scheduler, cache = scheduler or own[0], cache or own[1]
    return completed(scheduler, cache, options.scheduling_flags(args.scheduler, args.cache))


def _settings(args: SimulateArgs, workload: Workload) -> dict[str, Any]:
    """Return the settings of the command line, or else of the workload; the twin has the defaults."""
    from capplan.spec import allowed_lora_rank

    rank = args.max_lora_rank if args.max_lora_rank is not None else workload.engine.max_lora_rank
    plain = ("duration_s", "seed", "max_in_flight", "rules", "prefix_caching")
    link = {} if args.gpus_per_link is None else {"gpus_per_link": args.gpus_per_link}
    merged = workload.engine.given | args.engine.given
    if rank is None and workload.adapters:
        rank = allowed_lora_rank(max(a.rank for a in workload.adapters))
    chosen = {"scheduler": options.read_scheduler(args.scheduler), "cache": options.read_cache(args.cache)}
    return {
        "s_max": rank,
        **{name: getattr(args, name) for name in plain},
        **link,
        **{name: value.model_dump(mode="json") for name, value in chosen.items() if value is not None},
        **{name: value for name, value in merged.items() if name not in _SLOTS},
    }


def column_names(slots: Sequence[int], pair: tuple[Scheduler, Cache] | None) -> dict[int, str]:
    """Return the name of each simulation: its slots, or scheduler and cache."""
    return {
        count: f"max_loras {count}" if pair is None else f"{pair[0].name}\n{pair[1].policy}"
        for count in slots
    }


def _simulated(jobs: list[Job], args: SimulateArgs) -> tuple[tables.Outcomes, tables.Details]:
    """Return the results by number of slots, and the details if the command needs them.

    If no number of slots fits, the first error is raised.
    """
    from capplan.twin import DetailedResult, sweep, sweep_detailed

    run = sweep_detailed if args.detail or args.html or args.requests_out else sweep
    with progress_bars() as on_progress:
        on_progress("simulate", 0, len(jobs))
        results = run(
            jobs,
            workers=args.workers,
            ray_address=args.ray_address,
            progress=lambda done, total: on_progress("simulate", done, total),
        )
    failures = [result for result in results if isinstance(result, InfeasibleError)]
    if len(failures) == len(results):
        raise failures[0]
    found = dict(zip((job.settings["a_max"] for job in jobs), results, strict=True))
    details = {count: each for count, each in found.items() if isinstance(each, DetailedResult)}
    outcomes = {c: each.result if isinstance(each, DetailedResult) else each for c, each in found.items()}
    return outcomes, details


def _paired(jobs: list[Job], outcomes: tables.Outcomes, args: SimulateArgs) -> tuple[PairedMetric, ...]:
    """Return the metrics over all seeds; empty for one seed."""
    from capplan.twin import sweep

    first = {count: each for count, each in outcomes.items() if not isinstance(each, InfeasibleError)}
    if args.seeds == 1:
        return ()
    more = further_jobs([job for job in jobs if job.settings["a_max"] in first], args.seeds)
    with progress_bars() as on_progress:
        results = sweep(
            more,
            workers=args.workers,
            ray_address=args.ray_address,
            progress=lambda done, total: on_progress("paired seeds", done, total),
        )
    return paired_metrics(first, results)


def _print_order(paired: tuple[PairedMetric, ...], compared: int, names: Mapping[int, str]) -> None:
    if paired:
        print_table(paired_table(paired, names))
        if compared > 1:
            typer.echo(LEGEND)
    elif compared > 1:
        typer.echo(ONE_SEED)


def _print(
    outcomes: tables.Outcomes,
    details: tables.Details,
    names: Mapping[int, str],
    pair: tuple[Scheduler, Cache] | None,
) -> None:
    print_table(tables.metrics_table(outcomes, details, names, pair))
    if details:
        print_table(_ranks_table(details, names))
        if next(iter(details.values())).slo:
            print_table(_slo_table(details, names))
    for count, outcome in outcomes.items():
        if isinstance(outcome, InfeasibleError):
            typer.echo(f"max_loras {count}: {outcome}")


def _ranks_table(details: tables.Details, names: Mapping[int, str]) -> Table:
    metrics = ("finished", "served", "tok/s", "TTFT p50, s", "TTFT p99, s", "TPOT p50, ms", "slowdown p50")
    rows = [
        (
            names[slots].removeprefix("max_loras "),
            str(rank),
            number(group.finished),
            percent(group.served_fraction),
            number(group.throughput_tok_s),
            number(group.ttft_s.p50, 3),
            number(group.ttft_s.p99, 3),
            number(group.tpot_ms.p50, 2),
            number(group.slowdown.p50, 2),
            percent(group.hit_rate),
        )
        for slots, detail in details.items()
        for rank, group in detail.by_rank.items()
    ]
    by_slots = all(name.startswith("max_loras ") for name in names.values())
    head = "max_loras" if by_slots else "scheduler\ncache"
    return Table((head, "rank", *metrics, "resident"), rows, numbers_from=0)


def _slo_table(details: tables.Details, names: Mapping[int, str]) -> Table:
    rows = [
        (tables.bound_text(bounds[0].bound, bounds[0].limit), *(percent(bound.share) for bound in bounds))
        for bounds in zip(*(detail.slo for detail in details.values()), strict=True)
    ]
    return Table(("requests that keep", *(names[slots] for slots in details)), rows)


def documents(outcomes: tables.Outcomes, details: tables.Details) -> list[dict[str, Any]]:
    """Return everything as JSON data, one document per number of slots."""
    found = []
    for slots, outcome in outcomes.items():
        if isinstance(outcome, InfeasibleError):
            found.append({"a_max": slots, "infeasible": str(outcome)})
        else:
            found.append({"a_max": slots, **outcome.document(), **_detail(details.get(slots))})
    return found


def _detail(detail: DetailedResult | None) -> dict[str, Any]:
    if detail is None:
        return {}
    series = {field.name: getattr(detail.series, field.name) for field in fields(detail.series)}
    return {
        "overall": asdict(detail.overall),
        "by_rank": {str(rank): asdict(got) for rank, got in detail.by_rank.items()},
        "by_adapter": {name: asdict(got) for name, got in detail.by_adapter.items()},
        "slo": [{**asdict(bound), "share": bound.share} for bound in detail.slo],
        "series": {name: v if isinstance(v, float) else v.tolist() for name, v in series.items()},
    }


def _simulate_plan(args: SimulateArgs, plan_file: str, rebalance: options.RebalanceOptions) -> None:
    """Simulate the instances of a plan, and print the metrics of all, of each instance, and by rank."""
    from capplan.planner.verification import by_rank, fleet_of_plan, stored_adapters, without_instances
    from capplan.workload import load_workload

    workload = load_workload(args.workload)
    plan = options.read_any_plan(plan_file)
    failed = tuple(args.failed or ())
    if failed and args.requests_out is not None:
        rule = "does not go with --fail: the table would lack the requests without a server"
        raise InputError(rule, args.requests_out, "--requests-out")
    chosen = None if args.profile is None else options.chosen_profile(workload, args.profile)
    settings = rebalance.settings(plan.rebalance)
    if args.state_period_s is not None:
        options.require_state_period(args.state_period_s)
    announce_compilation(quiet=args.as_json)
    fleet = fleet_of_plan(plan, workload, chosen, args.workload, args.router, settings)
    if args.state_period_s is not None:
        fleet = replace(fleet, state_period_s=args.state_period_s)
    degraded = without_instances(fleet, failed) if failed else None
    duration_s = options.simulated_s(workload, args.duration_s)
    failure = None
    if degraded is None:
        result = fleet.simulate(args.seed, duration_s)
    else:
        failure = degraded.simulate(args.seed, duration_s)
        fleet, result = degraded.fleet, failure.result
    if args.requests_out is not None:
        from capplan.twin.instance import write_parquet

        write_parquet(args.requests_out, requests_table(fleet, result))
    ranks, held = by_rank(fleet, result), stored_adapters(fleet)
    found = [each.document() for each in fleet.extrapolations(result)]
    beyond = tuple(map(tables.extrapolation_line, found))
    trace = workload.trace
    if args.as_json:
        notes = {} if trace is None else {"trace_notes": trace.notes}
        lost = {} if degraded is None or failure is None else {"failure": _failure(degraded, failure)}
        print_json({**_fleet_document(fleet, result, ranks, held), **lost, "extrapolations": found, **notes})
    else:
        if failure is not None:
            for line in tables.degraded_lines(failure, failed, plan.slo):
                typer.echo(line)
        print_table(tables.cluster_table(fleet, result))
        print_table(tables.instances_table(fleet, result, held))
        print_table(tables.ranks_table(ranks))
        replayed = () if trace is None else tables.trace_lines(trace.speed, trace.notes)
        for line in (
            tables.storage_line(fleet, held),
            *tables.moves_lines(fleet, result),
            *beyond,
            *replayed,
        ):
            typer.echo(line)
    if args.strict:
        tables.require_no_extrapolation(beyond)
    if failure is not None and failure.broken:
        raise typer.Exit(options.FAILED)


def _failure(degraded: DegradedFleet, failure: DegradedResult) -> dict[str, Any]:
    """Return what fails without some instances, as JSON data."""
    submitted = failure.submitted
    return {
        "instances": degraded.failed,
        "requests": submitted,
        "served": failure.result.completed,
        "served_fraction": failure.served_fraction,
        "broken_bounds": failure.broken,
        "unserved_adapters": [
            {"name": name, "requests": count, "share": count / max(1, submitted)}
            for name, count in failure.unserved.items()
        ],
        "unserved_share": sum(failure.unserved.values()) / max(1, submitted),
    }


def _fleet_document(
    fleet: SimulatedFleet,
    result: ClusterResult,
    ranks: Sequence[RankMetrics],
    held: Sequence[StoredAdapters],
) -> dict[str, Any]:
    """Return the results as JSON data."""
    instances = [
        {
            "name": name,
            "requests": routed,
            **_metrics(own),
            "adapters_stored": store.count,
            "bytes": store.bytes,
        }
        for name, routed, own, store in zip(
            fleet.names, result.requests_per_instance, result.instances, held, strict=True
        )
    ]
    return {
        "router": fleet.router,
        "state_period_s": fleet.state_period_s,
        "gpus_per_link": fleet.gpus_per_link,
        "cluster": _metrics(result),
        "instances": instances,
        "ranks": [asdict(each) for each in ranks],
        **_moves(fleet, result),
    }


def _moves(fleet: SimulatedFleet, result: ClusterResult) -> dict[str, Any]:
    """Return the re-balancings and transfers as JSON data; empty without re-balancing."""
    moves = result.moves
    if moves is None or fleet.rebalance is None:
        return {}
    found = {name: value for name, value in vars(moves).items() if name not in ("rounds", "events")}
    return {
        "rebalance": {
            "settings": fleet.rebalance.settings.model_dump(mode="json"),
            "operating_points_tok_s": {str(r): p for r, p in fleet.rebalance.operating_points.items()},
            "rounds": [asdict(each) for each in moves.rounds],
            **found,
        }
    }


def _metrics(result: Any) -> dict[str, Any]:
    found = {name: getattr(result, name) for name, _, _ in tables.METRICS}
    return {**found, "served_fraction": result.served_fraction, "busy_fraction": result.busy_fraction}


def requests_table(fleet: SimulatedFleet, result: ClusterResult) -> pa.Table:
    """Return a row per request: adapter, instance and status by name, null for what had not happened."""
    import pyarrow as pa

    from capplan.twin.instance import STATUSES

    adapters = ("", *(adapter.name for adapter in fleet.workload.adapters))
    names = {"adapter": adapters, "instance": fleet.names, "status": STATUSES}
    columns = {}
    for name, column in vars(result.requests).items():
        if name in names:
            codes = pa.array(column.astype("int32"), mask=column < 0)
            columns[name] = pa.DictionaryArray.from_arrays(codes, pa.array(names[name], pa.string()))
        else:
            columns[name] = pa.array(column, from_pandas=True)  # NaN becomes null
    return pa.table(columns)
