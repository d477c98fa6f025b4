"""The setting of the digital twin paper, as its recipe has it, and profiles fitted to its measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pandas as pd

from capplan.datasets import load_profile, model_arch
from capplan.datasets.published import GROUPS, TABLES, PublishedModel, write_tables
from capplan.models import assumed_model
from capplan.models.calibration import Hardware, assumed_profile
from capplan.reproduce._recipe import cached, read_recipe
from capplan.spec import Adapter, Coefficient, Profile, SpecModel
from capplan.twin.calibration import CalibrationOptions, CalibrationTables, calibrate


class Predictable(SpecModel):
    """Scenarios of section 8.2."""

    ranks: tuple[tuple[int, ...], ...]
    adapters: tuple[int, ...]
    slots: tuple[int, ...]


class UnpredictableScenarios(SpecModel):
    """Scenarios of section 8.2 whose arrivals change every five minutes."""

    rank: int
    slots: int
    adapters: tuple[int, ...]


class Training(SpecModel):
    """Training of the surrogates of section 8.3."""

    scenarios: int
    combinations: int
    folds: int


class CurveSetting(SpecModel):
    """One curve of the placement figures."""

    model: str
    gpus: int
    rates: str
    ranks: str
    adapters: tuple[int, ...]


class Load(SpecModel):
    """A workload of Table 5."""

    adapters: int
    total_rps: float


class Placement(SpecModel):
    """Scenarios of section 8.4."""

    rates_rps: Mapping[str, tuple[float, ...]]
    ranks: Mapping[str, tuple[int, ...]]
    curves: Mapping[str, CurveSetting]
    model_len: Mapping[str, int]
    time_limit_s: float
    speed: Mapping[str, Load]
    repeats: int


class Motivation(SpecModel):
    """Llama-2-7B in sections 2.3 and 5.1 and in appendix A."""

    prompt_tokens: int
    output_tokens: int
    slora_output_tokens: int
    batched_tokens: int
    model_len: int
    slora_profile: str
    slora: Mapping[str, int]
    saturating_rps: float
    saturated_s: float
    memory_step: int
    scheduler_rps: float
    scheduler_s: float


class Setting(SpecModel):
    """All of the setting."""

    horizon_s: float
    models: Mapping[str, str]
    fitted_on: str
    judged_on: str
    rates_rps: Mapping[str, tuple[float, ...]]
    predictable: Predictable
    unpredictable: UnpredictableScenarios
    training: Training
    grids: Mapping[str, Mapping[str, tuple[Mapping[str, tuple[Any, ...]], ...]]]
    placement: Placement
    motivation: Motivation


@cached
def setting() -> Setting:
    return read_recipe("twin").typed(Setting)


def system(name: str) -> Mapping[str, str]:
    """Return solver and estimator of a system of the recipe."""
    found: Mapping[str, str] = read_recipe("twin").systems[name]
    return found


def numbered(ranks: Iterable[int], rates_rps: Iterable[float]) -> tuple[Adapter, ...]:
    """Return adapters a0, a1, ... of these ranks and rates."""
    pairs = zip(ranks, rates_rps, strict=True)
    return tuple(
        Adapter(name=f"a{i}", rank=int(rank), rate_rps=float(rate)) for i, (rank, rate) in enumerate(pairs)
    )


FORM: Final = "additive-without-ranks-and-requests"
FREE: Final = ("length_correlation", "request_ms", "scrape_us_per_series", "scrape_us_per_series_adapter")
HOST: Final = {
    "request_ms": 5.0,
    "client_itl_factor": 1.0,
    "scrape_interval_s": 2.0,  # pause of the client of the runs between two scrapes
    "scrape_us_per_series": 5.0,
    "scrape_us_per_series_adapter": 0.2,
    "scrape_share": 1.0,
}
_REQUEST_LENGTHS: Final = {"mean_dataset": (250, 231), "p75_dataset": (423, 358)}
"""Prompt and output tokens of the requests of section 5.1: mean and upper quartile of ShareGPT.

