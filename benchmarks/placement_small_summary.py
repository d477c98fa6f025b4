"""Tables of the small and the large cases: `capplan` beside `milp`, and beside the lower bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from benchmarks.fidelity_figures import markdown
from benchmarks.placement_grid_store import Record
from capplan.planner import SolverResult

OURS, YARDSTICK = "capplan", "milp"
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


@dataclass(frozen=True)
class Pair:
    """Both answers to one small case."""

    record: Record
    ours: SolverResult
    milp: SolverResult

    @property
    def outcome(self) -> str:
        """Which of `OUTCOMES` it is."""
        if not self.milp.answered and (self.milp.exit_code == 2 or self.milp.failure.startswith("time")):
            return UNDECIDED
        if self.ours.answered and self.milp.answered:
            gap = self.ours.gpus - self.milp.gpus
            return OUTCOMES[0] if gap == 0 else OUTCOMES[2 if gap > 0 else 3]
        if self.ours.answered:
            return OUTCOMES[4]
        return OUTCOMES[5] if self.milp.answered else OUTCOMES[1]

    def line(self) -> tuple[str, ...]:
        """Return the line under `DIFFERENT`."""
        record, case = self.record, self.record.case
        said = [f"{r.gpus}" if r.answered else r.failure.replace("|", "/") for r in (self.ours, self.milp)]
        return (
            record.name, self.outcome, f"{record.gpus}", f"{record.lower_bound_gpus}", *said,
            f"{case['adapters']}", f"{case['slots'] or 'open'}", f"{case['largest_share']:.2f}",
        )  # fmt: skip


def report(records: Sequence[Record]) -> str:
    """Return all tables for which there are records."""
    small = [record for record in records if record.row(YARDSTICK) is not None]
    large = [record for record in records if record.row(YARDSTICK) is None]
    parts = (small_tables(small) if small else []) + (large_tables(large) if large else [])
    return "\n\n".join(parts) + "\n"


def pairs(records: Sequence[Record]) -> list[Pair]:
    """Return the cases that both solvers were asked about."""
    rows = [(record, record.row(OURS), record.row(YARDSTICK)) for record in records]
    return [Pair(record, ours, milp) for record, ours, milp in rows if ours and milp]


def small_tables(records: Sequence[Record]) -> list[str]:
    """Return how often both agree, and every case where they do not."""
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
    """Return how GPUs compare with the lower bound, and the cases where they do worst."""
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
