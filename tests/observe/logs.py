"""Logs whose traffic is known, and small files in the layouts of published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from capplan.observe import Observation, observe

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
PROFILE = "h100-80g/llama-3.1-8b/vllm-0.15.1"
START = np.datetime64("2026-05-10T00:00:00", "us")


def observed(source: Path | str, **options: Any) -> Observation:
    return observe(source, **{"base_model": MODEL, "profile": PROFILE, **options})


def day_log(path: Path, requests: int, adapters: int = 50, seed: int = 0) -> None:
    """Write an access log of a day: nights, a burst, popular adapters, and some failures."""
    import pyarrow as pa
    import pyarrow.csv

    rng = np.random.default_rng(seed)
    minutes = np.arange(1440)
    rate = 1.0 + 0.6 * np.sin(2 * np.pi * (minutes / 1440 - 0.3))
    rate[840:846] *= 2.2
    counts = rng.poisson(rate / rate.sum() * requests)
    at_s = np.sort(np.repeat(minutes, counts) * 60.0 + rng.random(counts.sum()) * 60.0)
    places = 1.0 / np.arange(1, adapters + 1)
    adapter = rng.choice(adapters, len(at_s), p=places / places.sum())
    long = rng.standard_normal(len(at_s))
    other = 0.4 * long + np.sqrt(1 - 0.16) * rng.standard_normal(len(at_s))
    prompts = np.clip(np.exp(5.8 + 0.9 * long), 1, 16_000).astype(int) * np.where(adapter == 2, 3, 1)
    outputs = np.clip(np.exp(4.9 + 0.8 * other), 1, 4_000).astype(int)
    table = pa.table(
        {
            "time": np.datetime_as_string(START + (at_s * 1e6).astype("timedelta64[us]"), timezone="UTC"),
            "path": np.full(len(at_s), "/v1/chat/completions"),
            "model": np.char.add("lora-", adapter.astype(str)),
            "prompt_tokens": prompts,
            "completion_tokens": outputs,
            "status": np.where(rng.random(len(at_s)) < 0.01, 500, 200),
        }
    )
    pyarrow.csv.write_csv(table, path)
