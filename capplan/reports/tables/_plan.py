"""Tables of a plan, its verdict and explanation in words, the lines below them, and solvers compared.

Latencies of a plan: the bounded statistics, or else the 99th percentiles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from capplan.errors import InfeasibleError
from capplan.reports._console import DASH, GIB, Table, counted, number, percent
from capplan.spec import PLAN_ROUTER, describe_latency

if TYPE_CHECKING:
    from capplan.planner import SolverComparison, SolverResult
    from capplan.planner.explain import (
        Explanation,
        Headroom,
        LoadingPoint,
        PlanOutcome,
        SettingCurve,
        SizeGain,
    )
    from capplan.spec import Group, GroupVerification, Plan, Predicted, Workload


_DEFAULTS: Final = ("ttft_p99_s", "tpot_p99_ms")
_ORDER: Final = ("ttft", "tpot", "e2e", "tpt", "itl", "interruption")
_DECIMALS: Final = {"s": 2, "ms": 1, "count": 1, "share": 3}


def shown_latencies(plan: Plan) -> tuple[str, ...]:
    """Return the latencies to show, named as bounds.

    These are the bounded ones, and the 99th percentiles of TTFT and TPOT if these have no bound.
    """
    shown = list(plan.slo.latency_bounds())
    metrics = {name.split("_")[0] for name in shown}
    shown += [name for name in _DEFAULTS if name.split("_")[0] not in metrics]
    return tuple(sorted(shown, key=lambda name: _ORDER.index(name.split("_")[0])))


def latency_heads(plan: Plan, separator: str) -> tuple[str, ...]:
    """Return the heads of the columns of these latencies."""
    return tuple(separator.join(describe_latency(name)) for name in shown_latencies(plan))


def latency_cells(plan: Plan, group: Group) -> tuple[str, ...]:
    """Return the cells of these latencies, of one instance of a group."""
    return tuple(
        number(group.predicted.latency(name), _DECIMALS[name.rsplit("_", 1)[1]])
        for name in shown_latencies(plan)
    )


def worst_latency(plan: Plan, bound: str) -> float | None:
    """Return the largest latency of all groups."""
    known = (group.predicted.latency(bound) for group in plan.groups)
    return max((value for value in known if value is not None), default=None)


_MAX_BOTTLENECKS = 8
"""Groups with a line of their own below the table."""


def groups_table(plan: Plan) -> Table:
    """Return one row per group; predictions are for one instance of it."""
    from capplan.spec import DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS

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


def answer(plan: Plan) -> str:
    """Return the answer to how many GPUs, in one sentence."""
    totals, check = plan.totals, plan.verification
    kinds = ", ".join(dict.fromkeys(group.gpu for group in plan.groups))
    rate = number(sum(map(group_rate_rps, plan.groups)), 2)
    load = f"{counted(len(plan.adapters), 'adapter')} at {rate} req/s"
    gpus = f"{counted(totals.gpus, 'GPU')} ({kinds})"
    if not check.seeds or check.verdict == "undecided" or plan.changed_after_verification():
        return f"{gpus} for {load}: whether every bound holds is not decided."
    if not check.ok:
        return f"{gpus} for {load}: not every bound holds."
    least = totals.lower_bound_gpus
    bound = "no plan can use fewer" if least >= totals.gpus else f"the lower bound is {least}"
    if least < totals.gpus and plan.provenance.get("search") == "time_limit":
        bound += ", and the search ran out of time: --time-limit gives it more"
    serve = "serves" if totals.gpus == 1 else "serve"
    return f"{gpus} {serve} {load} within every bound; {bound}."


def move_words(plan: Plan) -> str:
    """Return the size of the moves from the plan in force; nothing without one."""
    return _move_words(plan.provenance, plan)


def choice_lines(plan: Plan) -> tuple[str, ...]:
    """Return one line per verified alternative that moves fewer adapters and costs more."""
    found: Any = plan.provenance.get("choices", [])
    return tuple(
        f"or {counted(each['gpus'], 'GPU')}{price_words(each.get('usd_per_hour'))}, verified: "
        f"{_move_words(each, plan)} (--move-cost {each['move_cost']:g})"
        for each in found
    )


def _move_words(sizes: Mapping[str, Any], plan: Plan) -> str:
    if "moved_adapters" not in sizes:
        return ""
    moved, copied_gib = sizes["moved_adapters"], sizes["moved_bytes"] / GIB
    return f"{moved:,} of {counted(len(plan.adapters), 'adapter')} to move, {copied_gib:.2f} GiB to copy"


def price_words(usd_per_hour: float | None) -> str:
    """Return a price after a comma; nothing if it is not known."""
    return "" if usd_per_hour is None else f", {usd_per_hour:,.2f} USD per hour"


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


MORE: Final = (
    "--workload FILE also explains the numbers of slots, utilization and headroom, and one GPU fewer or more"
)


_RESOURCES = {
    "kv": "KV-cache memory",
    "slots": "adapter slots",
    "compute": "compute",
    "slo": "a latency objective",
}


def gpus_reason(plan: Plan) -> str:
    """Return in words why the plan uses its number of GPUs, against the lower bound."""
    used, least = plan.totals.gpus, plan.totals.lower_bound_gpus
    if used <= least:
        return f"{counted(used, 'GPU')}: no plan can use fewer"
    binds = {
        name: [group.id for group in plan.groups if group.binds is not None and group.binds.resource == key]
        for key, name in _RESOURCES.items()
    }
    filled = "; ".join(f"{name} on {', '.join(ids)}" for name, ids in binds.items() if ids)
    parts = [
        f"{counted(used, 'GPU')}, {used - least} above the lower bound of {least}, "
        "which no plan can beat but which may be out of reach",
        f"what fills them: {filled}" if filled else "no group is full",
    ]
    loads = [g.predicted.load_over_capacity for g in plan.groups for _ in range(g.replicas)]
    known = [load for load in loads if load is not None]
    if known:
        parts.append(f"on average a GPU carries {percent(sum(known) / len(known))} of what it sustains")
    if plan.objective != "min_gpus":
        parts.append(f"the objective is {plan.objective.value}, not the fewest GPUs")
    return "; ".join(parts)


def size(group: Group) -> str:
    """Return how large a group is, and what it serves with which slots."""
    instances = f"{counted(group.replicas, 'instance')} of {counted(group.tp, 'GPU')} ({group.gpu})"
    load = f"{counted(len(group.placed), 'adapter')} at {number(group_rate_rps(group), 2)} req/s"
    if group.base is not None:
        load += f" ({number(base_rate_rps(group), 2)} of the base model)"
    slots = f"{group.engine_args.max_loras} slots of rank {group.engine_args.max_lora_rank}"
    if group.engine_args.max_loras == 0:
        slots = "no slots"
    elif group.scheduling is not None:
        slots = "adapters and KV in one memory"
    return f"{instances}, {load}, {slots}, profile {group.profile}"


def verified(check: GroupVerification | None, *, changed: bool) -> str:
    """Return the verdict of the twin on a group, of a plan that was perhaps `changed` since."""
    if check is None:
        return "not verified"
    before = " at planning" if changed else ""
    note = f": {check.note}" if check.note else ""
    return (
        f"{'verified' if check.ok else 'FAILED'}{before}{note}; {percent(check.served_fraction)} served, "
        f"{number(check.throughput_tok_s)} tok/s, TTFT p99 {number(check.ttft_p99_s, 2)} s on the worst seed"
    )


def provenance(plan: Plan) -> dict[str, str]:
    """Return the provenance of a plan without extrapolations, with values other than texts as JSON."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in plan.provenance.items()
        if key != "extrapolations"
    }


