"""Moves after a change of the workload: ``python -m benchmarks.placement_moves --out DIR`` prints the table.

Results are kept in DIR, so that an interrupted run continues. A workload is planned, changed, and planned
again twice: from scratch and from the plan in force. The first rows double the rates of 300 adapters of Zipf
popularity. The other workloads are random (20 to 150 adapters, ranks 8 to 64, Zipf exponents 0 to 1.2, half
of them with a TTFT bound); five kinds of change alternate.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.common import (
    H100_LLAMA,
    LLAMA,
    command_line,
    numbered_adapters,
    read_or_make,
    records_table,
    user_errors,
)
from capplan import Lengths, Workload, plan
from capplan.errors import CapplanError
from capplan.spec import zipf

CHANGES: Final = ("10 % more", "doubled", "one hot", "added", "removed")
MAX_GPUS = 64


@dataclass(frozen=True)
class Change:
    name: str
    before: Workload
    after: Workload


def make_workload(rank: Sequence[int], rate_rps: Sequence[float], **fields: object) -> Workload:
    lengths = {"prompt_tokens": Lengths(mean=223, std=245), "output_tokens": Lengths(mean=194, std=206)}
    common = {"base_model": LLAMA, "profile": H100_LLAMA, "gpus": {"count": MAX_GPUS}, **lengths}
    return Workload(**(common | {"adapters": numbered_adapters(rank, rate_rps)} | fields))


def scaled(workload: Workload, factors: Sequence[float]) -> Workload:
    adapters = zip(workload.adapters, factors, strict=True)
    return workload.replace(adapters=tuple(a.replace(rate_rps=a.rate_rps * by) for a, by in adapters))


def zipf_doubled(rank: int) -> Change:
    rates_rps = [40.0 * share for share in zipf(300, 1.0)]
    slo = {"ttft_p99_s": 1.0, "tpot_p99_ms": 50.0}
    before = make_workload([rank] * 300, rates_rps, slo=slo)
    return Change(f"Zipf, rank {rank}, doubled", before, scaled(before, [2.0] * 300))


def random_change(number: int, seed: int) -> Change:
    random = np.random.default_rng((seed, number))
    count, rate_rps = int(random.integers(20, 151)), float(random.uniform(10.0, 50.0))
    share = random.permutation(zipf(count, float(random.uniform(0.0, 1.2))))
    slo = {"ttft_p99_s": float(random.choice([1.0, 2.0, 5.0]))} if random.random() < 0.5 else {}
    rank = random.choice([8, 16, 32, 64], count).tolist()
    before = make_workload(rank, (rate_rps * share).tolist(), slo=slo)
    name = CHANGES[number % len(CHANGES)]
    return Change(name, before, changed(before, name, random))


def changed(workload: Workload, name: str, random: np.random.Generator) -> Workload:
    adapters, some = workload.adapters, int(random.integers(1, 6))
    if name == "one hot":
        factors = np.ones(len(adapters))
        factors[random.integers(len(adapters))] *= 10.0
        return scaled(workload, factors.tolist())
    if name == "added":
        like = random.choice(len(adapters), some)
        new = tuple(adapters[each].replace(name=f"new{i}") for i, each in enumerate(like.tolist()))
        return workload.replace(adapters=adapters + new)
    if name == "removed":
        gone = set(random.choice(len(adapters), some, replace=False).tolist())
        return workload.replace(adapters=tuple(a for i, a in enumerate(adapters) if i not in gone))
    return scaled(workload, [2.0 if name == "doubled" else 1.1] * len(adapters))


def measure(change: Change) -> dict[str, Any]:
    """Return the table row of a change."""
    old = plan(change.before)
    from_scratch, row = plan(change.after), {"change": change.name, "adapters": len(change.after.adapters)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        old.to_json(path)
        started = time.perf_counter()
        made = plan(change.after.replace(previous_plan=str(path)))
        seconds = time.perf_counter() - started
    moved = {m.adapter for m in made.moves if m.from_group is not None and m.to_group is not None}
    return row | {
        "GPUs before": old.totals.gpus,
        "from scratch": from_scratch.totals.gpus,
        "from the plan": made.totals.gpus,
        "moved": len(moved),
        "share moved": f"{100.0 * len(moved) / len(change.after.adapters):.0f} %",
        "verified": "yes" if made.verification.ok else "no",
        "scratch verified": "yes" if from_scratch.verification.ok else "no",
        "seconds": f"{seconds:.1f}",
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--cases", type=int, default=20, help="random changes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a JSON result per change")
    args = parser.parse_args()
    changes = [
        zipf_doubled(16),
        zipf_doubled(64),
        *(random_change(number, args.seed) for number in range(args.cases)),
    ]
    with user_errors():
        rows, failed = [], []
        for number, change in enumerate(changes):
            try:
                rows.append(read_or_make(args.out / f"{number}.json", partial(measure, change)))
            except CapplanError as error:
                failed.append(f"{change.name}, {len(change.after.adapters)} adapters: {error}")
            print(f"{number + 1} of {len(changes)}: {change.name}", flush=True)
    print(records_table(rows), *failed, sep="\n")


if __name__ == "__main__":
    main()
