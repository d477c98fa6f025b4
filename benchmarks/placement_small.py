"""GPUs of `capplan` beside the fewest: ``python -m benchmarks.placement_small --out DIR``.

Random small cases (up to 24 adapters on up to 4 GPUs; ranks, rates, lengths and sometimes slots are drawn),
where `milp` proves how many GPUs are needed; with ``--large``, random large cases (100 to 2,000 adapters),
where only the lower bound is known. Both solvers query the same twin; answers are verified on fresh seeds.
DIR has a JSON file per case; an interrupted run is resumed. ``summary --out DIR`` prints the figures.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Final

import numpy as np

from benchmarks.common import command_line, emit, numbered_adapters, records_table, user_errors
from benchmarks.placement_records import Record, Settings, Store, busy_gpus_of, workload_of
from capplan import EngineConfig, Lengths, Workload
from capplan.planner import SolverResult
from capplan.reproduce.twin._setting import setting
from capplan.twin._sweep import in_parallel

OURS, YARDSTICK = "capplan", "milp"
MOST_ADAPTERS, MOST_GPUS = 24, 4
SHOWN: Final = 10
UNDECIDED: Final = "milp has no answer: out of time, or more than 24 shares"
OUTCOMES: Final = (
    "as many GPUs",
    "both find none",
    "capplan takes more GPUs",
    "capplan takes fewer GPUs",
    "only capplan answers",
    "only milp answers",
    UNDECIDED,
)
RANKS: Final = (8, 16, 32, 64, 128)
LARGE_ADAPTERS: Final = (100, 2000)
LARGE_GPUS = 64


@dataclass(frozen=True)
class Pair:
    record: Record
    ours: SolverResult
    milp: SolverResult

    @property
    def outcome(self) -> str:
        if not self.milp.answered and (self.milp.exit_code == 2 or self.milp.failure.startswith("time")):
            return UNDECIDED
        if self.ours.answered and self.milp.answered:
            gap = self.ours.gpus - self.milp.gpus
            return OUTCOMES[0] if gap == 0 else OUTCOMES[2 if gap > 0 else 3]
        if self.ours.answered:
            return OUTCOMES[4]
        return OUTCOMES[5] if self.milp.answered else OUTCOMES[1]

    def line(self) -> dict[str, object]:
        record, case = self.record, self.record.case
        found = {
            row.solver: row.gpus if row.answered else row.failure.replace("|", "/")
            for row in (self.ours, self.milp)
        }
        return {
            "case": record.name,
            "what": self.outcome,
            "GPUs there are": record.gpus,
            "at least": record.lower_bound_gpus,
            **found,
            "adapters": case["adapters"],
            "slots": case["slots"] or "open",
            "largest share": f"{case['largest_share']:.2f}",
        }


def report(records: Sequence[Record]) -> str:
    small = [record for record in records if record.row(YARDSTICK) is not None]
    large = [record for record in records if record.row(YARDSTICK) is None]
    parts = (small_tables(small) if small else []) + (large_tables(large) if large else [])
    return "\n\n".join(parts) + "\n"


def pairs(records: Sequence[Record]) -> list[Pair]:
    rows = [(record, record.row(OURS), record.row(YARDSTICK)) for record in records]
    return [Pair(record, ours, milp) for record, ours, milp in rows if ours and milp]


def small_tables(records: Sequence[Record]) -> list[str]:
    compared = pairs(records)
    counts = Counter(pair.outcome for pair in compared)
    both = [pair for pair in compared if pair.ours.answered and pair.milp.answered]
    failing = [sum(not p.ours.holds for p in both), sum(not p.milp.holds for p in both)]
    parts = [
        f"## {len(compared)} small cases",
        records_table({"outcome": each, "cases": counts[each]} for each in OUTCOMES),
        f"Both answer in {len(both)}; of these answers {failing[0]} of capplan and {failing[1]} of milp "
        f"do not hold on every fresh seed. {_times(compared)}",
    ]
    unlike = [pair for pair in compared if pair.outcome not in (*OUTCOMES[:2], UNDECIDED)]
    return [*parts, records_table(pair.line() for pair in unlike)] if unlike else parts


def _times(compared: Sequence[Pair]) -> str:
    said = [
        f"{name} {median(times):.3g} s (longest {max(times):.3g})"
        for name, rows in ((OURS, [p.ours for p in compared]), (YARDSTICK, [p.milp for p in compared]))
        if (times := [row.solve_s for row in rows if row.answered])
    ]
    return f"Median solve time: {', '.join(said)}."


def large_tables(records: Sequence[Record]) -> list[str]:
    answered = [(record, row) for record in records if (row := record.row(OURS)) and row.answered]
    head = f"## {len(records)} large cases"
    if not answered:
        return [head, "None is answered."]
    worst = sorted(answered, key=lambda each: -_ratio(*each))
    ratios = [_ratio(*each) for each in worst]
    times = [row.solve_s for _, row in answered]
    failing = sum(not row.holds for _, row in answered)
    return [
        head,
        f"{len(answered)} are answered, of which {failing} do not hold on every fresh seed. GPUs over the "
        f"lower bound: median {median(ratios):.3f}, mean {fmean(ratios):.3f}, worst {ratios[0]:.3f}. Solve "
        f"time: median {median(times):.3g} s, longest {max(times):.3g} s. The worst:",
        records_table(_large(*each) for each in worst[:SHOWN]),
    ]


def _ratio(record: Record, row: SolverResult) -> float:
    return row.gpus / record.lower_bound_gpus


def _large(record: Record, row: SolverResult) -> dict[str, object]:
    return {
        "case": record.name,
        "adapters": record.case["adapters"],
        "req/s": f"{record.case['rate_rps']:.3g}",
        "busy": f"{record.busy_gpus:.2f}",
        "at least": record.lower_bound_gpus,
        "capplan": row.gpus,
        "ratio": f"{_ratio(record, row):.2f}",
        "holds": "yes" if row.holds else "no",
        "solve s": f"{row.solve_s:.2f}",
    }


@dataclass(frozen=True)
class Case:
    name: str
    workload: Workload
    gpus: int

    @property
    def facts(self) -> dict[str, object]:
        work = self.workload
        own = [lengths.mean_tokens for a in work.adapters for lengths in work.lengths_of(a)]
        return {
            "profile": work.profile,
            "gpus": self.gpus,
            "adapters": len(work.adapters),
            "rate_rps": work.total_rate_rps,
            "largest_share": max(a.rate_rps for a in work.adapters) / work.total_rate_rps,
            "ranks": sorted({a.rank for a in work.adapters}),
            "mean_tokens": [min(own), max(own)],
            "slots": work.engine.max_loras,
            "headroom": work.headroom,
        }


def small_case(settings: Settings, number: int) -> Case:
    random = np.random.default_rng((settings.draw, 0, number))
    gpus, adapters = int(random.integers(1, MOST_GPUS + 1)), int(random.integers(2, MOST_ADAPTERS + 1))
    slots = int(random.integers(1, adapters + 1)) if random.random() < 0.3 else None
    load = random.uniform(0.1, 0.8) * gpus
    return Case(f"small.{number}", _workload(random, adapters, slots, load), gpus)


def large_case(settings: Settings, number: int) -> Case:
    random = np.random.default_rng((settings.draw, 1, number))
    low, high = np.log(LARGE_ADAPTERS)
    load = float(np.exp(random.uniform(0.0, np.log(16.0))))
    return Case(
        f"large.{number}", _workload(random, round(np.exp(random.uniform(low, high))), None, load), LARGE_GPUS
    )


def _workload(random: np.random.Generator, adapters: int, slots: int | None, load: float) -> Workload:
    """Draw a workload whose tokens keep `load` GPUs busy."""
    model = str(random.choice(list(setting().models)))
    ranks = random.choice(RANKS, int(random.integers(1, len(RANKS) + 1)), replace=False)
    weight = np.exp(random.choice((0.0, 0.7, 1.5)) * random.standard_normal(adapters))
    kinds = [_lengths(random) for _ in range(int(random.choice((1, 1, 3))))]
    kind = random.integers(0, len(kinds), adapters)
    headroom = float(random.choice((0.0, 0.1)))
    rank = random.choice(ranks, adapters)

    def made(rate_rps: np.ndarray) -> Workload:
        own = [kinds[k] if k else (None, None) for k in kind]
        return workload_of(
            model,
            tuple(
                adapter.replace(prompt_tokens=prompt, output_tokens=output)
                for adapter, (prompt, output) in zip(numbered_adapters(rank, rate_rps), own, strict=True)
            ),
            prompt_tokens=kinds[0][0],
            output_tokens=kinds[0][1],
            headroom=headroom,
            engine=EngineConfig(max_loras=slots),
        )

    return made(weight * load / busy_gpus_of(made(weight)))


def _lengths(random: np.random.Generator) -> tuple[Lengths, Lengths]:
    prompt, output = np.exp(random.uniform(np.log((50, 30)), np.log((1500, 500)))).tolist()
    spread = float(random.choice((0.0, 0.5, 1.0)))
    return Lengths(mean=prompt, std=spread * prompt), Lengths(mean=output, std=spread * output)


def run_case(
    store: Store, settings: Settings, draw: Callable[[Settings, int], Case], number: int
) -> tuple[Record, float]:
    """Run the missing solvers; return the record and the seconds."""
    started = time.perf_counter()
    case = draw(settings, number)
    solvers = [OURS] if draw is large_case else [OURS, YARDSTICK]
    record = store.start(case.name, case.facts, case.workload, case.gpus, settings)
    record = store.complete(record, case.workload, solvers, settings)
    return record, time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("action", nargs="?", choices=("run", "summary"), default="run")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--large", action="store_true", help="large cases instead of small ones")
    parser.add_argument("--cases", type=int, metavar="N", help="250 small ones, or 40 large ones")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first case")
    parser.add_argument("--draw", type=int, default=Settings.draw, metavar="N", help="another set of cases")
    parser.add_argument("--seeds", type=int, default=Settings.seeds, metavar="N", help="verification seeds")
    parser.add_argument(
        "--time-limit", type=float, default=Settings.time_limit_s, metavar="S", help="of milp"
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="cases at a time")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="of the summary")
    given = parser.parse_args(arguments)
    store = Store(given.out)
    with user_errors():
        if given.action == "summary":
            emit(report(list(store.all())), given.markdown)
            return
        settings = Settings(draw=given.draw, seeds=given.seeds, time_limit_s=given.time_limit)
        draw, count = (large_case, 40) if given.large else (small_case, 250)
        numbers = range(given.first, given.first + (given.cases or count))
        run = partial(run_case, store, settings, draw)
        for record, wall_s in in_parallel(run, numbers, workers=given.workers):
            found = [f"{row.solver} {row.gpus if row.answered else row.failure[:60]}" for row in record.rows]
            print(
                f"{record.name} (>= {record.lower_bound_gpus}) {wall_s:.1f} s: {'; '.join(found)}", flush=True
            )


if __name__ == "__main__":
    main()
