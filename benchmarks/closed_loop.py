"""The closed loop on the reference engine: profile, calibrate, plan, validate.

    python -m benchmarks.closed_loop --out DIR

measures the engine, makes a profile of the tables, plans 24 adapters on one engine with it, and runs the plan
at 40, 70 and 90 % of its capacity and once overloaded, each under the twin's very requests; then it measures
other numbers of slots under overload, to see what the plan's choice is worth. Every stage leaves a file in
DIR; the same command goes on where an earlier one was stopped. All of it takes about half an hour with the
defaults, and wants a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.common import command_line, markdown
from capplan.profiling.validation.loop import ClosedLoop, LoopSettings, VoidError

LOADS: Final = (0.4, 0.7, 0.9, 1.5)
OVERLOAD: Final = 1.5
STAGES: Final = ("memory", "loads", "served")
"""Stages of `capplan profile engine` that calibration needs."""
SPAN_BAR: Final = 2.0
SLOTS_BAR: Final = 0.05


@dataclass(frozen=True)
class Run:
    load: float
    a_max: int
    facts: Mapping[str, Any]

    def metric(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(e for e in self.group["comparisons"] if e["name"] == name)
        return found

    @property
    def group(self) -> dict[str, Any]:
        group: dict[str, Any] = self.facts["groups"][0]
        return group


def measure(given: argparse.Namespace) -> list[Run]:
    """Run the missing validations: the plan at its loads, then other numbers of slots."""
    setting = LoopSettings(
        model=given.model,
        threads=given.threads,
        slots=tuple(given.profiled_slots),
        form=given.form,
        point_s=given.point_s,
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
    names = ("throughput_tok_s", "itl_ms_mean", "ttft_s_mean", "served_fraction")
    head = ["load", *(f"{name}: measured" for name in names), *(f"{name}: SMAPE, %" for name in names)]
    head += ["constant step: throughput, ITL, %", "offered load, %", "starved: measured, predicted", "agrees"]
    rows = []
    for run in at_plan:
        each = [run.metric(name) for name in names]
        rows.append(
            (
                f"{run.load:.0%}",
                *(_shown(e["measured"]) for e in each),
                *(_shown(e["error"]) for e in each),
                f"{_shown(each[0]['constant_step_error'])}, {_shown(each[1]['constant_step_error'])}",
                _shown(each[0]["offered_load_error"]),
                f"{run.group['starved']}, {run.group['predicted_starved']}",
                "yes" if run.group["agrees"] else "NO: " + "; ".join(run.group["faults"]),
            )
        )
    print(markdown(tuple(head), rows))
    gaps = [run.metric("itl_ms_mean")["measured"] for run in at_plan]
    span = max(gaps) / min(gaps)
    print(f"\nmeasured mean ITL spans a factor {span:.2f} (bar {SPAN_BAR:g})\n")
    swept = [run for run in runs if run.load == OVERLOAD]
    best = max(run.metric("throughput_tok_s")["measured"] for run in swept)
    slots = [
        (
            str(run.a_max) + (" (plan)" if run in at_plan else ""),
            _shown(run.metric("throughput_tok_s")["measured"]),
            _shown(run.metric("throughput_tok_s")["predicted"]),
            f"{run.metric('throughput_tok_s')['measured'] / best:.3f}",
        )
        for run in sorted(swept, key=lambda run: run.a_max)
    ]
    print(markdown(("slots", "throughput, tok/s", "predicted", "of the best"), slots))
    chosen = next(run for run in at_plan if run.load == OVERLOAD)
    near = chosen.metric("throughput_tok_s")["measured"] >= (1.0 - SLOTS_BAR) * best
    return near and span >= SPAN_BAR and all(run.group["agrees"] for run in at_plan)


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
