"""Plans of random workloads against a simulation of what they serve: ``python -m benchmarks.plan_soundness``.

Workloads over all features of the workload file are planned. Every plan is rebuilt from its document alone:
all instances under one clock behind the router that serves, with the whole traffic of seeds that neither
search nor verification used. Each statement of the document is compared with that.

A bound breaks if the mean over 20 seeds is beyond it by more than its standard error; that of an adapter, if
the mean over the seeds on which the adapter starves is. A plan states on which share of seeds bounds hold:
it is unsound if they break on more. The bounds of a trace are those of its worst window, of which further
seeds are bootstrap samples. DIR has a folder per workload; an interrupted run is resumed.
"""

from __future__ import annotations

import json
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

import numpy as np

from benchmarks.common import command_line, records_table
from benchmarks.soundness_workloads import Case, draw_case
from capplan import Plan, Profile, Workload, load_profile, load_workload, plan
from capplan.errors import InfeasibleError, InputError
from capplan.spec import Group, Renewal, allowed_lora_rank, write_text_atomic
from capplan.twin import SimulationResult
from capplan.twin.cluster import ClusterResult, Instance, simulate_cluster, simulate_without_adapters
from capplan.twin.instance import bound_value

FIRST_SEED: Final = 900_000_000
SEEDS: Final = 20
HORIZON_S: Final = 3600.0
ROUTER: Final = "smooth-shares"
_OF_ADAPTERS: Final = ("max_lora_rank", "max_cpu_loras")
"""Engine settings without a meaning for an instance that serves the base model alone."""
FEW_REQUESTS: Final = 3
"""Unserved requests of an adapter that are not starvation yet."""
STATUS_FINISHED: Final = 0
PERIODS: Final = ("period_s", "every_s", "over_s")
"""Fields of a modulation with the time after which it repeats or ends."""
KINDS: Final = ("verified", "undecided", "failed", "infeasible", "refused", "crash")
SLOW_S: Final = 60.0
TIME_LIMIT_S: Final = 120.0
"""Time limit of a plan."""


@dataclass
class Outcome:
    """Result of one workload."""

    number: int
    solver: str
    kind: str
    """One of `KINDS`."""
    message: str = ""
    plan_s: float = 0.0
    gpus: int = 0
    seeds: int = 0
    broken: list[str] = field(default_factory=list)
    """Statements of the plan that do not hold."""
    seeds_beyond: list[str] = field(default_factory=list)
    """Bounds that single seeds exceed."""
    seeds_broken: int = 0
    """Seeds on which any bound breaks."""
    seeds_allowed: float = 0.0
    """Those that the stated share leaves."""
    covered: int = 0
    """Throughputs within the predicted interval, of `predicted`."""
    predicted: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    rules: list[str] = field(default_factory=list)
    """Serving rules of the profiles."""


Values = dict[str, list[float]]
"""Statement to its values over the seeds, as fractions of the bound: above 1 is broken."""


def run_case(folder: Path, seed: int, number: int) -> Outcome:
    """Draw, plan and simulate one workload."""
    case = draw_case(folder, seed, number)
    outcome = Outcome(number, case.solver, "crash", options=dict(case.options))
    started = time.perf_counter()
    try:
        workload = load_workload(case.path)
        outcome.rules = sorted({profile.engine.rules for profile in profiles_of(workload, folder)})
        made = plan(workload, solver=case.solver, time_limit_s=TIME_LIMIT_S, **case.options)
    except (InputError, InfeasibleError) as error:
        outcome.kind = "refused" if isinstance(error, InputError) else "infeasible"
        outcome.message = str(error)
    except Exception:  # noqa: BLE001 - a crash is a finding
        outcome.message = traceback.format_exc()
    else:
        outcome.kind = made.verification.verdict
        outcome.gpus = made.totals.gpus
        made.to_json(folder / "plan.json")
    outcome.plan_s = time.perf_counter() - started
    if outcome.kind == "verified":
        check_plan(outcome, Plan.from_json(folder / "plan.json"), case)
    elif outcome.kind in ("undecided", "failed"):
        outcome.message = made.verification.reason
    return outcome


