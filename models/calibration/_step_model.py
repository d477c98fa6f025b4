"""Step model of a profile: regressors of the candidates, their fits, cross-validation and selection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from capplan._jit import jit
from capplan.errors import InputError
from capplan.models._step_latency import (
    ADDITIVE,
    DIGITAL_TWIN,
    FORMS,
    TABLE,
    LatencyForm,
    StepFeatures,
    StepRanks,
    latency_code,
    rank_ms,
    step_ms,
)
from capplan.models.calibration._least_squares import (
    SMAPE_FORMULA,
    LinearProblem,
    clustered_covariance,
    coefficient,
    fit_linear,
    fit_mean,
    r_squared,
    smape,
    uncertainty,
)
from capplan.models.calibration._tables import FROM_PREFILLS, REGIMES, MeasuredSteps
from capplan.spec import Coefficient, Fit, FittedModel, Kernel, Uncertainty

SERVING_FACTOR: Final = "serving_factor"
"""Fitted with every candidate if the table has loads: time of a load relative to an idle engine."""

TERM_GROUPS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "kv": tuple(name for name in ADDITIVE.coefficients if "_kv_" in name),
        "slots": tuple(name for name in ADDITIVE.coefficients if "_per_slot" in name),
        "adapters": tuple(name for name in ADDITIVE.coefficients if "_per_adapter" in name),
        "queue": tuple(name for name in ADDITIVE.coefficients if "_per_waiting" in name),
        "graphs": tuple(name for name in ADDITIVE.coefficients if "_beyond_graphs" in name),
        "ranks": tuple(name for name in ADDITIVE.optional if name.endswith("_krank")),
        "requests": ("ms_per_request", "ms_for_several", "ms_per_prefill"),
        "attention": ("ms_per_prefill_mpair",),
    }
)
"""Terms of the additive form that a candidate leaves out together, which shows their contribution."""

_MIN_WAITING: Final = 1.0
"""Mean number of waiting requests that one row at least must have for a fit of the queue terms."""
_MAX_PREFILLS: Final = 0.5
"""Largest mean number of prompts in that row.

