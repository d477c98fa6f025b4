"""TTFT of cold requests with and without assistance: ``python -m benchmarks.assisted_loading``.

The reference engine on this machine's CPU, alone, serves one request at a time. Its copies are held to a
bandwidth; the bandwidths are those at which the copy of an adapter takes a half, once and twice the time of a
prompt. The copies stand in for those over a GPU's link, all else is real. TTFT is a median. The twin
predicts it from parts that are measured apart: TTFT with all adapters loaded, the load at the bandwidth, and
the cores' times.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.common import command_line, records_table
from capplan import Adapter, Lengths, Profile, Workload, simulate
from capplan.engine import Engine, ModelConfig, bound_to, cpu_model, other_cpus
from capplan.engine.assist import CoreTimes, crew_cpus
from capplan.models import ADDITIVE
from capplan.models._memory import LOADING_FORM, MEMORY_FORM, assumed_model
from capplan.spec import Cache, CpuLora, Gpu, ProfileEngine, Provenance, ProvenanceKind

MODEL: Final = ModelConfig(
    name="assisted-loading",
    layers=16,
    hidden_size=512,
    heads=8,
    kv_heads=8,
    head_dim=64,
    intermediate_size=1408,
    vocab_size=1000,
    max_positions=1024,
)
RANK: Final = 32
PROMPT_TOKENS: Final = 128
ADAPTERS: Final = 6
COPY_OVER_PROMPT: Final = (0.5, 1.0, 2.0)
PROVENANCE: Final = Provenance(
    kind=ProvenanceKind.MEASURED, source="this machine", command="python -m benchmarks.assisted_loading"
)


def engine(loading: str, gb_per_s: float | None, cpus: Sequence[int]) -> Engine:
    return Engine(
        MODEL,
        {f"a{i}": RANK for i in range(ADAPTERS)},
        scheduler="fifo",
        cache=cache(loading),
        copy_gb_per_s=gb_per_s,
        beside_cpus=cpus,
        num_kv_blocks=1200,
        max_model_len=256,
        max_num_batched_tokens=512,
        max_num_seqs=8,
    )


def cache(loading: str) -> Cache:
    ahead = {} if loading == "cached" else {"prefetch": "none"}
    return Cache.model_validate({"policy": "none", "loading": loading} | ahead)


def ttft_ms(served: Engine, repeats: int) -> list[float]:
    """Return TTFT of requests one after the other, each of another adapter than the one before."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(repeats + ADAPTERS):
        prompt = rng.integers(0, MODEL.vocab_size, PROMPT_TOKENS).tolist()
        (answer,) = served.generate([prompt], [f"a{number % ADAPTERS}"], max_tokens=2, ignore_eos=True)
        found.append(1e3 * answer.timing.ttft_s)
        time.sleep(0.02)
    return found[ADAPTERS:]


def predicted_ms(profile: Profile, loading: str) -> float:
    load = Workload(
        base_model=MODEL.name,
        adapters=tuple(Adapter(name=f"a{i}", rank=RANK, rate_rps=1e-3) for i in range(ADAPTERS)),
        prompt_tokens=Lengths(mean=PROMPT_TOKENS),
        output_tokens=Lengths(mean=2),
    )
    result = simulate(load, profile, a_max=1, scheduler="fifo", cache=cache(loading), max_model_len=256)
    return 1e3 * result.ttft_s_p50


def profile_of(warm_ms: float, load_ms: float, times: CoreTimes, sites: int) -> Profile:
    """Return a profile of the engine: steps take as long as the prompt, loads what the bandwidth gives."""
    steps = dict.fromkeys(ADDITIVE.coefficients, 0.0) | {"base_ms": warm_ms}
    loading = {"gpu_base_ms": load_ms, "serving_factor": 1.0}
    zeros = ("gpu_ms_per_rank", "gpu_padding_ms", "disk_base_ms", "disk_ms_per_rank")
    memory = {"slot_factor": 1.0, "slot_overhead_bytes": 0.0, "bytes_per_seq": 0.0, "seqs_in_reserve": 0.0}
    return Profile(
        name="assisted-loading",
        gpu=Gpu(name=cpu_model(), memory_bytes=2**34),
        model=MODEL.arch(4).replace(hf_ids=(MODEL.name,)),
        engine=ProfileEngine(name="capplan", version="0", rules="chameleon"),
        step_latency=assumed_model(ADDITIVE.name, steps),
        memory=assumed_model(MEMORY_FORM, {**memory, "reserved_bytes": 0.0}),
        loading=assumed_model(LOADING_FORM, dict.fromkeys(zeros, 0.0) | loading),
        host=assumed_model("per-request", {"request_ms": 0.0, "client_itl_factor": 1.0}),
        cpu_lora=CpuLora(
            workers=times.cores,
            tokens_per_task=times.tokens_per_task,
            task_base_ms=times.task_base_ms,
            ms_per_mmac=times.ms_per_mmac,
            signal_ms=times.signal_ms * sites,
            provenance=PROVENANCE,
        ),
        provenance=PROVENANCE,
    )


def measure(repeats: int) -> list[Mapping[str, str]]:
    import torch

    cpus = crew_cpus(None)
    own = other_cpus(cpus)
    torch.set_num_threads(max(1, len(own)))
    with bound_to(own):
        with engine("cached", None, cpus) as warm:
            warm_ms = median(ttft_ms(warm, repeats))
            size_bytes = warm.core.lora.bytes(1)
        rows = []
        for share in COPY_OVER_PROMPT:
            load_ms = share * warm_ms
            gb_per_s = size_bytes / load_ms / 1e6
            found: dict[str, float] = {}
            for loading in ("on-demand", "assisted"):
                with engine(loading, gb_per_s, cpus) as served:
                    served.core.loader.bind(cpus or own)
                    found[loading] = median(ttft_ms(served, repeats))
                    if loading == "assisted":
                        runner: Any = served.worker.runner
                        times = runner.assistance.times
            profile = profile_of(warm_ms, load_ms, times, sites=4)
            row = {"copy": f"{load_ms:.1f} ms ({gb_per_s:.2f} GB/s)", "all loaded, ms": f"{warm_ms:.1f}"}
            for loading, measured in found.items():
                predicted = predicted_ms(profile, loading)
                row[f"{loading}, ms"] = f"{measured:.1f}"
                row[f"{loading}, twin"] = f"{predicted:.1f} ({predicted / measured - 1.0:+.0%})"
            rows.append(row)
    print(f"{cpu_model()}, {len(cpus)} core(s) beside the engine's, {repeats} requests each; {times}\n")
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    print(records_table(measure(parser.parse_args().repeats)))


if __name__ == "__main__":
    main()