_SLOT_COLUMNS: Final = (
    "KV tokens",
    "tok/s",
    "served",
    "TTFT p99, s",
    "E2E mean, s",
    "ITL mean, ms",
    "loads/min",
)


_KNOB_COLUMNS: Final = ("tok/s", "served", "TTFT p99, s", "TPOT p99, ms", "ITL p99, ms")


def curve_table(curve: SettingCurve, chosen: str = " ◀ chosen") -> Table:
    """Return one row per value of an engine setting, the chosen one marked."""
    of_slots = curve.setting == "a_max"
    name, columns = ("A_max", _SLOT_COLUMNS) if of_slots else (curve.setting, _KNOB_COLUMNS)
    rows = []
    for point in curve.points:
        cells = {
            "KV tokens": number(point.kv_tokens),
            "tok/s": number(point.throughput_tok_s),
            "served": percent(point.served_fraction),
            "TTFT p99, s": number(point.ttft_p99_s, 2),
            "TPOT p99, ms": number(point.tpot_p99_ms, 1),
            "E2E mean, s": number(point.e2e_mean_s, 2),
            "ITL mean, ms": number(point.itl_mean_ms, 1),
            "ITL p99, ms": number(point.itl_p99_ms, 1),
            "loads/min": number(point.loads_per_min, 1),
        }
        value = f"{point.value}{chosen if point.value == curve.chosen else ''}"
        holds = ("; ".join(point.broken) or "holds") if point.fits else "does not fit in memory"
        rows.append((value, *(cells[column] for column in columns), holds))
    return Table((f"{name} at {curve_load(curve)}", *columns, "verdict"), rows, text_last=True)