Without a queue for places or slots, requests still wait in steps whose token budget is full of prompts. What
is different in these steps would otherwise be the cost of every queue.
"""

_RANK_FIELDS: Final = ("lora_decodes", "lora_prefill_tokens")
_REQUIRED_BY_KERNEL: Final[Mapping[Kernel, tuple[str, ...]]] = MappingProxyType(
    {
        Kernel.VLLM: _RANK_FIELDS,
        Kernel.BGMV: (*_RANK_FIELDS, "max_rank"),
        Kernel.MBGMV: ("decode_rank_sum", "prefill_rank_tokens"),
    }
)
_UNBOUNDED: Final = "k3"
"""Coefficient of the digital-twin form that may be negative: adapters in the batch shorten the queue scan."""

_AT_BOUND: Final = 1e-9

BEYOND_CACHE: Final = "ms_per_kv_ktoken_beyond_cache"
CACHE: Final = "cache_kv_ktokens"
_CACHE_SHARES: Final = MappingProxyType({"8th": 0.125, "4th": 0.25, "half": 0.5})
"""Shares of the largest measured number of KV tokens that are tried as the size of the cache."""


@dataclass(frozen=True)
class StepModelCandidate:
    """A form of the step model with a subset of its terms."""

    label: str
    form: LatencyForm
    kernel: Kernel
    left_out: tuple[str, ...] = ()
    """Coefficients of the form that stay 0."""
    cache_kv_ktokens: float | None = None
    """Size of the cache, which is not fitted; None: none."""

    def missing(self, table: MeasuredSteps) -> tuple[str, ...]:
        """Return the required columns that the table does not have."""
        missing = tuple(name for name in self.form.needs if name not in table.ranks)
        return tuple(n for n in missing if n not in FROM_PREFILLS) if "prefills" in missing else missing

    def columns(self, table: MeasuredSteps) -> dict[str, NDArray[np.float64]]:
        """Return the regressor of each coefficient, including loads; only for linear forms."""
        fixed = {} if self.cache_kv_ktokens is None else {CACHE: self.cache_kv_ktokens}
        columns = unit_columns(latency_code(self.form.name, self.kernel), self.form.names, table, fixed)
        if table.load_ms is not None:
            columns[SERVING_FACTOR] = table.load_ms
        return {name: values for name, values in columns.items() if name not in self.left_out}

    def fit(self, table: MeasuredSteps) -> StepModelFit:
        """Fit the mean step times, with scatter proportional to them."""
        if self.form is DIGITAL_TWIN:
            return _fit_digital_twin(self, table)
        columns = self.columns(table)
        if self.form is not ADDITIVE:
            self._require_linear(table, columns)
        problem = LinearProblem.of(columns, table.step_ms)
        fit = fit_mean(problem)
        bound = np.isnan(fit.std_errors) if table.rows > len(columns) else np.zeros(len(columns), bool)
        values = np.where(bound, 0.0, fit.values)  # the solver stops slightly above the bound
        covariance = clustered_covariance(*problem.relative(values), ~bound, table.run)
        return StepModelFit(self, problem.names, values, covariance)

    def _require_linear(self, table: MeasuredSteps, columns: Mapping[str, NDArray[np.float64]]) -> None:
        """Check that the form is the sum of its regressors, as the fit takes it to be."""
        first, *others = self.form.names
        code = latency_code(self.form.name, self.kernel)
        whole = unit_columns(code, self.form.names, table, dict.fromkeys(others, 1.0))[first]
        if not np.allclose(whole, sum(columns[name] for name in self.form.names)):
            raise TypeError(
                f"step model {self.form.name}: must be linear in its coefficients, without a constant"
            )


@dataclass(frozen=True)
class StepModelFit:
    """A candidate with its coefficients, including the serving factor of loads."""

    candidate: StepModelCandidate
    names: tuple[str, ...]
    values: NDArray[np.float64]
    covariance: NDArray[np.float64]
    """NaN for coefficients on their bound."""

    @property
    def std_errors(self) -> NDArray[np.float64]:
        """Standard errors; NaN for coefficients on their bound."""
        return np.sqrt(np.diag(self.covariance))

    def predict(self, table: MeasuredSteps) -> NDArray[np.float64]:
        """Return the milliseconds of each row, including loads."""
        if self.candidate.form is DIGITAL_TWIN:
            return _digital_twin_ms(table, dict(zip(self.names, self.values, strict=True)))
        columns = self.candidate.columns(table)
        return np.column_stack([columns[name] for name in self.names]) @ self.values

    def coefficients(self) -> dict[str, Coefficient]:
        """Return the coefficients of the form as a profile stores them, in its order."""
        fitted = dict(zip(self.names, map(coefficient, self.values, self.std_errors), strict=True))
        form = self.candidate.form
        optional = {name for name in form.optional if name in fitted and fitted[name].value != 0.0}
        if BEYOND_CACHE in optional:
            fitted[CACHE] = Coefficient(value=self.candidate.cache_kv_ktokens or 0.0)
            optional.add(CACHE)
        return {
            name: fitted.get(name, Coefficient(value=0.0))
            for name in form.names
            if name in form.coefficients or name in optional
        }

    @property
    def serving_factor(self) -> Coefficient | None:
        """Time of a load relative to an idle engine; None if the table had no loads."""
        if SERVING_FACTOR not in self.names:
            return None
        at = self.names.index(SERVING_FACTOR)
        return coefficient(self.values[at], self.std_errors[at])


def candidates(table: MeasuredSteps, kernel: Kernel) -> tuple[StepModelCandidate, ...]:
    """Return the candidates: the additive form, variants of it, and published forms.

    Variants are without a group of terms, or with a cache of a given size, beyond which KV tokens cost more.
    The order is that of preference among candidates of equal error. Rank terms require the ranks that the
    kernel pays for, request terms the number of prefills, the attention of prompts its pairs of tokens, and
    queue terms a row with `_MIN_WAITING` and few prompts: requests that wait for the token budget do not
    determine the cost of a queue. Variants without the terms per request or of attention come first, and
    under ``vllm``, whose slots have terms of their own, variants without the rank terms as well: these terms
    must reduce the error. Variants with another kernel are for comparison only.
    """
    groups = _known_groups(table, kernel)
    not_fitted = _unknown_terms(table, groups)
    unknown = (*not_fitted, BEYOND_CACHE)
    additive = [StepModelCandidate(ADDITIVE.name, ADDITIVE, kernel, unknown)]
    for group, terms in groups.items():
        label = f"additive-without-{group}"
        additive.append(StepModelCandidate(label, ADDITIVE, kernel, (*unknown, *terms)))
    for other in Kernel:
        known = all(name in table.ranks for name in _REQUIRED_BY_KERNEL[other])
        if "ranks" in groups and other is not kernel and known:
            additive.append(StepModelCandidate(f"additive-as-{other}", ADDITIVE, other, unknown))
    spare = _must_contribute(groups, kernel)
    absent = [names for size in range(len(spare), 0, -1) for names in combinations(spare, size)]
    first = [f"additive-without-{'-and-'.join(names)}" for names in absent]
    for label, names in zip(first, absent, strict=True):
        if len(names) > 1:
            several = tuple(term for name in names for term in groups[name])
            additive.append(StepModelCandidate(label, ADDITIVE, kernel, (*unknown, *several)))
    for name, share in _CACHE_SHARES.items():
        ktokens = share * float(table.kv_tokens.max()) / 1e3
        additive.append(StepModelCandidate(f"additive-cache-{name}", ADDITIVE, kernel, not_fitted, ktokens))
    additive.sort(key=lambda each: first.index(each.label) if each.label in first else len(first))
    published = (form for form in FORMS if form not in (ADDITIVE, TABLE))
    return (*additive, *(StepModelCandidate(form.name, form, kernel) for form in published))


def _must_contribute(groups: Mapping[str, tuple[str, ...]], kernel: Kernel) -> list[str]:
    """Return the known groups of terms that a step model has only if they reduce the error."""
    names = ("ranks", "requests", "attention") if kernel is Kernel.VLLM else ("requests", "attention")
    return [name for name in names if name in groups]


def _known_groups(table: MeasuredSteps, kernel: Kernel) -> dict[str, tuple[str, ...]]:
    """Return the groups of terms that the columns of the table determine."""
    known = {
        "ranks": all(name in table.ranks for name in _REQUIRED_BY_KERNEL[kernel]),
        "requests": "prefills" in table.ranks,
        "queue": _has_queue(table),
        "attention": "prefill_mpairs" in table.ranks,
    }
    return {name: terms for name, terms in TERM_GROUPS.items() if known.get(name, True)}


def _has_queue(table: MeasuredSteps) -> bool:
    decodes = table.ranks.get("prefills", np.zeros(table.rows)) <= _MAX_PREFILLS
    return bool((table.waiting[decodes] >= _MIN_WAITING).any())


def _unknown_terms(table: MeasuredSteps, groups: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the coefficients that stay 0 in every variant of the additive form.

    Slots are not separable from ``base_ms`` in a table of one number of slots, nor their rank in one of one
    rank: the cost of the measured slots would be extrapolated to others.
    """
    unknown = [term for name, terms in TERM_GROUPS.items() if name not in groups for term in terms]
    unknown.append(CACHE)
    if "queue" not in groups:
        unknown.append("ms_per_adapter_queued")
    if np.unique(table.a_max).size < 2:
        unknown += TERM_GROUPS["slots"]
    if np.unique(table.s_max).size < 2:
        unknown += ["ms_per_slot_rank16", "ms_per_adapter_rank16"]
    if "requests" in groups and table.requests.min() >= 2.0:
        unknown.append("ms_for_several")  # not separable from base_ms without steps of one request
    return tuple(unknown)


