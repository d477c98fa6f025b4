"""Toppings' engine: Llama-2-7B on an A100, LightLLM with LoRA kernels, by the numbers that the paper prints.

- Prefill: 44 ms for 256 tokens and 90 ms for 1,024 (Fig. 4): 29 ms and 0.06 ms per token.
- Decode: an iteration is a step of as many tokens as requests, plus LoRA. For BGMV the two points of Fig. 6
  (34.8 ms for 24 requests of rank 32, 35.8 ms for 16 of rank 64) leave the same slope, 5.69 ms per 1000 units
  of requests x rank. For MBGMV (35.3 and 35.9 ms) they leave a slope and a constant of several requests.
  What the requests' contexts add is part of these points.
- Adapter kernels in prefill: rank 128 takes 1.29 times as long as rank 8, at 2,000 tokens (the LoRAServe
  authors' sweeps of the same kernel).
- Copies: `COPY_MS` for rank 64, in proportion to the rank, with which pipelined loading saves a tenth of a
  prefill of 64 tokens at rank 64 and a sixth at rank 128 (section 7.3: 1.1 and 1.2 times as fast).
- S-LoRA's loads take longer than such copies: it copies every adapter twice, in two pieces per layer
  (c1ddf48). `SLORA_LOAD_MS` is fixed by one figure, E2E in S3, 1.81 times that without loads.
- Outputs: `OUTPUT_FACTOR` times those of LMSYS's data card. With these the engine would be overloaded at
  9 RPS; the paper's requests are interrupted 10 times at 6 RPS (median, Fig. 4), so they stay for 1.7 s. The
  factor is fixed by that figure.
- CPU: a prefill by CPU alone, kernels of section 4.2, takes 61 ms for 64 tokens and 126 ms for 256 (section
  7.3). With 16 cores (Fig. 17) and 16 tokens per task (Fig. 12) these are 1 and 3 rounds of tasks in each of
  32 layers for 3 projections: 1.02 ms for a task, 0.89 ms for the signals of a layer.
- dLoRA (75f1c43, ``layers/lora.py``) multiplies each token with A and B of every adapter in memory, and holds
  q, k and v in one B of three times the rank by three times the width, zero beside its diagonal. An unmerged
  step takes the time of all these bytes and products, at the datasheet's bandwidth and `COMPUTE_SHARE` of its
  peak; nothing is fitted. Merged steps are the base model's. `Merging` has its own times. Prompts are apart
  from decodes (Fig. 15), although the code would mix them. A is whole on every GPU.
- Memory: the datasheet's, weights, and a tenth of the GPU for all else (assumed).
- Llama-2-70B on four GPUs (carried): steps are bound by their launches, so the constant grows with the
  layers, arithmetic with the weights of a GPU; adapters by bytes. Every GPU is copied to in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from capplan import Profile, Workload
from capplan.datasets import gpu_sheet, model_arch
from capplan.models import ADDITIVE, EngineChoice, roofline_profile
from capplan.models._memory import LOADING_FORM, assumed_model
from capplan.serving import lora_elements_per_rank, weight_bytes
from capplan.serving.pooled import LayerTimes, layer_groups
from capplan.spec import CpuLora, Kernel, Lengths, ModelArch, Provenance, ProvenanceKind

MODULES: Final = ("q_proj", "k_proj", "v_proj")
PREFILL_MS: Final = {256: 44.0, 1024: 90.0}
DECODE_MS: Final = {Kernel.BGMV: (34.8, 35.8), Kernel.MBGMV: (35.3, 35.9)}
BATCHES: Final = ((24, 32), (16, 64))
"""Requests and rank of the two points of `DECODE_MS`."""
PREFILL_RATIO: Final = 1.29
PREFILL_RANKS: Final = (8, 128)
PREFILL_TOKENS: Final = 2000
PIPELINE_GAIN: Final = {64: 1.1, 128: 1.2}
PIPELINE_TOKENS: Final = 64
COPY_MS: Final = 7.0
SLORA_LOAD_MS: Final = 28.0
"""Of an adapter of rank 64, both."""
OUTPUT_FACTOR: Final = 0.3
CPU_PREFILL_MS: Final = {64: 61.0, 256: 126.0}
COMPUTE_SHARE: Final = 0.7
"""Of the A100's peak, in the prefills of Fig. 4."""
CORES: Final = 16
TOKENS_PER_TASK: Final = 16
SMALL, LARGE = "llama-2-7b", "llama-2-70b"
GPUS: Final = {SMALL: 1, LARGE: 4}