def check_plan(outcome: Outcome, made: Plan, case: Case) -> None:
    """Compare the statements of a plan with fresh simulations."""
    workload = load_workload(case.path)
    outcome.broken += list(structure(made, workload))
    instances = list(served(made, workload, case.path.parent))
    values: Values = {}
    for seed in (FIRST_SEED + 7 * index for index in range(SEEDS)):
        traffic = workload
        if workload.trace is not None:
            start_s, length_s = made.verification.window_start_s or 0.0, made.verification.duration_s
            part = workload.trace.window(start_s, start_s + length_s)
            traffic = workload.replace(trace=part.resampled(seed))
        of_seed: Values = {}
        simulate_seed(outcome, of_seed, traffic, made, instances, seed)
        outcome.seeds_broken += any(value > 1.0 for own in of_seed.values() for value in own)
        for name, own in of_seed.items():
            values.setdefault(name, []).extend(own)
    outcome.seeds = SEEDS
    share = made.verification.least_share_of_seeds
    outcome.seeds_allowed = SEEDS * (1.0 - (share or 0.0))
    if outcome.seeds_broken > outcome.seeds_allowed:
        allowed = f"stated at most {outcome.seeds_allowed:.1f}"
        outcome.broken.append(f"a bound breaks on {outcome.seeds_broken} of {SEEDS} seeds, {allowed}")
    for name, own in values.items():
        error = stdev(own) / len(own) ** 0.5 if len(own) > 1 else 0.0
        if fmean(own) - error > 1.0:
            outcome.broken.append(f"{name}: {fmean(own):.3f} +- {error:.3f} of the bound")
        elif max(own) > 1.0:
            count = sum(value > 1.0 for value in own)
            outcome.seeds_beyond.append(f"{name}: {count} of {len(own)} seeds, worst {max(own):.3f}")


def structure(made: Plan, workload: Workload) -> Iterator[str]:
    """Yield the constraints of the workload that the document breaks, and what it says against itself."""
    check, totals = made.verification, made.totals
    if check.not_simulated:
        yield f"not simulated: {', '.join(check.not_simulated)}"
    if len(workload.pools) < 2 and totals.gpus < totals.lower_bound_gpus:
        yield f"{totals.gpus} GPUs, below the lower bound {totals.lower_bound_gpus}"
    for group in made.groups:
        load = group.predicted.load_over_capacity
        if load is not None and load > 1.0:
            yield f"{group.id}: load over capacity {load:.2f}"
        largest = max((adapter.rank for adapter in group.adapters), default=0)
        if largest and group.engine_args.max_lora_rank < allowed_lora_rank(largest):
            yield f"{group.id}: max_lora_rank below its adapters"
        for name, given in workload.engine:
            if name in _OF_ADAPTERS and not group.adapters:
                continue
            if given is not None and getattr(group.engine_args, name) != given:
                yield f"{group.id}: {name} is {getattr(group.engine_args, name)}, given {given}"
    used = Counter[str | None]()
    for group in made.groups:
        used[group.pool] += group.replicas * group.tp
    limits: dict[str | None, int] = {pool.name: pool.count for pool in workload.pools}
    limits |= {None: workload.gpus.count} if workload.gpus else {}
    yield from (f"pool {name}: {used[name]} GPUs of {n}" for name, n in limits.items() if used[name] > n)
    yield from misplaced(made, workload)


