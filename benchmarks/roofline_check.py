"""Analytic profiles against predictions and measurements of others.

    python -m benchmarks.roofline_check REFERENCE

REFERENCE is the folder of other tools' predictions for Llama-3.1-8B (``cross_checks``). SMAPE is
``100 * mean(|p - a| / (|p| + |a|))``, bias the mean of p/a - 1.

The tables are of the bare model; so is the profile. An in-flight batch of c requests of n input and m output
tokens is assumed to compute c * (1 + n/m) tokens per step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from benchmarks.common import command_line, records_table
from capplan import Profile, load_profile
from capplan.datasets import gpu_sheet, model_arch
from capplan.models import (
    Assumptions,
    Efficiencies,
    EngineChoice,
    StepFeatures,
    coefficient_array,
    gpu_load_ms,
    kv_budget,
    latency_code,
    roofline_profile,
    step_ms,
)
from capplan.models.calibration import smape
from capplan.spec import EngineLimits

INPUT_TOKENS, OUTPUT_TOKENS = 250, 230
BARE = EngineChoice(lora=False)
SHEETS = {"h100_sxm": "h100-80g", "H100": "h100-80g", "h200_sxm": "h200"}
SHIPPED = ("h100-64g/llama-3.1-8b/vllm-0.8.5", "h100-64g/qwen2.5-7b/vllm-0.8.5")
GRID = {"requests": (8, 32, 128, 256), "context": (100, 400), "adapters": (8, 32, 128), "prompts": (0, 500)}


class Comparison(NamedTuple):
    """Predictions p beside reference values a."""

    table: str
    what: str
    p: list[float]
    a: list[float]

    def row(self) -> dict[str, object]:
        bias = 100.0 * float(np.mean(np.array(self.p) / np.array(self.a) - 1.0))
        return {
            "compared with": self.table,
            "what": self.what,
            "rows": len(self.a),
            "SMAPE": f"{smape(self.p, self.a):.1f} %",
            "bias": f"{bias:+.1f} %",
        }


def milliseconds(
    profile: Profile, tokens: float, requests: float, kv_tokens: float, adapters: int = 0, s_max: int = 8
) -> float:
    """Return the time of a step, with a slot per adapter."""
    features = StepFeatures(
        tokens=float(tokens),
        requests=float(requests),
        kv_tokens=float(kv_tokens),
        adapters=float(adapters),
        a_max=float(adapters),
        s_max=float(s_max),
        waiting=0.0,
        slots_per_adapter=1.0,
        adapters_served=float(adapters),
    )
    model = profile.step_latency
    return float(step_ms(latency_code(model.form, profile.engine.kernel), coefficient_array(model), features))


def decode_ms(profile: Profile, batch: int) -> float:
    return milliseconds(profile, batch, batch, batch * (INPUT_TOKENS + OUTPUT_TOKENS / 2))


def prefill_ms(profile: Profile, batch: int) -> float:
    return milliseconds(profile, batch * INPUT_TOKENS, batch * INPUT_TOKENS, 0.0)


def in_flight_ms(profile: Profile, batch: int) -> float:
    tokens = batch * (1.0 + INPUT_TOKENS / OUTPUT_TOKENS)
    return milliseconds(profile, tokens, tokens, batch * (INPUT_TOKENS + OUTPUT_TOKENS / 2))


def others(folder: Path) -> Iterator[Comparison]:
    aic = pd.read_csv(folder / "aic_llama8b.csv")
    for (system, mode), rows in aic.groupby(["system", "database_mode"]):
        profile = _bare(str(system))
        name = f"aic {system} {mode}"
        batches = rows["batch"].to_list()
        for what, ours, column in (
            ("decode step", decode_ms, "decode_step_ms_mean"),
            ("prefill step", prefill_ms, "prefill_batch_ms"),
            ("ITL in flight", in_flight_ms, "agg_tpot_ms"),
        ):
            yield Comparison(name, what, [ours(profile, b) for b in batches], rows[column].to_list())
    for tool, column in (("ais", "itl_ms"), ("blis", "itl_mean_ms")):
        frame = pd.read_csv(folder / f"{tool}_llama8b.csv")
        for hardware, rows in frame.groupby("hardware"):
            ours = [in_flight_ms(_bare(str(hardware)), c) for c in rows["concurrency"]]
            yield Comparison(f"{tool} {hardware}", "ITL in flight", ours, rows[column].to_list())


def _bare(hardware: str) -> Profile:
    return roofline_profile(gpu_sheet(SHEETS[hardware]), model_arch("llama-3.1-8b"), BARE)


def measured() -> Iterator[Comparison]:
    for name in SHIPPED:
        shipped = load_profile(name)
        arch = model_arch(shipped.model.name)
        for host_ms, prompts in itertools.product((0.0, 3.0), GRID["prompts"]):
            analytic = _with_host(arch.name, host_ms)
            batches = [
                (requests + prompts, requests, requests * context, adapters, 16)
                for requests in GRID["requests"]
                for context in GRID["context"]
                for adapters in GRID["adapters"]
                if adapters <= requests
            ]
            ours, theirs = ([milliseconds(p, *batch) for batch in batches] for p in (analytic, shipped))
            what = f"step with {prompts} prompt tokens, {host_ms:g} ms of the host"
            yield Comparison(name, what, ours, theirs)


def sizes_and_loads() -> Iterator[Comparison]:
    for name in SHIPPED:
        shipped = load_profile(name)
        analytic = _with_host(shipped.model.name, 0.0)
        slots = [(a_max, s_max) for a_max in (8, 64, 192) for s_max in (8, 16, 32)]
        ours, theirs = (
            [float(kv_budget(profile, 0.9).tokens(EngineLimits(*slot, 256, 2048))) for slot in slots]
            for profile in (analytic, shipped)
        )
        fits = [at for at, tokens in enumerate(theirs) if tokens > 0.0]
        yield Comparison(name, "KV tokens", [ours[at] for at in fits], [theirs[at] for at in fits])
        ranks = (8, 16, 32)
        loads = [[gpu_load_ms(p.loading, rank, rank) for rank in ranks] for p in (analytic, shipped)]
        yield Comparison(name, "adapter into a slot", *loads)


def _with_host(model: str, host_ms: float) -> Profile:
    assumptions = Assumptions(physics=Efficiencies(step_ms=host_ms))
    engine = EngineChoice(version="0.8.5")
    return roofline_profile(gpu_sheet("h100-64g"), model_arch(model), engine, assumptions=assumptions)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("reference", type=Path, help="folder with aic_llama8b.csv and the others")
    folder = parser.parse_args().reference
    print(records_table(each.row() for each in (*others(folder), *measured(), *sizes_and_loads())))


if __name__ == "__main__":
    main()
