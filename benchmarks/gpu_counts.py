"""GPUs of plans by the papers' criterion, by stable queues, and with a latency bound.

    python -m benchmarks.gpu_counts [--traces DIR] [--only WORD] [--all-presets]

Rows are the examples, presets (those of recorded requests with ``--traces``) and five mixes of 64 to 384
adapters. Columns: GPUs by ``slo: {stable: false}`` (nine tenths of the tokens served, and the workload's own
bounds) with the largest load over capacity if queues must be stable; GPUs of the default with its largest
load over capacity; and of the mixes those with ``ttft_p99_s: 5`` of the solvers capplan and greedy. Every
plan is verified on three seeds, within --time-limit seconds. ``--all-presets`` takes every preset, by the
default criterion alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.common import (
    H100_LLAMA,
    LLAMA,
    command_line,
    numbered_adapters,
    preset_workload,
    records_table,
)
from capplan import Lengths, Plan, Workload, load_workload, plan
from capplan.errors import CapplanError, InfeasibleError, InputError
from capplan.planner.problem._evaluate import find_bottlenecks
from capplan.planner.problem._setup import rebuild
from capplan.spec import Slo
from capplan.workload import presets

EXAMPLES = ("chat-96", "support-12")
PRESETS = (
    *(f"loraserve-micro-{rank}" for rank in ("8", "16", "32", "64", "128", "8-128")),
    *("loraserve-uniform-uniform", "loraserve-poisson-shifting", "loraserve-poisson-exponential"),
    *("chameleon-up", "chameleon-up-100", "chameleon-pp-50"),
)
MIXES = {
    "64 of ranks 8 and 16, busy": (64, (8, 16), (1.5, 0.8, 0.4), (223, 245, 194, 206)),
    "128 of ranks 8 to 32": (128, (8, 16, 32), (0.4, 0.2, 0.1), (223, 245, 194, 206)),
    "192 of ranks 16 and 64, long prompts": (192, (16, 64), (0.1, 0.05), (1155, 1109, 211, 163)),
    "256 of ranks 8 and 16, long outputs": (256, (8, 16), (0.05, 0.025), (200, 150, 500, 350)),
    "384 rare ones of ranks 8 to 64": (384, (8, 16, 32, 64), (0.05, 0.0125, 0.003125), (223, 245, 194, 206)),
}
BOUND = Slo(ttft_p99_s=5.0)
SEEDS = 3


def mix(name: str) -> Workload:
    """Return one of the mixes, with ranks and rates drawn for each adapter."""
    count, ranks, rates_rps, (prompt, prompt_std, output, output_std) = MIXES[name]
    rng = np.random.default_rng(list(MIXES).index(name))
    return Workload(
        base_model=LLAMA,
        profile=H100_LLAMA,
        adapters=numbered_adapters(rng.choice(ranks, count), rng.choice(rates_rps, count)),
        prompt_tokens=Lengths(mean=prompt, std=prompt_std),
        output_tokens=Lengths(mean=output, std=output_std),
    )


def workloads(traces: str | None, every_preset: bool) -> Iterator[tuple[str, Workload]]:
    """Yield name and workload of the examples, the presets and the mixes."""
    for name in EXAMPLES:
        yield name, load_workload(Path("examples") / name / "workload.yaml")
    for name in presets() if every_preset else PRESETS:
        try:
            yield name, preset_workload(name, traces=traces).replace(gpus=None)
        except CapplanError as error:
            print(f"{name}: left out: {error}", file=sys.stderr)
    for name in MIXES:
        yield name, mix(name)


def planned(workload: Workload, limit_s: float, solver: str = "capplan") -> Plan | str:
    """Return the plan of a workload, or why there is none."""
    try:
        return plan(workload, solver=solver, seeds=SEEDS, time_limit_s=limit_s)
    except InfeasibleError as error:
        return error.reason
    except InputError as error:
        print(error, file=sys.stderr)
        return "refused"


def gpus_of(found: Plan | str) -> str:
    """Return the GPUs of a plan, and its verdict unless it is verified; or why there is no plan."""
    if isinstance(found, str):
        return f"none: {found}"
    verdict = found.verification.verdict
    return f"{found.totals.gpus}{'' if verdict == 'verified' else f' ({verdict})'}"


def largest_load(found: Plan | str) -> str:
    """Return the largest load over capacity of the groups."""
    if isinstance(found, str):
        return "-"
    return f"{max(group.predicted.load_over_capacity or 0.0 for group in found.groups):.2f}"


def load_if_stable(found: Plan | str, workload: Workload) -> str:
    """Return the largest load over capacity of a plan of the papers' criterion, if queues must be stable."""
    if isinstance(found, str):
        return "-"
    loads = []
    for each in rebuild(found, workload, None, "workload").groups:
        slo = workload.slo.replace(stable=True)
        stable = each.problem.workload.model_copy(update={"slo": slo})
        (bottleneck,) = find_bottlenecks(replace(each.problem, workload=stable), [each.assignment], 0)
        loads.append(0.0 if bottleneck is None else bottleneck[1] or 0.0)
    return f"{max(loads):.2f}"


def main() -> None:
    """Plan each workload by each criterion, and print the table."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--traces", metavar="DIR", help="folder of public traces, for presets that replay them"
    )
    parser.add_argument("--only", default="", metavar="WORD", help="workloads whose name holds this word")
    parser.add_argument("--time-limit", type=float, default=90.0, metavar="SECONDS", help="of each plan")
    parser.add_argument("--all-presets", action="store_true", help="every preset, by the default alone")
    given = parser.parse_args()
    rows = []
    for name, workload in workloads(given.traces, given.all_presets):
        if given.only not in name:
            continue
        row = {"workload": name}
        if not given.all_presets:
            papers = workload.replace(slo=workload.slo.replace(stable=False))
            before = planned(papers, given.time_limit)
            row |= {"papers: GPUs": gpus_of(before), "load if stable": load_if_stable(before, papers)}
        after = planned(workload, given.time_limit)
        row |= {"default: GPUs": gpus_of(after), "load": largest_load(after)}
        if name in MIXES and not given.all_presets:
            bounded = workload.replace(slo=BOUND)
            for solver in ("capplan", "greedy"):
                row[f"TTFT p99 5 s, {solver}"] = gpus_of(planned(bounded, given.time_limit, solver))
        rows.append(row)
        print(" | ".join(row.values()), flush=True)
    every = list(rows[-1])
    print(f"\n{records_table({key: row.get(key, '') for key in every} for row in rows)}")


if __name__ == "__main__":
    main()