def candidate_named(label: str, table: MeasuredSteps, kernel: Kernel) -> StepModelCandidate:
    """Return one candidate, if the table has the columns that its form requires."""
    known = {each.label: each for each in candidates(table, kernel)}
    if label not in known:
        raise InputError(f"must be one of {', '.join(known)}", label, "--form")
    missing = known[label].missing(table)
    if missing:
        raise InputError(f"form {label} needs the columns {', '.join(missing)}", location=table.source)
    return known[label]


class _Mixture(NamedTuple):
    """Rows as mixtures of steps: with and without a queue, without a prompt and with some of its tokens."""

    step: NDArray[np.float64]
    """Fields of `StepFeatures`, shape (rows, fields)."""
    ranks: NDArray[np.float64]
    """Fields of `StepRanks`, shape (rows, fields)."""
    queued: NDArray[np.float64]
    """Probability of a waiting request, shape (rows,)."""
    prefilled: NDArray[np.float64]
    """Probability of a prompt, shape (rows,)."""
    quantiles: NDArray[np.float64]
    """Prompt tokens relative to their mean, shape (rows, quantiles)."""
    prefills_known: bool
    """Whether tokens divide into those of prompts and those of decodes."""


def unit_columns(
    form: int, names: tuple[str, ...], table: MeasuredSteps, fixed: Mapping[str, float] = MappingProxyType({})
) -> dict[str, NDArray[np.float64]]:
    """Return the regressor of each coefficient of a linear form, without loads, shape (rows,) each.

    The regressor of a coefficient is the time of the step with that coefficient at 1 and the others at 0,
    computed by the functions that the twin uses; those in `fixed` keep their value. A window mean is first
    divided into a mixture of steps by Poisson arrivals, so that terms with a threshold apply to steps instead
    of means. Unknown ranks are 0.
    """
    zeros, known = np.zeros(table.rows), "prefills" in table.ranks
    mixture = _Mixture(
        step=np.column_stack([getattr(table, name) for name in StepFeatures._fields]),
        ranks=np.column_stack([table.ranks.get(name, zeros) for name in StepRanks._fields]),
        queued=table.probability_of_any(table.waiting),
        prefilled=table.probability_of_any(table.ranks["prefills"]) if known else np.ones(table.rows),
        quantiles=table.prompt_quantiles if known else np.ones((table.rows, 1)),
        prefills_known=known,
    )
    columns = np.zeros((table.rows, len(names)))
    _fill(form, np.array([fixed.get(name, 0.0) for name in names]), mixture, columns)
    return {name: columns[:, at] for at, name in enumerate(names)}


