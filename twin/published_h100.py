"""Fit the shipped H100 profiles from the published measurements of Agullo et al. (arXiv 2508.08343).

``python -m capplan.twin.published_h100 REFERENCE_DIR OUT_DIR`` writes one profile JSON per model below
OUT_DIR (the shipped ones live in ``datasets/profiles``). REFERENCE_DIR holds the published tables:
profiling_memory.csv, profiling_loading.csv, step_windows.parquet, runs.csv.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from capplan.models.calibrate import LinearProblem, cross_validate, fit_linear, fitted_model
from capplan.models.step_latency import ADDITIVE
from capplan.spec import (
    Coefficient,
    Fit,
    FittedModel,
    Profile,
    Provenance,
    ProvenanceKind,
    write_text_atomic,
)
from capplan.twin.published_models import ENGINE, GPU, PUBLISHED, PublishedModel
from capplan.twin.published_runs import GROUPS, TOKEN_BUDGET, published_runs
from capplan.twin.published_tables import fit_loading, fit_memory

LOAD_ROUNDS = 2


def fit_steps(
    reference: Path,
    model: PublishedModel,
    groups: tuple[str, ...],
    load_ms: Mapping[int, float] | None = None,
) -> tuple[FittedModel, float]:
    """Fit the additive step model to ten-second windows of real runs.

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
    windows = pd.read_parquet(reference / "step_windows.parquet")
    runs = pd.read_csv(reference / "runs.csv")
    disturbed = runs[runs.anomalies.fillna("").str.contains("exclude")].run_idx
    windows = windows[
        (windows.model == model.key) & windows.group.isin(groups) & ~windows.run_idx.isin(disturbed)
    ]
    loads = np.asarray(windows.run_idx.map(load_ms or {}).fillna(0.0), np.float64)
    problem = step_problem(windows, loads)
    fit = fit_linear(problem)
    fitted = fitted_model(
        ADDITIVE.name,
        fit,
        f"step_windows.parquet: {len(windows)} windows of {windows.run_idx.nunique()} runs",
        cross_validated=cross_validate(problem, windows.run_idx),
        ranges=_step_ranges(windows),
    )
    coefficients = dict(fitted.coefficients)
    factor = coefficients.pop("serving_factor").value
    return fitted.replace(coefficients=coefficients), factor


def step_problem(windows: pd.DataFrame, load_ms: NDArray[np.float64]) -> LinearProblem:
    """Return the linear problem of the additive form, and of the loads beside it, for a table of windows."""
    requests = windows.running_mean.to_numpy(float)
    tokens = np.minimum(TOKEN_BUDGET, requests + windows.prefill_tokens_per_step.to_numpy(float))
    a_max = windows.a_max.to_numpy(float)
    adapters = windows.unique_adapters_est.to_numpy(float)
    waiting = windows.waiting_mean.to_numpy(float)
    blocked = np.maximum(0.0, 1.0 - a_max / windows.n_adapters.to_numpy(float))
    columns = {
        "base_ms": np.ones_like(tokens),
        "ms_per_ktoken": tokens / 1000,
        "ms_per_kv_ktoken": windows.kv_ktokens.to_numpy(float),
        "ms_per_slot": a_max,
        "ms_per_slot_ktoken": a_max * tokens / 1000,
        "ms_per_slot_rank16": a_max * windows.s_max.to_numpy(float) / 16,
        "ms_per_adapter": adapters,
        "ms_per_adapter_ktoken": adapters * tokens / 1000,
        "ms_per_adapter_krequest": adapters * requests / 1000,
        # With a mean of W waiting requests, a step had none with a probability of about exp(-W).
        "ms_per_adapter_queued": adapters * (1.0 - np.exp(-waiting)),
        "ms_per_waiting_krequest": waiting / 1000 * blocked,
        "ms_beyond_graphs": (tokens > 512).astype(float),
        "serving_factor": load_ms,
    }
    names = (*ADDITIVE.coefficients, "serving_factor")
    return LinearProblem(
        names, np.column_stack([columns[name] for name in names]), windows.step_ms.to_numpy(float)
    )


def _step_ranges(windows: pd.DataFrame) -> dict[str, tuple[float, float]]:
    columns = {
        "requests": windows.running_mean,
        "kv_tokens": windows.kv_ktokens * 1000,
        "adapters": windows.unique_adapters_est,
        "a_max": windows.a_max,
        "s_max": windows.s_max,
        "waiting": windows.waiting_mean,
    }
    return {name: (float(column.min()), float(column.max())) for name, column in columns.items()}


