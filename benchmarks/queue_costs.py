"""What queues cost and give: ``python -m benchmarks.queue_costs`` plans random workloads with and without.

Random workloads (12 to 48 adapters of ranks 8 to 64, mixed lengths, a third without a bound, a third with
one on TTFT, a third with one on E2E) are planned as they are and with ``queues``. One GPU of each plan with
queues is then simulated at 1.3 times its capacity, with its queues and in order of arrival, with the same
cache, for the 99th percentile of the TTFT of the smallest requests. It fails if a plan needs more GPUs with
queues, unless the workload bounds a latency.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.common import command_line, records_table, user_errors
from benchmarks.placement_moves import make_workload
from capplan import InfeasibleError, Plan, Workload, load_profile, plan, simulate
from capplan.profiling.load._requests import scaled
from capplan.spec import Lengths, QueueConfig, zipf

OVERLOAD = 1.3
DURATION_S = 900.0
TIME_LIMIT_S = 600.0
"""No search ends by it, so that a busy machine finds the same plans."""


@dataclass(frozen=True)
class Costs:
    """A workload planned with and without queues; None: no plan."""

    adapters: int
    bound: str
    gpus: int | None
    queued_gpus: int | None
    small_ttft_s: tuple[float, float] | None
    """P99 TTFT of the smallest requests under overload: with queues, in order of arrival."""

    @property
    def is_dearer(self) -> bool:
        """Whether queues need more GPUs, or have no plan where there is one without."""
        return self.gpus is not None and (self.queued_gpus is None or self.queued_gpus > self.gpus)


def random_workload(number: int, seed: int) -> tuple[Workload, str]:
    """Return a random workload, and the metric that it bounds."""
    random = np.random.default_rng((seed, number))
    count = int(random.integers(12, 49))
    share = random.permutation(zipf(count, float(random.uniform(0.0, 1.2))))
    rates = (float(random.uniform(3.0, 30.0)) * share).tolist()
    bound = ("none", "ttft", "e2e")[number % 3]
    slo = {
        "none": {},
        "ttft": {"ttft_p99_s": float(random.choice([1.0, 2.0, 5.0]))},
        "e2e": {"e2e_p99_s": float(random.choice([20.0, 40.0, 60.0]))},
    }[bound]
    lengths = {
        "prompt_tokens": Lengths(mean=float(random.uniform(100, 900)), std=float(random.uniform(100, 900))),
        "output_tokens": Lengths(mean=float(random.uniform(80, 300)), std=float(random.uniform(50, 300))),
    }
    return make_workload(random.choice([8, 16, 32, 64], count).tolist(), rates, slo=slo, **lengths), bound


def planned(workload: Workload) -> Plan | None:
    """Return a plan; None if there is none, or it is not verified."""
    try:
        made = plan(workload, seeds=2, time_limit_s=TIME_LIMIT_S)
    except InfeasibleError:
        return None
    return made if made.verification.ok else None


def small_ttft_s(workload: Workload, made: Plan) -> tuple[float, float] | None:
    """Return the P99 TTFT of the smallest requests on an overloaded GPU: with queues, in order of arrival."""
    group = made.groups[0]
    load = group.predicted.load_over_capacity
    if load is None or group.cache is None:
        return None
    shares = {each.name: each.share for each in group.adapters}
    alone = scaled(workload.subset(list(shares), shares), OVERLOAD / load)
    found = []
    for scheduler in (group.scheduler, "fifo"):
        args = group.engine_args
        result = simulate(
            alone.replace(queues=None),
            load_profile(group.profile),
            a_max=args.max_loras,
            s_max=args.max_lora_rank,
            duration_s=DURATION_S,
            scheduler=scheduler,
            cache=group.cache,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=args.max_model_len,
        )
        if result.pool is None or not result.pool.sizes:
            return None
        found.append(result.pool.sizes[0].ttft_s.p99)
    with_queues, in_order = found
    return None if None in found else (with_queues, in_order)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--cases", type=int, default=40, help="random workloads")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows: list[Costs] = []
    with user_errors():
        for number in range(args.cases):
            workload, bound = random_workload(number, args.seed)
            alone, queued = planned(workload), planned(workload.replace(queues=QueueConfig()))
            rows.append(
                Costs(
                    adapters=len(workload.adapters),
                    bound=bound,
                    gpus=None if alone is None else alone.totals.gpus,
                    queued_gpus=None if queued is None else queued.totals.gpus,
                    small_ttft_s=None if queued is None else small_ttft_s(workload, queued),
                )
            )
            print(number + 1, _cells(rows[-1]), flush=True)
    print(records_table([_cells(row) for row in rows]))
    dearer = [row for row in rows if row.is_dearer]
    fewer = [row for row in rows if row.queued_gpus and (row.gpus is None or row.queued_gpus < row.gpus)]
    ratios = [row.small_ttft_s[0] / row.small_ttft_s[1] for row in rows if row.small_ttft_s]
    bounded = sum(row.bound != "none" for row in dearer)
    print(f"more GPUs with queues: {len(dearer)}, of which {bounded} have a bound on a latency")
    print(f"fewer GPUs with queues: {len(fewer)}")
    print(f"small requests under overload, queues over order: median {median(ratios):.2f} of {len(ratios)}")
    return int(any(row.bound == "none" for row in dearer))


def _cells(row: Costs) -> dict[str, object]:
    small = ("", "") if row.small_ttft_s is None else tuple(f"{each:.2f}" for each in row.small_ttft_s)
    return {
        "adapters": row.adapters,
        "bound": row.bound,
        "GPUs": row.gpus or "none",
        "GPUs with queues": row.queued_gpus or "none",
        "small, TTFT p99 s": small[0],
        "in order of arrival": small[1],
    }


if __name__ == "__main__":
    raise SystemExit(main())