@jit
def _fill(form: int, k: NDArray[np.float64], mixture: _Mixture, columns: NDArray[np.float64]) -> None:
    """Fill `columns`, shape (rows, coefficients); `k` is a working array, 0 but for fixed coefficients."""
    step, ranks, queued, prefilled = mixture.step, mixture.ranks, mixture.queued, mixture.prefilled
    quantiles = mixture.quantiles.shape[1]
    for row in range(step.shape[0]):
        for state in range(2 * (1 + quantiles)):  # without or with a queue; no prompt or one of its quantiles
            with_queue = state % 2
            quantile = state // 2 - 1
            share = queued[row] if with_queue else 1.0 - queued[row]
            share *= prefilled[row] / quantiles if quantile >= 0 else 1.0 - prefilled[row]
            if share <= 0.0:
                continue
            scale = mixture.quantiles[row, quantile] / prefilled[row] if quantile >= 0 else 0.0
            tokens = step[row, 0]
            if mixture.prefills_known:
                tokens = ranks[row, 0] + (tokens - ranks[row, 0]) * scale
            features = StepFeatures(
                tokens=tokens,
                requests=step[row, 1],
                kv_tokens=step[row, 2],
                adapters=step[row, 3],
                a_max=step[row, 4],
                s_max=step[row, 5],
                waiting=step[row, 6] / queued[row] if with_queue else 0.0,
                slots_per_adapter=step[row, 7],
                adapters_served=step[row, 8],
            )
            held = StepRanks(
                decodes=ranks[row, 0],
                prefills=ranks[row, 1] * scale,
                lora_decodes=ranks[row, 2],
                lora_prefills=ranks[row, 3] * scale,
                lora_prefill_tokens=ranks[row, 4] * scale,
                max_rank=ranks[row, 5],
                decode_rank_sum=ranks[row, 6],
                prefill_rank_sum=ranks[row, 7] * scale,
                prefill_rank_tokens=ranks[row, 8] * scale,
                prefill_mpairs=ranks[row, 9] * scale,
            )
            for at in range(k.size):
                fixed = k[at]
                k[at] = 1.0
                milliseconds = step_ms(form, k, features) + rank_ms(form, k, features.s_max, held)
                columns[row, at] += share * milliseconds
                k[at] = fixed


def _digital_twin_ms(table: MeasuredSteps, k: Mapping[str, float]) -> NDArray[np.float64]:
    """Return the milliseconds of each row by the adapter-caching paper's form, including loads."""
    in_batch = table.adapters / table.adapters_served
    scheduler = k["k1"] * table.requests + table.waiting * (k["k2"] + k["k3"] * in_batch)
    overhead = k["k6"] * table.adapters + k["k7"]
    if "k7_base" in k:
        overhead = np.where(table.adapters == 0.0, k["k7_base"], overhead)
    milliseconds: NDArray[np.float64] = scheduler + (k["k4"] * table.requests + k["k5"]) * overhead
    if table.load_ms is not None:
        milliseconds = milliseconds + k[SERVING_FACTOR] * table.load_ms
    return milliseconds


