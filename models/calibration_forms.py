"""Candidates for the step model: the columns of a step table that each form regresses on, and the fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.models.calibrate import LinearProblem, fit_linear
from capplan.models.calibration_columns import unit_columns
from capplan.models.calibration_errors import clustered_errors
from capplan.models.calibration_tables import FROM_PREFILLS, StepTable
from capplan.models.calibration_twin_form import fit_digital_twin, predict_digital_twin
from capplan.models.step_latency import (
    ADDITIVE,
    DIGITAL_TWIN,
    TOPPINGS_BGMV,
    TOPPINGS_MBGMV,
    LatencyForm,
    latency_code,
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
class Candidate:
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

    def fit(self, table: StepTable) -> FormFit:
        """Minimise the relative squared error of the steps' times."""
        if self.form is DIGITAL_TWIN:
            solution = fit_digital_twin(table)
            return FormFit(self, solution.names, solution.values, solution.std_errors)
        columns = self.columns(table)
        problem = LinearProblem(tuple(columns), np.column_stack(list(columns.values())), table.step_ms)
        fit = fit_linear(problem)
        bound = np.isnan(fit.std_errors) if table.rows > len(columns) else np.zeros(len(columns), bool)
        values = np.where(bound, 0.0, fit.values)  # the solver stops a hair's breadth before the bound
        weighted = problem.design / problem.y[:, None]
        errors = clustered_errors(weighted, weighted @ values - 1.0, ~bound, table.run)
        return FormFit(self, problem.names, values, errors)


@dataclass(frozen=True)
class FormFit:
    """A candidate with its coefficients, loads' factor among them."""

    candidate: Candidate
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


def candidates(table: StepTable, kernel: Kernel) -> tuple[Candidate, ...]:
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
    ours = [Candidate(ADDITIVE.name, ADDITIVE, kernel, unknown)]
    for group, terms in groups.items():
        ours.append(Candidate(f"additive-without-{group}", ADDITIVE, kernel, (*unknown, *terms)))
    ours += [
        Candidate(f"additive-as-{other}", ADDITIVE, other, unknown)
        for other in Kernel
        if "ranks" in groups and other is not kernel and all(name in table.ranks for name in _NEEDED[other])
    ]
    must_tell = ("ranks", "requests") if kernel is Kernel.VLLM else ("requests",)
    spare = [name for name in must_tell if name in groups]
    if len(spare) > 1:
        both = tuple(term for name in spare for term in groups[name])
        ours.append(Candidate(f"additive-without-{'-and-'.join(spare)}", ADDITIVE, kernel, (*unknown, *both)))
    first = [f"additive-without-{name}" for name in ("-and-".join(spare), *spare)]
    ours.sort(key=lambda each: first.index(each.label) if each.label in first else len(first))
    papers = [Candidate(form.name, form, kernel) for form in (DIGITAL_TWIN, TOPPINGS_BGMV, TOPPINGS_MBGMV)]
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


def candidate_named(label: str, table: StepTable, kernel: Kernel) -> Candidate:
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
