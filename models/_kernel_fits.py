"""Fits of kernel times: Toppings' two forms, and an additive one of reads, operations and launches.

Toppings (section 5, eq. 2) predicts whole iterations. Its forms are fitted to kernel times here by ordinary
least squares, as there. The additive form is fitted to relative errors with coefficients of at least 0
(`capplan.models.calibration._least_squares`).

Crossover of the Triton LoRA kernels.

A kernel in tiles of tokens (SGMV) beats one token by token (MBGMV) from some number of tokens per adapter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.models.calibration._least_squares import LinearProblem, fit_linear, r_squared, smape
from capplan.spec import open_stream

MBGMV: Final = "mbgmv"
SGMV: Final = "sgmv"
_CASE: Final = ["width", "case"]


@dataclass(frozen=True)
class Crossover:
    """Threshold between the kernels, and what it costs against the faster kernel of each case."""

    sgmv_from_tokens: int
    """Mean tokens per adapter from which a step uses tiles."""
    cases: int
    """Measured cases with both kernels."""
    mean_loss: float
    """Mean over cases of the time of the chosen kernel relative to the faster one, less 1."""
    max_loss: float
    """Largest loss of a case."""

    def summary(self) -> str:
        """Return the threshold in a sentence."""
        return (
            f"sgmv from {self.sgmv_from_tokens} tokens per adapter: {100 * self.mean_loss:.1f} % slower "
            f"than the faster kernel of each of {self.cases} cases, at most {100 * self.max_loss:.1f} %"
        )


def read_crossover(path: str | os.PathLike[str]) -> Crossover:
    """Return the threshold of a table of kernel timings.

    Raises
    ------
    InputError
        For an unreadable file, or one without cases of both kernels.
    """
    found = crossover(read_kernel_table(path))
    if found is None:
        rule = f"must have cases of phase crossover with {MBGMV} and {SGMV}"
        raise InputError(rule, location=os.fspath(path))
    return found


def crossover(table: pd.DataFrame) -> Crossover | None:
    """Return the threshold with the least mean loss over the cases of phase ``crossover``.

    Candidates are the measured tokens per adapter, and twice the largest: tiles never. The smallest of equal
    ones is returned, and None without cases of both kernels.
    """
    rows = table[table["phase"] == "crossover"]
    # The sum of shrink and expand.
    times = rows.pivot_table(index=_CASE, columns="kernel", values="median_us", aggfunc="sum")
    if not {MBGMV, SGMV} <= set(times.columns):
        return None
    times = times[[MBGMV, SGMV]].dropna()
    if times.empty:
        return None
    first = rows.groupby(_CASE)[["tokens", "adapters"]].first().loc[times.index]
    tokens_each = (first["tokens"] / first["adapters"]).to_numpy(np.float64)
    least = times.min(axis=1).to_numpy(np.float64)
    by_token, tiled = (times[name].to_numpy(np.float64) for name in (MBGMV, SGMV))
    candidates = [*sorted({int(each) for each in tokens_each}), 2 * int(tokens_each.max())]
    losses = {each: np.where(tokens_each >= each, tiled, by_token) / least - 1.0 for each in candidates}
    best = min(candidates, key=lambda each: float(losses[each].mean()))
    return Crossover(best, len(times), float(losses[best].mean()), float(losses[best].max()))


COLUMNS: Final = (
    "kernel",
    "half",
    "width",
    "case",
    "configuration",
    "grid",
    "phase",
    "requests",
    "tokens",
    "adapters",
    "max_rank",
    "rank_sum",
    "adapter_rank_sum",
    "rank_tokens",
    "median_us",
    "relative_error",
    "visits",
    "disturbed",
    "visits_us",
)
"""One row per kernel, half (``shrink`` or ``expand``), width and case. ``rank_sum`` counts an adapter's rank
once per request, ``adapter_rank_sum`` once, ``rank_tokens`` once per token. Times are in microseconds."""


def read_kernel_table(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Return a table of kernel timings.

    Raises
    ------
    InputError
        For an unreadable file or a missing column.
    """
    name = os.fspath(path)
    try:
        with open_stream(path) as file:
            frame = pd.read_parquet(file)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise InputError(f"must be a table of kernel timings: {error}", location=name) from None
    missing = [column for column in COLUMNS if column not in frame.columns]
    if missing:
        raise InputError(f"must have a column {missing[0]!r}", location=name)
    return frame


