"""Order of numbers of adapter slots by paired simulations, for `capplan simulate --seeds`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, cast

from capplan.errors import InfeasibleError, InputError
from capplan.reports.console import Table, number
from capplan.spec.limits import require_seed_count

if TYPE_CHECKING:
    from capplan.spec import Workload
    from capplan.twin import SimulationResult
    from capplan.twin.instance.paired import PairedOrder
    from capplan.twin.instance.simulate import SimulateSettings
    from capplan.twin.sweep import Job

_METRICS: Final = (  # metric of the result, its name with unit, decimals, whether the largest is best
    ("throughput_tok_s", "throughput, tok/s", 0, True),
    ("ttft_s_mean_charged", "TTFT mean, charged, s", 3, False),
    ("itl_ms_mean", "ITL mean, ms", 2, False),
)
ONE_SEED: Final = "one seed does not order numbers of slots; --seeds 5 compares paired runs"
LEGEND: Final = "~: undecided, the difference is within two standard errors, or there are fewer than 5 seeds"


@dataclass(frozen=True)
class PairedMetric:
    """One metric of several numbers of slots."""

    metric: str
    title: str
    decimals: int
    values: Mapping[int, tuple[float, ...]]
    """By number of slots, one per seed."""
    order: PairedOrder


def require_seeds(count: int, workload: Workload) -> None:
    """Check the number of paired seeds.

    Raises
    ------
    InputError
        For fewer than one, too many, or several with a trace.
    """
    require_seed_count(count, "--seeds")
    if count > 1 and workload.trace is not None:
        raise InputError("must be 1 for a trace, which every seed replays alike", count, "--seeds")


def further_jobs(jobs: Sequence[Job], seeds: int) -> list[Job]:
    """Return the jobs of the further seeds, job by job."""
    further = []
    for job in jobs:
        for step in range(1, seeds):
            settings = {**job.settings, "seed": job.settings.get("seed", 0) + step}
            further.append(replace(job, settings=cast("SimulateSettings", settings)))
    return further


def paired_metrics(
    first: Mapping[int, SimulationResult], further: Sequence[SimulationResult | InfeasibleError]
) -> tuple[PairedMetric, ...]:
    """Return the metrics of numbers of slots.

    Parameters
    ----------
    first
        Results of the first seed by number of slots.
    further
        Results of `further_jobs` of the same numbers.
    """
    from capplan.twin.instance.paired import paired_order

    each = len(further) // len(first)
    runs = {
        slots: (result, *(r for r in further[at * each : (at + 1) * each]))
        for at, (slots, result) in enumerate(first.items())
    }
    found = []
    for metric, title, decimals, largest_first in _METRICS:
        values = {slots: tuple(float(getattr(r, metric)) for r in results) for slots, results in runs.items()}
        order = paired_order(values, largest_first=largest_first)
        found.append(PairedMetric(metric, title, decimals, values, order))
    return tuple(found)


def paired_table(metrics: Sequence[PairedMetric], names: Mapping[int, str]) -> Table:
    """Return means with standard errors, one column per number of slots with its name, and the order."""
    from capplan.twin.instance.paired import mean_with_error

    def cell(values: Sequence[float], decimals: int) -> str:
        found = mean_with_error(values)
        return f"{number(found.mean, decimals)} ± {number(found.std_error, decimals)}"

    slots = list(metrics[0].values)
    seeds = len(metrics[0].values[slots[0]])
    rows = [
        (each.title, *(cell(each.values[n], each.decimals) for n in slots), str(each.order))
        for each in metrics
    ]
    return Table((f"mean of {seeds} paired seeds", *(names[n] for n in slots), "best first"), rows)


def paired_documents(metrics: Sequence[PairedMetric]) -> list[dict[str, Any]]:
    """Return the comparison as JSON data."""
    return [
        {
            "metric": each.metric,
            "values": {str(slots): list(values) for slots, values in each.values.items()},
            "order": asdict(each.order),
        }
        for each in metrics
    ]
