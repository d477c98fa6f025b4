"""Toppings' engine: Llama-2-7B on an A100, LightLLM with LoRA kernels, by the numbers that the paper prints.

- Prefill: the line through the two prompts of Fig. 4.
- Decode: an iteration is a step of as many tokens as requests, plus LoRA. For BGMV the two points of Fig. 6
  leave the same slope in requests x rank; for MBGMV they leave a slope and a constant of several requests.
  What the requests' contexts add is part of these points.
- Adapter kernels in prefill: in proportion to tokens x rank, by the ratio of two ranks.
- Copies: in proportion to the rank. S-LoRA copies every adapter twice, in two pieces per layer (c1ddf48).
- CPU: the two prefills by CPU alone are rounds of tasks over the cores in every layer, and signals.
- dLoRA (75f1c43, ``layers/lora.py``) multiplies each token with A and B of every adapter in memory, and holds
  q, k and v in one B of three times the rank by three times the width, zero beside its diagonal. An unmerged
  step takes the time of all these bytes and products, at the datasheet's bandwidth and the compute share of
  its peak; nothing is fitted. Merged steps are the base model's. `Merging` has its own times. Prompts are
  apart from decodes (Fig. 15), although the code would mix them.
- Memory: the datasheet's, weights, and a tenth of the GPU for all else (assumed).
- The large model (carried): steps are bound by their launches, so the constant grows with the layers,
  arithmetic with the weights of a GPU, adapters with their bytes: B is partitioned, A whole on every GPU
  (section 6).
"""

from __future__ import annotations

from collections.abc import Sequence

from capplan.datasets import gpu_sheet
from capplan.models import ADDITIVE, EngineChoice, assumed_model, roofline_profile
from capplan.reproduce._recipe import cached
from capplan.reproduce.toppings._setting import PAPER, PrefillTime, Server, setting
from capplan.serving import lora_elements_per_rank, weight_bytes
from capplan.serving.pooled import LayerTimes, layer_groups
from capplan.spec import CpuLora, Kernel, ModelArch, Profile, Provenance, ProvenanceKind

COPIED_RANK = 64
"""Of the adapter that the setting's copies are those of."""


def line(points: Sequence[PrefillTime]) -> tuple[float, float]:
    """Return the constant of a prefill in ms, and its ms per 1000 tokens."""
    short, long = points
    slope = (long.ms - short.ms) / (long.tokens - short.tokens)
    return short.ms - slope * short.tokens, 1e3 * slope


def decode_terms(kernel: Kernel) -> tuple[float, float]:
    """Return ms per 1000 units of requests x rank, and what several requests add."""
    base_ms, ms_per_ktoken = line(setting().prefill)
    points = setting().decode
    works = [point.requests * point.rank / 1e3 for point in points]
    times_ms = [point.bgmv_ms if kernel is Kernel.BGMV else point.mbgmv_ms for point in points]
    rests = [
        ms - base_ms - ms_per_ktoken * point.requests / 1e3
        for ms, point in zip(times_ms, points, strict=True)
    ]
    if kernel is Kernel.BGMV:
        return sum(rests) / sum(works), 0.0
    slope = (rests[1] - rests[0]) / (works[1] - works[0])
    return slope, rests[0] - slope * works[0]


def prefill_ms_per_krank() -> float:
    """Return the ms per 1000 units of prompt tokens x rank."""
    base_ms, ms_per_ktoken = line(setting().prefill)
    given = setting().prefill_ratio
    ktokens = given.tokens / 1e3
    plain_ms = base_ms + ms_per_ktoken * ktokens
    return (given.ratio - 1.0) * plain_ms / (ktokens * (given.high_rank - given.ratio * given.low_rank))


def pipeline_gain(rank: int, copy_ms: float, tokens: int = 64) -> float:
    """Return how much faster a prefill is in groups of layers than by CPU until its adapter is copied."""
    arch, cores = setting().small.model, cpu_lora()
    layers = arch.layers
    base_ms, ms_per_ktoken = line(setting().prefill)
    gpu_ms = (base_ms + (ms_per_ktoken + prefill_ms_per_krank() * rank) * tokens / 1e3) / layers
    load_ms = copy_ms * rank / COPIED_RANK
    mmacs = cores.tokens_per_task * rank * 2 * arch.hidden_size / 1e6
    cpu_ms = max(gpu_ms, _rounds(tokens) * mmacs * cores.ms_per_mmac) + cores.signal_ms
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
    """Return the times of the cores: equal tasks, as many rounds as the busiest core has, and signals."""
    arch, given = setting().small.model, setting().cpu
    few, many = given.prefill
    task_ms = (many.ms - few.ms) / arch.layers / (_rounds(many.tokens) - _rounds(few.tokens))
    return CpuLora(
        workers=given.cores,
        tokens_per_task=given.tokens_per_task,
        task_base_ms=0.0,
        ms_per_mmac=task_ms / (given.tokens_per_task * given.rank * 2 * arch.hidden_size / 1e6),
        signal_ms=few.ms / arch.layers - _rounds(few.tokens) * task_ms,
        provenance=_provenance("Toppings, sections 4.2 and 7.3"),
    )


