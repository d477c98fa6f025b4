"""The published hour-long vLLM runs, and their conversion into input tables of `capplan calibrate`.

Source: runs.csv (see `capplan.datasets.published`). The workload holds what a planner would have known:
adapters, ranks, rates, and mean and spread of the lengths. Arrivals, lengths of single requests and the
assignment of rates to ranks were not published.

In the tables, quantities that were not recorded are estimated. Tokens of a step: running requests plus prompt
tokens, at most the token budget. Prompts in prefill: prompt tokens over the mean prompt. Ranks of running
requests: the mean rank of all adapters; the largest rank is always present.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pandas as pd

from capplan.datasets._profile_files import load_profile
from capplan.spec import Adapter, Lengths, ModelArch, Workload

GROUPS: Final = ("dt_real_results", "ml_test_dataset")
MAX_NUM_SEQS: Final = 2048
TOKEN_BUDGET: Final = 2048
UTILIZATION: Final = 0.9
CLIENT_MAX_IN_FLIGHT: Final = 25_000
"""Connections that the client of the runs could hold open."""

LENGTHS: Final = MappingProxyType(
    {
        "llama-3.1-8b-instruct": (Lengths(mean=223, std=245), Lengths(mean=194, std=206)),
        "qwen-2.5-7b-instruct": (Lengths(mean=223, std=245), Lengths(mean=190.5, std=206)),
    }
)
"""Prompt and completed-output lengths over all runs of a model."""

PROMPT_TOKENS: Final = (4, 1024)
"""Shortest and longest prompt: the client of the runs kept conversations of these lengths."""

_KV_FULL: Final = 0.97


@dataclass(frozen=True)
class PublishedModel:
    """One of the two measured models."""

    key: str
    """Name in the tables."""
    profile: str
    """Name of the shipped profile."""

    @property
    def arch(self) -> ModelArch:
        """Architecture, as in the shipped profile."""
        return load_profile(self.profile).model


PUBLISHED: Final = (
    PublishedModel(key="llama-3.1-8b-instruct", profile="h100-64g/llama-3.1-8b/vllm-0.8.5"),
    PublishedModel(key="qwen-2.5-7b-instruct", profile="h100-64g/qwen2.5-7b/vllm-0.8.5"),
)


@dataclass(frozen=True)
class PublishedRun:
    """One measured run."""

    index: int
    group: str
    model: str
    workload: Workload
    a_max: int
    s_max: int
    throughput_tok_s: float
    offered_tok_s: float
    sent_share: float
    """Requests sent over those expected at the nominal rates; NaN if they were not counted."""
    starved: bool
    itl_ms_mean: float
    itl_is_reliable: bool
    """False if the median ITL is under 1 ms: the client read tokens in bursts."""
    ttft_s_p50: float
    ttft_s_mean_charged: float
    """Unfinished requests charged the whole run; NaN if sent requests were not counted."""
    mean_running: float
    mean_waiting: float
    kv_bound: bool
    """Whether the KV cache was ever full."""
    client_bound: bool
    """Whether the client ran out of connections, so that requests failed before reaching the engine."""

    @property
    def queued(self) -> bool:
        """Whether requests waited most of the time."""
        return self.mean_waiting >= 1.0

    @property
    def settings(self) -> dict[str, Any]:
        """Engine settings, as arguments of `simulate`."""
        return {
            "a_max": self.a_max,
            "s_max": self.s_max,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "max_in_flight": CLIENT_MAX_IN_FLIGHT,
        }


def undisturbed_runs(
    reference: Path, model: PublishedModel, groups: tuple[str, ...] = GROUPS
) -> pd.DataFrame:
    """Return the rows of runs.csv of a model, without runs that disturbed each other, by ``run_idx``."""
    table = pd.read_csv(reference / "runs.csv").set_index("run_idx", drop=False)
    disturbed = table.anomalies.fillna("").str.contains("exclude", regex=False)
    return table[(table.model == model.key) & table.group.isin(groups) & ~disturbed]


def published_runs(
    reference: Path, model: PublishedModel, groups: tuple[str, ...] = GROUPS
) -> list[PublishedRun]:
    """Return the undisturbed finished runs of a model, in the order of the table.

    Parameters
    ----------
    reference
        Folder with runs.csv.
    model
        The model.
    groups
        Groups of runs.
    """
    table = undisturbed_runs(reference, model, groups)
    return [_run(row) for _, row in table[table.status == "ok"].iterrows()]


def _run(row: pd.Series) -> PublishedRun:
    return PublishedRun(
        index=int(row.run_idx),
        group=row.group,
        model=row.model,
        workload=_workload(row),
        a_max=int(row.a_max),
        s_max=int(row.s_max),
        throughput_tok_s=float(row.total_throughput),
        offered_tok_s=float(row.offered_tok_s),
        sent_share=float(row.arrivals_sent) / float(row.arrivals_expected),
        starved=bool(row.starved),
        itl_ms_mean=float(row.itl_mean_ms),
        itl_is_reliable=bool(row.itl_median_ms >= 1.0),
        ttft_s_p50=float(row.ttft_median_ms) / 1e3,
        ttft_s_mean_charged=float(row.ttft_mean_authors_def_ms) / 1e3,
        mean_running=float(row.mean_running),
        mean_waiting=float(row.mean_waiting),
        kv_bound=bool(row.max_kv_usage > _KV_FULL),
        client_bound="client_port_exhaustion" in str(row.anomalies),
    )


def _workload(row: pd.Series) -> Workload:
    """Ranks cycle over the adapters; rates are assigned at random, like the server's shuffle did."""
    counts = [int(count) for count in row.rate_counts.split()]
    rates = np.repeat([float(rate) for rate in row.rate_values.split()], counts)
    np.random.default_rng(int(row.run_idx)).shuffle(rates)
    ranks = [int(rank) for rank in row.rank_list.split()]
    prompt, output = LENGTHS[row.model]
    adapters = tuple(
        Adapter(name=f"dummy-{i}", rank=ranks[i % len(ranks)], rate_rps=float(rate))
        for i, rate in enumerate(rates)
    )
    return Workload(base_model=row.model, adapters=adapters, prompt_tokens=prompt, output_tokens=output)