def loading_table(points: Sequence[LoadingPoint], chosen: str = " ◀ chosen") -> Table:
    """Return one row per loading policy, the plan's marked."""
    rows = [
        (
            f"{point.loading}{'' if at else chosen}",
            number(point.ttft_mean_s, 3),
            number(point.tpt_mean_ms, 2),
            percent(point.interruption_mean_share),
            "; ".join(point.broken) or "holds",
        )
        for at, point in enumerate(points)
    ]
    head = ("loading at the planned load", "TTFT mean, s", "TPT mean, ms", "paused, of E2E", "verdict")
    return Table(head, rows, text_last=True)


def gains_table(gains: Sequence[SizeGain]) -> Table:
    """Return one row per size class: TTFT p99 with queues and in order of arrival."""
    rows = [
        (each.size, *(number(value, 2) for value in (*each.planned_s, *each.overloaded_s))) for each in gains
    ]
    overloaded = f"at {times(gains[0].overload)}"
    head = (
        "TTFT p99, s, by size",
        "with queues",
        "in order of arrival",
        f"with queues\n{overloaded}",
        f"in order\n{overloaded}",
    )
    return Table(head, rows)


def curve_load(curve: SettingCurve) -> str:
    """Return the load and the step times of a curve, as text."""
    slow = "" if curve.robust is None else f", step times at quantile {curve.robust:g}"
    return f"{times(curve.scale)}{slow}"


def room_table(room: Headroom) -> Table:
    """Return one row per resource and bound, at the planned load and where the instance fails."""
    loads = ["at the planned load"]
    if room.fails_at is not None:
        loads.append(f"at {times(room.fails_at)}")
    rows = [(use.name, *map(percent, (use.now, use.beyond)[: len(loads)]), use.detail) for use in room.uses]
    return Table(("in use", *loads, ""), rows, text_last=True)


def what_if_table(explanation: Explanation) -> Table:
    """Return one row for the plan, and one for each other number of GPUs."""
    plan = explanation.outcome
    cases: list[tuple[int, str, PlanOutcome | None, str]] = [(plan.gpus, "this plan", plan, DASH)]
    cases += [(each.gpus, each.change, each.outcome, each.words) for each in explanation.what_if]
    rows = [
        (name, *_outcome_cells(gpus, outcome), words)
        for gpus, name, outcome, words in sorted(cases, key=lambda case: case[0])
    ]
    head = ("", "GPUs", "USD/h", "TTFT p99, s", "TPOT mean, ms", "tok/s", "holds up to", "what follows")
    return Table(head, rows, text_last=True)


def _outcome_cells(gpus: int, outcome: PlanOutcome | None) -> tuple[str, ...]:
    if outcome is None:
        return (number(gpus), *[DASH] * 5)
    held = DASH if outcome.holds_until is None else times(outcome.holds_until)
    return (
        number(gpus),
        number(outcome.usd_per_hour, 2),
        number(outcome.ttft_p99_s, 2),
        number(outcome.tpot_mean_ms, 1),
        number(outcome.throughput_tok_s),
        held if outcome.fails or outcome.holds_until is None else f"{held} or more",
    )


def times(scale: float) -> str:
    """Return a multiple of the planned load."""
    return f"{scale:.2f} × load"


_LONG_WAIT_S: Final = 10.0
"""TTFT p99 from which a plan without latency bounds has a hint."""
_SAME_SPEED: Final = 0.005

Strict: TypeAlias = Annotated[
    bool, typer.Option("--strict", help="Exit with 3 if there are extrapolations beyond the fitted ranges.")
]


def plan_notes(plan: Plan) -> tuple[str, ...]:
    """Return the lines below the table of a plan."""
    return (
        *extrapolation_lines(plan.provenance),
        *trace_lines(plan.provenance.get("trace_speed"), plan.provenance.get("trace_notes")),
        *_missing_quotas(plan),
        *_hints(plan),
    )


def _missing_quotas(plan: Plan) -> tuple[str, ...]:
    """Return a line per group whose queues have less than their minimum quotas."""
    return tuple(
        f"{group.id}: the minimum quotas for the bound on E2E need {group.queues.missing_tokens:,} more "
        "tokens than its KV memory has, by a queueing model; they are scaled down, and the twin decides"
        for group in plan.groups
        if group.queues is not None and group.queues.missing_tokens
    )


def folder_lines(workload: Workload) -> tuple[str, ...]:
    """Return lines on adapters that are planned as stated, and on base models that go by another name."""
    from capplan.spec import PeftFiles, local_folder, path_kind

    absent: list[str] = []
    named: dict[str, list[str]] = {}
    for adapter in workload.adapters:
        folder = local_folder(adapter.path)
        if folder is not None:
            base_model = PeftFiles.of(folder).describe().base_model or workload.base_model
            if base_model != workload.base_model:
                named.setdefault(base_model, []).append(adapter.name)
        elif adapter.path is not None and path_kind(adapter.path) == "folder":
            absent.append(adapter.name)
    lines = [
        f"base_model_name_or_path of {_some(names)} is {base_model}, which is taken for {workload.base_model}"
        for base_model, names in named.items()
    ]
    if absent:
        lines.append(f"the folder of {_some(absent)} is not on this machine: rank and layers are as stated")
    return tuple(lines)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    return f"adapter {names[0]}{more}"


