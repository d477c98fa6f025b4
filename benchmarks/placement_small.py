"""How near `capplan` comes to the fewest GPUs: ``python -m benchmarks.placement_small --out DIR``.

Random small cases (up to 24 adapters on up to 4 GPUs; ranks, rates, lengths and sometimes slots are drawn),
where `milp` proves how many GPUs are needed; with ``--large``, random large cases (100 to 2,000 adapters),
where only the lower bound is known. Both solvers ask the same twin; the answers are then judged on fresh
seeds. A JSON per case stands in DIR, and a run that was broken off goes on where it stopped.
``summary --out DIR`` prints the figures.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Final

import numpy as np

from benchmarks.common import command_line, emit, markdown
from benchmarks.placement_grid import MODELS
from benchmarks.placement_records import Record, Store, find_all
from capplan import Adapter, EngineConfig, Lengths, Workload
from capplan.errors import CapplanError
from capplan.planner import SolverResult, compare
from capplan.planner.bound import busy_gpus, lower_bound_gpus
from capplan.planner.problem import make_problem
from capplan.twin.sweep import in_parallel

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
DIFFERENT: Final = (
    "case", "what", "GPUs there are", "at least", "capplan", "milp", "adapters", "slots", "largest share",
)  # fmt: skip
LARGE: Final = ("case", "adapters", "req/s", "busy", "at least", "capplan", "ratio", "holds", "solve s")
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

    def line(self) -> tuple[str, ...]:
        record, case = self.record, self.record.case
        said = [f"{r.gpus}" if r.answered else r.failure.replace("|", "/") for r in (self.ours, self.milp)]
        return (
            record.name, self.outcome, f"{record.gpus}", f"{record.lower_bound_gpus}", *said,
            f"{case['adapters']}", f"{case['slots'] or 'open'}", f"{case['largest_share']:.2f}",
        )  # fmt: skip


def report(records: Sequence[Record]) -> str:
    small = [record for record in records if record.row(YARDSTICK) is not None]
    large = [record for record in records if record.row(YARDSTICK) is None]
    parts = (small_tables(small) if small else []) + (large_tables(large) if large else [])
    return "\n\n".join(parts) + "\n"


def pairs(records: Sequence[Record]) -> list[Pair]:
    rows = [(record, record.row(OURS), record.row(YARDSTICK)) for record in records]
    return [Pair(record, ours, milp) for record, ours, milp in rows if ours and milp]


def small_tables(records: Sequence[Record]) -> list[str]:
    asked = pairs(records)
    counts = Counter(pair.outcome for pair in asked)
    both = [pair for pair in asked if pair.ours.answered and pair.milp.answered]
    failing = [sum(not p.ours.holds for p in both), sum(not p.milp.holds for p in both)]
    parts = [
        f"## {len(asked)} small cases",
        markdown(("outcome", "cases"), [(each, f"{counts[each]}") for each in OUTCOMES]),
        f"Both answer in {len(both)}; of these answers {failing[0]} of capplan and {failing[1]} of milp "
        f"do not hold on every fresh seed. {_times(asked)}",
    ]
    unlike = [pair for pair in asked if pair.outcome not in (*OUTCOMES[:2], UNDECIDED)]
    return [*parts, markdown(DIFFERENT, [pair.line() for pair in unlike])] if unlike else parts


def _times(asked: Sequence[Pair]) -> str:
    said = [
        f"{name} {median(times):.3g} s (longest {max(times):.3g})"
        for name, rows in ((OURS, [p.ours for p in asked]), (YARDSTICK, [p.milp for p in asked]))
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
        markdown(LARGE, [_large(*each) for each in worst[:SHOWN]]),
    ]


def _ratio(record: Record, row: SolverResult) -> float:
    return row.gpus / record.lower_bound_gpus


def _large(record: Record, row: SolverResult) -> tuple[str, ...]:
    case = record.case
    return (
        record.name, f"{case['adapters']}", f"{case['rate_rps']:.3g}", f"{record.busy_gpus:.2f}",
        f"{record.lower_bound_gpus}", f"{row.gpus}", f"{_ratio(record, row):.2f}",
        "yes" if row.holds else "no", f"{row.solve_s:.2f}",
    )  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What all cases of a run have in common."""

    draw: int = 0
    seed: int = 0
    seeds: int = 5
    time_limit_s: float = 60.0


