"""Step tables of a known step model, computed by the step-latency functions of the twin."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from capplan.models import (
    ADDITIVE,
    StepFeatures,
    StepRanks,
    coefficient_array,
    latency_code,
    rank_ms,
    step_ms,
)
from capplan.spec import Kernel
from tests.twin.examples import part

_KNOWN = {
    "base_ms": 12.0,
    "ms_per_ktoken": 30.0,
    "ms_per_kv_ktoken": 0.06,
    "ms_per_slot": 0.01,
    "ms_per_slot_rank16": 0.03,
    "ms_per_adapter": 0.3,
    "ms_per_adapter_queued": 0.05,
    "ms_per_waiting_krequest": 0.4,
    "ms_per_ktoken_beyond_graphs": 5.0,
    "ms_per_decode_krank": 0.7,
    "ms_per_prefill_krank": 0.3,
    "ms_per_request": 0.02,
    "ms_for_several": 1.5,
    "ms_per_prefill": 0.9,
    "ms_per_prefill_mpair": 60.0,
}
ADDITIVE_TRUTH = {name: _KNOWN.get(name, 0.08) for name in ADDITIVE.names if "cache" not in name}
DIGITAL_TWIN_TRUTH = {
    "k1": 0.004,
    "k2": 0.0006,
    "k3": -0.0003,
    "k4": 0.05,
    "k5": 9.0,
    "k6": 0.02,
    "k7": 1.0,
    "k7_base": 0.9,
}
TOPPINGS_TRUTH = {"decode_alpha": 0.004, "decode_beta": 25.0, "prefill_alpha": 0.3, "prefill_beta": 40.0}


def steps_of(
    form: str,
    truth: Mapping[str, float],
    *,
    kernel: Kernel = Kernel.VLLM,
    rows: int = 400,
    runs: int = 20,
    noise: float = 0.0,
    seed: int = 0,
) -> pd.DataFrame:
    """Return a table of single steps, every column known; `noise` is the scatter of log(step_ms)."""
    rng = np.random.default_rng(seed)
    requests = np.where(rng.random(rows) < 0.1, 1, rng.integers(1, 400, rows))
    prefills = np.where(rng.random(rows) < 0.4, rng.integers(1, 5, rows), 0)
    prefills = np.minimum(prefills, requests)
    decodes = requests - prefills
    prompt_tokens = prefills * rng.integers(20, 300, rows)
    a_max = rng.choice([8, 16, 32, 64], rows)
    adapters = np.minimum(np.minimum(a_max, requests), rng.integers(0, 65, rows))
    lora = adapters > 0
    decode_rank, prefill_rank = rng.choice([8, 12, 16], rows), rng.choice([8, 12, 16], rows)
    frame = pd.DataFrame(
        {
            "run": np.sort(rng.integers(0, runs, rows)),
            "tokens": decodes + prompt_tokens,
            "requests": requests,
            "kv_tokens": requests * rng.integers(100, 900, rows),
            "adapters": adapters,
            "a_max": a_max,
            "s_max": rng.choice([16, 32, 64], rows),
            "waiting": np.where(rng.random(rows) < 0.5, 0, rng.integers(1, 5000, rows)),
            "adapters_served": np.maximum(a_max, rng.integers(8, 200, rows)),
            "load_ms": np.where(rng.random(rows) < 0.2, rng.random(rows) * 10, 0.0),
            "decodes": decodes,
            "prefills": prefills,
            "lora_decodes": decodes * lora,
            "lora_prefills": prefills * lora,
            "lora_prefill_tokens": prompt_tokens * lora,
            "max_rank": 16 * lora,
            "decode_rank_sum": decodes * lora * decode_rank,
            "prefill_rank_sum": prefills * lora * prefill_rank,
            "prefill_rank_tokens": prompt_tokens * lora * prefill_rank,
            "prefill_mpairs": prompt_tokens * (prompt_tokens / np.maximum(prefills, 1) + 1) / 2e6,
        }
    )
    exact = milliseconds(frame, form, truth, kernel)
    frame.insert(0, "step_ms", exact * np.exp(noise * rng.standard_normal(rows)))
    return frame


def milliseconds(
    frame: pd.DataFrame, form: str, truth: Mapping[str, float], kernel: Kernel = Kernel.VLLM
) -> np.ndarray:
    """Return what the twin would charge for each row; a load takes 1.5 times as long as on an idle engine."""
    k, code = coefficient_array(part(form, **truth)), latency_code(form, kernel)
    answers = []
    for row in frame.to_dict("records"):
        share = min(1.0, row["a_max"] / row["adapters_served"])
        known = {name: float(row[name]) for name in StepFeatures._fields if name in row}
        step = StepFeatures(slots_per_adapter=share, **known)
        ranks = StepRanks(**{name: float(row[name]) for name in StepRanks._fields if name in row})
        loads = 1.5 * row["load_ms"]
        answers.append(step_ms(code, k, step) + rank_ms(code, k, step.s_max, ranks) + loads)
    return np.array(answers)
