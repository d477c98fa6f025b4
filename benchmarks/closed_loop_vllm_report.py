"""The table of `benchmarks.closed_loop_vllm`: what was measured and predicted of every held-out point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.fidelity_figures import markdown
from capplan.profiling.validation.compare import MetricComparison

SHOWN: Final = ("throughput_tok_s", "itl_ms_mean", "ttft_s_mean", "served_fraction")


@dataclass(frozen=True)
class Held:
    """An operating point to predict; its load is a share of what 16 adapters in 8 slots bear."""

    adapters: int
    slots: int
    load: float

    @property
    def name(self) -> str:
        return f"adapters{self.adapters}-slots{self.slots}-load{round(100 * self.load)}"


def report(runs: Sequence[tuple[Held, tuple[MetricComparison, ...]]]) -> bool:
    """Print the table, and tell whether all that was asked for holds."""
    rows, good = [], True
    for held, comparisons in runs:
        by_name = {each.name: each for each in comparisons}
        cells = [
            f"{each.measured:.4g} / {each.predicted:.4g} ({each.error:.1f} %)"
            for each in (by_name[name] for name in SHOWN)
        ]
        throughput, itl = by_name[SHOWN[0]], by_name[SHOWN[1]]
        plain = f"{throughput.constant_step_error:.1f} %, {itl.constant_step_error:.1f} %"
        rows.append(
            (
                str(held.adapters),
                str(held.slots),
                f"{held.load:.0%}",
                *cells,
                plain,
                f"{throughput.offered_load_error:.1f} %",
            )
        )
        good &= all(each.agrees for each in comparisons)
    head = ("adapters", "slots", "load", "throughput, tok/s", "mean ITL, ms", "mean TTFT, s", "served")
    print(markdown((*head, "constant step: throughput, ITL", "offered load: throughput"), rows))
    print("\nmeasured / predicted (SMAPE)\n")
    for name, rising in (("throughput_tok_s", True), ("ttft_s_mean", False)):
        orders = [_order(runs, name, of, rising=rising) for of in ("measured", "predicted")]
        good &= orders[0] == orders[1]
        print(f"slots by {name}, best first: measured {orders[0]}, predicted {orders[1]}")
    return good


def _order(
    runs: Sequence[tuple[Held, tuple[MetricComparison, ...]]], name: str, of: str, *, rising: bool
) -> list[int]:
    """Return the numbers of slots of the overloaded points, best first."""
    found = {
        held.slots: next(float(getattr(each, of)) for each in comparisons if each.name == name)
        for held, comparisons in runs
        if held.load > 1.0
    }
    return sorted(found, key=lambda slots: -found[slots] if rising else found[slots])
