"""Candidate step models: their regressors and their least-squares fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from capplan.compile import jit
from capplan.errors import InputError
from capplan.models.calibration.least_squares import LinearProblem, clustered_errors, fit_linear
from capplan.models.calibration.tables import FROM_PREFILLS, StepTable
from capplan.models.step_latency import (
    ADDITIVE,
    DIGITAL_TWIN,
    TOPPINGS_BGMV,
    TOPPINGS_MBGMV,
    LatencyForm,
    StepFeatures,
    StepRanks,
    latency_code,
    rank_ms,
    step_ms,
)
from capplan.spec import Coefficient, Kernel

SERVING_FACTOR: Final = "serving_factor"

"""Fitted beside every form where the table knows loads: how much longer they take than on an idle engine."""

TERM_GROUPS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "kv": tuple(name for name in ADDITIVE.coefficients if "_kv_" in name),
        "slots": tuple(name for name in ADDITIVE.coefficients if "_per_slot" in name),
        "adapters": tuple(name for name in ADDITIVE.coefficients if "_per_adapter" in name),
        "queue": tuple(name for name in ADDITIVE.coefficients if "_per_waiting" in name),
        "graphs": tuple(name for name in ADDITIVE.coefficients if "_beyond_graphs" in name),
        "ranks": tuple(name for name in ADDITIVE.optional if name.endswith("_krank")),
        "requests": ("ms_per_request", "ms_for_several", "ms_per_prefill"),
    }
)

"""Terms of the additive form that are left out together, to see what they are worth."""

_LEAST_QUEUE: Final = 1.0

"""Requests that wait in the mean, in one row at least, for a table to tell what a queue costs."""

_RANK_FIELDS: Final = ("lora_decodes", "lora_prefill_tokens")

_NEEDED: Final[Mapping[Kernel, tuple[str, ...]]] = MappingProxyType(
    {
        Kernel.VLLM: _RANK_FIELDS,
        Kernel.BGMV: (*_RANK_FIELDS, "max_rank"),
        Kernel.MBGMV: ("decode_rank_sum", "prefill_rank_tokens"),
    }
)


@dataclass(frozen=True)
class StepModelCandidate:
    """One form of the step model that may be fitted."""

    label: str
    form: LatencyForm
    kernel: Kernel
    left_out: tuple[str, ...] = ()
    """Coefficients of the form that stay 0."""

    def missing(self, table: StepTable) -> tuple[str, ...]:
        """Return the columns that this form needs and the table does not have."""
        missing = tuple(name for name in self._needed() if name not in table.ranks)
        return tuple(n for n in missing if n not in FROM_PREFILLS) if "prefills" in missing else missing

    def _needed(self) -> tuple[str, ...]:
        phases = ("decodes", "prefills")
        if self.form is TOPPINGS_BGMV:
            return (*phases, "lora_decodes", "lora_prefills", "max_rank")
        if self.form is TOPPINGS_MBGMV:
            return (*phases, "decode_rank_sum", "prefill_rank_sum")
        return ()

    def columns(self, table: StepTable) -> dict[str, NDArray[np.float64]]:
        """Return the regressor of each coefficient, loads among them; only of forms that are linear."""
        columns = unit_columns(latency_code(self.form.name, self.kernel), self.form.names, table)
        if table.load_ms is not None:
            columns[SERVING_FACTOR] = table.load_ms
        return {name: values for name, values in columns.items() if name not in self.left_out}

    def fit(self, table: StepTable) -> StepModelFit:
        """Minimise the relative squared error of the steps' times."""
        if self.form is DIGITAL_TWIN:
            solution = fit_digital_twin(table)
            return StepModelFit(self, solution.names, solution.values, solution.std_errors)
        columns = self.columns(table)
        problem = LinearProblem(tuple(columns), np.column_stack(list(columns.values())), table.step_ms)
        fit = fit_linear(problem)
        bound = np.isnan(fit.std_errors) if table.rows > len(columns) else np.zeros(len(columns), bool)
        values = np.where(bound, 0.0, fit.values)  # the solver stops a hair's breadth before the bound
        weighted = problem.design / problem.y[:, None]
        errors = clustered_errors(weighted, weighted @ values - 1.0, ~bound, table.run)
        return StepModelFit(self, problem.names, values, errors)


