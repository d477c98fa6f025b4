"""`capplan plan`: from a workload file to a verified plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import typer

from capplan.cli.options import (
    FAILED,
    AsJson,
    CacheName,
    ProfileName,
    Quiet,
    RouterOption,
    SchedulerName,
    Seed,
    WorkloadFile,
    chosen_profile,
    command,
    command_line,
    read_cache,
    read_scheduler,
    scheduling_flags,
)
from capplan.cli.output import require_writable_files
from capplan.cli.progress import announce_compilation, progress_bars
from capplan.errors import InputError
from capplan.planner import SOLVERS
from capplan.reports.console import DASH, Table, counted, number, percent, print_table
from capplan.reports.tables.latency import latency_cells, latency_heads
from capplan.reports.tables.notes import (
    Strict,
    extrapolation_lines,
    folder_lines,
    plan_notes,
    require_no_extrapolation,
)
from capplan.spec.routing import PLAN_ROUTER
from capplan.spec.scheduling import completed

if TYPE_CHECKING:
    from capplan.spec import Group, Plan, Predicted, Workload

_GIB = 2**30
_MAX_BOTTLENECKS = 8
"""Groups with a line of their own below the table."""
_PRINTING = ("output", "as_json", "quiet")


@dataclass(frozen=True, kw_only=True)
class PlanArgs:
    """Options of `capplan plan`."""

    workload: WorkloadFile
    output: str | None = typer.Option(
        None, "--output", "-o", metavar="FILE", help="Write the plan here: all of it or nothing."
    )
    profile: ProfileName = None
    gpus: int | None = typer.Option(
        None, metavar="N", help="GPUs the plan may use; default: the workload's, or as needed."
    )
    solver: str = typer.Option("capplan", metavar="NAME", help=f"How to place: {', '.join(SOLVERS)}.")
    seed: Seed = 0
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
    scheduler: SchedulerName = None
    cache: CacheName = None
    queues: bool = typer.Option(
        False, "--queues", help="Plan queues by request size: --scheduler chameleon with every default."
    )
    router: RouterOption = None
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
    strict: Strict = False
    as_json: AsJson = False
    quiet: Quiet = False


@command
def plan(args: PlanArgs) -> None:
    """Plan which adapters share which GPUs, with which engine settings, and verify it with the twin."""
    from capplan.spec import load_workload

    require_writable_files(args.output)
    workload = _with_scheduling(load_workload(args.workload), args)
    if args.previous is not None:
        workload = workload.replace(previous_plan=args.previous)
    if args.router is not None:
        workload = workload.replace(router=args.router)
    if args.move_cost is not None:
        workload = workload.replace(move_cost=args.move_cost)
    chosen = chosen_profile(workload, args.profile)
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
    recorded = command_line("capplan plan", args, without=_PRINTING)  # equal plans are equal files
    result = result.replace(provenance={**result.provenance, "command": recorded})
    if args.output is not None:
        result.to_json(args.output)
    if args.as_json:
        typer.echo(result.to_json(), nl=False)
    elif not args.quiet:
        print_table(groups_table(result))
        for line in bottleneck_lines(result):
            typer.echo(line)
        typer.echo(_summary(result, args.output))
        for line in (*plan_notes(result), *folder_lines(workload)):
            typer.echo(line)
    if args.strict:
        require_no_extrapolation(extrapolation_lines(result.provenance))
    if args.verify and not result.verification.ok:
        raise typer.Exit(FAILED)


def _with_scheduling(workload: Workload, args: PlanArgs) -> Workload:
    """Return the workload with the scheduler and the cache of the command line."""
    from capplan.spec import QueueConfig

    if args.queues and args.scheduler is not None:
        raise InputError("does not go with --scheduler", location="--queues")
    changes: dict[str, Any] = {}
    if args.scheduler is not None:
        changes |= {"scheduler": read_scheduler(args.scheduler), "queues": None}
    elif args.queues and not (workload.scheduler is not None and workload.scheduler.policy == "chameleon"):
        changes["queues"] = workload.queues or QueueConfig()
    if args.cache is not None:
        changes["cache"] = read_cache(args.cache)
    scheduler, cache = (changes.get(name, getattr(workload, name)) for name in ("scheduler", "cache"))
    completed(scheduler, cache, scheduling_flags(args.scheduler, args.cache))
    return workload.replace(**changes) if changes else workload


def groups_table(plan: Plan) -> Table:
    """Return one row per group; predictions are for one instance of it."""
    from capplan.spec.engine_args import DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS

    queued = any(group.queues is not None for group in plan.groups)
    scheduled = any(group.scheduling is not None for group in plan.groups)
    knobs = {(each.engine_args.max_num_batched_tokens, each.engine_args.max_num_seqs) for each in plan.groups}
    tuned = not knobs <= {(DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS)}
    several = any(group.replicas * group.tp > 1 for group in plan.groups)
    based = any(group.base is not None for group in plan.groups)
    head = (
        *(
            "group",
            "profile",
            *(["GPUs"] if several else []),
            "adapters",
            "rate\nreq/s",
            *(["base model\nreq/s"] if based else []),
        ),
        *("max\nloras", "max lora\nrank", "KV\ntokens"),
        *("tok/s\n(low..high)", *latency_heads(plan, "\n"), "served", "binds"),
        *(["scheduler\ncache", "loaded at\nadmission"] if scheduled else []),
        *(["quotas\ntokens"] if queued else []),
        *(["max batched\ntokens", "max\nseqs"] if tuned else []),
    )
    rows = []
    for group in plan.groups:
        predicted, args = group.predicted, group.engine_args
        queues = () if group.queues is None else group.queues.classes
        scheduler, cache = group.scheduling or (None, None)
        policies = DASH if scheduler is None or cache is None else f"{scheduler.name}\n{cache.policy}"
        hit_rate = None if predicted.scheduling is None else predicted.scheduling.hit_rate
        quotas = "\n".join(number(each.quota_tokens) for each in queues) or DASH
        rows.append(
            (
                group.id if group.replicas == 1 else f"{group.id} ×{group.replicas}",
                group.profile,
                *([number(group.replicas * group.tp)] if several else []),
                f"{len(group.placed):,}",
                number(group_rate_rps(group), 2),
                *([number(base_rate_rps(group), 2)] if based else []),
                str(args.max_loras) if group.scheduling is None else DASH,
                str(args.max_lora_rank),
                number(predicted.kv_tokens),
                "\n".join(throughput(predicted)),
                *latency_cells(plan, group),
                percent(predicted.served_fraction),
                DASH if group.binds is None else group.binds.resource,
                *([policies, percent(hit_rate)] if scheduled else []),
                *([quotas] if queued else []),
                *([number(args.max_num_batched_tokens), number(args.max_num_seqs)] if tuned else []),
            )
        )
    return Table(head, rows, numbers_from=2)


def bottleneck_lines(plan: Plan) -> tuple[str, ...]:
    """Return the bottleneck of each group, of the fullest ones only if there are many."""
    by_load = sorted(plan.groups, key=lambda group: -(group.predicted.load_over_capacity or 0.0))
    shown = {group.id for group in by_load[:_MAX_BOTTLENECKS]}
    return tuple(f"{group.id}: {binding(plan, group)}" for group in plan.groups if group.id in shown)


_BY_SHARES: Final = (None, PLAN_ROUTER, "plan-shares")


def binding(plan: Plan, group: Group) -> str:
    """Return the load of a group over its capacity, and what binds at the load where it fails.

    Both are those of an instance at its shares in the plan, which is said where others get its requests.
    """
    load = group.predicted.load_over_capacity
    moves = plan.rebalance is not None or plan.router not in _BY_SHARES
    use = "" if load is None else f"{100.0 * load:.0f} % of capacity{' at its shares' if moves else ''}"
    limit = "nothing binds yet" if group.binds is None else group.binds.note
    return "; ".join(filter(None, (use, limit)))


def throughput(predicted: Predicted) -> tuple[str, ...]:
    """Return the throughput, and its interval if there is one."""
    middle, low, high = predicted.throughput_tok_s, predicted.low_tok_s, predicted.high_tok_s
    if low is None or high is None:
        return (number(middle),)
    return number(middle), f"({number(low)}..{number(high)})"


def group_rate_rps(group: Group) -> float:
    """Return the rate of the requests of a group over all its replicas, in requests per second."""
    return sum(adapter.rate_rps * adapter.share for adapter in group.adapters) + base_rate_rps(group)


def base_rate_rps(group: Group) -> float:
    """Return the rate of the base model's requests to a group over all its replicas."""
    return 0.0 if group.base is None else group.base.rate_rps * group.base.share


