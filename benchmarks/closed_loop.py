"""The closed loop on the reference engine: profile, calibrate, plan, validate.

    python -m benchmarks.closed_loop --out DIR

measures the engine, makes a profile of the tables, plans 24 adapters on one engine with it, and runs the plan
at 40, 70 and 90 % of its capacity and once overloaded, each under the requests of the twin; then it measures
other numbers of slots under overload, for comparison with the plan's choice. Each stage writes a file to DIR;
an interrupted run is resumed. The run takes about half an hour with the defaults, on an idle machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.common import command_line, records_table
from capplan.profiling.validation.loop import ClosedLoop, LoopSettings, VoidError

LOADS: Final = (0.4, 0.7, 0.9, 1.5)
OVERLOAD: Final = 1.5
STAGES: Final = ("memory", "loads", "served")
"""Stages of `capplan profile engine` that calibration needs."""
METRICS: Final = ("throughput_tok_s", "itl_ms_mean", "ttft_s_mean", "served_fraction")
SPAN_BAR: Final = 2.0
SLOTS_BAR: Final = 0.05


@dataclass(frozen=True)
class Run:
    load: float
    a_max: int
    facts: Mapping[str, Any]

    def metric(self, name: str) -> dict[str, Any]:
        return next(each for each in self.group["comparisons"] if each["name"] == name)

    @property
    def group(self) -> dict[str, Any]:
        return self.facts["groups"][0]


def measure(given: argparse.Namespace) -> list[Run]:
    """Run the missing validations: the plan at its loads, then other numbers of slots."""
    slots = tuple(given.profiled_slots)
    setting = LoopSettings(
        model=given.model, threads=given.threads, slots=slots, form=given.form, point_s=given.point_s
    )
    loop = ClosedLoop(given.out, setting, lambda line: print(time.strftime("%H:%M:%S"), line, flush=True))
    if not loop.profile.exists():
        loop.measure(given.budget_s, STAGES)
    loop.plan()
    planned = int(loop.group()["engine_args"]["max_loras"])
    runs = [Run(load, planned, loop.validate(load, given.duration_s)) for load in LOADS]
    others = [n for n in given.slots if n != planned]
    return runs + [Run(OVERLOAD, n, loop.validate(OVERLOAD, given.duration_s, n)) for n in others]


def report(runs: Sequence[Run]) -> bool:
    """Print the plan at its loads and the slots; return whether all bars hold."""
    at_plan = runs[: len(LOADS)]
    print(records_table(map(_load_row, at_plan)))
    gaps = [run.metric("itl_ms_mean")["measured"] for run in at_plan]
    span = max(gaps) / min(gaps)
    print(f"\nmeasured mean ITL spans a factor {span:.2f} (bar {SPAN_BAR:g})\n")
    swept = {run.a_max: run.metric("throughput_tok_s") for run in runs if run.load == OVERLOAD}
    best = max(throughput["measured"] for throughput in swept.values())
    planned = at_plan[0].a_max
    print(
        records_table(
            {
                "slots": f"{a_max} (plan)" if a_max == planned else a_max,
                "throughput, tok/s": _shown(throughput["measured"]),
                "predicted": _shown(throughput["predicted"]),
                "of the best": f"{throughput['measured'] / best:.3f}",
            }
            for a_max, throughput in sorted(swept.items())
        )
    )
    near = swept[planned]["measured"] >= (1.0 - SLOTS_BAR) * best
    return near and span >= SPAN_BAR and all(run.group["agrees"] for run in at_plan)


def _load_row(run: Run) -> dict[str, object]:
    metrics = {name: run.metric(name) for name in METRICS}
    throughput, itl = metrics["throughput_tok_s"], metrics["itl_ms_mean"]
    steps = f"{_shown(throughput['constant_step_error'])}, {_shown(itl['constant_step_error'])}"
    return {
        "load": f"{run.load:.0%}",
        **{f"{name}: measured": _shown(each["measured"]) for name, each in metrics.items()},
        **{f"{name}: SMAPE, %": _shown(each["error"]) for name, each in metrics.items()},
        "constant step: throughput, ITL, %": steps,
        "offered load, %": _shown(throughput["offered_load_error"]),
        "starved: measured, predicted": f"{run.group['starved']}, {run.group['predicted_starved']}",
        "agrees": "yes" if run.group["agrees"] else "NO: " + "; ".join(run.group["faults"]),
    }


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", default="small-llama", help="small-llama, or as for capplan serve")
    parser.add_argument("--form", default="additive")
    parser.add_argument("--budget-s", type=float, default=600.0, help="of the profile")
    parser.add_argument("--point-s", type=float, default=6.0)
    parser.add_argument("--duration-s", type=float, default=120.0, help="of each validation")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profiled-slots", type=int, nargs="+", default=[4, 24])
    parser.add_argument("--slots", type=int, nargs="*", default=[2, 4, 8, 16, 24])
    given = parser.parse_args()
    try:
        runs = measure(given)
    except VoidError as error:
        raise SystemExit(f"{error}; the same command measures it again") from None
    return 0 if report(runs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