@dataclass(frozen=True)
class StepModelFit:
    """A candidate with its coefficients, loads' factor among them."""

    candidate: StepModelCandidate
    names: tuple[str, ...]
    values: NDArray[np.float64]
    std_errors: NDArray[np.float64]
    """NaN for coefficients on their bound."""

    def predict(self, table: StepTable) -> NDArray[np.float64]:
        """Return the milliseconds of each row, loads included."""
        if self.candidate.form is DIGITAL_TWIN:
            return predict_digital_twin(table, dict(zip(self.names, self.values, strict=True)))
        columns = self.candidate.columns(table)
        return np.column_stack([columns[name] for name in self.names]) @ self.values

    def coefficients(self) -> dict[str, Coefficient]:
        """Return the coefficients of the form as a profile stores them, in its order."""
        fitted = {
            name: Coefficient(value=float(value), std_error=None if np.isnan(error) else float(error))
            for name, value, error in zip(self.names, self.values, self.std_errors, strict=True)
        }
        form = self.candidate.form
        optional = {name for name in form.optional if name in fitted and fitted[name].value != 0.0}
        return {
            name: fitted.get(name, Coefficient(value=0.0))
            for name in form.names
            if name in form.coefficients or name in optional
        }

    @property
    def serving_factor(self) -> Coefficient | None:
        """How much longer loads take than on an idle engine; None where the table did not know them."""
        if SERVING_FACTOR not in self.names:
            return None
        at = self.names.index(SERVING_FACTOR)
        error = self.std_errors[at]
        return Coefficient(value=float(self.values[at]), std_error=None if np.isnan(error) else float(error))


def candidates(table: StepTable, kernel: Kernel) -> tuple[StepModelCandidate, ...]:
    """Return the forms that are compared: ours, ours without each group of terms, and the papers'.

    The order is that of preference among forms that are as good as each other. The rank terms are among ours
    where the table knows the ranks that the kernel pays for, those per request where it knows who is in
    prefill, and those of the queue where there was one: what a handful of steps with somebody waiting seem to
    tell is no use for queues of hundreds. Terms per request must make a difference, which GPUs do not show,
    and under ``vllm``, whose slots have terms of their own, those of ranks, too. With them ours is also shown
    as it would be under each other kernel, for comparison: which one an engine has is known, not fitted.
    """
    groups = _known_groups(table, kernel)
    unknown = _unknown_terms(table, groups)
    ours = [StepModelCandidate(ADDITIVE.name, ADDITIVE, kernel, unknown)]
    for group, terms in groups.items():
        ours.append(StepModelCandidate(f"additive-without-{group}", ADDITIVE, kernel, (*unknown, *terms)))
    ours += [
        StepModelCandidate(f"additive-as-{other}", ADDITIVE, other, unknown)
        for other in Kernel
        if "ranks" in groups and other is not kernel and all(name in table.ranks for name in _NEEDED[other])
    ]
    must_tell = ("ranks", "requests") if kernel is Kernel.VLLM else ("requests",)
    spare = [name for name in must_tell if name in groups]
    if len(spare) > 1:
        both = tuple(term for name in spare for term in groups[name])
        ours.append(
            StepModelCandidate(f"additive-without-{'-and-'.join(spare)}", ADDITIVE, kernel, (*unknown, *both))
        )
    first = [f"additive-without-{name}" for name in ("-and-".join(spare), *spare)]
    ours.sort(key=lambda each: first.index(each.label) if each.label in first else len(first))
    papers = [
        StepModelCandidate(form.name, form, kernel) for form in (DIGITAL_TWIN, TOPPINGS_BGMV, TOPPINGS_MBGMV)
    ]
    return (*ours, *papers)


def _known_groups(table: StepTable, kernel: Kernel) -> dict[str, tuple[str, ...]]:
    """Return the groups of terms that a table can tell something of."""
    known = {
        "ranks": all(name in table.ranks for name in _NEEDED[kernel]),
        "requests": "prefills" in table.ranks,
        "queue": table.waiting.max() >= _LEAST_QUEUE,
    }
    return {name: terms for name, terms in TERM_GROUPS.items() if known.get(name, True)}


