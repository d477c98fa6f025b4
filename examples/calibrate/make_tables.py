"""Simulated measurements as input tables of `capplan calibrate`.

`python examples/calibrate/make_tables.py DIR` simulates a known profile and writes steps.csv, runs.csv and
truth.json into DIR. Real steps come from an engine's log: means over about ten seconds each.
"""

import itertools
import json
import sys
from pathlib import Path

import pandas as pd

from capplan import Adapter, Lengths, Profile, Workload, simulate
from capplan.datasets import read_arch
from capplan.models.calibration import Hardware, assumed_profile
from capplan.spec import Coefficient

MODEL = "example/3b"
TRUTH = {
    "base_ms": 9.0,
    "ms_per_ktoken": 22.0,
    "ms_per_kv_ktoken": 0.03,
    "ms_per_slot_ktoken": 0.06,
    "ms_per_slot_rank16": 0.03,
    "ms_per_adapter": 0.25,
    "ms_per_waiting_krequest": 0.3,
}


def true_profile() -> Profile:
    arch = read_arch(Path(__file__).parent / "config.json", MODEL)
    profile = assumed_profile(arch, Hardware(gpu="Example 24GB", gpu_memory_bytes=24 * 2**30))
    known = {name: Coefficient(value=value) for name, value in TRUTH.items()}
    step = profile.step_latency
    return profile.replace(step_latency=step.replace(coefficients=step.coefficients | known))


def main(folder: Path) -> None:
    profile = true_profile()
    slots = [(8, 8, 16), (32, 8, 16), (32, 32, 16), (96, 32, 32), (96, 96, 16), (64, 16, 32)]
    lengths = [(60.0, 250.0), (250.0, 200.0), (900.0, 60.0)]
    loads_rps = [0.5, 2.0, 8.0, 20.0]
    steps, runs = [], []
    for number, setting in enumerate(itertools.product(slots, lengths, loads_rps)):
        (adapters, a_max, s_max), (prompt, output), load_rps = setting
        rate_rps = load_rps / adapters
        workload = Workload(
            base_model=MODEL,
            adapters=[Adapter(name=f"a{i}", rank=s_max, rate_rps=rate_rps) for i in range(adapters)],
            prompt_tokens=Lengths(mean=prompt, std=prompt),
            output_tokens=Lengths(mean=output, std=output),
        )
        result = simulate(workload, profile, duration_s=600.0, seed=number, a_max=a_max, s_max=s_max)
        tokens = (result.input_tok_s + result.output_tok_s) * result.duration_s / result.steps
        steps.append(
            {
                "run": number,
                "steps": result.steps,
                "step_ms": round(result.busy_fraction * result.duration_s * 1e3 / result.steps, 4),
                "tokens": round(tokens, 3),
                "requests": round(result.running_mean, 3),
                "kv_tokens": round(result.kv_tokens_mean),
                "adapters": round(result.adapters_mean, 3),
                "a_max": a_max,
                "s_max": s_max,
                "waiting": round(result.waiting_mean, 2),
                "adapters_served": adapters,
                "load_ms": round(result.load_s * 1e3 / result.steps, 4),
                "kv_capacity": result.kv_tokens,
            }
        )
        runs.append(
            {
                "run": number,
                "adapters": adapters,
                "ranks": s_max,
                "rates_rps": rate_rps,
                "prompt_mean": prompt,
                "prompt_std": prompt,
                "output_mean": output,
                "output_std": output,
                "a_max": a_max,
                "s_max": s_max,
                "duration_s": 600,
                "throughput_tok_s": round(result.throughput_tok_s, 1),
                "itl_ms_mean": round(result.itl_ms_mean, 3),
                "ttft_s_p50": round(result.ttft_s_p50, 4) if result.waiting_mean < 1 else None,
            }
        )
    pd.DataFrame(steps).to_csv(folder / "steps.csv", index=False)
    pd.DataFrame(runs[::3]).to_csv(folder / "runs.csv", index=False)
    (folder / "truth.json").write_text(json.dumps(profile.model_dump(mode="json"), indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
