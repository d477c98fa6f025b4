"""Fit the shipped H100 profiles from the published measurements of Agullo et al. (arXiv 2508.08343).

``python -m capplan.twin.published_h100 REFERENCE_DIR OUT_DIR [GROUP...]`` writes one profile JSON per model
below OUT_DIR (the shipped ones live in ``datasets/profiles``), fitted on the named groups of runs, or on all.
REFERENCE_DIR holds the published tables: profiling_memory.csv, profiling_loading.csv,
profiling_step_latency.csv, step_windows.parquet, timeseries.parquet, runs.csv.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from capplan.spec import Coefficient, Profile, Provenance, ProvenanceKind, write_text_atomic
from capplan.twin.published_host import fit_host, no_host
from capplan.twin.published_lengths import fit_length_correlation
from capplan.twin.published_models import ENGINE, GPU, PUBLISHED, PublishedModel
from capplan.twin.published_runs import GROUPS, published_runs
from capplan.twin.published_steps import SERVING_FACTOR, fit_steps
from capplan.twin.published_tables import fit_loading, fit_memory

LOAD_ROUNDS = 2
_SIMULATED_S = 1200.0


def build_profile(reference: Path, model: PublishedModel, groups: tuple[str, ...] = GROUPS) -> Profile:
    """Fit everything for one model; whatever comes from runs, on those of the named groups only.

    The tables do not count adapter loads, so the twin does: a first fit without them, then one with the loads
    that the twin sees in each run.

    Parameters
    ----------
    reference
        Folder with the published tables.
    model
        The model.
    groups
        Groups of runs. Memory, loading and profiled steps come from separate measurements.
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
        host=no_host(),
        length_correlation=fit_length_correlation(reference, model, groups),
        provenance=_provenance(groups),
    )
    for _ in range(LOAD_ROUNDS):
        loads = _idle_load_ms(reference, profile, model, groups)
        steps, factor = fit_steps(reference, model, groups, loads)
        scaled = idle_loading.coefficients | {SERVING_FACTOR: Coefficient(value=factor)}
        profile = profile.replace(step_latency=steps, loading=idle_loading.replace(coefficients=scaled))
    return profile.replace(host=fit_host(reference, profile, model, groups))


def _provenance(groups: tuple[str, ...]) -> Provenance:
    only = "" if groups == GROUPS else f" {' '.join(groups)}"
    return Provenance(
        kind=ProvenanceKind.PUBLISHED,
        source="Agullo et al., arXiv 2508.08343; "
        "tables extracted from GPULLMAdapterOptimization, commit bae36e2",
        license="Apache-2.0",
        command=f"python -m capplan.twin.published_h100 REFERENCE_DIR OUT_DIR{only}",
        notes="One NVIDIA H100 64GB HBM2, vLLM 0.8.5 (V1 engine), bf16, prefix caching off, "
        "token budget 2048, /metrics scraped every 2 s (set scrape_interval_s to 0 for a server that nobody "
        "scrapes). Nothing was measured with a token budget above 2048 or a mean prompt above 1,100 tokens.",
    )


def _idle_load_ms(
    reference: Path, profile: Profile, model: PublishedModel, groups: tuple[str, ...]
) -> dict[int, float]:
    """Return the milliseconds of adapter loads per step of each run, as the twin counts, engine idle."""
    factor = profile.loading.value(SERVING_FACTOR)
    loads = {}
    for run in published_runs(reference, model.key, groups):
        result = run.simulate(profile, duration_s=_SIMULATED_S)
        loads[run.index] = result.load_s * 1e3 / factor / max(1, result.steps)
    return loads


def main(arguments: list[str]) -> None:
    """Write the profiles of both models."""
    reference, out = Path(arguments[0]), Path(arguments[1])
    groups = tuple(arguments[2:]) or GROUPS
    for model in PUBLISHED:
        profile = build_profile(reference, model, groups)
        path = out / f"{model.profile}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, json.dumps(profile.model_dump(mode="json"), indent=2) + "\n")
        error = profile.step_latency.fit.cross_validated_error
        sys.stdout.write(f"{path}: step SMAPE {error:.2f} % on left-out runs\n")


if __name__ == "__main__":
    main(sys.argv[1:])