def _fit_digital_twin(candidate: StepModelCandidate, table: MeasuredSteps) -> StepModelFit:
    """Fit the form that is not linear. k7 is 1: ``(k4*B + k5) * (k6*A + k7)`` has a spare constant."""
    names = ["k1", "k2", "k3", "k4", "k5", "k6"]
    if np.any(table.adapters == 0.0) and np.any(table.adapters > 0.0):
        names.append("k7_base")
    if table.load_ms is not None:
        names.append(SERVING_FACTOR)
    start = _digital_twin_start(table)
    # Units of the start make all directions comparable, including those without effect on the residuals.
    unit = np.array([max(abs(start.get(name, 1.0)), _negligible(name, table)) for name in names])

    def named(scaled: NDArray[np.float64]) -> dict[str, float]:
        return {"k7": 1.0, **dict(zip(names, (scaled * unit).tolist(), strict=True))}

    def residuals(scaled: NDArray[np.float64]) -> NDArray[np.float64]:
        return _deviance_residuals(_digital_twin_ms(table, named(scaled)), table.step_ms)

    lower = np.array([-np.inf if name == _UNBOUNDED else 0.0 for name in names])
    begin = np.array([start.get(name, 1.0) for name in names]) / unit
    found: Any = least_squares(
        residuals, np.maximum(begin, lower + 1e-6), bounds=(lower, np.inf), max_nfev=200
    )
    bound = (found.x < _AT_BOUND) & (lower == 0.0)
    values = np.where(bound, 0.0, found.x) * unit
    covariance = clustered_covariance(found.jac, found.fun, ~bound, table.run) * np.outer(unit, unit)
    with_k7 = np.pad(covariance, (0, 1), constant_values=np.nan)
    return StepModelFit(candidate, (*names, "k7"), np.append(values, 1.0), with_k7)