TOPPINGS_BGMV: Final = "toppings-bgmv"
TOPPINGS_MBGMV: Final = "toppings-mbgmv"
ADDITIVE_KERNEL: Final = "additive"
FORMS: Final = (TOPPINGS_BGMV, TOPPINGS_MBGMV, ADDITIVE_KERNEL)
FOLDS: Final = 5

EXPLAINS_FROM: Final = 0.8
"""Least share of the variance on left-out configurations for a form to explain a kernel."""

GRIDS: Final = MappingProxyType({"paper": ("paper",), "wide": ("paper", "wide"), "tiny": ("tiny",)})
"""Fitted grids of decode, and the grids of cases that belong to each."""

MEANT_FOR: Final = MappingProxyType(
    {
        "padded": TOPPINGS_BGMV,
        "bgmv": TOPPINGS_BGMV,
        "grouped": TOPPINGS_MBGMV,
        "compiled": TOPPINGS_MBGMV,
        "triton": TOPPINGS_MBGMV,
        "mbgmv": TOPPINGS_MBGMV,
        "sgmv": TOPPINGS_MBGMV,
    }
)
"""Kernel to the Toppings form that is meant for it."""


@dataclass(frozen=True)
class KernelFit:
    """One of `FORMS` fitted to a kernel."""

    form: str
    coefficients: Mapping[str, float]
    """Microseconds per unit."""
    held_out: NDArray[np.float64]
    """Microseconds by fits without the row's configuration, shape (rows,)."""
    r2: float
    held_out_r2: float
    """Explained share of the variance on left-out rows; may be negative."""
    error: float
    """SMAPE in percent."""
    held_out_error: float


@dataclass(frozen=True)
class KernelReport:
    """Fits of one kernel, half, width and phase on one grid, by form."""

    kernel: str
    phase: str
    grid: str
    width: int
    half: str
    """``shrink``, ``expand``, or ``both`` for their sum."""
    rows: pd.DataFrame
    """Timings, one row per case."""
    fits: Mapping[str, KernelFit]

    @property
    def meant(self) -> str | None:
        """Toppings form that is meant for this kernel."""
        return MEANT_FOR.get(self.kernel)

    @property
    def explained_by(self) -> str | None:
        """Better Toppings form if it predicts left-out configurations, else None."""
        best = self._toppings()[0]
        return best.form if best.held_out_r2 >= EXPLAINS_FROM else None

    def verdict(self) -> str:
        """Return a sentence on the form that explains the kernel."""
        best, other = self._toppings()
        ours = self.fits[ADDITIVE_KERNEL]
        if self.explained_by is None:
            return (
                f"neither form of Toppings explains it: R² {best.held_out_r2:.3f} and "
                f"{other.held_out_r2:.3f} on left-out configurations; additive {ours.held_out_r2:.3f}, "
                f"with errors of {ours.held_out_error:.1f} %"
            )
        text = f"{best.form} explains it"
        if best.form != self.meant:
            text += f", though {self.meant} is meant for it"
        text += (
            f": R² {best.held_out_r2:.3f} on left-out configurations, {other.form} {other.held_out_r2:.3f}"
        )
        if ours.held_out_error < best.held_out_error:
            text += f"; additive errs by {ours.held_out_error:.1f} % instead of {best.held_out_error:.1f} %"
        return text

    def _toppings(self) -> list[KernelFit]:
        fits = [self.fits[form] for form in (TOPPINGS_BGMV, TOPPINGS_MBGMV)]
        return sorted(fits, key=lambda fit: -fit.held_out_r2)