def misplaced(made: Plan, workload: Workload) -> Iterator[str]:
    """Yield the adapters that are placed against a constraint."""
    groups: dict[str, set[str]] = {adapter.name: set() for adapter in workload.adapters}
    for group in made.groups:
        for adapter in group.adapters:
            groups[adapter.name].add(group.id)
    pool_of = {group.id: group.pool for group in made.groups}
    replicas = {group.id: group.replicas for group in made.groups}
    if workload.base is not None and all(group.base is None for group in made.groups):
        yield "the base model: served nowhere"
    for adapter in workload.adapters:
        own = groups[adapter.name]
        if not own:
            yield f"{adapter.name}: served nowhere"
        if adapter.max_replicas is not None and sum(map(replicas.__getitem__, own)) > adapter.max_replicas:
            yield f"{adapter.name}: more than max_replicas"
        if adapter.pool is not None and {pool_of[each] for each in own} != {adapter.pool}:
            yield f"{adapter.name}: outside its pool"
        yield from (f"{adapter.name}: with {other}" for other in adapter.apart_from if own & groups[other])
        yield from (f"{adapter.name}: without {o}" for o in adapter.together_with if own != groups[o])


def profiles_of(workload: Workload, folder: Path) -> list[Profile]:
    """Return the profiles of a workload file in a folder."""
    names = [str(pool.profile) for pool in workload.pools] or [str(workload.profile)]
    return [load_profile(folder / name if name.startswith("./") else name) for name in names]


def served(made: Plan, workload: Workload, folder: Path) -> Iterator[tuple[Group, Instance]]:
    """Yield every instance of a plan document with its group."""
    profiles = {profile.name: profile for profile in profiles_of(workload, folder)}
    for group in made.groups:
        shares = {name: share / group.replicas for name, share in made.shares_of(group).items()}
        instance = Instance.of(profiles[group.profile], group.engine_args, shares)
        yield from [(group, instance)] * group.replicas


def simulate_seed(
    outcome: Outcome,
    values: Values,
    workload: Workload,
    made: Plan,
    instances: Sequence[tuple[Group, Instance]],
    seed: int,
) -> None:
    """Simulate one seed; append the ratio of every statement to its bound."""
    horizon_s = horizon(workload)
    if workload.trace is None:
        horizon_s = max(horizon_s, made.verification.duration_s)
    engines = [instance for _, instance in instances]
    fleet = simulate_cluster(workload, engines, router=ROUTER, duration_s=horizon_s, seed=seed)
    bound = workload.slo.served_fraction

    def add(name: str, ratio: float) -> None:
        values.setdefault(name, []).append(ratio)

    add("fleet served_fraction", (1.0 - fleet.served_fraction) / (1.0 - bound + 1e-9))
    for at, ((group, instance), result) in enumerate(zip(instances, fleet.instances, strict=True)):
        add(f"{group.id} served_fraction", (1.0 - result.served_fraction) / (1.0 - bound + 1e-9))
        for name, limit in workload.slo.latency_limits().items():
            value = bound_value(result, name)
            add(f"{group.id} {name}", value / limit if value == value else 0.0)
        if workload.slo.tpt_over_base is not None:
            add(f"{group.id} attainment", missed(workload, instance, fleet, at, horizon_s, seed))
        check_group(outcome, group, result)
        for name, ratio in starving_adapters(workload, fleet, at, horizon_s):
            add(f"{group.id} {name}", ratio)
        for window, ratio in starving_hours(fleet, at, horizon_s, bound):
            add(f"{group.id} hour {window}", ratio)
        low, high = group.predicted.low_tok_s, group.predicted.high_tok_s
        if low is not None and high is not None:  # a trace is simulated once, without an interval
            outcome.covered += low <= result.throughput_tok_s <= high
            outcome.predicted += 1


def horizon(workload: Workload) -> float:
    """Return the length of the trace, or an hour, or the longest period of the arrivals if that is longer."""
    if workload.trace is not None:
        return workload.trace.duration_s
    processes = [workload.arrivals, *([workload.base.arrivals] if workload.base else [])]
    modulations = [each.modulation for each in processes if isinstance(each, Renewal)]
    periods = (getattr(each, name, None) for each in modulations for name in PERIODS)
    return max([HORIZON_S, *(period for period in periods if period)])


