"""Batch runs of vLLM without adapters on an H100 64 GB (``memory_gap_h100.csv``): all requests at once.

Source: github.com/FerranAgulloLopez/vLLMBatchingMemoryGap, commit a918634, Apache-2.0. The group ``advisor``
has one length of prompts and outputs per run; other groups have recorded ones, which the table lacks. OPT
models have no gated MLP and are not modelled. The table names no engine version; it dates from
February 2025.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import pandas as pd

from benchmarks.measured.case import Deployment
from benchmarks.measured.replay import Engine, latencies, requests_of, scenario_of
from capplan import Profile
from capplan.twin.instance import run

FILE: Final = "memory_gap_h100.csv"
_PATH: Final = re.compile(r"advisor/output_length/_(?P<output>\d+)/(?P<model>[^/]+)/_(?P<batch>\d+)__\d+")
_MODELS: Final = MappingProxyType(
    {"llama-2-7b": "meta-llama/Llama-2-7b-hf", "llama-2-13b": "meta-llama/Llama-2-13b-hf"}
)
_MOST_REQUESTS: Final = 600
"""Requests of a simulation; steady state sets throughput and ITL long before."""


@dataclass(frozen=True)
class BatchRun:
    """One row."""

    name: str
    deployment: Deployment
    max_num_seqs: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    measured: Mapping[str, float]

    def predict(self, profile: Profile) -> Mapping[str, float]:
        """Return simulated throughput and ITL."""
        count = min(self.requests, max(_MOST_REQUESTS, 4 * self.max_num_seqs))
        requests = requests_of(
            np.zeros(count), np.full(count, self.prompt_tokens), np.full(count, self.output_tokens)
        )
        engine = Engine(max_num_seqs=self.max_num_seqs, max_num_batched_tokens=2048, max_model_len=4096)
        scenario = scenario_of(profile, engine, requests)
        trace = run(scenario)
        found = latencies(scenario, trace)
        return {
            "output_tok_s": count * self.output_tokens / (float(trace.finish_ns.max()) / 1e9),
            "itl_ms": found.itl_ms_mean,
        }


def read(folder: Path) -> list[BatchRun]:
    """Return the runs of Llama models with one length of prompts and outputs."""
    table = pd.read_csv(folder / FILE)
    found = ((_PATH.fullmatch(str(row["path"])), row) for row in table.to_dict("records"))
    return [
        _run(parts["model"], int(parts["batch"]), row)
        for parts, row in found
        if parts is not None and parts["model"] in _MODELS
    ]


def _run(model: str, batch: int, row: Mapping[str, object]) -> BatchRun:
    completed, prompts, outputs = (
        int(str(row[name])) for name in ("completed", "total_input_tokens", "total_output_tokens")
    )
    return BatchRun(
        name=f"{prompts // completed} + {outputs // completed}, batch {batch}",
        deployment=Deployment("h100-64g", _MODELS[model], 1, "", "float16"),
        max_num_seqs=batch,
        requests=completed,
        prompt_tokens=prompts // completed,
        output_tokens=outputs // completed,
        measured={
            "output_tok_s": float(str(row["output_throughput"])),
            "itl_ms": float(str(row["mean_itl_ms"])),
        },
    )
