"""Speed of the twin in Chameleon's setting: ``python -m benchmarks.chameleon_speed --traces DIR``.

One hour on the A40 with 100 adapters per case, requests drawn and results reduced, in CPU seconds of this
process after compilation. The bar is 10,000 simulated seconds per CPU second with Chameleon at 9 RPS.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common import command_line, cpu_timed, records_table
from capplan import SimulationResult, Workload
from capplan.reproduce.chameleon._setting import A40, at_rate, profile, system, workload
from capplan.twin.instance import Run, simulate_run

HOUR_S = 3600.0
BAR = 10_000.0
LOADS_RPS = (6.0, 9.0, 12.0)
NAMES = ("slora", "no-sched", "sjf", "no-cache", "chameleon", "histogram")


def run(load: Workload, name: str, duration_s: float = HOUR_S) -> SimulationResult:
    chosen = system(name)
    options = Run(duration_s, scheduler=chosen.scheduler, cache=chosen.cache)
    return simulate_run(load, profile(A40), A40.args(len(load.adapters)), options)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--traces", required=True, help="folder of the Azure trace")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each case; the fastest counts")
    chosen = parser.parse_args(arguments)
    paper = workload("up", chosen.traces)
    rows = []
    for name in NAMES:
        run(paper, name, 1.0)  # compile first
        for rps in LOADS_RPS:
            load = at_rate(paper, rps)
            timed = [cpu_timed(lambda name=name, load=load: run(load, name)) for _ in range(chosen.repeat)]
            seconds, result = min(timed, key=lambda each: each[0])
            rows.append(
                {
                    "system": name,
                    "req/s": f"{rps:g}",
                    "requests": f"{result.submitted:,}",
                    "steps": f"{result.steps:,}",
                    "waiting (mean)": f"{result.waiting_mean:.1f}",
                    "CPU s": f"{seconds:.3f}",
                    "simulated s per CPU s": f"{HOUR_S / seconds:,.0f}",
                }
            )
    print(records_table(rows))


if __name__ == "__main__":
    main()
