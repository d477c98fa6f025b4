"""TTFT of cold requests with and without assistance, and cores: ``python -m benchmarks.assisted_loading``.

The reference engine on this machine's CPU, alone, serves one request at a time. Its copies are held to a
bandwidth; the bandwidths are those at which the copy of an adapter takes a half, once and twice the time of a
prompt. The copies stand in for those over a GPU's link, all else is real. TTFT is a median. The twin
predicts it from parts that are measured apart: TTFT with all adapters loaded, the load at the bandwidth, and
the cores' times.

``--device cuda`` serves on a GPU, over its own link. ``--part cores`` compares the product of a prompt of 256
tokens with A and B of q, k and v on 1, 2, 4, ... cores with PyTorch's threads (Toppings, Fig. 17).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from statistics import median
from typing import Any, Final

import numpy as np
import torch

from benchmarks.common import command_line, records_table
from capplan import Adapter, Lengths, Profile, Workload, simulate
from capplan.engine import Engine, ModelConfig, bound_to, cpu_model, other_cpus
from capplan.engine.assist import BoardShape, CoreTimes, Crew, Task, crew_cpus, start_crew
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


def engine(loading: str, gb_per_s: float | None, cpus: Sequence[int], device: str) -> Engine:
    return Engine(
        MODEL,
        {f"a{i}": RANK for i in range(ADAPTERS)},
        device=device,
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


def measure(repeats: int, device: str) -> list[Mapping[str, str]]:
    cpus = crew_cpus(None)
    own = other_cpus(cpus)
    torch.set_num_threads(max(1, len(own)))
    with bound_to(own):
        with engine("cached", None, cpus, device) as warm:
            warm_ms = median(ttft_ms(warm, repeats))
            size_bytes = warm.core.lora.bytes(1)
        rows = []
        for share in COPY_OVER_PROMPT if device == "cpu" else (None,):
            gb_per_s = None if share is None else size_bytes / (share * warm_ms) / 1e6
            found: dict[str, float] = {}
            for loading in ("on-demand", "assisted"):
                with engine(loading, gb_per_s, cpus, device) as served:
                    served.core.loader.bind(cpus or own)
                    found[loading] = median(ttft_ms(served, repeats))
                    if loading == "assisted":
                        runner: Any = served.worker.runner
                        times = runner.assistance.times
            load_ms = size_bytes / times.copy_gb_per_s / 1e6
            profile = profile_of(warm_ms, load_ms, times, sites=4)
            row = {"copy": f"{load_ms:.1f} ms ({times.copy_gb_per_s:.2f} GB/s)"}
            row["all loaded, ms"] = f"{warm_ms:.1f}"
            for loading, measured in found.items():
                predicted = predicted_ms(profile, loading)
                row[f"{loading}, ms"] = f"{measured:.1f}"
                row[f"{loading}, twin"] = f"{predicted:.1f} ({predicted / measured - 1.0:+.0%})"
            rows.append(row)
    print(f"{cpu_model()}, {len(cpus)} core(s) beside the engine's, {repeats} requests each; {times}\n")
    return rows


def scaling(repeats: int) -> list[Mapping[str, str]]:
    """Return the time of the products of a prompt by cores and by as many threads of PyTorch."""
    hidden, tokens, rank = 4096, 256, 64
    cpus, rows = crew_cpus(None), []
    x, a, b = torch.rand(tokens, hidden), torch.rand(3, rank, hidden), torch.rand(3, rank, hidden)
    for count in [1 << i for i in range(5) if 1 << i <= len(cpus)]:
        shape = BoardShape(count, 3 * tokens, tokens, hidden, 3 * hidden, 4)
        sizes = (1, 6 * rank * hidden, torch.float32)
        with bound_to(other_cpus(cpus)), closing(start_crew(shape, cpus[:count], *sizes)) as crew:
            tasks = projections(count, tokens, hidden, rank)
            with crew.working() as cores:

                def by_cores(crew: Crew = crew, tasks: list[Task] = tasks, cores: list[int] = cores) -> None:
                    crew.board.x(tokens, hidden).copy_(x)
                    crew.finish(crew.post(tasks), cores)

                cores_ms = timed_ms(by_cores, repeats)
        torch.set_num_threads(count)
        threads_ms = timed_ms(lambda: [(x @ a[m].t()) @ b[m] for m in range(3)], repeats)
        times = {"cores, ms": f"{cores_ms:.2f}", "PyTorch's threads, ms": f"{threads_ms:.2f}"}
        rows.append({"cores": str(count), **times, "ratio": f"{threads_ms / cores_ms:.2f}"})
    return rows


def projections(cores: int, tokens: int, hidden: int, rank: int) -> list[Task]:
    """Return the tasks of q, k and v, so that each core has as many tokens."""
    size = -(-3 * tokens // cores)
    slices = [(m, at) for m in range(3) for at in range(0, tokens, size)]
    return [
        Task(i % cores, at, min(size, tokens - at), hidden, 0, rank * hidden, rank, hidden, m * hidden)
        for i, (m, at) in enumerate(slices)
    ]


def timed_ms(run: Callable[[], object], repeats: int) -> float:
    run()
    times_ms = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        run()
        times_ms.append(1e3 * (time.perf_counter() - began_s))
    return median(times_ms)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--part", choices=("ttft", "cores"), nargs="+", default=("ttft", "cores"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=30)
    chosen = parser.parse_args()
    if "ttft" in chosen.part:
        print(records_table(measure(chosen.repeats, chosen.device)))
    if "cores" in chosen.part:
        print(records_table(scaling(chosen.repeats)))


if __name__ == "__main__":
    main()