def trace_lines(speed: object, notes: object) -> tuple[str, ...]:
    """Return the notes of a trace, and a line if it is replayed faster or slower than it was recorded."""
    lines = tuple(f"trace: {note}" for note in notes) if isinstance(notes, tuple | list) else ()
    if not isinstance(speed, float) or abs(speed - 1.0) <= _SAME_SPEED:
        return lines
    change = "compressed" if speed > 1.0 else "stretched"
    return (
        *lines,
        f"trace at {speed:.3g} times its recorded rate: time is {change}, bursts and pauses included",
    )


def _hints(plan: Plan) -> tuple[str, ...]:
    """Return a hint if waits are long and no latency is bounded."""
    waits_s = [(g.predicted.ttft_s.p99, g.id) for g in plan.groups if g.predicted.ttft_s.p99 is not None]
    longest_s, group = max(waits_s, default=(0.0, ""))
    if plan.slo.latency_bounds() or longest_s < _LONG_WAIT_S:
        return ()
    return (
        f"hint: TTFT p99 of {group} is {longest_s:,.1f} s, and no latency is bounded; set slo.ttft_p99_s in "
        "the workload to plan for one",
    )


def extrapolation_lines(provenance: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a line for each extrapolation of a plan, by its provenance.

    Plans of earlier versions list none; a line then names each analytic profile.
    """
    found = provenance.get("extrapolations")
    if isinstance(found, list):
        return tuple(extrapolation_line(each) for each in found if isinstance(each, Mapping))
    pools = provenance.get("pools")
    told = list(pools.values()) if isinstance(pools, Mapping) else [provenance]
    names = (each.get("profile") for each in told if each.get("profile_kind") == "roofline")
    return tuple(f"profile {name} is an analytic roofline, not measured" for name in dict.fromkeys(names))


def extrapolation_line(record: Mapping[str, Any]) -> str:
    """Return an extrapolation in words, with its groups unless the whole profile is meant."""
    if record.get("quantity") is None:
        return str(record.get("note"))
    groups = ", ".join(map(str, record.get("groups") or ()))
    return f"extrapolation: {record.get('note')}" + (f" ({groups})" if groups else "")


def require_no_extrapolation(lines: Sequence[str]) -> None:
    """End the command with exit code 3 if there are extrapolations; the lines go to the standard error."""
    if not lines:
        return
    for line in lines:
        typer.echo(f"--strict: {line}", err=True)
    raise typer.Exit(InfeasibleError.exit_code)


def rows_table(result: SolverComparison) -> Table:
    """Return one row per solver, in the order given."""
    head = (
        *("solver", "GPUs", "starved", "late", "memory\nerrors", "short of\nheadroom", "served", "tok/s"),
        *("ITL\nms", "TTFT p99\ns", "solve\ns", "verdict"),
    )
    return Table(head, [solver_cells(row) for row in result.rows], text_last=True)


def solver_cells(row: SolverResult) -> tuple[str, ...]:
    """Return the cells of a solver."""
    if not row.answered:
        return (row.solver, *(DASH,) * 10, row.failure)
    counts = (row.gpus, row.starved, row.late, row.memory_errors, row.short_of_headroom)
    return (
        row.solver,
        *(f"{count:,}" for count in counts),
        percent(row.served_fraction),
        number(row.throughput_tok_s),
        number(row.itl_ms_mean, 1),
        number(row.ttft_s_p99, 2),
        number(row.solve_s, 3),
        solver_verdict(row),
    )


def solver_verdict(row: SolverResult) -> str:
    """Return the verdict of the twin on an answer."""
    if not row.answered:
        return "no answer"
    if row.holds:
        return "holds" if not row.short_of_headroom else "holds, but not the headroom"
    return "fails"


def summary(result: SolverComparison) -> str:
    """Return the best answers and the size of the comparison in one line."""
    holding = [row for row in result.rows if row.holds]
    best = min(holding, key=lambda row: row.gpus, default=None)
    if best is None:
        words = "no answer holds"
    else:
        names = ", ".join(row.solver for row in holding if row.gpus == best.gpus)
        words = f"fewest GPUs that hold: {best.gpus} ({names})"
    tried = f"{counted(len(result.seeds), 'seed')} × {result.duration_s:g} s"
    return (
        f"{words}; lower bound {result.lower_bound_gpus}, available {result.gpus}; "
        f"{counted(result.adapters, 'adapter')} at {number(result.rate_rps, 2)} req/s, raw answers on {tried}"
    )
