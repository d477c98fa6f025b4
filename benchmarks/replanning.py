"""Time to plan from a plan in force: ``python -m benchmarks.replanning`` prints the ratio.

Random workloads (20 to 60 adapters by default, ranks 8 to 64, Zipf exponents 0 to 1.2, 10 to 30 requests per
second for up to 60 adapters and in proportion for more, half of them with a TTFT bound) are planned, 10 %
more adapters are added, and both plans of the larger workload are timed with their verification: from
scratch, and from the plan in force. The two take turns in going first.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np

from benchmarks.common import command_line, records_table, user_errors
from benchmarks.placement_moves import make_workload
from capplan import Plan, Workload, plan
from capplan.errors import CapplanError
from capplan.spec import zipf

MOST: Final = 1.2
"""Largest median ratio that is acceptable."""
ADDED: Final = 0.1
"""Share of adapters that are added."""


@dataclass(frozen=True)
class Times:
    """A workload planned from scratch and from the plan in force."""

    adapters: int
    scratch_gpus: int
    near_gpus: int
    moved: int
    choices: int
    scratch_s: float
    near_s: float

    @property
    def ratio(self) -> float:
        """Time from the plan in force over that from scratch."""
        return self.near_s / self.scratch_s


def random_workload(number: int, seed: int, least: int, most: int) -> Workload:
    """Return a random workload of some adapters."""
    random = np.random.default_rng((seed, number))
    count = int(random.integers(least, most + 1))
    share = random.permutation(zipf(count, float(random.uniform(0.0, 1.2))))
    slo = {"ttft_p99_s": float(random.choice([1.0, 2.0, 5.0]))} if random.random() < 0.5 else {}
    rank = random.choice([8, 16, 32, 64], count).tolist()
    return make_workload(rank, (most / 60.0 * float(random.uniform(10.0, 30.0)) * share).tolist(), slo=slo)


def enlarged(workload: Workload) -> Workload:
    """Return the workload with copies of its first adapters added."""
    some = max(1, round(ADDED * len(workload.adapters)))
    new = tuple(each.replace(name=f"new{i}") for i, each in enumerate(workload.adapters[:some]))
    return workload.replace(adapters=workload.adapters + new)


def timed(workload: Workload) -> tuple[Plan, float]:
    """Return a plan, and the seconds that it took."""
    started_s = time.perf_counter()
    made = plan(workload)
    return made, time.perf_counter() - started_s


def measure(before: Workload, near_first: bool) -> Times:
    """Return the times of the enlarged workload."""
    after = enlarged(before)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan(before).to_json(path)
        kinds = {"scratch": after, "near": after.replace(previous_plan=str(path))}
        order = sorted(kinds, reverse=not near_first)
        found = {kind: timed(kinds[kind]) for kind in order}
    (scratch, scratch_s), (near, near_s) = found["scratch"], found["near"]
    return Times(
        adapters=len(after.adapters),
        scratch_gpus=scratch.totals.gpus,
        near_gpus=near.totals.gpus,
        moved=len({m.adapter for m in near.moves if None not in (m.from_group, m.to_group)}),
        choices=len(near.provenance.get("choices", [])),
        scratch_s=scratch_s,
        near_s=near_s,
    )


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--cases", type=int, default=20, help="random workloads")
    parser.add_argument("--adapters", type=int, nargs=2, default=(20, 60), metavar=("LEAST", "MOST"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows: list[Times] = []
    with user_errors():
        plan(random_workload(args.cases, args.seed, *args.adapters))  # compiles the twin
        for number in range(args.cases):
            try:
                rows.append(
                    measure(random_workload(number, args.seed, *args.adapters), near_first=number % 2 == 1)
                )
            except CapplanError as error:
                print(f"workload {number}: {error}", flush=True)
                continue
            print(f"{number + 1} of {args.cases}: {rows[-1].ratio:.2f}", flush=True)
    print(
        records_table(
            [
                {
                    "adapters": row.adapters,
                    "GPUs, scratch": row.scratch_gpus,
                    "GPUs, in force": row.near_gpus,
                    "moved": row.moved,
                    "choices": row.choices,
                    "scratch, s": f"{row.scratch_s:.2f}",
                    "in force, s": f"{row.near_s:.2f}",
                    "ratio": f"{row.ratio:.2f}",
                }
                for row in rows
            ]
        )
    )
    ratio = median(row.ratio for row in rows)
    print(f"median ratio {ratio:.2f} over {len(rows)} workloads (at most {MOST:g})")
    return 0 if ratio <= MOST else 1


if __name__ == "__main__":
    raise SystemExit(main())
