"""`capplan explain`: why a plan is as it is, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from capplan.cli.console import counted, number, percent, print_json, print_table, table
from capplan.cli.inputs import AsJson, PlanFile
from capplan.cli.plan import group_rate_rps, verdict
from capplan.cli.queue_table import queues_table

if TYPE_CHECKING:
    from rich.table import Table

    from capplan.spec import Group, GroupVerification, Plan

_RESOURCES = {
    "kv": "KV-cache memory",
    "slots": "adapter slots",
    "compute": "compute",
    "slo": "a latency objective",
}


def explain(plan: PlanFile, as_json: AsJson = False) -> None:
    """Tell what binds on every group, what is predicted and verified, and why the plan needs its GPUs."""
    from capplan.spec import Plan

    document = Plan.from_json(plan)
    if as_json:
        print_json(_document(document))
        return
    engine = document.engine
    typer.echo(f"{document.base_model} on {engine.name} {engine.version} (rules {engine.rules})")
    typer.echo(f"  {gpus_reason(document)}")
    typer.echo(f"  {verdict(document)}")
    verdicts = {check.id: check for check in document.verification.groups}
    for group in document.groups:
        typer.echo(f"\n{group.id}: {_size(group)}")
        typer.echo(f"  {binding(group)}")
        typer.echo(f"  {_verified(verdicts.get(group.id))}")
        print_table(_predicted_table(group))
        if group.queues is not None:
            print_table(queues_table(group.queues))
    if document.provenance:
        rows = table("where it comes from", "")
        for key, value in document.provenance.items():
            rows.add_row(key, value if isinstance(value, str) else _compact(value))
        print_table(rows)


def binding(group: Group) -> str:
    """Return in words what keeps a group from serving more, and how near it is."""
    load = group.predicted.load_over_capacity
    near = "" if load is None else f"; its load is {percent(load)} of what it sustains"
    if group.binds is None:
        return f"nothing binds yet{near}"
    note = f" ({group.binds.note})" if group.binds.note else ""
    return f"bound by {_RESOURCES[group.binds.resource]}: {group.binds.value:.4g}{note}{near}"


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


def _size(group: Group) -> str:
    instances = f"{counted(group.replicas, 'instance')} of {counted(group.tp, 'GPU')} ({group.gpu})"
    load = f"{counted(len(group.adapters), 'adapter')} at {number(group_rate_rps(group), 2)} req/s"
    slots = f"{group.engine_args.max_loras} slots of rank {group.engine_args.max_lora_rank}"
    return f"{instances}, {load}, {slots}, profile {group.profile}"


def _verified(check: GroupVerification | None) -> str:
    if check is None:
        return "not verified"
    note = f": {check.note}" if check.note else ""
    return (
        f"{'verified' if check.ok else 'FAILED'}{note}; {percent(check.served_fraction)} served, "
        f"{number(check.throughput_tok_s)} tok/s, TTFT p99 {number(check.ttft_p99_s, 2)} s on the worst seed"
    )


def _predicted_table(group: Group) -> Table:
    predicted = group.predicted
    rows = table(f"predicted for one GPU ({predicted.source})", "mean", "p50", "p95", "p99", numbers_from=1)
    for name, values, decimals in (("TTFT, s", predicted.ttft_s, 3), ("TPOT, ms", predicted.tpot_ms, 2)):
        statistics = (values.mean, values.p50, values.p95, values.p99)
        rows.add_row(name, *(number(value, decimals) for value in statistics))
    low, middle, high = map(number, (predicted.low_tok_s, predicted.throughput_tok_s, predicted.high_tok_s))
    rows.add_row("tok/s", f"{middle} ({low}..{high})")
    rows.add_row("served", percent(predicted.served_fraction))
    rows.add_row("KV capacity, tokens", number(predicted.kv_tokens))
    return rows


def _document(plan: Plan) -> dict[str, Any]:
    whole = plan.model_dump(mode="json")
    verdicts = {check["id"]: check for check in whole["verification"]["groups"]}
    return {
        "gpus": gpus_reason(plan),
        "totals": whole["totals"],
        "verdict": verdict(plan),
        "verification": whole["verification"],
        "groups": [
            {
                "id": group.id,
                "binding": binding(group),
                "binds": each["binds"],
                "predicted": each["predicted"],
                "queues": each["queues"],
                "verification": verdicts.get(group.id),
            }
            for group, each in zip(plan.groups, whole["groups"], strict=True)
        ],
        "provenance": whole["provenance"],
    }


def _compact(value: Any) -> str:
    import json

    return json.dumps(value, ensure_ascii=False)
