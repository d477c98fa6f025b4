"""The step model of the shipped H100 profiles, from windows of real runs and from profiled steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from capplan.models.calibration.least_squares import LinearProblem, cross_validate, fit_linear, fitted_model
from capplan.models.step_latency import ADDITIVE, GRAPH_TOKENS, SPLIT_TOKENS
from capplan.spec import FittedModel
from capplan.twin.published_lumps import share_of_small_steps, tokens_beyond_graphs
from capplan.twin.published_models import PublishedModel
from capplan.twin.published_runs import LENGTHS, TOKEN_BUDGET

SERVING_FACTOR = "serving_factor"
_NAMES = (*ADDITIVE.coefficients, SERVING_FACTOR)
_FEWEST_STEPS = 5
_ALONE = -1
"""Group of the profiled steps in cross-validation; they are of no run."""


def fit_steps(
    reference: Path,
    model: PublishedModel,
    groups: tuple[str, ...],
    load_ms: Mapping[int, float] | None = None,
) -> tuple[FittedModel, float]:
    """Fit the additive step model to ten-second windows of real runs and to profiled steps.

    Parameters
    ----------
    reference, model
        Tables and model.
    groups
        Groups of runs whose windows are used.
    load_ms
        Adapter loads per step of each run, in milliseconds on an idle engine; None: none.

    Returns
    -------
    model : FittedModel
    serving_factor : float
        How much longer the loads take than on an idle engine.
    """
    windows = _windows(reference, model, groups)
    loads = np.asarray(windows.run_idx.map(load_ms or {}).fillna(0.0), np.float64)
    profiled = profiled_problem(reference, model)
    problem = _stacked(window_problem(windows, loads, model), profiled)
    runs = np.concatenate([windows.run_idx.to_numpy(np.int64), np.full(profiled.y.size, _ALONE)])
    fitted = fitted_model(
        ADDITIVE.name,
        fit_linear(problem),
        f"step_windows.parquet: {len(windows)} windows of {windows.run_idx.nunique()} runs "
        f"({', '.join(groups)}); profiling_step_latency.csv: {profiled.y.size} rows with LoRA",
        cross_validated=cross_validate(problem, runs),
        ranges=_ranges(windows),
    )
    coefficients = dict(fitted.coefficients)
    factor = coefficients.pop(SERVING_FACTOR).value
    return fitted.replace(coefficients=coefficients), factor


def _windows(reference: Path, model: PublishedModel, groups: tuple[str, ...]) -> pd.DataFrame:
    windows = pd.read_parquet(reference / "step_windows.parquet")
    runs = pd.read_csv(reference / "runs.csv")
    disturbed = runs[runs.anomalies.fillna("").str.contains("exclude")].run_idx
    return windows[
        (windows.model == model.key) & windows.group.isin(groups) & ~windows.run_idx.isin(disturbed)
    ]


def window_problem(
    windows: pd.DataFrame, load_ms: NDArray[np.float64], model: PublishedModel
) -> LinearProblem:
    """Return the linear problem of the additive form, and of the loads beside it, for a table of windows."""
    requests = windows.running_mean.to_numpy(float)
    prompt_tokens = windows.prefill_tokens_per_step.to_numpy(float)
    prompts, _ = LENGTHS[model.key]
    blocked = np.maximum(0.0, 1.0 - windows.a_max.to_numpy(float) / windows.n_adapters.to_numpy(float))
    waiting = windows.waiting_mean.to_numpy(float)
    return _problem(
        step_ms=windows.step_ms.to_numpy(float),
        tokens=np.minimum(TOKEN_BUDGET, requests + prompt_tokens),
        requests=requests,
        kv_ktokens=windows.kv_ktokens.to_numpy(float),
        adapters=windows.unique_adapters_est.to_numpy(float),
        a_max=windows.a_max.to_numpy(float),
        s_max=windows.s_max.to_numpy(float),
        # With a mean of W waiting requests, a step had none with a probability of about exp(-W).
        queued=1.0 - np.exp(-waiting),
        scanned=waiting * blocked,
        small=share_of_small_steps(requests, prompt_tokens, prompts),
        beyond_graphs=tokens_beyond_graphs(requests, prompt_tokens, prompts, TOKEN_BUDGET),
        load_ms=load_ms,
    )


def profiled_problem(reference: Path, model: PublishedModel) -> LinearProblem:
    """Return the same problem for steps that were profiled one by one; only those of engines with LoRA."""
    table = pd.read_csv(reference / "profiling_step_latency.csv")
    known = table.batched_tokens.notna() & table.unique_adapters.notna()
    table = table[(table.model == model.key) & (table.n_steps >= _FEWEST_STEPS) & (table.a_max > 0) & known]
    tokens = table.batched_tokens.to_numpy(float)
    nothing = np.zeros_like(tokens)
    return _problem(
        step_ms=table.step_ms_median.to_numpy(float),
        tokens=tokens,
        requests=table.decode_batch.fillna(0).to_numpy(float),
        kv_ktokens=table.kv_tokens_in_use.fillna(0).to_numpy(float) / 1000,
        adapters=table.unique_adapters.to_numpy(float),
        a_max=table.a_max.to_numpy(float),
        s_max=table.s_max.to_numpy(float),
        queued=nothing,
        scanned=nothing,
        small=(tokens < SPLIT_TOKENS).astype(float),
        beyond_graphs=np.maximum(0.0, tokens - GRAPH_TOKENS),
        load_ms=nothing,
    )


def _problem(
    *,
    step_ms: NDArray[np.float64],
    tokens: NDArray[np.float64],
    requests: NDArray[np.float64],
    kv_ktokens: NDArray[np.float64],
    adapters: NDArray[np.float64],
    a_max: NDArray[np.float64],
    s_max: NDArray[np.float64],
    queued: NDArray[np.float64],
    scanned: NDArray[np.float64],
    small: NDArray[np.float64],
    beyond_graphs: NDArray[np.float64],
    load_ms: NDArray[np.float64],
) -> LinearProblem:
    columns = {
        "base_ms": np.ones_like(tokens),
        "ms_per_ktoken": tokens / 1000,
        "ms_per_kv_ktoken": kv_ktokens,
        "ms_per_slot": a_max,
        "ms_per_slot_ktoken": a_max * tokens / 1000,
        "ms_per_slot_rank16": a_max * s_max / 16,
        "ms_per_adapter": adapters,
        "ms_per_adapter_rank16": adapters * s_max / 16,
        "ms_per_adapter_small_rank16": adapters * np.ceil(s_max / 16) * small,
        "ms_per_adapter_krequest": adapters * requests / 1000,
        "ms_per_adapter_queued": adapters * queued,
        "ms_per_waiting_krequest": scanned / 1000,
        "ms_per_ktoken_beyond_graphs": beyond_graphs / 1000,
        SERVING_FACTOR: load_ms,
    }
    return LinearProblem(_NAMES, np.column_stack([columns[name] for name in _NAMES]), step_ms)


def _stacked(first: LinearProblem, second: LinearProblem) -> LinearProblem:
    return LinearProblem(
        first.names, np.vstack([first.design, second.design]), np.concatenate([first.y, second.y])
    )


def _ranges(windows: pd.DataFrame) -> dict[str, tuple[float, float]]:
    columns = {
        "requests": windows.running_mean,
        "kv_tokens": windows.kv_ktokens * 1000,
        "adapters": windows.unique_adapters_est,
        "a_max": windows.a_max,
        "s_max": windows.s_max,
        "waiting": windows.waiting_mean,
    }
    return {name: (float(column.min()), float(column.max())) for name, column in columns.items()}
