"""Re-balancing of a running cluster on the CPU: correctness, latency, and random schedules.

    python -m benchmarks.running_cluster --out DIR --stage schedules --cases 50    # 8 minutes
    python -m benchmarks.pool_loop --out DIR --stage profile                       # once, 5 minutes
    python -m benchmarks.running_cluster --out DIR --stage correctness             # 12 minutes
    python -m benchmarks.running_cluster --out DIR --stage latency --duration 120 --rate-rps 3

``correctness``: `capplan serve PLAN --rebalance` with 4 instances and 24 adapters under a workload whose
popular adapters change every `PHASE_S`. No request may fail, and each adapter must be stored at the end.

``latency``: 2 single-threaded instances, each pinned to a core, with the popular adapters of one of them
becoming popular at the same time; only requests after that are measured. P95 of TTFT with the plan's shares,
re-balanced, and with all adapters on both instances behind `least-work-left`, beside the twin's with the
final shares of each. The share of each core in use is stated, with router and client.

``schedules``: requests, re-balancing, crashes, stalls, locks and broken copies at random
(`benchmarks.moving_cluster`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.common import command_line, records_table
from benchmarks.moving_cluster import MovingCluster, RandomSchedule, make_adapters, placed_at_first, plan_of
from benchmarks.served_drift import MAX_MODEL_LEN, RANKS, ClusterSetting, Drift, serve_drift
from capplan import EngineArgs, load_profile
from capplan.spec import DEFAULT_GPU_MEMORY_UTILIZATION, STATE_PERIOD_S
from capplan.twin.cluster import Instance, served_router, simulate_cluster

SCHEDULED_ADAPTERS: Final = 12
SCHEDULED_INSTANCES: Final = 3
SCHEDULE_S: Final = 5.0
BUSY_BAR: Final = 60.0
"""Share of each core in use, in percent, below which latencies are compared."""


def run_schedules(given: argparse.Namespace) -> bool:
    """Run random schedules one after the other on one cluster; print what has happened."""
    top = given.out / "schedules"
    shutil.rmtree(top, ignore_errors=True)
    top.mkdir(parents=True)
    names = [f"a{number}" for number in range(SCHEDULED_ADAPTERS)]
    plan = plan_of(placed_at_first(names, SCHEDULED_INSTANCES), names)
    make_adapters(top, names, plan.base_model)
    return asyncio.run(_run_schedules(MovingCluster(top, plan, names), given.first, given.cases))


async def _run_schedules(cluster: MovingCluster, first: int, cases: int) -> bool:
    events: Counter[str] = Counter()
    failed = []
    async with cluster.running():
        await cluster.learn()
        cluster.lose_sources()
        for seed in range(first, first + cases):
            schedule = RandomSchedule(cluster, seed, SCHEDULE_S)
            try:
                await schedule.run()
            except AssertionError as error:
                failed.append(seed)
                print(f"schedule {seed}: {error}", flush=True)
                cluster.outcomes.wrong.clear()
            events += schedule.events
            await cluster.until_up()
        for name in cluster.names:
            await cluster.ask(name)
        cluster.check_stored()
        moved, unpermuted = cluster.loop.moved_bytes, cluster.loop.unpermuted_bytes
    outcomes = cluster.outcomes
    print(f"{cases} schedules of {SCHEDULE_S:g} s, {len(failed)} failed: {failed}")
    print(records_table([dict(sorted(events.items()))]))
    print(f"\n{outcomes.total} requests: {outcomes.answered} answered, refused: {dict(outcomes.refused)}")
    print(f"bytes moved by re-balancing: {moved}, {unpermuted} without the permutation")
    return not failed and not outcomes.wrong


def check_correctness(given: argparse.Namespace) -> bool:
    """Serve a drifting workload with re-balancing; return whether no request has failed."""
    setting = ClusterSetting.of(given, instances=4, adapters=24, rate_rps=given.rate_rps)
    drift = Drift(duration_s=given.duration_s, phase_s=given.phase_s, seed=given.seed)
    served = serve_drift(setting, drift, rebalance_s=given.rebalance_s)
    print(records_table([served.row()]))
    print("\n" + records_table([served.rounds()]))
    print(json.dumps(served.placement["rebalancing"]["last"], indent=1))
    lost = served.lost_adapters()
    return served.failed == 0 and not lost


def compare_latency(given: argparse.Namespace) -> bool:
    """Measure TTFT for three systems; return whether no request failed and cores were busy for under 60 %."""
    rows: list[dict[str, Any]] = []
    busy: list[float] = []
    for system in ("frozen", "re-balanced", "looking"):
        setting = ClusterSetting.of(given, instances=2, adapters=8, rate_rps=given.rate_rps)
        drift = Drift(duration_s=given.duration_s, phase_s=given.phase_s, seed=given.seed, onto_one=True)
        rebalance_s = given.rebalance_s if system == "re-balanced" else None
        router = "least-work-left" if system == "looking" else "smooth-shares"
        served = serve_drift(setting, drift, rebalance_s=rebalance_s, pinned=True, router=router)
        p50_ms, p95_ms = predicted_ttft_ms(setting, drift, served.placement["placement"], router)
        twin = {"twin: TTFT p50, ms": round(p50_ms, 1), "twin: p95, ms": round(p95_ms, 1)}
        rows.append({"system": system, **served.row(), **twin})
        busy += served.core_busy
        print(time.strftime("%H:%M:%S"), json.dumps(rows[-1]), flush=True)
    print(records_table(rows))
    return all(row["failed"] == 0 for row in rows) and max(busy) < BUSY_BAR


def predicted_ttft_ms(
    setting: ClusterSetting, drift: Drift, placement: Mapping[str, Any], router: str
) -> tuple[float, float]:
    """Return the twin's median and P95 of TTFT of the requests after the warm-up.

    Parameters
    ----------
    placement
        Shares by instance, as ``GET /v1/placement`` returns them; they hold from the start.
    """
    profile = load_profile(str(setting.profile))
    args = EngineArgs(
        max_loras=len(setting.names),
        max_lora_rank=max(RANKS),
        max_num_seqs=16,
        max_num_batched_tokens=512,
        max_model_len=MAX_MODEL_LEN,
        gpu_memory_utilization=DEFAULT_GPU_MEMORY_UTILIZATION,
    )
    trace = drift.trace(setting.names, setting.rate_rps, setting.held)
    result = simulate_cluster(
        setting.workload(drift).model_copy(update={"trace": trace}),
        [Instance.of(profile, args, own["adapters"]) for own in placement.values()],
        router=served_router(router),
        duration_s=drift.duration_s,
        seed=drift.seed,
        state_period_s=STATE_PERIOD_S,
    )
    requests = result.requests
    measured = (requests.arrival_s >= drift.warm_up_s) & ~np.isnan(requests.ttft_s)
    p50_s, p95_s = np.percentile(requests.ttft_s[measured], (50, 95)).tolist()
    return 1e3 * p50_s, 1e3 * p95_s


STAGES: Final = {"schedules": run_schedules, "correctness": check_correctness, "latency": compare_latency}


def main() -> int:
    """Run one stage."""
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", choices=STAGES, required=True)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="seed of the first schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--duration", dest="duration_s", type=float, default=600.0)
    parser.add_argument("--phase-s", type=float, default=100.0)
    parser.add_argument("--rebalance-s", type=float, default=50.0)
    parser.add_argument("--rate-rps", type=float, default=4.0)
    given = parser.parse_args()
    return int(not STAGES[given.stage](given))


if __name__ == "__main__":
    raise SystemExit(main())