PROFILED = "profiled"
TABLES = ("steps.parquet", "runs.csv", "memory.csv", "loading.csv")
_MIN_STEPS = 5
_PROFILED_RANK = 8
_NO_LIMIT = 1e12
_WARM_UP_S = 120.0


def write_tables(
    reference: Path, model: PublishedModel, folder: Path, groups: tuple[str, ...] = GROUPS
) -> None:
    """Write the four input tables of a model.

    Parameters
    ----------
    reference
        Folder with step_windows.parquet, runs.csv, profiling_step_latency.csv, profiling_memory.csv and
        profiling_loading.csv.
    model
        The model.
    folder
        Created if missing.
    groups
        Groups of runs. Profiled steps, start-ups and loads are separate measurements.
    """
    folder.mkdir(parents=True, exist_ok=True)
    step_frame(reference, model, groups).to_parquet(folder / "steps.parquet", index=False)
    run_frame(reference, model, groups).to_csv(folder / "runs.csv", index=False)
    memory_frame(reference, model).to_csv(folder / "memory.csv", index=False)
    loading_frame(reference, model).to_csv(folder / "loading.csv", index=False)


def step_frame(reference: Path, model: PublishedModel, groups: tuple[str, ...] = GROUPS) -> pd.DataFrame:
    """Return the ten-second windows of undisturbed runs, and the profiled steps, as a step table."""
    runs = undisturbed_runs(reference, model, groups)
    windows = pd.read_parquet(reference / "step_windows.parquet")
    windows = windows[windows.run_idx.isin(runs.index)]
    parts = (_window_frame(windows, runs.loc[windows.run_idx], model), _profiled_frame(reference, model))
    return pd.concat(parts, ignore_index=True)


def _window_frame(windows: pd.DataFrame, runs: pd.DataFrame, model: PublishedModel) -> pd.DataFrame:
    """Return the windows as a step table; `runs` holds the run of each window."""
    step_ms = windows.step_ms.to_numpy(float)
    requests = windows.running_mean.to_numpy(float)
    prompt_tokens = windows.prefill_tokens_per_step.to_numpy(float)
    prefills = prompt_tokens / runs.submitted_mean_input_len.to_numpy(float)
    ranks = [[int(rank) for rank in text.split()] for text in runs.rank_list]
    mean_rank = np.array([np.mean(each) for each in ranks])
    return pd.DataFrame(
        {
            "run": windows.run_idx.astype(str).to_numpy(),
            "step_ms": step_ms,
            "steps": np.maximum(1.0, windows.window_s.to_numpy(float) * 1e3 / step_ms),
            "tokens": np.minimum(TOKEN_BUDGET, requests + prompt_tokens),
            "requests": requests,
            "kv_tokens": windows.kv_ktokens.to_numpy(float) * 1e3,
            "adapters": windows.unique_adapters_est.to_numpy(float),
            "a_max": windows.a_max.to_numpy(float),
            "s_max": windows.s_max.to_numpy(float),
            "waiting": windows.waiting_mean.to_numpy(float),
            "adapters_served": windows.n_adapters.to_numpy(float),
            "kv_capacity": runs.kv_cache_tokens.to_numpy(float),
            "token_budget": float(TOKEN_BUDGET),
            "in_flight_limit": float(CLIENT_MAX_IN_FLIGHT),
            "prefills": prefills,
            "prompt_std": LENGTHS[model.key][0].std_tokens,
            "lora_prefill_tokens": prompt_tokens,
            "max_rank": [float(max(each)) for each in ranks],
            "decode_rank_sum": requests * mean_rank,
            "prefill_rank_sum": prefills * mean_rank,
            "prefill_rank_tokens": prompt_tokens * mean_rank,
            "load_ms": None,
            "regime": "",
        }
    )