def _deviance_residuals(
    predicted_ms: NDArray[np.float64], step_ms: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return signed roots of the deviance; its least squares fit the mean as `fit_mean` does."""
    excess = step_ms / np.maximum(predicted_ms, _AT_BOUND * step_ms) - 1.0
    deviance = 2.0 * (excess - np.log1p(excess))
    return -np.sign(excess) * np.sqrt(np.maximum(deviance, 0.0))


def _digital_twin_start(table: MeasuredSteps) -> dict[str, float]:
    """Return initial coefficients: the expanded form is linear in B, A and A*B."""
    columns = {
        "k5": np.ones_like(table.requests),
        "k4": table.requests,
        "k5*k6": table.adapters,
        "k4*k6": table.adapters * table.requests,
        "k2": table.waiting,
    }
    k = dict(zip(columns, fit_linear(LinearProblem.of(columns, table.step_ms)).values, strict=True))
    by_base = k["k5*k6"] / k["k5"] if k["k5"] > 0.0 else 0.0
    return {"k1": 0.0, "k2": k["k2"], "k3": 0.0, "k4": k["k4"], "k5": k["k5"], "k6": by_base}


def _negligible(name: str, table: MeasuredSteps) -> float:
    """Return the value at which a coefficient contributes about a thousandth of a step."""
    small = 1e-3 * float(np.median(table.step_ms))
    regressor = {"k1": table.requests, "k2": table.waiting, "k3": table.waiting, "k4": table.requests}
    if name in regressor:
        return small / max(1.0, float(np.mean(regressor[name])))
    return {"k5": small, "k6": 1e-3 / max(1.0, float(np.mean(table.adapters)))}.get(name, 1.0)


DEFAULT_FOLDS: Final = 5
_UNFITTED: Final = "cannot be fitted: values are too large, too small or too far apart"
NEGLIGIBLE: Final = 0.01
NEGLIGIBLE_POINTS: Final = 0.02
"""Candidates count as equal if their held-out errors differ by less than `NEGLIGIBLE` of the error or by less
than this number of percentage points.

The full additive form is preferred among equals. Runs of one length distribution do not separate KV tokens
from requests, for example, and a term left out for this reason would be missed with other lengths.
"""


@dataclass(frozen=True)
class StepModelScore:
    """Errors of one candidate; NaN if it could not be fitted."""

    label: str
    coefficients: int
    """Number of coefficients that are not on a bound."""
    error: float
    """SMAPE on the rows of the fit, in percent."""
    held_out_error: float
    """SMAPE on rows whose run was left out of the fit, in percent."""
    held_out_r2: float
    """Explained share of the variance on left-out rows; negative if worse than their mean."""
    missing: tuple[str, ...] = ()
    """Required columns that the table does not have."""


@dataclass(frozen=True)
class Residuals:
    """Errors of predictions on left-out rows of one part of the table, in percent."""

    name: str
    rows: int
    bias: float
    """Mean of predicted / measured - 1."""
    error: float
    """SMAPE."""
    p95: float
    """95th percentile of |predicted / measured - 1|."""


@dataclass(frozen=True)
class StepCalibration:
    """The selected step model and the scores of all candidates."""

    table: MeasuredSteps
    fit: StepModelFit
    forced: bool
    """Whether the form was given instead of selected."""
    scores: tuple[StepModelScore, ...]
    """In ascending order of held-out error."""
    held_out_ms: NDArray[np.float64]
    """Predictions of the selected candidate by fits without the row's run, shape (rows,)."""

    @property
    def score(self) -> StepModelScore:
        """Score of the selected candidate."""
        return next(score for score in self.scores if score.label == self.fit.candidate.label)

    def model(self) -> FittedModel:
        """Return the step model as a profile stores it."""
        table = self.table
        predicted = self.fit.predict(table)
        runs = f" of {len(table.run_names)} runs" if table.run_names else ""
        return FittedModel(
            form=self.fit.candidate.form.name,
            coefficients=self.fit.coefficients(),
            fitted_range=step_ranges(table),
            fit=Fit(
                source=f"{table.source}: {table.rows} rows{runs}",
                samples=table.rows,
                error_formula=SMAPE_FORMULA,
                error=smape(predicted, table.step_ms),
                cross_validated_error=self.score.held_out_error,
                max_error=float(100 * np.max(np.abs(predicted / table.step_ms - 1.0))),
                probe_ms=table.probe_ms,
            ),
            uncertainty=self.uncertainty(),
        )

    def uncertainty(self) -> Uncertainty:
        """Return covariance of the coefficients of the step model, and scatter of left-out runs."""
        known = [at for at, name in enumerate(self.fit.names) if name in self.fit.candidate.form.names]
        covariance = self.fit.covariance[np.ix_(known, known)]
        scatter = run_scatter(self.table, self.held_out_ms)
        return uncertainty([self.fit.names[at] for at in known], covariance, scatter)

    def by_regime(self) -> tuple[Residuals, ...]:
        """Return the errors in each regime, in the order of `REGIMES`, followed by other names."""
        present = set(self.table.regime.tolist())
        order = [*(name for name in REGIMES if name in present), *sorted(present - set(REGIMES))]
        return tuple(self._residuals(name, self.table.regime == name) for name in order)

    def by_a_max(self) -> tuple[Residuals, ...]:
        """Return the errors at each number of slots."""
        values = np.unique(self.table.a_max)
        return tuple(self._residuals(f"{value:g}", self.table.a_max == value) for value in values)

    def _residuals(self, name: str, keep: NDArray[np.bool_]) -> Residuals:
        predicted, measured = self.held_out_ms[keep], self.table.step_ms[keep]
        relative = predicted / measured - 1.0
        return Residuals(
            name=name,
            rows=int(keep.sum()),
            bias=100 * float(np.mean(relative)),
            error=smape(predicted, measured),
            p95=100 * float(np.percentile(np.abs(relative), 95)),
        )


def run_scatter(table: MeasuredSteps, predicted_ms: NDArray[np.float64]) -> float:
    """Return the root mean square over runs of the mean of measured / predicted - 1 in a run."""
    _, numbers = np.unique(table.run, return_inverse=True)
    relative = table.step_ms / predicted_ms - 1.0
    return float(np.sqrt(np.mean((np.bincount(numbers, relative) / np.bincount(numbers)) ** 2)))


def step_ranges(table: MeasuredSteps) -> dict[str, tuple[float, float]]:
    """Return the smallest and largest value of each input of the step model."""
    inputs = ("tokens", "requests", "kv_tokens", "adapters", "a_max", "s_max", "waiting")
    own = {name: (float(getattr(table, name).min()), float(getattr(table, name).max())) for name in inputs}
    return {**own, **table.load_ranges}


def calibrate_steps(
    table: MeasuredSteps,
    kernel: Kernel = Kernel.VLLM,
    *,
    form: str | None = None,
    folds: int = DEFAULT_FOLDS,
    progress: Callable[[int, int], None] | None = None,
) -> StepCalibration:
    """Fit every candidate and select one.

    Parameters
    ----------
    table
        The measured steps.
    kernel
        Kernel of the engine, which determines the ranks that it pays for.
    form
        Label of the candidate to take. None: the first in the order of `candidates` whose held-out error
        equals the lowest, by `NEGLIGIBLE`.
    folds
        Parts of the cross-validation; run g belongs to part g mod folds and is never on both sides.
    progress
        Called with (fits done, all fits).

    Raises
    ------
    InputError
        For an unknown form, one whose columns are missing, or fewer rows than coefficients.
    """
    forced = None if form is None else candidate_named(form, table, kernel)
    every = candidates(table, kernel)
    possible = [each for each in every if not each.missing(table)]
    fits: dict[str, StepModelFit] = {}
    held_out: dict[str, NDArray[np.float64]] = {}
    for done, each in enumerate(possible):
        if progress is not None:
            progress(done, len(possible))
        fits[each.label] = _fit(each, table)
        held_out[each.label] = predict_left_out(each, table, folds)
    if progress is not None:
        progress(len(possible), len(possible))
    nan = float("nan")
    scores = [_score(fits[each.label], table, held_out[each.label]) for each in possible]
    scores += [
        StepModelScore(each.label, 0, nan, nan, nan, missing)
        for each in every
        if (missing := each.missing(table))
    ]
    scores.sort(key=lambda s: (np.isnan(s.held_out_error), s.held_out_error, s.coefficients))
    preferred = [each.label for each in possible if each.kernel is kernel]
    label = _best(scores, preferred) if forced is None else forced.label
    return StepCalibration(table, fits[label], forced is not None, tuple(scores), held_out[label])


def predict_left_out(candidate: StepModelCandidate, table: MeasuredSteps, folds: int) -> NDArray[np.float64]:
    """Return the milliseconds of each row predicted by a fit without the row's run, shape (rows,)."""
    _, numbers = np.unique(table.run, return_inverse=True)
    part = numbers % folds
    if np.unique(part).size < 2:
        rule = "must hold two runs to be cross-validated; without a column run, rows are cut in stretches"
        raise InputError(rule, location=table.source)
    predicted = np.empty(table.rows)
    for fold in np.unique(part):
        out = part == fold
        predicted[out] = _fit(candidate, table.select(~out)).predict(table.select(out))
    return predicted


def _fit(candidate: StepModelCandidate, table: MeasuredSteps) -> StepModelFit:
    coefficients = len(candidate.form.names) - len(candidate.left_out)
    if table.rows < coefficients:
        rule = f"must leave at least {coefficients} rows to each fit of the form {candidate.label}"
        raise InputError(rule, table.rows, table.source)
    try:
        return candidate.fit(table)
    except (ValueError, np.linalg.LinAlgError) as error:  # ValueError: sums that overflow
        if isinstance(error, InputError):
            raise
        raise InputError(f"{_UNFITTED} by {candidate.label}", location=table.source) from None


def _score(fit: StepModelFit, table: MeasuredSteps, held_out: NDArray[np.float64]) -> StepModelScore:
    return StepModelScore(
        label=fit.candidate.label,
        coefficients=int(np.sum(~np.isnan(fit.std_errors))),
        error=smape(fit.predict(table), table.step_ms),
        held_out_error=smape(held_out, table.step_ms),
        held_out_r2=r_squared(held_out, table.step_ms),
    )


def _best(scores: Sequence[StepModelScore], preferred: Sequence[str]) -> str:
    """Return the first label in order of preference whose held-out error equals the lowest."""
    errors = {
        score.label: score.held_out_error if np.isfinite(score.held_out_error) else np.inf for score in scores
    }
    least = min(errors[label] for label in preferred)
    if not np.isfinite(least):
        raise InputError(_UNFITTED, location="steps")
    limit = least + max(NEGLIGIBLE * least, NEGLIGIBLE_POINTS)
    return next(label for label in preferred if errors[label] <= limit)
