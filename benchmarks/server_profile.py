"""From a server measured from outside to predictions: ``python -m benchmarks.server_profile`` prints a table.

A toy server of known step times (a base, and a time per token) runs in a child process. `capplan profile
server` measures it, `capplan calibrate` fits a profile, and the twin predicts loads not in the profile, with
the same arrivals and lengths that the load generator then sends. It takes about four minutes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.common import command_line, equal_adapters, records_table
from benchmarks.stand_in_servers import running
from capplan import Lengths, Profile, Workload, simulate
from capplan.models.calibration import Hardware, assumed_profile, smape
from capplan.profiling import MeasurementFolder
from capplan.profiling import _tables as files
from capplan.profiling.load import BenchOptions, BenchResult, LoadSettings, Target, bench
from capplan.profiling.server import EngineSetting, ServerProfilingOptions, profile_server
from capplan.spec import EngineConfig, ModelArch
from capplan.twin.calibration import CalibrationOptions, CalibrationResult, CalibrationTables, calibrate

SERVER = {"base_ms": 15.0, "ms_per_token": 0.3, "load_ms": 12.0, "slots": 4}
ADAPTERS = 6
A_MAX, S_MAX, SEQS, BUDGET, LONGEST = 4, 8, 32, 512, 512
LENGTHS = (Lengths(mean=80, std=40), Lengths(mean=40, std=20))
ARCH = ModelArch(
    name="toy",
    hf_ids=("toy",),
    layers=2,
    hidden_size=64,
    heads=2,
    kv_heads=2,
    head_dim=32,
    intermediate_size=128,
    vocab_size=1000,
)


def measured(url: str, folder: Path, budget_s: float) -> CalibrationResult:
    ranks = {f"a{i}": S_MAX for i in range(ADAPTERS)}
    options = ServerProfilingOptions(
        budget_s=budget_s, point_s=4.0, max_streams=16, prompt_tokens=80, output_tokens=40
    )
    setting = EngineSetting(A_MAX, S_MAX, EngineConfig(max_num_seqs=SEQS, max_num_batched_tokens=BUDGET))
    profile_server(Target(url, base_model="base"), ranks, setting, MeasurementFolder(folder), options)
    hardware = Hardware("toy", 16 * 2**30, engine_version="0.32.0", rules="vllm-0.32-sync")
    tables = {name: str(folder / file) for name, file in (("steps", files.STEPS), ("runs", files.RUNS))}
    return calibrate(
        assumed_profile(ARCH, hardware), CalibrationTables(**tables), CalibrationOptions(workers=1)
    )


def workload(rate_rps: float) -> Workload:
    prompt, output = LENGTHS
    return Workload(
        base_model="toy",
        adapters=equal_adapters(A_MAX, S_MAX, rate_rps),
        prompt_tokens=prompt,
        output_tokens=output,
        length_correlation=0.0,
    )


def row(url: str, profile: Profile, rate_rps: float, duration_s: float) -> dict[str, str]:
    load = workload(rate_rps)
    settings = LoadSettings(duration_s=duration_s, drain_s=1.0)
    found: BenchResult = bench(load, Target(url), settings, BenchOptions(seed=5, max_model_len=LONGEST))
    predicted = simulate(
        load,
        profile,
        a_max=A_MAX,
        s_max=S_MAX,
        duration_s=duration_s,
        seed=5,
        max_num_seqs=SEQS,
        max_num_batched_tokens=BUDGET,
        max_model_len=LONGEST,
    )
    overall = found.overall
    pairs = {
        "tok/s": (overall.throughput_tok_s, predicted.throughput_tok_s),
        "ITL, ms": (overall.itl_ms.mean or 0.0, predicted.itl_ms_mean),
        "TTFT p50, ms": (1e3 * (overall.ttft_s.p50 or 0.0), 1e3 * predicted.ttft_s_p50),
    }
    return {
        "requests/s": f"{rate_rps:g}",
        **{name: f"{a:.1f} / {p:.1f} ({smape([p], [a]):.1f} %)" for name, (a, p) in pairs.items()},
        "client lag p50, ms": f"{found.client.lag_ms.p50:.1f}",
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--budget-s", type=float, default=100.0)
    parser.add_argument("--duration", dest="duration_s", type=float, default=40.0)
    parser.add_argument("--rates-rps", type=float, nargs="+", default=[1.0, 4.0, 8.0])
    given = parser.parse_args()
    names = ["base", *(f"a{i}" for i in range(ADAPTERS))]
    with running("toy", **SERVER, names=names) as url, tempfile.TemporaryDirectory() as folder:
        made = measured(url, Path(folder), given.budget_s)
        rows = [row(url, made.profile, rate, given.duration_s) for rate in given.rates_rps]
    assert made.steps is not None
    score = made.steps.score
    print(f"step model: {score.label}, SMAPE {score.held_out_error:.2f} % on left-out points\n")
    print(records_table(rows))
    print("\nmeasured / predicted (SMAPE)")


if __name__ == "__main__":
    main()