def verdict(plan: Plan) -> str:
    """Return the verdict of the twin on a plan in words."""
    if not plan.verification.seeds:
        return "not verified"
    words = _verdict_of_twin(plan)
    changed = plan.changed_after_verification()
    if not changed:
        return words
    passed = plan.verification.ok
    return f"NOT VERIFIED: {changed}; the verdict was: {words}" if passed else f"{words}; {changed}"


def _verdict_of_twin(plan: Plan) -> str:
    """Return the recorded verdict in words, whether or not it is on this plan."""
    check = plan.verification
    quantile = plan.provenance.get("robust")
    slow = "" if quantile is None else f", headroom with step times at quantile {quantile}"
    start_s = check.window_start_s
    worst = "" if start_s is None else f" from {start_s:g} s of the trace, its worst window"
    tried = f"in simulation, {len(check.seeds)} × {duration(check.duration_s)}{worst}{evidence(plan)}{slow}"
    served = f"at least {percent(check.min_served_fraction)} of the tokens served"
    if check.ok:
        return f"verified {tried}, {served}"
    if check.not_simulated and all(group.ok for group in check.groups):
        settings = " and ".join(check.not_simulated)
        missing = f"the verification did not simulate {settings}; plan again"
        return f"NOT VERIFIED: {missing}; without them verified {tried}, {served}"
    if check.verdict == "undecided":
        return f"UNDECIDED: {check.reason}; {served} {tried}"
    failed = ", ".join(group.id for group in check.groups if not group.ok)
    return f"VERIFICATION DISAGREES {tried}, {served}; failing: {failed or 'the plan as a whole'}"