Those of the lower quartile make batches of up to 1,700 requests, far beyond those of any figure.
"""
SATURATED_FORM: Final = "additive-without-slots"
"""In saturated servers slots take the KV that requests could hold: their own time cannot be told from it."""
_WITHOUT: Final = 0
_NO_LIMIT: Final = 1e12


def base_profile(model: PublishedModel) -> Profile:
    """Return GPU, model and engine of the shipped profile, with assumed coefficients."""
    shipped = load_profile(model.profile)
    hardware = Hardware(gpu=shipped.gpu.name, gpu_memory_bytes=shipped.gpu.memory_bytes)
    assumed = assumed_profile(shipped.model, hardware)
    return assumed.replace(engine=shipped.engine, host=assumed_model("per-request", HOST))


def published_profile(
    reference: Path, model: PublishedModel, groups: tuple[str, ...] = GROUPS, workers: int = 1
) -> Profile:
    """Return the profile of a model calibrated to the published tables of vLLM 0.8.5, in a folder.

    `groups` are the runs to fit to; memory, loading and profiled steps are separate measurements. `workers`
    are threads of the simulations.
    """
    provenance = load_profile(model.profile).provenance
    options = CalibrationOptions(name=model.profile, form=FORM, free=FREE, workers=workers)
    with TemporaryDirectory() as folder:
        write_tables(reference, model, Path(folder), groups)
        tables = CalibrationTables(*(str(Path(folder) / name) for name in TABLES))
        profile = calibrate(base_profile(model), tables, options).profile
    chosen = "" if groups == GROUPS else f" {' '.join(groups)}"
    command = f"python -m benchmarks.shipped_profiles REFERENCE_DIR OUT_DIR{chosen}"
    return profile.replace(provenance=provenance.replace(command=command))


def bare_profile(model: str) -> Profile:
    """Return a 64 GB H100 under vLLM 0.8, nearest to 0.5 of what rules are known, with assumed coefficients.

    Beside its matrices a slot holds the embeddings of an adapter's extra tokens, at the input and the output.
    """
    gpu = load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5").gpu
    hardware = Hardware(
        gpu=gpu.name, gpu_memory_bytes=gpu.memory_bytes, rules="vllm-0.8", lora_extra_vocab=256
    )
    profile = assumed_profile(model_arch(model), hardware)
    arch, memory = profile.model, profile.memory
    extra_bytes = 2.0 * hardware.lora_extra_vocab * arch.hidden_size * arch.dtype_bytes
    of_slots = memory.coefficients | {"slot_overhead_bytes": Coefficient(value=extra_bytes)}
    return profile.replace(memory=memory.replace(coefficients=of_slots))


def profiling_profile(reference: Path, model_len: int, batched_tokens: int) -> Profile:
    """Return the profile of Llama-2-7B on vLLM 0.5.0, fitted to the authors' profiling runs of section 5.1.

    `model_len` is the longest request: servers without room for one did not start. `batched_tokens` are those
    of a step.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        memory = _starts(reference)
        known = memory[memory.kv_tokens >= model_len].assign(max_num_batched_tokens=batched_tokens)
        known.to_csv(folder / "memory.csv", index=False)
        _steps(reference).assign(token_budget=_NO_LIMIT).to_csv(folder / "steps.csv", index=False)
        _loads(reference).to_csv(folder / "loading.csv", index=False)
        paths = {each: str(folder / f"{each}.csv") for each in ("steps", "memory", "loading")}
        options = CalibrationOptions(form=SATURATED_FORM)
        return calibrate(bare_profile("llama-2-7b"), CalibrationTables(**paths), options).profile


def _starts(reference: Path) -> pd.DataFrame:
    """Return the KV tokens by slots and their rank, of servers that could start."""
    table = memory_table(reference, "llama-2-7b")
    return table.dropna(subset="kv_tokens").drop_duplicates(["a_max", "s_max"])[
        ["a_max", "s_max", "kv_tokens"]
    ]


def memory_table(reference: Path, model: str) -> pd.DataFrame:
    """Return the published starts of servers of a model on vLLM 0.5.0."""
    table = pd.read_csv(reference / "profiling_memory.csv")
    return table[(table.model == model) & table.source.str.startswith("v0.5.0")]


def _steps(reference: Path) -> pd.DataFrame:
    """Return each saturated profiling run as its mean step.

    A request that runs computes one token per step, and brings its prompt once in its outputs. Its KV holds
    the prompt and half of the output on average.
    """
    memory = memory_table(reference, "llama-2-7b")
    memory = memory.assign(
        dataset=memory.source.str.rpartition("/")[2],
        rank=memory.s_max,
        running=memory.mean_running_batch,
        adapters=float(_WITHOUT),
    )
    compute = pd.read_csv(reference / "profiling_compute_overhead_v050.csv")
    compute = compute[compute.table == "compute_overhead"]
    compute = compute.assign(running=compute.mean_running, adapters=compute.mean_unique_adapters_in_batch)
    columns = ["dataset", "rank", "a_max", "adapters", "running", "output_throughput"]
    runs = pd.concat([memory, compute], ignore_index=True)[columns].dropna()
    runs = runs[runs.dataset.isin(list(_REQUEST_LENGTHS)) & (runs.a_max > 0) & (runs.running > 0)]
    lengths = pd.DataFrame([_REQUEST_LENGTHS[name] for name in runs.dataset], index=runs.index)
    prompt, output = lengths[0], lengths[1]
    prompts = runs.running * prompt / output
    with_adapter = runs.adapters > 0
    return pd.DataFrame(
        {
            "run": [f"{row.dataset}-{row.rank:g}-{row.a_max:g}" for row in runs.itertuples()],
            "step_ms": 1e3 * runs.running / runs.output_throughput,
            "tokens": runs.running + prompts,
            "requests": runs.running,
            "kv_tokens": runs.running * (prompt + output / 2),
            "adapters": runs.adapters,
            "a_max": runs.a_max,
            "s_max": runs["rank"],
            "waiting": 0.0,
            "adapters_served": runs.a_max,
            "prefills": runs.running / output,
            "lora_decodes": runs.running * with_adapter,
            "lora_prefills": runs.running / output * with_adapter,
            "lora_prefill_tokens": prompts * with_adapter,
            "load_ms": 0.0,
        }
    )


def _loads(reference: Path) -> pd.DataFrame:
    """Return the adapter loads to the GPU, and from file to host memory; a first load of all is left out."""
    table = pd.read_csv(reference / "profiling_loading.csv")
    table = table[table.model == "llama-2-7b"]
    kinds = {"cpu_to_gpu_activate": "gpu", "disk_to_cpu": "disk"}
    table = table[table.kind.isin(list(kinds))]
    return pd.DataFrame(
        {"rank": table.adapter_rank, "s_max": table.s_max, "ms": table.mean_ms, "kind": table.kind.map(kinds)}
    )
