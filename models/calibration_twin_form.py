"""The adapter-caching paper's step model, fitted: the one form that is not linear in its coefficients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from capplan.models.calibrate import LinearProblem, fit_linear
from capplan.models.calibration_errors import clustered_errors
from capplan.models.calibration_tables import StepTable

_FREE_SIGN: Final = "k3"
"""More resident adapters mean less scanning of the queue: held above 0, the term would vanish."""

_AT_BOUND: Final = 1e-9


class Solution(NamedTuple):
    """Coefficients of the form; k7 is 1, since ``(k4*B + k5) * (k6*A + k7)`` has one constant too many."""

    names: tuple[str, ...]
    values: NDArray[np.float64]
    std_errors: NDArray[np.float64]


def predict_digital_twin(table: StepTable, k: Mapping[str, float]) -> NDArray[np.float64]:
    """Return the milliseconds of each row; `k` holds k1 to k7, and k7_base and serving_factor if known."""
    scheduler = k["k1"] * table.requests + table.waiting * (k["k2"] + k["k3"] * table.slots_per_adapter)
    overhead = k["k6"] * table.adapters + k["k7"]
    if "k7_base" in k:
        overhead = np.where(table.adapters == 0.0, k["k7_base"], overhead)
    milliseconds: NDArray[np.float64] = scheduler + (k["k4"] * table.requests + k["k5"]) * overhead
    if table.load_ms is not None:
        milliseconds = milliseconds + k["serving_factor"] * table.load_ms
    return milliseconds


def _derivatives(table: StepTable, k: Mapping[str, float]) -> dict[str, NDArray[np.float64]]:
    """Return the derivative of each row's milliseconds by each coefficient."""
    base_only = (table.adapters == 0.0) & ("k7_base" in k)
    overhead = np.where(base_only, k.get("k7_base", 1.0), k["k6"] * table.adapters + k["k7"])
    backbone = k["k4"] * table.requests + k["k5"]
    columns = {
        "k1": table.requests,
        "k2": table.waiting,
        "k3": table.waiting * table.slots_per_adapter,
        "k4": table.requests * overhead,
        "k5": overhead,
        "k6": np.where(base_only, 0.0, backbone * table.adapters),
        "k7_base": np.where(base_only, backbone, 0.0),
    }
    return columns if table.load_ms is None else columns | {"serving_factor": table.load_ms}


def fit_digital_twin(table: StepTable) -> Solution:
    """Minimise the relative squared error; all coefficients but k3 are bounded below by 0."""
    names = ["k1", "k2", "k3", "k4", "k5", "k6"]
    if np.any(table.adapters == 0.0) and np.any(table.adapters > 0.0):
        names.append("k7_base")
    if table.load_ms is not None:
        names.append("serving_factor")
    start = _start(table)
    # A table without a queue, say, leaves directions in which nothing changes: in units of the start, the
    # solver walks all of them alike.
    unit = np.array([max(abs(start.get(name, 1.0)), _floor(name, table)) for name in names])

    def named(scaled: NDArray[np.float64]) -> dict[str, float]:
        return {"k7": 1.0, **dict(zip(names, (scaled * unit).tolist(), strict=True))}

    def residuals(scaled: NDArray[np.float64]) -> NDArray[np.float64]:
        return predict_digital_twin(table, named(scaled)) / table.step_ms - 1.0

    def slopes(scaled: NDArray[np.float64]) -> NDArray[np.float64]:
        columns = _derivatives(table, named(scaled))
        by_unit: NDArray[np.float64] = np.column_stack([columns[name] for name in names]) * unit
        return np.divide(by_unit, table.step_ms[:, None])

    lower = np.array([-np.inf if name == _FREE_SIGN else 0.0 for name in names])
    begin = np.array([start.get(name, 1.0) for name in names]) / unit
    found: Any = least_squares(
        residuals, np.maximum(begin, lower + 1e-6), slopes, bounds=(lower, np.inf), max_nfev=200
    )
    bound = (found.x < _AT_BOUND) & (lower == 0.0)
    values = np.where(bound, 0.0, found.x) * unit
    errors = clustered_errors(found.jac, found.fun, ~bound, table.run) * unit
    return Solution((*names, "k7"), np.append(values, 1.0), np.append(errors, np.nan))


def _start(table: StepTable) -> dict[str, float]:
    """Return coefficients near the best ones: the form multiplied out is linear in B, A and A*B."""
    columns = {
        "k5": np.ones_like(table.requests),
        "k4": table.requests,
        "k5*k6": table.adapters,
        "k4*k6": table.adapters * table.requests,
        "k2": table.waiting,
    }
    problem = LinearProblem(tuple(columns), np.column_stack(list(columns.values())), table.step_ms)
    k = dict(zip(columns, fit_linear(problem).values, strict=True))
    by_base = k["k5*k6"] / k["k5"] if k["k5"] > 0.0 else 0.0
    return {"k1": 0.0, "k2": k["k2"], "k3": 0.0, "k4": k["k4"], "k5": k["k5"], "k6": by_base}


def _floor(name: str, table: StepTable) -> float:
    """Return a size below which a coefficient would not be seen: about a thousandth of a step."""
    small = 1e-3 * float(np.median(table.step_ms))
    regressor = {"k1": table.requests, "k2": table.waiting, "k3": table.waiting, "k4": table.requests}
    if name in regressor:
        return small / max(1.0, float(np.mean(regressor[name])))
    return {"k5": small, "k6": 1e-3 / max(1.0, float(np.mean(table.adapters)))}.get(name, 1.0)
