"""Speed of the twin: ``python -m benchmarks.twin_speed`` prints the tables of the docs.

All figures are of the public `simulate()`, drawing of requests included, in CPU seconds of this process,
after compilation. Since machines differ, two baselines are measured in the same run: the reference twin on a
small case, and the drawing of requests alone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial, reduce
from pathlib import Path

import numpy as np

from benchmarks.common import (
    H100_LLAMA,
    LLAMA,
    command_line,
    cpu_timed,
    emit,
    in_fresh_process,
    markdown,
    numbered_adapters,
    peak_mib,
    records_table,
)
from capplan import Lengths, SimulationResult, Workload, load_profile, simulate
from capplan.spec import DEFAULT_MAX_MODEL_LEN
from capplan.twin import cores
from capplan.twin.instance import SimulateSettings
from capplan.twin.instance._scenario import with_length_correlation
from capplan.workload import Requests, draw_requests
from tests.oracle import simulate_with_reference

PROFILE = load_profile(H100_LLAMA)
HOUR_S = 3600.0
SIZES = (8, 16, 32, 64, 128, 192, 256, 320, 384)
RATE_SETS = {"high": (1.6, 0.8, 0.4), "low": (0.1, 0.05, 0.025)}
IN_FLIGHT = 25_000
CHATS = (Lengths(mean=223, std=245), Lengths(mean=194, std=206))

GRID_BAR = 50_000.0  # simulated seconds per CPU second
SHORT_BAR = 60_000.0
RSS_BAR_MB = 400.0
OVERLOAD_RULES = ("vllm-0.8", "vllm-0.11")
OVERLOAD_HOURS = (0.25, 0.5, 1.0)
RSS_REQUESTS = 400_000


@dataclass(frozen=True)
class Case:
    name: str
    workload: Workload
    a_max: int
    duration_s: float = HOUR_S
    max_in_flight: int | None = None
    seed: int = 0
    rules: str | None = None
    """Rules other than those of the profile."""

    @property
    def settings(self) -> SimulateSettings:
        return {
            "a_max": self.a_max,
            "s_max": 8,
            "duration_s": self.duration_s,
            "seed": self.seed,
            "max_in_flight": self.max_in_flight,
            "rules": self.rules,
        }

    def run(self) -> SimulationResult:
        return simulate(self.workload, PROFILE, **self.settings)

    def run_reference(self) -> SimulationResult:
        return simulate_with_reference(self.workload, PROFILE, **self.settings)

    def draw(self) -> Requests:
        correlated = with_length_correlation(self.workload, PROFILE)
        return draw_requests(correlated, self.duration_s, self.seed, DEFAULT_MAX_MODEL_LEN)


@dataclass(frozen=True)
class Cost:
    """Cost of calls of `simulate()`."""

    simulated_s: float
    cpu_s: float
    drawing_s: float
    """CPU seconds of drawing the requests only."""
    requests: int
    steps: int

    @property
    def times_real_time(self) -> float:
        return self.simulated_s / self.cpu_s

    @property
    def ns_per_request(self) -> float:
        return 1e9 * self.cpu_s / self.requests

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def workload(rates_rps: Iterable[float], lengths: tuple[Lengths, Lengths] = CHATS) -> Workload:
    rates = list(rates_rps)
    adapters = numbered_adapters([8] * len(rates), rates)
    return Workload(base_model=LLAMA, adapters=adapters, prompt_tokens=lengths[0], output_tokens=lengths[1])


def even(adapters: int, total_rps: float) -> Workload:
    return workload([total_rps / adapters] * adapters)


def grid(rates: str) -> Iterator[Case]:
    """Yield section 8.2 of the adapter-caching paper: one hour per pair A_max <= A, rates in turn."""
    for adapters in SIZES:
        cycled = workload(RATE_SETS[rates][i % 3] for i in range(adapters))
        for a_max in (size for size in SIZES if size <= adapters):
            yield Case(f"{rates} {adapters}/{a_max}", cycled, a_max, max_in_flight=IN_FLIGHT)


def short_cases(spread: float, seeds: int = 20) -> Iterator[Case]:
    """Yield about 12,000 requests at 20 per second, of 250 and 230 tokens, 128 adapters on 32 slots."""
    lengths = (Lengths(mean=250, std=250 * spread), Lengths(mean=230, std=230 * spread))
    for seed in range(seeds):
        yield Case(f"short {seed}", workload([20 / 128] * 128, lengths), 32, duration_s=600.0, seed=seed)


def by_adapters() -> dict[float, Case]:
    return {n: Case(f"{n} adapters", even(n, 7.5), min(64, n)) for n in (16, 128, 1024, 10_000)}


def by_rate() -> dict[float, Case]:
    rates = (1.0, 4.0, 16.0, 64.0, 256.0)
    return {r: Case(f"{r:g} req/s", even(128, r), 64, max_in_flight=IN_FLIGHT) for r in rates}


def by_horizon() -> dict[float, Case]:
    return {h: Case(f"{h:g} h", even(128, 7.5), 64, duration_s=h * HOUR_S) for h in (0.25, 1.0, 4.0, 16.0)}


def by_overload(rules: str) -> Iterator[Case]:
    """Yield loads of which most requests wait for a slot: the queue grows with the hours."""
    for adapters, a_max, rate_rps in ((64, 2, 20.0), (384, 32, 40.0)):
        name = f"{adapters} adapters, {a_max} slots, {rate_rps:g} req/s"
        for hours in OVERLOAD_HOURS:
            yield Case(name, even(adapters, rate_rps), a_max, hours * HOUR_S, IN_FLIGHT, rules=rules)


def small_case() -> Case:
    """Return a case for the reference twin."""
    return Case("small", even(16, 2.0), 8, duration_s=120.0)


def cost(case: Case, repeat: int = 1) -> Cost:
    """Time a case and its drawing; the fastest of `repeat` runs counts."""
    runs = [cpu_timed(case.run) for _ in range(repeat)]
    drawing_s = min(cpu_timed(case.draw)[0] for _ in range(repeat))
    result = runs[0][1]
    return Cost(case.duration_s, min(s for s, _ in runs), drawing_s, result.submitted, result.steps)


def total(cases: Iterable[Case], repeat: int = 1) -> Cost:
    return reduce(Cost.__add__, (cost(case, repeat) for case in cases))


def slope(costs: Sequence[Cost]) -> float:
    """Return the exponent of CPU time in requests, by least squares."""
    requests, seconds = zip(*((c.requests, c.cpu_s) for c in costs), strict=True)
    return float(np.polyfit(np.log(requests), np.log(seconds), 1)[0])


def peak_rss_mb() -> float:
    # The first process may compile, which takes more memory.
    return [float(in_fresh_process("twin_speed", "--peak-rss")) for _ in range(2)][-1]


def own_peak_rss_mb() -> float:
    result = Case("memory", even(128, RSS_REQUESTS / HOUR_S), 64).run()
    if abs(result.submitted / RSS_REQUESTS - 1) > 0.01:
        raise AssertionError(f"{result.submitted} arrivals instead of {RSS_REQUESTS}")
    return peak_mib()


def speed_table(repeat: int) -> str:
    high, low = (total(grid(rates), repeat) for rates in RATE_SETS)
    cases = (
        ("section 8.2, high rates, 45 hours", high, None),
        ("section 8.2, low rates, 45 hours", low, None),
        ("section 8.2, all 90 hours", high + low, GRID_BAR),
        ("12,000 requests at 20 req/s, constant lengths, 20 seeds", total(short_cases(0), repeat), SHORT_BAR),
        ("the same, lengths spread as far as their mean", total(short_cases(1), repeat), SHORT_BAR),
    )
    return records_table(
        {
            "scenarios": name,
            "requests": f"{c.requests:,}",
            "steps": f"{c.steps:,}",
            "CPU s": f"{c.cpu_s:.2f}",
            "of it drawing": f"{c.drawing_s / c.cpu_s:.0%}",
            "simulated s per CPU s": f"{c.times_real_time:,.0f}",
            "bar": f"{bar:,.0f}" if bar else "",
        }
        for name, c, bar in cases
    )


def growth_table(repeat: int) -> str:
    families: dict[str, Mapping[float, Case]] = {
        "adapters, 7.5 req/s in all": by_adapters(),
        "req/s, 128 adapters": by_rate(),
        "hours, 128 adapters at 7.5 req/s": by_horizon(),
    }
    return records_table(
        {
            "one GPU, 64 slots": f"{value:,g} {family}",
            "requests": f"{c.requests:,}",
            "CPU ms": f"{1e3 * c.cpu_s:.1f}",
            "ns per request": f"{c.ns_per_request:,.0f}",
            "of it drawing": f"{1e9 * c.drawing_s / c.requests:.0f}",
        }
        for family, cases in families.items()
        for value, case in cases.items()
        for c in (cost(case, repeat),)
    )


def overload_table(repeat: int) -> str:
    return records_table(
        {
            "rules": rules,
            "overload": case.name,
            "hours": case.duration_s / HOUR_S,
            "requests": f"{c.requests:,}",
            "steps": f"{c.steps:,}",
            "CPU ms": f"{1e3 * c.cpu_s:.1f}",
        }
        for rules in OVERLOAD_RULES
        for case in by_overload(rules)
        for c in (cost(case, repeat),)
    )


def baseline_table(repeat: int) -> str:
    small = small_case()
    compiled = cost(small, max(repeat, 5))
    reference_s, _ = cpu_timed(small.run_reference)
    faster = f"{1e3 * compiled.cpu_s:.2f} CPU ms, {reference_s / compiled.cpu_s:,.0f} times faster"
    reference = f"reference twin, {compiled.steps:,} steps, {compiled.requests} requests"
    peak = f"{peak_rss_mb():.0f} MB (bar {RSS_BAR_MB:.0f})"
    rows = [
        (reference, f"{reference_s:.2f} CPU s"),
        ("compiled twin on the same", faster),
        (f"peak memory of an hour with {RSS_REQUESTS:,} arrivals", peak),
    ]
    return markdown(("baseline", "value"), rows)


def dataset_table(scenarios: int) -> str:
    """Return the rate of `generate_dataset` for one-hour scenarios of every design, by wall time."""
    # With pyarrow and scipy.stats: 57 MB that peak memory is measured without.
    from capplan.twin.dataset import DESIGNS, generate_dataset

    rows = []
    for design in DESIGNS:
        with tempfile.TemporaryDirectory() as folder:
            generate = partial(generate_dataset, profile=PROFILE, design=design)
            generate(Path(folder) / "compile", scenarios=1, duration_s=1.0, workers=1)
            begin_s = time.perf_counter()
            generate(Path(folder) / "data", scenarios=scenarios, workers=cores())
            rate = scenarios / (time.perf_counter() - begin_s) / cores()
        rows.append((design, f"{rate:.2f}", f"{10_000 / rate / 2 / 60:.1f}"))
    return markdown(("design", "scenarios per second and core", "10,000 on 2 cores, min"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--repeat", type=int, default=1, help="runs of each case; the fastest counts")
    parser.add_argument("--datasets", type=int, default=0, metavar="N", help="scenarios per dataset design")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file, too")
    parser.add_argument("--peak-rss", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.peak_rss:
        print(own_peak_rss_mb())
        return
    small_case().run()  # compile first
    tables = [table(chosen.repeat) for table in (speed_table, growth_table, overload_table, baseline_table)]
    if chosen.datasets:
        tables.append(dataset_table(chosen.datasets))
    emit("\n\n".join(tables) + "\n", chosen.markdown)


if __name__ == "__main__":
    main()