def fit_host(
    reference: Path, profile: Profile, model: PublishedModel, groups: tuple[str, ...] = GROUPS
) -> FittedModel:
    """Fit what happens outside the engine's steps, with the twin in the loop.

    ``request_ms``: the median gap between measured and simulated TTFT where nobody queues.
    ``client_itl_factor``: the median ratio of the inter-token latency that clients measured to the simulated
    one. Runs that KV binds are left out: there the batch depends on how prompt and output lengths go
    together, which the tables do not tell.
    """
    runs = [
        run
        for run in published_runs(reference, model.key, groups)
        if run.itl_is_reliable and not run.kv_bound
    ]
    ours = [run.simulate(profile, duration_s=900.0) for run in runs]
    calm = [i for i, run in enumerate(runs) if run.mean_waiting < 1.0 and not run.starved]
    ttft = np.array([ours[i].ttft_s_p50 for i in calm])
    measured = np.array([runs[i].ttft_s_p50 for i in calm])
    request_ms = max(0.0, float(np.median(measured - ttft)) * 1e3)
    ratios = [run.itl_ms_mean / our.itl_ms_mean for run, our in zip(runs, ours, strict=True)]
    error = float(np.median(np.abs((ttft + request_ms / 1e3) / measured - 1)) * 100)
    return _host(request_ms, float(np.median(ratios)), len(runs), error)


def _host(request_ms: float, itl_factor: float, samples: int = 0, error: float = 0.0) -> FittedModel:
    return FittedModel(
        form="per-request",
        coefficients={
            "request_ms": Coefficient(value=round(request_ms, 3)),
            "client_itl_factor": Coefficient(value=round(itl_factor, 4)),
        },
        fit=Fit(
            source="runs.csv: runs that KV does not bind, twin in the loop",
            samples=samples,
            error_formula="100 * median(|p - a| / a) of the median TTFT where nobody queues",
            error=error,
        ),
    )


def build_profile(reference: Path, model: PublishedModel, groups: tuple[str, ...] = GROUPS) -> Profile:
    """Fit everything for one model; the step model on runs of the named groups only.

    The tables do not count adapter loads, so the twin does: a first fit without them, then one with the loads
    that the twin sees in each run.
    """
    steps, _ = fit_steps(reference, model, groups)
    idle_loading = fit_loading(reference, model)
    profile = Profile(
        name=model.profile,
        gpu=GPU,
        model=model.arch,
        engine=ENGINE,
        step_latency=steps,
        memory=fit_memory(reference, model),
        loading=idle_loading,
        host=_host(0.0, 1.0),
        provenance=Provenance(
            kind=ProvenanceKind.PUBLISHED,
            source="Agullo et al., arXiv 2508.08343; "
            "tables extracted from GPULLMAdapterOptimization, commit bae36e2",
            license="Apache-2.0",
            command="python -m capplan.twin.published_h100 REFERENCE_DIR OUT_DIR",
            notes="One NVIDIA H100 64GB HBM2, vLLM 0.8.5 (V1 engine), bf16, prefix caching off, "
            "token budget 2048. Nothing was measured with a token budget above 2048 "
            "or a mean prompt above 1,100 tokens.",
        ),
    )
    for _ in range(LOAD_ROUNDS):
        loads = _idle_load_ms(reference, profile, model, groups)
        steps, factor = fit_steps(reference, model, groups, loads)
        scaled = idle_loading.coefficients | {"serving_factor": Coefficient(value=factor)}
        profile = profile.replace(step_latency=steps, loading=idle_loading.replace(coefficients=scaled))
    return profile.replace(host=fit_host(reference, profile, model, groups))


def _idle_load_ms(
    reference: Path, profile: Profile, model: PublishedModel, groups: tuple[str, ...]
) -> dict[int, float]:
    """Return the milliseconds of adapter loads per step of each run, as the twin counts, engine idle."""
    factor = profile.loading.value("serving_factor")
    loads = {}
    for run in published_runs(reference, model.key, groups):
        result = run.simulate(profile, duration_s=1200.0)
        loads[run.index] = result.load_s * 1e3 / factor / max(1, result.steps)
    return loads


def main(arguments: list[str]) -> None:
    """Write the profiles of both models."""
    reference, out = Path(arguments[0]), Path(arguments[1])
    for model in PUBLISHED:
        profile = build_profile(reference, model)
        path = out / f"{model.profile}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, json.dumps(profile.model_dump(mode="json"), indent=2) + "\n")
        error = profile.step_latency.fit.cross_validated_error
        sys.stdout.write(f"{path}: step SMAPE {error:.2f} % on left-out runs\n")


if __name__ == "__main__":
    main(sys.argv[1:])
