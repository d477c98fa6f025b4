"""Input tables of a calibration: reading, validation, and the table of measured steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import gamma

from capplan.errors import InputError
from capplan.models._step_latency import StepRanks
from capplan.spec import read_columns

if TYPE_CHECKING:
    import pandas as pd

STEP_COLUMNS: Final = (
    "step_ms",
    "tokens",
    "requests",
    "kv_tokens",
    "adapters",
    "a_max",
    "s_max",
    "waiting",
    "adapters_served",
)
"""Required columns of a step table: the measured time ``step_ms``, and fields of `StepFeatures`."""

STEP_OPTIONS: Final = (
    "load_ms",
    "run",
    "regime",
    "steps",
    "kv_capacity",
    "token_budget",
    "in_flight_limit",
    "prompt_std",
    "streams",
    "rate_rps",
    "probe_ms",
    *StepRanks._fields,
)
"""Optional columns. ``load_ms``: time of adapter loads within the step by the loading model with a
serving_factor of 1; blank if unknown. ``run``: group of the row, never on both sides of a cross-validation.
``steps``: number of steps of which the row is the mean. ``prompt_std``: standard deviation of the tokens that
one request has in a step of its prefill, beside ``prefills`` in rows that are means; default 0. ``regime``:
replaces the result of `regimes` unless blank. ``streams``, ``rate_rps``: requests in flight and requests per
second, for the ranges of the profile. ``probe_ms``: time of the engine's speed probe meanwhile, blank if
unknown. Step times are multiplied by the median of this column over its value: times at one speed of the
machine. The others are the limits that `regimes` uses, and the fields of `StepRanks`.
"""

FROM_PREFILLS: Final = ("decodes", "lora_decodes", "lora_prefills", "lora_prefill_tokens")
"""Fields of `StepRanks` that default to values derived from ``prefills``: the other requests decode, and all
requests have adapters.
"""

_MOST: Final = 1e18  # of a cell; bytes, tokens and milliseconds are less, and squares of cells are finite
_LEAST: Final = 1e-9  # of a positive cell
_POSITIVE: Final = (
    "step_ms",
    "requests",
    "a_max",
    "s_max",
    "adapters_served",
    "steps",
    "kv_capacity",
    "probe_ms",
)

UNQUEUED: Final = "un-queued"
SLOT_BOUND: Final = "slot-bound"
KV_BOUND: Final = "KV-bound"
OVERLOADED: Final = "overloaded"
QUEUED: Final = "queued"
REGIMES: Final = (UNQUEUED, QUEUED, SLOT_BOUND, KV_BOUND, OVERLOADED)

KV_FULL: Final = 0.95
AT_LIMIT: Final = 0.98

QUANTILES: Final = 8
"""Equally likely amounts of prompt tokens that represent the steps of a window that hold a prompt."""


def read_table(
    path: str | Path,
    required: Sequence[str],
    optional: Sequence[str] = (),
    *,
    text: Sequence[str] = (),
    blank: Sequence[str] = (),
) -> pd.DataFrame:
    """Read a CSV or Parquet table of finite numbers that are not negative; other columns are ignored.

    Columns of `text` hold text, those of `blank` may be blank, which reads as NaN. Errors name the file, the
    column and the row, where the first one after the header is 1.
    """
    path = Path(path)
    frame = read_columns(path, required, optional)
    if frame.empty:
        raise InputError("must hold at least one row", location=str(path))
    for name in frame.columns:
        if name not in text:
            frame[name] = _numbers(frame[name], f"{path}: {name}", may_be_blank=name in blank)
    return frame


def _numbers(column: pd.Series, location: str, *, may_be_blank: bool) -> NDArray[np.float64]:
    import pandas as pd

    try:
        values = pd.to_numeric(column, errors="coerce").to_numpy(np.float64)
    except OverflowError:  # whole numbers of hundreds of digits
        raise InputError("must be finite numbers >= 0", location=location) from None
    wrong = ~((values >= 0.0) & (values <= _MOST))
    if may_be_blank:
        wrong &= column.notna().to_numpy(bool)
    if wrong.any():
        row = int(np.argmax(wrong))
        rule = "must be a finite number >= 0"
        if _MOST < values[row] < np.inf:
            rule = f"must be at most {_MOST:g}"
        raise InputError(rule, _plain(column.iloc[row]), f"{location}, row {row + 1}")
    return values


def require_positive(frame: pd.DataFrame, columns: Sequence[str], location: str) -> None:
    """Check that the values of these columns are above 0; missing columns are skipped."""
    for name in columns:
        if name in frame.columns and (frame[name] < _LEAST).any():
            row = int(np.argmax(frame[name].to_numpy() < _LEAST))
            cell = f"{location}: {name}, row {row + 1}"
            raise InputError("must be above 0", _plain(frame[name].iloc[row]), cell)


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value


@dataclass(frozen=True)
class MeasuredSteps:
    """Measured steps, one per row, or means over the steps of one window.

    Arrays have shape (rows,) unless stated otherwise.
    """

    source: str
    step_ms: NDArray[np.float64]
    tokens: NDArray[np.float64]
    requests: NDArray[np.float64]
    kv_tokens: NDArray[np.float64]
    adapters: NDArray[np.float64]
    a_max: NDArray[np.float64]
    s_max: NDArray[np.float64]
    waiting: NDArray[np.float64]
    slots_per_adapter: NDArray[np.float64]
    adapters_served: NDArray[np.float64]
    steps: NDArray[np.float64]
    """1 for a single step."""
    load_ms: NDArray[np.float64] | None
    """NaN in rows of unknown loads; None if no row has them."""
    run: NDArray[np.int64]
    """Number of the run; blocks of neighbouring rows if the table has no column ``run``."""
    run_names: tuple[str, ...]
    """Empty if the table has no column ``run``."""
    regime: NDArray[np.str_]
    ranks: Mapping[str, NDArray[np.float64]]
    """Known fields of `StepRanks`."""
    prompt_quantiles: NDArray[np.float64]
    """See `prompt_quantiles`, shape (rows, `QUANTILES`)."""
    load_ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Smallest and largest ``streams`` and ``rate_rps``, if the table has them."""
    probe_ms: float | None = None
    """Time of the engine's speed probe to which the step times refer; None: unknown."""

    @property
    def unknown_loads(self) -> NDArray[np.bool_]:
        """Rows of unknown loads, shape (rows,)."""
        return np.ones(self.rows, bool) if self.load_ms is None else np.isnan(self.load_ms)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.step_ms.size

    def probability_of_any(self, mean: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the probability that a step of the row has a count above 0, given its mean count.

        1 or 0 in a row of one step. ``1 - exp(-mean)`` in window means, whose steps are taken as Poisson.
        """
        return np.where(self.steps > 1.0, 1.0 - np.exp(-mean), (mean > 0.0).astype(float))

    def select(self, keep: NDArray[np.bool_]) -> MeasuredSteps:
        """Return a subset of the rows."""
        changed: dict[str, Any] = {
            each.name: value[keep]
            for each in fields(self)
            if isinstance(value := getattr(self, each.name), np.ndarray)
        }
        ranks = {name: values[keep] for name, values in self.ranks.items()}
        return replace(self, ranks=ranks, **changed)


def read_steps(path: str | Path, folds: int = 5) -> MeasuredSteps:
    """Read a step table from a .parquet file, or from a CSV file under any other name.

    Parameters
    ----------
    path
        Table with `STEP_COLUMNS` and any of `STEP_OPTIONS`; other columns are ignored.
    folds
        Number of blocks of rows in a table without a column ``run``.

    Raises
    ------
    InputError
        For an unreadable or empty file, a missing column, or a value that is not a number, negative, or 0 in
        a column that must be positive.
    """
    frame = read_table(
        path, STEP_COLUMNS, STEP_OPTIONS, text=("run", "regime"), blank=("load_ms", "probe_ms")
    )
    require_positive(frame, _POSITIVE, str(path))
    return step_table(frame, Path(path).name, folds)


def step_table(frame: pd.DataFrame, source: str, folds: int = 5) -> MeasuredSteps:
    """Return the step table of a validated frame; see `read_steps`."""
    rows = len(frame)

    def column(name: str, default: float) -> NDArray[np.float64]:
        return frame[name].to_numpy(np.float64) if name in frame.columns else np.full(rows, default)

    if "run" in frame.columns:
        names, run = np.unique(frame["run"].astype(str).to_numpy(str), return_inverse=True)
        run_names = tuple(str(name) for name in names)
    else:
        run, run_names = np.arange(rows) * folds // rows, ()
    regime = regimes(frame)
    if "regime" in frame.columns:
        given = frame["regime"].fillna("").astype(str).to_numpy(str)
        regime = np.where(given == "", regime, given)
    ranks = _ranks(frame)
    prefills = ranks.get("prefills", np.zeros(rows))
    prompt_tokens = column("tokens", 0.0) - ranks.get("decodes", np.zeros(rows))
    prompt_mean = np.maximum(prompt_tokens, 1.0) / np.maximum(prefills, 1e-9)
    steps = column("steps", 1.0)
    loads = column("load_ms", np.nan)
    probes = column("probe_ms", np.nan)
    probe_ms = None if np.isnan(probes).all() else float(np.nanmedian(probes))
    slower = np.ones(rows) if probe_ms is None else np.where(np.isnan(probes), 1.0, probes / probe_ms)
    offered = {name: column(name, 0.0) for name in ("streams", "rate_rps") if name in frame.columns}
    return MeasuredSteps(
        source=source,
        step_ms=column("step_ms", 0.0) / slower,
        **{name: column(name, 0.0) for name in STEP_COLUMNS if name != "step_ms"},
        slots_per_adapter=np.minimum(1.0, column("a_max", 1.0) / column("adapters_served", 1.0)),
        steps=steps,
        load_ms=None if np.isnan(loads).all() else loads,
        run=run,
        run_names=run_names,
        regime=regime,
        ranks=ranks,
        prompt_quantiles=prompt_quantiles(prefills, column("prompt_std", 0.0) / prompt_mean, steps <= 1.0),
        load_ranges={name: (float(each.min()), float(each.max())) for name, each in offered.items()},
        probe_ms=probe_ms,
    )


def regimes(frame: pd.DataFrame) -> NDArray[np.str_]:
    """Return the limiting resource of each row.

    In this order: *overloaded*: requests in flight (requests + waiting) within 2 % of in_flight_limit, or
    tokens within 2 % of token_budget; *KV-bound*: kv_tokens above 95 % of kv_capacity; *un-queued*: fewer
    than one request waiting; *slot-bound*: more adapters served than slots; *queued*: the rest. A missing
    column is no limit.
    """
    unlimited = np.full(len(frame), np.inf)

    def limit(name: str) -> NDArray[np.float64]:
        values = frame[name].to_numpy(np.float64) if name in frame.columns else unlimited
        return np.where(values > 0.0, values, np.inf)

    in_flight = frame["requests"] + frame["waiting"] >= AT_LIMIT * limit("in_flight_limit")
    in_step = frame["tokens"] >= AT_LIMIT * limit("token_budget")
    return np.select(
        [
            in_flight | in_step,
            frame["kv_tokens"] > KV_FULL * limit("kv_capacity"),
            frame["waiting"] < 1.0,
            frame["a_max"] < frame["adapters_served"],
        ],
        [OVERLOADED, KV_BOUND, UNQUEUED, SLOT_BOUND],
        QUEUED,
    ).astype(str)


def _ranks(frame: pd.DataFrame) -> dict[str, NDArray[np.float64]]:
    """Return the known fields of `StepRanks`, including `FROM_PREFILLS`."""
    known = {name: frame[name].to_numpy(np.float64) for name in StepRanks._fields if name in frame.columns}
    requests, tokens = (frame[name].to_numpy(np.float64) for name in ("requests", "tokens"))
    if "prefills" in known:
        known.setdefault("decodes", np.maximum(0.0, requests - known["prefills"]))
        known.setdefault("lora_prefills", known["prefills"])
    if "decodes" in known:
        known.setdefault("lora_decodes", known["decodes"])
        known.setdefault("lora_prefill_tokens", np.maximum(0.0, tokens - known["decodes"]))
    return known


def prompt_quantiles(
    prefills: NDArray[np.float64], std_per_mean: NDArray[np.float64], single: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return quantiles of the prompt tokens of steps with a prompt, relative to their mean.

    Step times are not linear in the tokens, so the mean time of a window is not the time at its mean tokens.
    The prompts of a step are taken as Poisson in number. Their tokens are taken as gamma-distributed, with
    the mean and the variance of the compound sum given at least one prompt.

    `prefills` is the mean number of prompts in a step, `std_per_mean` the standard deviation over the mean of
    the tokens that one prompt has in a step, and `single` marks rows of one step, whose tokens are known;
    shape (rows,) each. The result has shape (rows, `QUANTILES`), each row with mean 1.
    """
    number = np.maximum(prefills, 1e-9)
    share = -np.expm1(-number)
    mean = number / share
    variance = (number * (1.0 + std_per_mean**2) + number**2) / share - mean**2
    spread = np.where(single | (prefills <= 0.0), 0.0, np.maximum(variance, 0.0) / mean**2)
    quantiles = np.ones((prefills.size, QUANTILES))
    wide = spread > 1e-6
    shape = 1.0 / spread[wide, None]
    levels = (np.arange(QUANTILES) + 0.5) / QUANTILES
    drawn: NDArray[np.float64] = np.asarray(gamma.ppf(levels, shape, scale=1.0 / shape))
    quantiles[wide] = drawn / drawn.mean(axis=1, keepdims=True)
    return quantiles
