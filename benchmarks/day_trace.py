"""A long trace with latency bounds: a plan within the default limits, and its worst window simulated alone.

    python -m benchmarks.day_trace [--requests 500000] [--rate-rps 30] [--speed 1]

The rate of the trace swings by half of its mean; 64 adapters of four ranks are called by Zipf's law. The
second table compares the latencies of the plan's worst window with a separate simulation of
the requests of that window, cut out of the trace, on the placement of the plan.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.common import H100_LLAMA, LLAMA, command_line, markdown, peak_mib
from capplan import Adapter, Lengths, Plan, Workload, plan
from capplan.planner.verification import fleet_of_plan
from capplan.spec import Slo, Trace, zipf
from capplan.twin.instance import bound_value

_SLO = Slo(ttft_p99_s=5.0, tpot_p99_ms=120.0)
_RANKS = (8, 16, 32, 64)
_ADAPTERS = 64
_SEED = 1


def day_workload(requests: int, rate_rps: float) -> Workload:
    """Return a workload with a recorded trace whose rate rises and falls once."""
    rng = np.random.default_rng(_SEED)
    duration_s = requests / rate_rps
    grid = np.linspace(0.0, 1.0, 4097)
    passed = grid - 0.5 / (2.0 * np.pi) * np.sin(2.0 * np.pi * grid)  # rate 1 - 0.5 cos: quiet at both ends
    arrival_s = duration_s * np.interp(np.sort(rng.random(requests)), passed, grid)
    names = [f"a{i}" for i in range(_ADAPTERS)]
    shares = zipf(_ADAPTERS, 1.0)
    row = rng.choice(_ADAPTERS, requests, p=shares)
    prompt = np.clip(rng.gamma(0.83, 269.0, requests).round(), 1, 4096)
    output = np.clip(rng.gamma(0.89, 219.0, requests).round(), 1, 2048)
    trace = Trace.from_arrays(arrival_s, [names[i] for i in row], prompt, output, duration_s)
    adapters = [
        Adapter(name=name, rank=_RANKS[i % 4], rate_rps=rate_rps * shares[i]) for i, name in enumerate(names)
    ]
    return Workload(
        base_model=LLAMA,
        adapters=adapters,
        prompt_tokens=Lengths(mean=223),
        output_tokens=Lengths(mean=194),
        profile=H100_LLAMA,
        trace=trace,
        slo=_SLO,
    )


def worst_window(answer: Plan, workload: Workload) -> list[list[str]]:
    """Return rows of each group: bound, value of the plan over its seeds, and that of the window alone."""
    start_s, length_s = answer.verification.window_start_s or 0.0, answer.verification.duration_s
    assert workload.trace is not None
    part = workload.trace.window(start_s, start_s + length_s)
    fleet = fleet_of_plan(answer, workload, None, "workload")
    alone = type(fleet)(**{**vars(fleet), "workload": workload.replace(trace=part)}).simulate(0, length_s)
    rows = []
    for group, result in zip(answer.groups, alone.instances, strict=True):
        for bound in _SLO.latency_bounds():
            low, high = group.predicted.intervals.get(bound, (float("nan"),) * 2)
            stated = group.predicted.bounded[bound]
            rows.append(
                [
                    group.id,
                    bound,
                    f"{stated:.4g} ({low:.4g} to {high:.4g})",
                    f"{bound_value(result, bound):.4g}",
                ]
            )
    return rows


def main() -> None:
    """Plan, and print both tables."""
    parser = command_line(__doc__)
    parser.add_argument("--requests", type=int, default=500_000)
    parser.add_argument("--rate-rps", type=float, default=30.0)
    parser.add_argument("--speed", type=float, default=1.0, help="Replay the trace so many times as fast.")
    given = parser.parse_args()
    workload = day_workload(given.requests, given.rate_rps).at_load(given.speed)
    began_s = time.perf_counter()
    answer = plan(workload)
    wall_s = time.perf_counter() - began_s
    check = answer.verification
    head = ("requests", "req/s", "GPUs", "verdict", "search", "worst window", "wall s", "peak MiB")
    start_s = check.window_start_s or 0.0
    window = f"{start_s:g} to {start_s + check.duration_s:g} s"
    row = [f"{given.requests:,}", f"{given.rate_rps * given.speed:g}", str(answer.totals.gpus), check.verdict]
    row += [str(answer.provenance["search"]), window, f"{wall_s:.0f}", f"{peak_mib():.0f}"]
    print(markdown(head, [row]))
    print()
    print(markdown(("group", "bound", "plan", "window alone"), worst_window(answer, workload)))


if __name__ == "__main__":
    main()
