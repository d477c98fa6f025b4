"""Measured runs as a table: what was served, with which settings, and what came out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from capplan.errors import InfeasibleError, InputError
from capplan.spec import Adapter, Lengths, Profile, Workload, load_workload
from capplan.spec.files import read_columns
from capplan.twin.result import SimulationResult
from capplan.twin.simulate import simulate

if TYPE_CHECKING:
    import pandas as pd

TARGETS: Final = (
    "throughput_tok_s",
    "itl_ms_mean",
    "tpot_ms_mean",
    "ttft_s_p50",
    "ttft_s_mean",
    "ttft_s_mean_charged",
    "e2e_s_mean",
)
"""What may have been measured; fields of `SimulationResult`. A blank cell was not measured."""

SLOTS: Final = ("a_max", "s_max")
DRAWN: Final = ("adapters", "ranks", "rates_rps", "prompt_mean", "prompt_std", "output_mean", "output_std")
"""A workload in one row. ``ranks`` and ``rates_rps`` are one number or several with spaces between: ranks go
round the adapters in turn, rates are dealt out in equal numbers at random.
"""

SETTINGS: Final = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_cpu_loras",
    "max_model_len",
    "max_in_flight",
    "gpu_memory_utilization",
    "duration_s",
)
"""Engine settings and the length of the run, by the names of `simulate`, whose defaults hold for blanks."""

OTHER: Final = ("run", "workload", "rate_counts", "length_correlation", "regime")
"""``run``: its name. ``workload``: a workload file, relative to the table, in place of the columns `DRAWN`.
``rate_counts``: how many adapters have each rate. ``length_correlation``: the profile's unless given.
``regime``: in place of the twin's answer.
"""

_FRACTIONS: Final = ("gpu_memory_utilization", "duration_s")
_DURATION_S: Final = 3600.0


@dataclass(frozen=True)
class MeasuredRun:
    """One run of a real engine."""

    name: str
    workload: Workload
    settings: Mapping[str, Any]
    """Arguments of `simulate`."""
    measured: Mapping[str, float]
    """Of `TARGETS`, those that were measured."""
    regime: str = ""
    location: str = ""
    """Where it stands, for errors."""

    def simulate(self, profile: Profile, seed: int) -> SimulationResult:
        """Return what the twin makes of it.

        Raises
        ------
        InputError
            When its settings break a rule, or the profile's memory model says that it cannot have run.
        """
        try:
            return simulate(self.workload, profile, seed=seed, **self.settings)
        except InfeasibleError as error:
            raise InputError(f"was measured, but the profile says: {error}", location=self.location) from None
        except InputError as error:
            raise InputError(error.rule, error.value, f"{self.location}: {error.location}") from None


def read_runs(path: str | Path, base_model: str) -> tuple[MeasuredRun, ...]:
    """Read a table of runs from a .parquet file, or from a CSV file under any other name.

    Parameters
    ----------
    path
        A table with `SLOTS`, either `DRAWN` or ``workload``, at least one of `TARGETS`, and any of `SETTINGS`
        and `OTHER`; further columns are left alone.
    base_model
        Model of the workloads that are written in the table.

    Raises
    ------
    InputError
        For an unreadable or empty file, a missing column, or a value that breaks a rule; with its row.
    """
    path = Path(path)
    frame = read_columns(path, SLOTS, (*DRAWN, *TARGETS, *SETTINGS, *OTHER))
    if frame.empty:
        raise InputError("must hold at least one row", location=str(path))
    if not set(TARGETS) & set(frame.columns):
        raise InputError(f"must have one of the columns {', '.join(TARGETS)}", location=str(path))
    if "workload" not in frame.columns:
        for name in DRAWN:
            if name not in frame.columns:
                raise InputError("column is missing", location=f"{path}: {name}")
    rows = frame.to_dict("records")
    return tuple(_run(_Row(row, path, number), base_model) for number, row in enumerate(rows, start=1))


@dataclass(frozen=True)
class _Row:
    """One row of the table, with checks of its cells."""

    cells: Mapping[Any, Any]
    path: Path
    number: int

    def at(self, name: str) -> str:
        return f"{self.path}: {name}, row {self.number}"

    def given(self, name: str) -> bool:
        value = self.cells.get(name)
        return value is not None and value == value and value != ""  # NaN differs from itself

    def number_of(self, name: str, *, least: float = 0.0, above: bool = False) -> float:
        rule = f"must be a finite number {'above' if above else 'of at least'} {least:g}"
        try:
            value = float(self.cells[name])
        except (TypeError, ValueError):
            raise InputError(rule, self.cells[name], self.at(name)) from None
        if not np.isfinite(value) or value < least or (above and value == least):
            raise InputError(rule, value, self.at(name))
        return value

    def count_of(self, name: str) -> int:
        value = self.number_of(name, least=1.0)
        if value != int(value):
            raise InputError("must be a whole number", value, self.at(name))
        return int(value)

    def numbers_of(self, name: str) -> list[float]:
        rule = "must be one number above 0, or several with spaces between"
        try:
            values = [float(part) for part in str(self.cells.get(name, "")).split()]
        except ValueError:
            values = []
        if not values or not all(np.isfinite(value) and value > 0.0 for value in values):
            raise InputError(rule, self.cells.get(name), self.at(name))
        return values


def _run(row: _Row, base_model: str) -> MeasuredRun:
    measured = {name: row.number_of(name, above=True) for name in TARGETS if row.given(name)}
    if not measured:
        raise InputError(
            f"must have a value of {', '.join(TARGETS)}", location=f"{row.path}: row {row.number}"
        )
    settings: dict[str, Any] = {name: row.count_of(name) for name in SLOTS}
    settings["duration_s"] = _DURATION_S
    for name in SETTINGS:
        if row.given(name):
            settings[name] = row.number_of(name, above=True) if name in _FRACTIONS else row.count_of(name)
    return MeasuredRun(
        name=_name(row),
        workload=_workload(row, base_model),
        settings=settings,
        measured=measured,
        regime=str(row.cells["regime"]) if row.given("regime") else "",
        location=f"{row.path}: row {row.number}",
    )


def _name(row: _Row) -> str:
    value = row.cells["run"] if row.given("run") else row.number
    return f"{value:g}" if isinstance(value, float) else str(value)


def _workload(row: _Row, base_model: str) -> Workload:
    if row.given("workload"):
        return load_workload(row.path.parent / str(row.cells["workload"]))
    adapters = row.count_of("adapters")
    ranks = row.numbers_of("ranks")
    rates = np.array(_rates(row, adapters))
    np.random.default_rng(row.number).shuffle(rates)
    told = row.given("length_correlation")
    try:
        return Workload(
            base_model=base_model,
            adapters=tuple(
                Adapter(name=f"a{i}", rank=int(ranks[i % len(ranks)]), rate_rps=float(rate))
                for i, rate in enumerate(rates)
            ),
            prompt_tokens=Lengths(mean=row.number_of("prompt_mean"), std=row.number_of("prompt_std")),
            output_tokens=Lengths(mean=row.number_of("output_mean"), std=row.number_of("output_std")),
            length_correlation=row.number_of("length_correlation", least=-1.0) if told else None,
        )
    except InputError as error:
        raise InputError(error.rule, error.value, f"{row.path}: row {row.number}: {error.location}") from None


def _rates(row: _Row, adapters: int) -> list[float]:
    rates = row.numbers_of("rates_rps")
    if not row.given("rate_counts"):
        return [rates[i % len(rates)] for i in range(adapters)]
    counts = [int(count) for count in row.numbers_of("rate_counts")]
    if len(counts) != len(rates) or sum(counts) != adapters:
        rule = f"must hold one number for each rate, {adapters} in sum"
        raise InputError(rule, row.cells["rate_counts"], row.at("rate_counts"))
    return [rate for rate, count in zip(rates, counts, strict=True) for _ in range(count)]


def in_frame(runs: tuple[MeasuredRun, ...]) -> pd.DataFrame:
    """Return what was measured of the runs, one row each, NaN where nothing was."""
    import pandas as pd

    return pd.DataFrame([dict(run.measured) for run in runs], index=[run.name for run in runs])