def _unknown_terms(table: StepTable, groups: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the coefficients that stay 0 in all of ours."""
    unknown = [term for name, terms in TERM_GROUPS.items() if name not in groups for term in terms]
    if "queue" not in groups:
        unknown.append("ms_per_adapter_queued")
    if "requests" in groups and table.requests.min() >= 2.0:
        unknown.append("ms_for_several")  # part of base_ms: no request by itself tells them apart
    return tuple(unknown)


def candidate_named(label: str, table: StepTable, kernel: Kernel) -> StepModelCandidate:
    """Return one candidate.

    Raises
    ------
    InputError
        For an unknown name, or a form that needs columns which the table does not have.
    """
    known = {each.label: each for each in candidates(table, kernel)}
    if label not in known:
        raise InputError(f"must be one of {', '.join(known)}", label, "--form")
    missing = known[label].missing(table)
    if missing:
        raise InputError(f"form {label} needs the columns {', '.join(missing)}", location=table.source)
    return known[label]


def unit_columns(form: int, names: tuple[str, ...], table: StepTable) -> dict[str, NDArray[np.float64]]:
    """Return the regressor of each coefficient, shape (rows,) each, loads left out.

    Parameters
    ----------
    form
        Number of a form that is linear in its coefficients, by `latency_code`.
    names
        Its coefficients in order.
    table
        The measured steps; ranks that it does not know count as 0.
    """
    step = np.column_stack([getattr(table, name) for name in StepFeatures._fields])
    nothing = np.zeros(table.rows)
    ranks = np.column_stack([table.ranks.get(name, nothing) for name in StepRanks._fields])
    known = "prefills" in table.ranks
    queued = table.likely(table.waiting)
    prefilled = table.likely(table.ranks["prefills"]) if known else np.ones(table.rows)
    columns = np.zeros((table.rows, len(names)))
    lumps = table.lumps if known else np.ones((table.rows, 1))
    _fill(form, np.zeros(len(names)), step, ranks, queued, prefilled, lumps, known, columns)
    return {name: columns[:, at] for at, name in enumerate(names)}


@jit
def _fill(
    form: int,
    k: NDArray[np.float64],
    step: NDArray[np.float64],
    ranks: NDArray[np.float64],
    queued: NDArray[np.float64],
    prefilled: NDArray[np.float64],
    lumps: NDArray[np.float64],
    knows_prefills: bool,
    columns: NDArray[np.float64],
) -> None:
    """Fill `columns`, shape (rows, coefficients); `k` is a working array of zeros."""
    nodes = lumps.shape[1]
    for row in range(step.shape[0]):
        for state in range(2 * (1 + nodes)):  # nobody waiting or a queue; no prompt or an amount of prompts
            with_queue = state % 2
            node = state // 2 - 1
            share = queued[row] if with_queue else 1.0 - queued[row]
            share *= prefilled[row] / nodes if node >= 0 else 1.0 - prefilled[row]
            if share <= 0.0:
                continue
            more = lumps[row, node] / prefilled[row] if node >= 0 else 0.0
            tokens = step[row, 0]
            if knows_prefills:
                tokens = ranks[row, 0] + (tokens - ranks[row, 0]) * more
            features = StepFeatures(
                tokens=tokens,
                requests=step[row, 1],
                kv_tokens=step[row, 2],
                adapters=step[row, 3],
                a_max=step[row, 4],
                s_max=step[row, 5],
                waiting=step[row, 6] / queued[row] if with_queue else 0.0,
                slots_per_adapter=step[row, 7],
            )
            held = StepRanks(
                decodes=ranks[row, 0],
                prefills=ranks[row, 1] * more,
                lora_decodes=ranks[row, 2],
                lora_prefills=ranks[row, 3] * more,
                lora_prefill_tokens=ranks[row, 4] * more,
                max_rank=ranks[row, 5],
                decode_rank_sum=ranks[row, 6],
                prefill_rank_sum=ranks[row, 7] * more,
                prefill_rank_tokens=ranks[row, 8] * more,
            )
            for at in range(k.size):
                k[at] = 1.0
                milliseconds = step_ms(form, k, features) + rank_ms(form, k, features.s_max, held)
                columns[row, at] += share * milliseconds
                k[at] = 0.0


_UNBOUNDED: Final = "k3"

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

    lower = np.array([-np.inf if name == _UNBOUNDED else 0.0 for name in names])
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