def explain_kernels(table: pd.DataFrame, folds: int = FOLDS) -> list[KernelReport]:
    """Fit every form to every kernel of a table.

    Sets with fewer than two configurations per fold are left out. In the cross-validation, draws of one
    configuration are never on both sides.
    """
    reports = []
    for (kernel, phase, width, half), rows in with_both_halves(table).groupby(
        ["kernel", "phase", "width", "half"], sort=True
    ):
        for grid, part in _by_grid(rows, str(phase)):
            if part["configuration"].nunique() >= 2 * folds:
                fits = {form: fit_kernel(part, form, folds) for form in FORMS}
                reports.append(
                    KernelReport(str(kernel), str(phase), grid, int(str(width)), str(half), part, fits)
                )
    return reports


def with_both_halves(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with a third half ``both``, the sum of shrink and expand."""
    spot = ["kernel", "width", "case"]
    shrink = table[table["half"] == "shrink"].set_index(spot)
    expand = table[table["half"] == "expand"].set_index(spot)
    both = shrink.assign(half="both", median_us=shrink["median_us"] + expand["median_us"]).reset_index()
    return pd.concat([table, both[table.columns]], ignore_index=True)


def _by_grid(rows: pd.DataFrame, phase: str) -> Iterator[tuple[str, pd.DataFrame]]:
    if phase == "prefill":
        yield "prefill", rows.reset_index(drop=True)
        return
    for grid, parts in GRIDS.items():
        if (rows["grid"] == grid).any():
            yield grid, rows[rows["grid"].isin(parts)].reset_index(drop=True)


def fit_kernel(rows: pd.DataFrame, form: str, folds: int = FOLDS) -> KernelFit:
    """Fit one of `FORMS` to the timings of one kernel, half, width and phase."""
    columns = _regressors(form, rows)
    names = tuple(columns)
    design: NDArray[np.float64] = np.array([columns[name] for name in names], np.float64).T
    y: NDArray[np.float64] = rows["median_us"].to_numpy(np.float64)
    values = _solve(form, names, design, y)
    held_out: NDArray[np.float64] = np.empty(y.size)
    # Neighbours on the grid go into different parts.
    part = pd.factorize(rows["configuration"])[0] % folds
    for fold in range(folds):
        out = part == fold
        held_out[out] = design[out] @ _solve(form, names, design[~out], y[~out])
    predicted = design @ values
    return KernelFit(
        form=form,
        coefficients=dict(zip(names, values.tolist(), strict=True)),
        held_out=held_out,
        r2=r_squared(predicted, y),
        held_out_r2=r_squared(held_out, y),
        error=smape(predicted, y),
        held_out_error=smape(held_out, y),
    )


def _regressors(form: str, rows: pd.DataFrame) -> dict[str, pd.Series[float]]:
    ones = rows["requests"] ** 0
    if form == TOPPINGS_BGMV:
        return {"alpha": rows["requests"] * rows["max_rank"], "beta": ones}
    if form == TOPPINGS_MBGMV:
        return {"alpha": rows["rank_sum"], "beta": ones}
    # Launches, weights read and products computed, at true ranks and padded ones.
    columns = {
        "us": ones,
        "us_per_adapter": rows["adapters"],
        "us_per_adapter_rank": rows["adapter_rank_sum"],
        "us_per_padded_adapter_rank": rows["adapters"] * rows["max_rank"],
        "us_per_token": rows["tokens"],
        "us_per_token_rank": rows["rank_tokens"],
        "us_per_padded_token_rank": rows["tokens"] * rows["max_rank"],
    }
    kept: dict[str, pd.Series[float]] = {}
    for name, column in columns.items():
        # Coefficients of equal columns are not separable.
        if not any(np.array_equal(column, other) for other in kept.values()):
            kept[name] = column
    return kept


def _solve(
    form: str, names: tuple[str, ...], design: NDArray[np.float64], y: NDArray[np.float64]
) -> NDArray[np.float64]:
    if form == ADDITIVE_KERNEL:
        return fit_linear(LinearProblem(names, design, y)).values  # noqa: PD011 - no table
    return np.asarray(np.linalg.lstsq(design, y, rcond=None)[0], np.float64)