def _profiled_frame(reference: Path, model: PublishedModel) -> pd.DataFrame:
    """Return the steps profiled in closed loops with LoRA, medians of five or more.

    Each kind of closed loop is one run. The number of requests in prefill was not recorded.
    """
    table = pd.read_csv(reference / "profiling_step_latency.csv")
    known = table.batched_tokens.notna() & table.unique_adapters.notna()
    table = table[(table.model == model.key) & (table.n_steps >= _MIN_STEPS) & (table.a_max > 0) & known]
    tokens = table.batched_tokens.to_numpy(float)
    requests = np.maximum(1.0, table.decode_batch.fillna(0).to_numpy(float))
    decodes = np.minimum(tokens, requests)
    prefills = (tokens > decodes).astype(float)
    rank = table.adapter_rank.fillna(_PROFILED_RANK).to_numpy(float)
    return pd.DataFrame(
        {
            "run": table.source.to_numpy(),
            "step_ms": table.step_ms_median.to_numpy(float),
            "steps": 1.0,
            "tokens": tokens,
            "requests": requests,
            "kv_tokens": table.kv_tokens_in_use.fillna(0).to_numpy(float),
            "adapters": table.unique_adapters.to_numpy(float),
            "a_max": table.a_max.to_numpy(float),
            "s_max": table.s_max.to_numpy(float),
            "waiting": 0.0,
            "adapters_served": table.a_max.to_numpy(float),
            "kv_capacity": _NO_LIMIT,
            "token_budget": float(TOKEN_BUDGET),
            "in_flight_limit": _NO_LIMIT,
            "prefills": prefills,
            "prompt_std": 0.0,
            "lora_prefill_tokens": tokens - decodes,
            "max_rank": rank,
            "decode_rank_sum": rank * decodes,
            "prefill_rank_sum": rank * prefills,
            "prefill_rank_tokens": rank * (tokens - decodes),
            "load_ms": 0.0,
            "regime": PROFILED,
        }
    )


def run_frame(reference: Path, model: PublishedModel, groups: tuple[str, ...] = GROUPS) -> pd.DataFrame:
    """Return the finished runs as a table of runs.

    The mean ITL is blank if the client read tokens in bursts. The median TTFT is blank for runs with a queue,
    whose waiting time would dominate it. The KV tokens per request leave out the first two minutes.
    """
    rows = {int(row.run_idx): row for _, row in pd.read_csv(reference / "runs.csv").iterrows()}
    windows = pd.read_parquet(reference / "step_windows.parquet")
    totals = (
        windows[windows.t_since_start_s > _WARM_UP_S].groupby("run_idx")[["kv_ktokens", "running_mean"]].sum()
    )
    held = totals.kv_ktokens.astype(float) * 1e3 / totals.running_mean.astype(float)
    runs = published_runs(reference, model, groups)
    return pd.DataFrame([_run_row(run, rows[run.index], held.get(run.index)) for run in runs])


def _run_row(run: PublishedRun, row: pd.Series, kv_tokens_per_request: float | None) -> dict[str, object]:
    prompt, output = run.workload.prompt_tokens, run.workload.output_tokens
    return {
        "run": run.index,
        "adapters": len(run.workload.adapters),
        "ranks": row.rank_list,
        "rates_rps": row.rate_values,
        "rate_counts": row.rate_counts,
        "prompt_mean": prompt.mean,
        "prompt_std": prompt.std,
        "output_mean": output.mean,
        "output_std": output.std,
        **run.settings,
        "duration_s": 3600.0,
        "throughput_tok_s": run.throughput_tok_s,
        "itl_ms_mean": run.itl_ms_mean if run.itl_is_reliable else None,
        "ttft_s_p50": None if run.queued or run.starved else run.ttft_s_p50,
        "kv_tokens_per_request": kv_tokens_per_request,
    }


def memory_frame(reference: Path, model: PublishedModel) -> pd.DataFrame:
    """Return the KV sizes that vLLM printed at start-up."""
    table = pd.read_csv(reference / "profiling_memory.csv")
    table = table[(table.model == model.key) & table.source.str.startswith("v0.8.5")]
    table = table[table.kv_tokens_incl_crash_estimate > 0]
    return pd.DataFrame(
        {
            "a_max": table.a_max,
            "s_max": table.s_max.fillna(0).clip(lower=0),
            "kv_tokens": table.kv_tokens_incl_crash_estimate,
            "max_num_seqs": table.max_num_seqs.fillna(MAX_NUM_SEQS),
            "max_num_batched_tokens": TOKEN_BUDGET,
            "gpu_memory_utilization": UTILIZATION,
        }
    )


def loading_frame(reference: Path, model: PublishedModel) -> pd.DataFrame:
    """Return the adapter loads from host to GPU and from disk to host; each row is the mean of about 50."""
    table = pd.read_csv(reference / "profiling_loading.csv")
    table = table[(table.model == model.key) & table.source.str.startswith("predictor")]
    kinds = {"cpu_to_gpu_swap": "gpu", "disk_to_cpu": "disk"}
    table = table[table.kind.isin(list(kinds))]
    return pd.DataFrame(
        {
            "rank": table.adapter_rank,
            "s_max": table.s_max.fillna(table.adapter_rank),
            "ms": table.mean_ms,
            "kind": table.kind.map(kinds),
        }
    )
