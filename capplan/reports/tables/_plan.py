"""Tables of a plan, and its verdict in words.

Latencies of a plan: the bounded statistics, or else the 99th percentiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from capplan.reports._console import DASH, GIB, Table, counted, number, percent
from capplan.spec import PLAN_ROUTER, describe_latency

if TYPE_CHECKING:
    from collections.abc import Mapping

    from capplan.spec import Group, Plan, Predicted


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