def check_group(outcome: Outcome, group: Group, result: SimulationResult) -> None:
    facts = {
        "kv_tokens": (result.kv_tokens, group.predicted.kv_tokens),
        "one request of max_model_len fits": (result.kv_tokens >= group.engine_args.max_model_len, True),
    }
    for name, (found, stated) in facts.items():
        if found != stated:
            outcome.broken.append(f"{group.id} {name}: {found}, stated {stated}")


def missed(
    workload: Workload, instance: Instance, fleet: ClusterResult, at: int, horizon_s: float, seed: int
) -> float:
    """Return the share of requests of an instance beyond tpt_over_base, relative to the share allowed."""
    slo, own = workload.slo, fleet.requests.instance == at
    alone = workload.subset(instance.adapters or {}, instance.adapters)
    base = simulate_without_adapters(alone, [instance], duration_s=min(horizon_s, HORIZON_S), seed=seed)
    tpt_ms = fleet.requests.tpt_ms[own & (fleet.requests.status == STATUS_FINISHED)]
    late = float(np.mean(tpt_ms > (slo.tpt_over_base or 0.0) * base.tpt_ms_mean)) if tpt_ms.size else 0.0
    return late / max(1.0 - (slo.attainment or 0.0), 1e-3)


def starving_adapters(
    workload: Workload, fleet: ClusterResult, at: int, horizon_s: float
) -> Iterator[tuple[str, float]]:
    """Yield the adapters of an instance of whose requests too many wait longer than served_fraction allows.

    An instance that serves this fraction in order of arrival lets no request wait for longer than the rest of
    the horizon. Adapters with too few requests for a verdict on each are judged together.
    """
    requests, fraction = fleet.requests, workload.slo.served_fraction
    early = (requests.instance == at) & (requests.arrival_s < fraction * horizon_s)
    count = np.bincount(requests.adapter[early], minlength=len(workload.adapters) + 1)
    lost = np.bincount(requests.adapter[early & np.isnan(requests.ttft_s)], minlength=count.size)
    for number in np.flatnonzero((lost > FEW_REQUESTS) & (lost > (1.0 - fraction) * count)).tolist():
        name = workload.adapters[number - 1].name if number else "of the base model"
        yield f"adapter {name}", lost[number] / count[number] / (1.0 - fraction + 1e-9)
    light = count * (1.0 - fraction) <= FEW_REQUESTS
    if lost[light].sum() > FEW_REQUESTS:
        yield "light adapters", lost[light].sum() / count[light].sum() / (1.0 - fraction + 1e-9)