def _rounds(tokens: int) -> int:
    given = setting().cpu
    return -(-len(setting().modules) * -(-tokens // given.tokens_per_task) // given.cores)


def _provenance(source: str) -> Provenance:
    return Provenance(
        kind=ProvenanceKind.PUBLISHED,
        source=source,
        command=f"capplan reproduce {PAPER}",
        notes=f"see datasets/papers/{PAPER}.yaml",
    )


@cached
def profile(
    kernel: Kernel = Kernel.BGMV, server: Server | None = None, copy_ms: float | None = None
) -> Profile:
    """Return the engine's profile; by default of the small model, with Toppings' copies."""
    given, small = setting(), setting().small
    server = server or small
    arch, tp = server.model, server.gpus
    plain = roofline_profile(gpu_sheet(given.gpu), arch, EngineChoice(rules="chameleon", kernel=kernel), tp)
    base_ms, ms_per_ktoken = line(given.prefill)
    decode_krank, several = decode_terms(kernel)
    larger = _elements(arch, tp) / _elements(small.model, 1)
    steps = dict.fromkeys(plain.step_latency.coefficients, 0.0) | {
        "base_ms": base_ms * arch.layers / small.model.layers,
        "ms_per_ktoken": ms_per_ktoken * weight_bytes(arch, tp) / weight_bytes(small.model),
        "ms_per_decode_krank": decode_krank * larger,
        "ms_per_prefill_krank": prefill_ms_per_krank() * larger,
        "ms_for_several": several,
    }
    source = f"Toppings, Figs. 4 and 6; see datasets/papers/{PAPER}.yaml"
    loading = dict.fromkeys(plain.loading.coefficients, 0.0) | {
        "gpu_ms_per_rank": (copy_ms or given.copy_ms) / COPIED_RANK,
        "serving_factor": 1.0,
    }
    return plain.replace(
        name=f"{given.gpu}/{server.arch}/toppings-{kernel.value}",
        engine=plain.engine.replace(name="lightllm", target_modules=given.modules),
        step_latency=assumed_model(ADDITIVE.name, steps, source),
        loading=assumed_model(plain.loading.form, loading, source),
        host=assumed_model(plain.host.form, {"request_ms": 0.0, "client_itl_factor": 1.0}, source),
        cpu_lora=cpu_lora(),
        provenance=_provenance(source),
    )


def padded_elements(arch: ModelArch, tp: int) -> int:
    """Return dLoRA's elements of A and B per unit of rank, all layers, on one GPU."""
    outputs = (arch.heads + 2 * arch.kv_heads) * arch.head_dim // tp
    return arch.layers * len(setting().modules) * (arch.hidden_size + outputs)


def padded_rank(rank: int, server: Server) -> int:
    """Return the rank of adapters without padding that take the memory of dLoRA's."""
    arch, tp = server.model, server.gpus
    return -(-rank * padded_elements(arch, tp) // _elements(arch, tp, fully_sharded=True))


@cached
def dlora_profile(rank: int, server: Server) -> Profile:
    """Return the profile with dLoRA's computation of adapters of one rank, which are all in memory."""
    plain = profile(server=server)
    sheet, elements = gpu_sheet(setting().gpu), rank * padded_elements(plain.model, plain.tp)
    read_ms = 1e3 * plain.model.dtype_bytes * elements / sheet.bytes_per_s
    products_ms = 1e3 * 2 * elements / (setting().compute_share * sheet.flop_per_s)
    steps = dict.fromkeys(plain.step_latency.coefficients, 0.0)
    steps |= {name: plain.step_latency.value(name) for name in ("base_ms", "ms_per_ktoken")}
    steps |= {"ms_per_slot": read_ms, "ms_per_slot_ktoken": 1e3 * products_ms}
    return plain.replace(
        name=f"{setting().gpu}/{server.arch}/dlora-{rank}",
        step_latency=assumed_model(ADDITIVE.name, steps, "dLoRA-artifact 75f1c43"),
    )


def _elements(arch: ModelArch, tp: int, *, fully_sharded: bool = False) -> int:
    return int(lora_elements_per_rank(arch, tp, setting().modules, fully_sharded=fully_sharded))