@dataclass(frozen=True)
class Case:
    name: str
    workload: Workload
    gpus: int

    @property
    def told(self) -> dict[str, object]:
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
    model = MODELS[str(random.choice(list(MODELS)))]
    ranks = random.choice(RANKS, int(random.integers(1, len(RANKS) + 1)), replace=False)
    weight = np.exp(random.choice((0.0, 0.7, 1.5)) * random.standard_normal(adapters))
    kinds = [_lengths(random) for _ in range(int(random.choice((1, 1, 3))))]
    kind = random.integers(0, len(kinds), adapters)
    headroom = float(random.choice((0.0, 0.1)))
    rank = random.choice(ranks, adapters)

    def made(rate_rps: np.ndarray) -> Workload:
        return Workload(
            base_model=model.arch.hf_ids[0],
            profile=model.profile,
            prompt_tokens=kinds[0][0],
            output_tokens=kinds[0][1],
            headroom=headroom,
            engine=EngineConfig(max_loras=slots),
            adapters=tuple(
                Adapter(
                    name=f"a{i}",
                    rank=int(rank[i]),
                    rate_rps=float(rate_rps[i]),
                    prompt_tokens=kinds[kind[i]][0] if kind[i] else None,
                    output_tokens=kinds[kind[i]][1] if kind[i] else None,
                )
                for i in range(adapters)
            ),
        )

    unscaled = make_problem(made(weight), 1, None)
    return made(weight * load / busy_gpus(unscaled))


def _lengths(random: np.random.Generator) -> tuple[Lengths, Lengths]:
    prompt, output = np.exp(random.uniform(np.log((50, 30)), np.log((1500, 500)))).tolist()
    spread = float(random.choice((0.0, 0.5, 1.0)))
    return Lengths(mean=prompt, std=spread * prompt), Lengths(mean=output, std=spread * output)


def run_case(store: Store, settings: Settings, draw: Callable[[Settings, int], Case], number: int) -> Record:
    case = draw(settings, number)
    known = store.get(case.name, asdict(settings))
    rows = () if known is None else tuple(known.rows)
    there = {row.solver for row in rows}
    missing = [s for s in (("capplan",) if draw is large_case else ("capplan", "milp")) if s not in there]
    if known is not None and not missing:
        return known
    started = time.perf_counter()
    made = compare(
        case.workload,
        find_all(missing),
        gpus=case.gpus,
        seed=settings.seed,
        seeds=settings.seeds,
        time_limit_s=settings.time_limit_s,
    )
    problem = make_problem(case.workload, case.gpus, None)
    record = Record(
        name=case.name,
        case=case.told | {"wall_s": time.perf_counter() - started},
        settings=asdict(settings),
        gpus=case.gpus,
        busy_gpus=busy_gpus(problem),
        lower_bound_gpus=lower_bound_gpus(problem),
        rows=(*rows, *made.rows),
    )
    store.put(record)
    return record


def in_a_line(record: Record) -> str:
    said = [f"{row.solver} {row.gpus if row.answered else row.failure[:60]}" for row in record.rows]
    return f"{record.name} (>= {record.lower_bound_gpus}) {record.case['wall_s']:.1f} s: {'; '.join(said)}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("action", nargs="?", choices=("run", "summary"), default="run")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--large", action="store_true", help="large cases instead of small ones")
    parser.add_argument("--cases", type=int, metavar="N", help="250 small ones, or 40 large ones")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first case")
    parser.add_argument("--draw", type=int, default=Settings.draw, metavar="N", help="another set of cases")
    parser.add_argument("--seeds", type=int, default=Settings.seeds, metavar="N", help="of judging")
    parser.add_argument(
        "--time-limit", type=float, default=Settings.time_limit_s, metavar="S", help="of milp"
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="cases at a time")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="of the summary")
    given = parser.parse_args(arguments)
    store = Store(given.out)
    try:
        if given.action == "summary":
            text = report(list(store.all()))
            emit(text, given.markdown)
            return
        settings = Settings(draw=given.draw, seeds=given.seeds, time_limit_s=given.time_limit)
        draw, count = (large_case, 40) if given.large else (small_case, 250)
        numbers = range(given.first, given.first + (given.cases or count))
        ask = partial(run_case, store, settings, draw)
        for record in in_parallel(ask, numbers, workers=given.workers):
            print(in_a_line(record), flush=True)
    except CapplanError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