def starving_hours(
    fleet: ClusterResult, at: int, horizon_s: float, bound: float
) -> Iterator[tuple[int, float]]:
    """Yield the hours at whose end more of the hour's requests than allowed have not begun."""
    requests = fleet.requests
    own = requests.instance == at
    arrival_s = requests.arrival_s[own]
    first_s = np.nan_to_num(arrival_s + requests.ttft_s[own], nan=np.inf)
    for hour in range(int(horizon_s // HORIZON_S) if horizon_s > HORIZON_S else 0):
        begin_s, end_s = hour * HORIZON_S, (hour + 1) * HORIZON_S
        here = (arrival_s >= begin_s) & (arrival_s < end_s)
        late = float(np.mean(first_s[here] > end_s)) if here.any() else 0.0
        yield hour, late / (1.0 - bound + 1e-9)


def row(outcome: Outcome, folder: Path) -> Mapping[str, object]:
    """Return the row of a workload for the table."""
    found = outcome.broken[:2] or outcome.seeds_beyond[:1] or outcome.message.strip().splitlines()[-1:]
    return {
        "workload": outcome.number,
        "solver": outcome.solver,
        "features": features(json.loads((folder / "workload.yaml").read_text()), outcome),
        "outcome": outcome.kind,
        "GPUs": outcome.gpus or "",
        "plan s": f"{outcome.plan_s:.1f}",
        "seeds": outcome.seeds or "",
        "broken": len(outcome.broken),
        "finding": "; ".join(found)[:160],
    }


def features(document: Mapping[str, Any], outcome: Outcome) -> str:
    """Return the features of a workload in a few words."""
    requests, adapters = document.get("requests", {}), document.get("adapters", ())
    arrivals = requests.get("arrivals", "poisson")
    if isinstance(arrivals, dict):
        modulation = arrivals.get("modulation", {}).get("kind")
        arrivals = "+".join(filter(None, [arrivals["process"], modulation]))
    words = ["trace" if "trace" in document else arrivals, *document.get("slo", {})]
    words += [k for k in ("lengths_from", "stickiness", "shared_prefix_tokens") if k in requests]
    words += [k for k in ("base", "pools", "queues", "previous_plan", "move_cost") if k in document]
    words += document.get("engine", {})
    entries = adapters if isinstance(adapters, list) else []
    constraints = ("pool", "apart_from", "together_with", "max_replicas")
    words += [key for key in constraints if any(key in entry for entry in entries)]
    words += [] if document["objective"] == "min_gpus" else [document["objective"]]
    words += [f"{name} {value}" for name, value in outcome.options.items()]
    return ", ".join([*words, f"headroom {document['headroom']:g}", *outcome.rules])


def starves(finding: str) -> bool:
    """Tell whether a broken statement is starvation, of an instance, an adapter or an hour."""
    return any(word in finding for word in ("served_fraction", " adapter", " hour "))


def unsound(outcome: Outcome) -> bool:
    """Tell whether bounds of a plan break on more seeds than it states."""
    return outcome.seeds_broken > outcome.seeds_allowed


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the table of totals."""
    kinds = Counter(outcome.kind for outcome in outcomes)
    ok = [outcome for outcome in outcomes if outcome.kind == "verified"]
    starving = [o for o in ok if any(starves(each) for each in o.broken)]
    broken = sum(o.seeds_broken for o in ok)
    tested, covered = sum(o.predicted for o in ok), sum(o.covered for o in ok)
    lines: list[tuple[str, object]] = [
        ("workloads", len(outcomes)),
        *(
            (kind, kinds[kind])
            for kind in ("verified", "undecided", "failed", "infeasible", "refused", "crash")
        ),
        ("verified plans that starve", len(starving)),
        ("verified plans that break on more seeds than stated", sum(unsound(o) for o in ok)),
        ("verified plans with a statement that does not hold", sum(bool(o.broken) for o in ok)),
        ("verified plans with a bound that single seeds exceed", sum(bool(o.seeds_beyond) for o in ok)),
        ("seeds on which a verified plan breaks a bound", f"{broken} of {sum(o.seeds for o in ok)}"),
        ("throughputs within the predicted interval", f"{covered} of {tested}"),
        (f"plan times over {SLOW_S:g} s", sum(o.plan_s > SLOW_S for o in outcomes)),
    ]
    return records_table({"count of": name, "number": value} for name, value in lines)


def outcomes_of(out: Path, seed: int, numbers: Iterable[int]) -> Iterator[Outcome]:
    """Yield the outcome of every workload, from its file if there is one."""
    for number in numbers:
        folder = out / f"{seed}.{number}"
        file = folder / "outcome.json"
        if not file.exists():
            outcome = run_case(folder, seed, number)
            write_text_atomic(file, json.dumps(asdict(outcome), indent=1))
        yield Outcome(**json.loads(file.read_text()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--workloads", type=int, default=100, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first workload")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="another set of workloads")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON instead of tables")
    given = parser.parse_args(arguments)
    outcomes, rows = [], []
    for outcome in outcomes_of(given.out, given.seed, range(given.first, given.first + given.workloads)):
        outcomes.append(outcome)
        rows.append(row(outcome, given.out / f"{given.seed}.{outcome.number}"))
        if not given.json:
            print(" | ".join(map(str, rows[-1].values())), flush=True)
    if given.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    else:
        print(f"\n{records_table(rows)}\n\n{summary(outcomes)}")


if __name__ == "__main__":
    main()