def prefill_line() -> tuple[float, float]:
    """Return the constant of a prefill in ms, and its ms per 1000 tokens."""
    (short, first), (long, last) = PREFILL_MS.items()
    slope = (last - first) / (long - short)
    return first - slope * short, 1e3 * slope


def decode_terms(kernel: Kernel) -> tuple[float, float]:
    """Return ms per 1000 units of requests x rank, and what several requests add."""
    base_ms, ms_per_ktoken = prefill_line()
    works = [requests * rank / 1e3 for requests, rank in BATCHES]
    rests = [
        milliseconds - base_ms - ms_per_ktoken * requests / 1e3
        for milliseconds, (requests, _) in zip(DECODE_MS[kernel], BATCHES, strict=True)
    ]
    if kernel is Kernel.BGMV:
        return sum(rests) / sum(works), 0.0
    slope = (rests[1] - rests[0]) / (works[1] - works[0])
    return slope, rests[0] - slope * works[0]


def prefill_ms_per_krank() -> float:
    """Return the ms per 1000 units of prompt tokens x rank."""
    base_ms, ms_per_ktoken = prefill_line()
    ktokens, (low, high) = PREFILL_TOKENS / 1e3, PREFILL_RANKS
    plain_ms = base_ms + ms_per_ktoken * ktokens
    return (PREFILL_RATIO - 1.0) * plain_ms / (ktokens * (high - PREFILL_RATIO * low))