def evidence(plan: Plan) -> str:
    """Return the kind of the profiles that a plan rests on, after a comma; nothing if it is not known."""
    pools = plan.provenance.get("pools")
    sources = list(pools.values()) if isinstance(pools, dict) else [plan.provenance]
    kinds = [
        str(each["profile_kind"]) for each in sources if isinstance(each, dict) and "profile_kind" in each
    ]
    words = dict.fromkeys("measured" if kind == "published" else kind for kind in kinds)
    return f", profile {' and '.join(words)}" if words else ""


def duration(seconds: float) -> str:
    """Return a duration in the largest unit that divides it."""
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= length and seconds % length == 0.0:
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} s"


def _summary(plan: Plan, output: str | None) -> str:
    totals = plan.totals
    price = "" if totals.usd_per_hour is None else f", {totals.usd_per_hour:,.2f} USD per hour"
    moves = _moves(plan)
    written = "not written (-o FILE writes it)" if output is None else f"written to {output}"
    gpus = f"{counted(totals.gpus, 'GPU')} (lower bound {totals.lower_bound_gpus})"
    cut = "; the time limit ended the search, a longer --time-limit may find a better plan"
    search = cut if plan.provenance.get("search") == "time_limit" else ""
    return f"{gpus}{price}; {verdict(plan)}{search}{moves}; {written}"


def _moves(plan: Plan) -> str:
    """Return the size of the moves from the plan in force; nothing without one."""
    copied, moved = plan.provenance.get("moved_bytes"), plan.provenance.get("moved_adapters")
    if not isinstance(copied, int) or not isinstance(moved, int):
        return ""
    adapters = {adapter.name for group in plan.groups for adapter in group.adapters}
    return f"; {moved:,} of {counted(len(adapters), 'adapter')} to move, {copied / _GIB:.2f} GiB to copy"
