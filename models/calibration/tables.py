"""Input tables of a calibration: reading, validation and the step table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import gamma

from capplan.errors import InputError
from capplan.models.step_latency import StepRanks
from capplan.spec.files import read_columns

if TYPE_CHECKING:
    import pandas as pd


def read_table(
    path: str | Path,
    required: Sequence[str],
    optional: Sequence[str] = (),
    *,
    text: Sequence[str] = (),
    blank: Sequence[str] = (),
) -> pd.DataFrame:
    """Read a CSV or Parquet table: every required column there and every number finite and not negative.

    Parameters
    ----------
    path
        A .parquet file, or a CSV file under any other name.
    required, optional
        Columns that must and that may be there; others are left alone.
    text
        Columns that are no numbers.
    blank
        Columns of numbers that may be blank, which is then NaN.

    Raises
    ------
    InputError
        Naming file, column and row (the first row after the header is 1).
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

    values = pd.to_numeric(column, errors="coerce").to_numpy(np.float64)
    wrong = ~(np.isfinite(values) & (values >= 0.0))
    if may_be_blank:
        wrong &= column.notna().to_numpy(bool)
    if wrong.any():
        row = int(np.argmax(wrong))
        rule = "must be a finite number >= 0"
        raise InputError(rule, _plain(column.iloc[row]), f"{location}, row {row + 1}")
    return values


def require_positive(frame: pd.DataFrame, columns: Sequence[str], location: str) -> None:
    """Check that no value of these columns is 0; columns that are not there are fine.

    Raises
    ------
    InputError
        Naming the first row that breaks the rule.
    """
    for name in columns:
        if name in frame.columns and (frame[name] <= 0.0).any():
            row = int(np.argmax(frame[name].to_numpy() <= 0.0))
            at = f"{location}: {name}, row {row + 1}"
            raise InputError("must be above 0", _plain(frame[name].iloc[row]), at)


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value


NODES: Final = 8

"""Equally likely amounts of prompt tokens that stand for all the steps of a window that hold a prompt."""


