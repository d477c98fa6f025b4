"""`capplan simulate WORKLOAD --plan PLAN`: the instances of a plan under one clock, behind its router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from capplan.cli.options import (
    FAILED,
    RebalanceOptions,
    chosen_profile,
    read_any_plan,
    require_state_period,
    simulated_s,
)
from capplan.cli.progress import announce_compilation
from capplan.errors import InputError
from capplan.reports import print_json, print_table
from capplan.reports.tables import (
    METRICS,
    cluster_table,
    degraded_lines,
    extrapolation_line,
    instances_table,
    moves_lines,
    ranks_table,
    require_no_extrapolation,
    storage_line,
    trace_lines,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from capplan.planner.verification import (
        DegradedFleet,
        DegradedResult,
        RankMetrics,
        SimulatedFleet,
        StoredAdapters,
    )
    from capplan.twin.cluster import ClusterResult


@dataclass(frozen=True, kw_only=True)
class PlanSimulation:
    """Options of a simulated plan; those that are None are as in the plan."""

    profile: str | None
    router: str | None
    state_period_s: float | None
    rebalance: RebalanceOptions
    duration_s: float | None
    seed: int
    requests_out: str | None = None
    failed: tuple[str, ...] = ()
    """Instances that are missing, as ``GROUP`` or ``GROUP:REPLICA``."""


def require_plan(
    router: str | None,
    state_period_s: float | None,
    rebalance: RebalanceOptions,
    failed: Sequence[str] | None,
) -> None:
    """Raise an `InputError` if an option of a plan is given, for a simulation without a plan."""
    for flag, value in (("--router", router), ("--state-period-s", state_period_s)):
        if value is not None:
            raise InputError("goes with --plan", value, flag)
    if failed:
        raise InputError("goes with --plan", failed[0], "--fail")
    rebalance.require_plan()


def simulate_plan(
    workload_file: str, plan_file: str, given: PlanSimulation, *, strict: bool, as_json: bool
) -> None:
    """Simulate the instances of a plan, and print the metrics of all, of each instance, and by rank."""
    from capplan.planner.verification import by_rank, fleet_of_plan, stored_adapters, without_instances
    from capplan.workload import load_workload

    workload = load_workload(workload_file)
    plan = read_any_plan(plan_file)
    if given.failed and given.requests_out is not None:
        rule = "does not go with --fail: the table would lack the requests without a server"
        raise InputError(rule, given.requests_out, "--requests-out")
    chosen = None if given.profile is None else chosen_profile(workload, given.profile)
    settings = given.rebalance.settings(plan.rebalance)
    if given.state_period_s is not None:
        require_state_period(given.state_period_s)
    announce_compilation(quiet=as_json)
    fleet = fleet_of_plan(plan, workload, chosen, workload_file, given.router, settings)
    if given.state_period_s is not None:
        fleet = replace(fleet, state_period_s=given.state_period_s)
    degraded = without_instances(fleet, given.failed) if given.failed else None
    duration_s = simulated_s(workload, given.duration_s)
    failure = None
    if degraded is None:
        result = fleet.simulate(given.seed, duration_s)
    else:
        failure = degraded.simulate(given.seed, duration_s)
        fleet, result = degraded.fleet, failure.result
    if given.requests_out is not None:
        from capplan.twin.instance import write_parquet

        write_parquet(given.requests_out, requests_table(fleet, result))
    ranks, held = by_rank(fleet, result), stored_adapters(fleet)
    found = [each.document() for each in fleet.extrapolations(result)]
    beyond = tuple(map(extrapolation_line, found))
    trace = workload.trace
    if as_json:
        notes = {} if trace is None else {"trace_notes": trace.notes}
        lost = {} if degraded is None or failure is None else {"failure": _failure(degraded, failure)}
        print_json({**document(fleet, result, ranks, held), **lost, "extrapolations": found, **notes})
    else:
        if failure is not None:
            for line in degraded_lines(failure, given.failed, plan.slo):
                typer.echo(line)
        print_table(cluster_table(fleet, result))
        print_table(instances_table(fleet, result, held))
        print_table(ranks_table(ranks))
        replayed = () if trace is None else trace_lines(trace.speed, trace.notes)
        for line in (storage_line(fleet, held), *moves_lines(fleet, result), *beyond, *replayed):
            typer.echo(line)
    if strict:
        require_no_extrapolation(beyond)
    if failure is not None and failure.broken:
        raise typer.Exit(FAILED)


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


def document(
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
    found = {name: getattr(result, name) for name, _, _ in METRICS}
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
