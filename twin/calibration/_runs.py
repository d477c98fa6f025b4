"""Table of measured runs: workload, engine settings and measured metrics of each run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InfeasibleError, InputError
from capplan.spec import Adapter, Lengths, Profile, Workload, read_columns
from capplan.twin.instance._core import run as run_compiled
from capplan.twin.instance._metrics import SimulationResult
from capplan.twin.instance._scenario import Scenario
from capplan.twin.instance._simulate import SimulateSettings, result_of, scenario_of, typed_settings
from capplan.workload import load_workload

TARGETS: Final = (
    "throughput_tok_s",
    "itl_ms_mean",
    "tpot_ms_mean",
    "ttft_s_p50",
    "ttft_s_mean",
    "ttft_s_mean_charged",
    "e2e_s_mean",
)
"""Metrics that a run may have, fields of `SimulationResult`. A blank cell was not measured."""

SLOTS: Final = ("a_max", "s_max")
WORKLOAD: Final = ("adapters", "ranks", "rates_rps", "prompt_mean", "prompt_std", "output_mean", "output_std")
"""A workload in one row. ``ranks`` and ``rates_rps`` hold one number or several separated by spaces. Ranks
cycle over the adapters; rates are assigned in equal numbers at random.
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
"""Engine settings and duration, named as the arguments of `simulate`, whose defaults replace blanks."""

OPTIONAL: Final = (
    "run",
    "workload",
    "rate_counts",
    "length_correlation",
    "regime",
    "kv_tokens_per_request",
)
"""``run``: name of the run. ``workload``: path of a workload file, relative to the table, instead of the
columns `WORKLOAD`. ``rate_counts``: number of adapters with each rate. ``length_correlation``: default: the
profile's. ``regime``: default: from the simulation. ``kv_tokens_per_request``: mean KV tokens of a running
request, from the server's metrics.
"""

_REAL: Final = ("gpu_memory_utilization", "duration_s")
_DURATION_S: Final = 3600.0


@dataclass(frozen=True)
class MeasuredRun:
    """One run of a real engine."""

    name: str
    workload: Workload
    settings: SimulateSettings
    """Arguments of `simulate`."""
    measured: Mapping[str, float]
    """Measured metrics, a subset of `TARGETS`."""
    regime: str = ""
    kv_tokens_per_request: float | None = None
    location: str = ""
    """File and row, for errors."""

    def scenario(self, profile: Profile, seed: int) -> Scenario:
        """Return what the twin simulates of the run.

        Raise `InputError` for a setting that breaks a rule, or a run that the profile's memory model rules
        out.
        """
        try:
            args, options = typed_settings(self.workload, profile, {**self.settings, "seed": seed})
            return scenario_of(self.workload, profile, args, options)
        except InfeasibleError as error:
            raise InputError(f"was measured, but the profile says: {error}", location=self.location) from None
        except InputError as error:
            raise InputError(error.rule, error.value, f"{self.location}: {error.location}") from None

    def simulate(self, profile: Profile, seed: int) -> SimulationResult:
        """Simulate the run; errors are those of `scenario`."""
        scenario = self.scenario(profile, seed)
        return result_of(profile, scenario, run_compiled(scenario))


def measured_targets(runs: tuple[MeasuredRun, ...]) -> NDArray[np.float64]:
    """Return the measured `TARGETS` of each run, shape (runs, targets), NaN if not measured."""
    return np.array([[run.measured.get(target, np.nan) for target in TARGETS] for run in runs])


def read_runs(path: str | Path, base_model: str) -> tuple[MeasuredRun, ...]:
    """Read a table of runs from a .parquet file, or from a CSV file under any other name.

    It has `SLOTS`, either `WORKLOAD` or ``workload``, at least one of `TARGETS`, and any of `SETTINGS` and
    `OPTIONAL`. Other columns are ignored. `base_model` is that of workloads given by columns. Raise
    `InputError` for an unreadable or empty file, a missing column, or a value that breaks a rule, with its
    row.
    """
    path = Path(path)
    frame = read_columns(path, SLOTS, (*WORKLOAD, *TARGETS, *SETTINGS, *OPTIONAL))
    if frame.empty:
        raise InputError("must hold at least one row", location=str(path))
    if not set(TARGETS) & set(frame.columns):
        raise InputError(f"must have one of the columns {', '.join(TARGETS)}", location=str(path))
    for name in () if "workload" in frame.columns else WORKLOAD:
        if name not in frame.columns:
            raise InputError("column is missing", location=f"{path}: {name}")
    rows = frame.to_dict("records")
    return tuple(_run(_Row(row, path, number), base_model) for number, row in enumerate(rows, start=1))