def pipeline_gain(rank: int, copy_ms: float) -> float:
    """Return how much faster a prefill is in groups of layers than by CPU until its adapter is copied."""
    layers, cores = model_arch(SMALL).layers, cpu_lora()
    base_ms, ms_per_ktoken = prefill_line()
    plain_ms = base_ms + (ms_per_ktoken + prefill_ms_per_krank() * rank) * PIPELINE_TOKENS / 1e3
    rounds = -(-len(MODULES) * -(-PIPELINE_TOKENS // TOKENS_PER_TASK) // CORES)
    mmacs = TOKENS_PER_TASK * rank * 2 * model_arch(SMALL).hidden_size / 1e6
    gpu_ms, load_ms = plain_ms / layers, copy_ms * rank / 64
    cpu_ms = max(gpu_ms, rounds * mmacs * cores.ms_per_mmac) + cores.signal_ms
    times = LayerTimes(*(round(1e6 * each) for each in (cpu_ms, gpu_ms, load_ms / layers)))
    first, *others = layer_groups(layers, times)

    def prefill_ms(copied_ms: Sequence[float]) -> float:
        passed_ms = 0.0
        for at_ms in copied_ms:
            passed_ms += cpu_ms if at_ms > passed_ms else gpu_ms
        return passed_ms

    in_groups = [load_ms] * len(first)
    for group in others:
        in_groups += [load_ms * (group.stop - first.stop) / layers] * len(group)
    return prefill_ms([load_ms] * layers) / prefill_ms(in_groups)


def cpu_lora() -> CpuLora:
    arch = model_arch(SMALL)
    projections = len(MODULES)
    rounds = {tokens: -(-projections * -(-tokens // TOKENS_PER_TASK) // CORES) for tokens in CPU_PREFILL_MS}
    (few, first), (many, last) = CPU_PREFILL_MS.items()
    per_layer = 1.0 / arch.layers
    task_ms = (last - first) * per_layer / (rounds[many] - rounds[few])
    mmacs = TOKENS_PER_TASK * 64 * 2 * arch.hidden_size / 1e6
    return CpuLora(
        workers=CORES,
        tokens_per_task=TOKENS_PER_TASK,
        task_base_ms=0.0,
        ms_per_mmac=task_ms / mmacs,
        signal_ms=first * per_layer - rounds[few] * task_ms,
        provenance=_provenance("Toppings, sections 4.2 and 7.3"),
    )


def _provenance(source: str) -> Provenance:
    return Provenance(
        kind=ProvenanceKind.PUBLISHED,
        source=source,
        command="python -m benchmarks.papers.toppings.servers",
        notes="see benchmarks/papers/toppings/baseline.py",
    )


@lru_cache
def profile(kernel: Kernel = Kernel.BGMV, model: str = SMALL, load_ms: float = COPY_MS) -> Profile:
    """Return the engine's profile; `load_ms` of an adapter of rank 64 for the small model."""
    arch, tp = model_arch(model), GPUS[model]
    engine = EngineChoice(rules="chameleon", kernel=kernel)
    plain = roofline_profile(gpu_sheet("a100-80g"), arch, engine, tp)
    base_ms, ms_per_ktoken = prefill_line()
    decode_krank, several = decode_terms(kernel)
    small = model_arch(SMALL)
    deeper, wider = arch.layers / small.layers, weight_bytes(arch, tp) / weight_bytes(small)
    larger = _elements(arch, tp) / _elements(small, 1)
    steps = dict.fromkeys(plain.step_latency.coefficients, 0.0) | {
        "base_ms": base_ms * deeper,
        "ms_per_ktoken": ms_per_ktoken * wider,
        "ms_per_decode_krank": decode_krank * larger,
        "ms_per_prefill_krank": prefill_ms_per_krank() * larger,
        "ms_for_several": several,
    }
    source = "Toppings, Figs. 4 and 6; see benchmarks/papers/toppings/baseline.py"
    loading = dict.fromkeys(plain.loading.coefficients, 0.0) | {
        "gpu_ms_per_rank": load_ms * larger / 64,
        "serving_factor": 1.0,
    }
    return plain.replace(
        name=f"a100-80g/{model}/toppings-{kernel.value}",
        engine=plain.engine.replace(name="lightllm", target_modules=MODULES),
        step_latency=assumed_model(ADDITIVE.name, steps, source),
        loading=assumed_model(LOADING_FORM, loading, source),
        host=assumed_model(plain.host.form, {"request_ms": 0.0, "client_itl_factor": 1.0}, source),
        cpu_lora=cpu_lora(),
        provenance=_provenance(source),
    )


def padded_elements(arch: ModelArch, tp: int) -> int:
    """Return dLoRA's elements of A and B per unit of rank, all layers, on one GPU."""
    outputs = (arch.heads + 2 * arch.kv_heads) * arch.head_dim // tp
    return arch.layers * len(MODULES) * (arch.hidden_size + outputs)


def padded_rank(rank: int, model: str) -> int:
    """Return the rank of adapters without padding that take the memory of dLoRA's."""
    arch, tp = model_arch(model), GPUS[model]
    return -(-rank * padded_elements(arch, tp) // _elements(arch, tp))


@lru_cache
def dlora_profile(rank: int, model: str = SMALL) -> Profile:
    """Return the profile with dLoRA's computation of adapters of one rank, which are all in memory."""
    plain = profile(model=model)
    sheet, elements = gpu_sheet("a100-80g"), rank * padded_elements(plain.model, plain.tp)
    read_ms = 1e3 * plain.model.dtype_bytes * elements / sheet.bytes_per_s
    products_ms = 1e3 * 2 * elements / (COMPUTE_SHARE * sheet.flop_per_s)
    steps = dict.fromkeys(plain.step_latency.coefficients, 0.0)
    steps |= {name: plain.step_latency.value(name) for name in ("base_ms", "ms_per_ktoken")}
    steps |= {"ms_per_slot": read_ms, "ms_per_slot_ktoken": 1e3 * products_ms}
    source = "dLoRA-artifact 75f1c43; see benchmarks/papers/toppings/baseline.py"
    return plain.replace(
        name=f"a100-80g/{model}/dlora-{rank}", step_latency=assumed_model(ADDITIVE.name, steps, source)
    )


def with_outputs(load: Workload, factor: float = OUTPUT_FACTOR) -> Workload:
    """Return the workload with shorter outputs: the middle of each bin of its histogram, times a factor."""
    given = load.output_tokens
    counts: Counter[int] = Counter()
    for low, high, count in zip(given.edges[:-1], given.edges[1:], given.counts, strict=True):
        counts[max(1, round(factor * (low + high - 1) / 2))] += count
    values = tuple(sorted(counts))
    lengths = Lengths(values=values, counts=tuple(counts[value] for value in values))
    return load.model_copy(update={"output_tokens": lengths})


def _elements(arch: ModelArch, tp: int) -> int:
    return int(lora_elements_per_rank(arch, tp, MODULES, fully_sharded=True))