def prompt_quantiles(
    prefills: NDArray[np.float64], std_per_mean: NDArray[np.float64], single: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return how many times their mean the prompt tokens of steps with a prompt are, shape (rows, NODES).

    Prompts in a step are taken to be Poisson in number, and their tokens to add up to a gamma distribution
    with the mean and the variance of that compound sum, given that there is a prompt.

    Parameters
    ----------
    prefills
        Mean number of prompts in a step, shape (rows,).
    std_per_mean
        Standard deviation over mean of the tokens that one prompt has in a step, same shape.
    single
        Rows that are one step, whose tokens are known, same shape.
    """
    number = np.maximum(prefills, 1e-9)
    share = -np.expm1(-number)
    mean = number / share
    variance = (number * (1.0 + std_per_mean**2) + number**2) / share - mean**2
    spread = np.where(single | (prefills <= 0.0), 0.0, np.maximum(variance, 0.0) / mean**2)
    lumps = np.ones((prefills.size, NODES))
    wide = spread > 1e-6
    at = (np.arange(NODES) + 0.5) / NODES
    shape = 1.0 / spread[wide, None]
    drawn: NDArray[np.float64] = np.asarray(gamma.ppf(at, shape, scale=1.0 / shape))
    lumps[wide] = drawn / drawn.mean(axis=1, keepdims=True)
    return lumps


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

"""What every step table has; the meaning is that of `StepFeatures`, and step_ms the measured time."""

STEP_OPTIONS: Final = (
    "load_ms",
    "run",
    "regime",
    "steps",
    "kv_capacity",
    "token_budget",
    "in_flight_limit",
    "prompt_std",
    *StepRanks._fields,
)

"""What it may have. ``load_ms``: adapter loads within the step, as the loading model counts them with a
serving_factor of 1; blank where they are not known. ``run``: which rows belong together; never on both sides
of a cross-validation. ``steps``: how many steps the row is the mean of. ``prompt_std``: standard deviation of
the tokens that one request has in a step of its prefill, beside ``prefills`` in rows that are means; 0 unless
given. ``regime``: instead of what `regimes` says, where it is not blank. The rest are the limits by which
`regimes` tells them apart, and the fields of `StepRanks`.
"""

FROM_PREFILLS: Final = ("decodes", "lora_decodes", "lora_prefills", "lora_prefill_tokens")

"""Fields of `StepRanks` that follow from ``prefills`` where the table does not have them: then the other
requests decode, and all requests have adapters.
"""

_POSITIVE: Final = ("step_ms", "requests", "a_max", "s_max", "adapters_served", "steps", "kv_capacity")

_TEXT: Final = ("run", "regime")

UNQUEUED: Final = "un-queued"

SLOT_BOUND: Final = "slot-bound"

KV_BOUND: Final = "KV-bound"

OVERLOADED: Final = "overloaded"

QUEUED: Final = "queued"

REGIMES: Final = (UNQUEUED, QUEUED, SLOT_BOUND, KV_BOUND, OVERLOADED)

KV_FULL: Final = 0.95

AT_LIMIT: Final = 0.98


@dataclass(frozen=True)
class StepTable:
    """Measured steps, one per row, or means over several steps of one window.

    All arrays have shape (rows,) unless they say otherwise.
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
    steps: NDArray[np.float64]
    """1 for a single step."""
    load_ms: NDArray[np.float64] | None
    """NaN in rows whose loads are not known; None where no row's are."""
    run: NDArray[np.int64]
    """Number of the run; blocks of neighbouring rows where the table does not say."""
    run_names: tuple[str, ...]
    """Empty where the table does not say."""
    regime: NDArray[np.str_]
    ranks: Mapping[str, NDArray[np.float64]]
    """Those fields of `StepRanks` that are known."""
    lumps: NDArray[np.float64]
    """By `prompt_quantiles`, shape (rows, nodes)."""

    @property
    def unknown_loads(self) -> NDArray[np.bool_]:
        """Rows whose loads are not known, shape (rows,)."""
        return np.ones(self.rows, bool) if self.load_ms is None else np.isnan(self.load_ms)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.step_ms.size

    def likely(self, mean: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how likely a step of the row has any of what it has `mean` of on average.

        In a row that is one step, 1 or 0; in a mean over a window, ``1 - exp(-mean)``: the counts of its
        steps are taken to be Poisson.
        """
        return np.where(self.steps > 1.0, 1.0 - np.exp(-mean), (mean > 0.0).astype(float))

    def select(self, keep: NDArray[np.bool_]) -> StepTable:
        """Return the table with some of its rows."""
        changed: dict[str, Any] = {
            each.name: value[keep]
            for each in fields(self)
            if isinstance(value := getattr(self, each.name), np.ndarray)
        }
        ranks = {name: values[keep] for name, values in self.ranks.items()}
        return replace(self, ranks=ranks, **changed)


def read_steps(path: str | Path, folds: int = 5) -> StepTable:
    """Read a step table from a .parquet file, or from a CSV file under any other name.

    Parameters
    ----------
    path
        A table with `STEP_COLUMNS` and any of `STEP_OPTIONS`; further columns are left alone.
    folds
        Into how many blocks the rows are cut where no column says which run they are of.

    Raises
    ------
    InputError
        For an unreadable or empty file, a missing column, or a value that is no number, negative or, where it
        cannot be, 0.
    """
    frame = read_table(path, STEP_COLUMNS, STEP_OPTIONS, text=_TEXT, blank=("load_ms",))
    require_positive(frame, _POSITIVE, str(path))
    return step_table(frame, Path(path).name, folds)


def step_table(frame: pd.DataFrame, source: str, folds: int = 5) -> StepTable:
    """Return the step table of a checked frame; see `read_steps`."""
    rows = len(frame)

    def column(name: str, otherwise: float) -> NDArray[np.float64]:
        return frame[name].to_numpy(np.float64) if name in frame.columns else np.full(rows, otherwise)

    if "run" in frame.columns:
        names, run = np.unique(frame["run"].astype(str).to_numpy(str), return_inverse=True)
        run_names = tuple(str(name) for name in names)
    else:
        run, run_names = np.arange(rows) * folds // rows, ()
    known = regimes(frame)
    if "regime" in frame.columns:
        told = frame["regime"].fillna("").astype(str).to_numpy(str)
        known = np.where(told == "", known, told)
    ranks = _ranks(frame)
    prefills = ranks.get("prefills", np.zeros(rows))
    prompt_tokens = column("tokens", 0.0) - ranks.get("decodes", np.zeros(rows))
    mean = np.maximum(prompt_tokens, 1.0) / np.maximum(prefills, 1e-9)
    return StepTable(
        source=source,
        **{name: column(name, 0.0) for name in STEP_COLUMNS if name != "adapters_served"},
        slots_per_adapter=np.minimum(1.0, column("a_max", 1.0) / column("adapters_served", 1.0)),
        steps=column("steps", 1.0),
        load_ms=_loads(frame),
        run=run,
        run_names=run_names,
        regime=known,
        ranks=ranks,
        lumps=prompt_quantiles(prefills, column("prompt_std", 0.0) / mean, column("steps", 1.0) <= 1.0),
    )


def regimes(frame: pd.DataFrame) -> NDArray[np.str_]:
    """Return what held each row back, by the columns that say so.

    In this order: *overloaded*: requests in flight (requests + waiting) within 2 % of in_flight_limit, or
    tokens within 2 % of token_budget; *KV-bound*: kv_tokens above 95 % of kv_capacity; *un-queued*: fewer
    than one request waiting; *slot-bound*: more adapters served than slots; *queued*: the rest. Without a
    limit's column, nothing is counted as held back by it.
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


def _loads(frame: pd.DataFrame) -> NDArray[np.float64] | None:
    if "load_ms" not in frame.columns or frame["load_ms"].isna().all():
        return None
    return frame["load_ms"].to_numpy(np.float64)


def _ranks(frame: pd.DataFrame) -> dict[str, NDArray[np.float64]]:
    """Return the known fields of `StepRanks`, `FROM_PREFILLS` filled in."""
    known = {name: frame[name].to_numpy(np.float64) for name in StepRanks._fields if name in frame.columns}
    requests, tokens = (frame[name].to_numpy(np.float64) for name in ("requests", "tokens"))
    if "prefills" in known:
        known.setdefault("decodes", np.maximum(0.0, requests - known["prefills"]))
        known.setdefault("lora_prefills", known["prefills"])
    if "decodes" in known:
        known.setdefault("lora_decodes", known["decodes"])
        known.setdefault("lora_prefill_tokens", np.maximum(0.0, tokens - known["decodes"]))
    return known