@dataclass(frozen=True)
class _Row:
    """One row of the table, with validated access to its cells."""

    cells: Mapping[Any, Any]
    path: Path
    number: int

    @property
    def location(self) -> str:
        return f"{self.path}: row {self.number}"

    def cell(self, name: str) -> str:
        return f"{self.path}: {name}, row {self.number}"

    def given(self, name: str) -> bool:
        value = self.cells.get(name)
        return value is not None and value == value and value != ""  # NaN differs from itself

    def real(self, name: str, *, least: float = 0.0, above: bool = False) -> float:
        rule = f"must be a finite number {'above' if above else 'of at least'} {least:g}"
        try:
            value = float(self.cells[name])
        except (TypeError, ValueError):
            raise InputError(rule, self.cells[name], self.cell(name)) from None
        if not np.isfinite(value) or value < least or (above and value == least):
            raise InputError(rule, value, self.cell(name))
        return value

    def count(self, name: str) -> int:
        value = self.real(name, least=1.0)
        if value != int(value):
            raise InputError("must be a whole number", value, self.cell(name))
        return int(value)

    def reals(self, name: str) -> list[float]:
        rule = "must be one number above 0, or several with spaces between"
        try:
            values = [float(part) for part in str(self.cells.get(name, "")).split()]
        except ValueError:
            values = []
        if not values or not all(np.isfinite(value) and value > 0.0 for value in values):
            raise InputError(rule, self.cells.get(name), self.cell(name))
        return values


def _run(row: _Row, base_model: str) -> MeasuredRun:
    measured = {name: row.real(name, above=True) for name in TARGETS if row.given(name)}
    if not measured:
        raise InputError(f"must have a value of {', '.join(TARGETS)}", location=row.location)
    settings: dict[str, Any] = {name: row.count(name) for name in SLOTS}
    settings["duration_s"] = _DURATION_S
    for name in SETTINGS:
        if row.given(name):
            settings[name] = row.real(name, above=True) if name in _REAL else row.count(name)
    kv_known = row.given("kv_tokens_per_request")
    return MeasuredRun(
        name=_name(row),
        workload=_workload(row, base_model),
        settings=cast("SimulateSettings", settings),
        measured=measured,
        regime=str(row.cells["regime"]) if row.given("regime") else "",
        kv_tokens_per_request=row.real("kv_tokens_per_request", above=True) if kv_known else None,
        location=row.location,
    )


def _name(row: _Row) -> str:
    value = row.cells["run"] if row.given("run") else row.number
    return f"{value:g}" if isinstance(value, float) else str(value)


def _workload(row: _Row, base_model: str) -> Workload:
    if row.given("workload"):
        return load_workload(row.path.parent / str(row.cells["workload"]))
    adapters = row.count("adapters")
    ranks = row.reals("ranks")
    rates = np.array(_rates(row, adapters))
    np.random.default_rng(row.number).shuffle(rates)
    correlated = row.given("length_correlation")
    try:
        return Workload(
            base_model=base_model,
            adapters=tuple(
                Adapter(name=f"a{i}", rank=int(ranks[i % len(ranks)]), rate_rps=float(rate))
                for i, rate in enumerate(rates)
            ),
            prompt_tokens=Lengths(mean=row.real("prompt_mean"), std=row.real("prompt_std")),
            output_tokens=Lengths(mean=row.real("output_mean"), std=row.real("output_std")),
            length_correlation=row.real("length_correlation", least=-1.0) if correlated else None,
        )
    except InputError as error:
        raise InputError(error.rule, error.value, f"{row.location}: {error.location}") from None


def _rates(row: _Row, adapters: int) -> list[float]:
    rates = row.reals("rates_rps")
    if not row.given("rate_counts"):
        return [rates[i % len(rates)] for i in range(adapters)]
    counts = [int(count) for count in row.reals("rate_counts")]
    if len(counts) != len(rates) or sum(counts) != adapters:
        rule = f"must hold one number for each rate, {adapters} in sum"
        raise InputError(rule, row.cells["rate_counts"], row.cell("rate_counts"))
    return [rate for rate, count in zip(rates, counts, strict=True) for _ in range(count)]
