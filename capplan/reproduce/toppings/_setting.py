"""Toppings' setting: numbers of the recipe, the engine, and requests.

The engine is Llama-2-7B on an A100, LightLLM with LoRA kernels, by the numbers that the paper prints:

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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from capplan.datasets import gpu_sheet, model_arch
from capplan.models import ADDITIVE, EngineChoice, assumed_model, roofline_profile
from capplan.reproduce._recipe import cached, read_recipe
from capplan.serving import lora_elements_per_rank, weight_bytes
from capplan.serving.pooled import LayerTimes, layer_groups
from capplan.spec import (
    Adapter,
    Cache,
    Count,
    CpuLora,
    Kernel,
    Lengths,
    ModelArch,
    Positive,
    Profile,
    Provenance,
    ProvenanceKind,
    Rank,
    Share,
    SpecModel,
    Text,
    Trace,
    Workload,
)
from capplan.workload import load_workload, preset

PAPER: Final = "toppings"


class Server(SpecModel):
    """A base model and its GPUs."""

    arch: Text
    gpus: Count

    @property
    def model(self) -> ModelArch:
        return model_arch(self.arch)


class PrefillTime(SpecModel):
    """Time of a prompt."""

    tokens: Count
    ms: Positive


class DecodeTime(SpecModel):
    """Time of an iteration of requests of one rank, by LoRA kernel."""

    requests: Count
    rank: Rank
    bgmv_ms: Positive
    mbgmv_ms: Positive


class PrefillRatio(SpecModel):
    """Prefill with adapters of one rank over that with another."""

    tokens: Count
    low_rank: Rank
    high_rank: Rank
    ratio: Positive


class CpuPrefill(SpecModel):
    """Prefills whose adapter is on CPU cores alone."""

    prefill: tuple[PrefillTime, PrefillTime]
    rank: Rank
    cores: Count
    tokens_per_task: Count


class Functions(SpecModel):
    """Shares of functions by their calls per second."""

    ends_rps: tuple[Positive, ...]
    shares: tuple[Share, ...]


class Production(SpecModel):
    """Functions of one server, and their calls."""

    adapters: Count
    rps: Positive


class Motivation(SpecModel):
    """Functions of one server at several loads."""

    adapters: Count
    rps: tuple[Positive, ...]


class Cumulative(SpecModel):
    """Equal requests at equal distances, each of an adapter of its own."""

    requests: Count
    rank: Rank
    prompt_tokens: Count
    output_tokens: Count
    every_ms: Positive


class Routing(SpecModel):
    """One request to be routed."""

    slo_ms: Positive
    new_rank: Rank


class Cluster(SpecModel):
    """Instances at several loads."""

    instances: Count
    rps: tuple[Positive, ...]
    duration_s: Positive


class Simulation(SpecModel):
    """Instances that serve all functions."""

    instances: Count
    rps: Positive
    adapters: Count
    ranks: tuple[Rank, ...]
    duration_s: Positive


class Setting(SpecModel):
    """Numbers of the paper's setting. Copies are those of an adapter of rank 64, to all GPUs."""

    gpu: Text
    modules: tuple[Text, ...]
    small: Server
    large: Server
    prefill: tuple[PrefillTime, PrefillTime]
    decode: tuple[DecodeTime, DecodeTime]
    prefill_ratio: PrefillRatio
    cpu: CpuPrefill
    compute_share: Share = Field(description="Of the GPU's peak, in prefills.")
    copy_ms: Positive
    slora_copy_ms: Positive
    large_copy_ms: Positive
    outputs: Positive = Field(description="Output lengths over those of the data card.")
    cluster_outputs: Positive
    max_model_len: Count
    max_adapters_rank: Rank
    duration_s: Positive
    functions: Functions
    function_rank: Rank
    production: tuple[Production, ...]
    cumulative: Cumulative
    motivation: Motivation
    compression: Count
    routing: Routing
    cluster: Cluster
    simulation: Simulation
    slo_factor: Positive


class System(SpecModel):
    """A compared server; nothing is kept without a request, or loaded ahead."""

    loading: Text
    slora_copies: bool = False
    cores: Count | None = None
    dlora: bool = False

    def cache(self) -> Cache:
        """Return the settings of the twin."""
        loads = {} if self.loading in ("cached", "resident") else {"prefetch": "none"}
        cores = {} if self.cores is None else {"cpu_workers": self.cores}
        return Cache.model_validate({"policy": "none", "loading": self.loading, **loads, **cores})


@cached
def setting() -> Setting:
    return read_recipe(PAPER).typed(Setting)


@cached
def systems() -> Mapping[str, System]:
    return {name: System.model_validate(given) for name, given in read_recipe(PAPER).systems.items()}


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


_LENGTHS: Final = "toppings-maf-512"
"""The preset whose lengths all requests have."""


def preset_workload(name: str, outputs: float, traces: str | None = None) -> Workload:
    """Return a preset with outputs times a factor, or with its recorded prompts compressed."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "workload.yaml"
        path.write_text(preset(name).yaml(traces=traces), encoding="utf-8")
        load = load_workload(path)
    if load.length_pairs is not None:
        prompts = np.maximum(1, load.length_pairs.prompt_tokens // setting().compression)
        shorter = replace(load.length_pairs, prompt_tokens=prompts)
        return load.model_copy(update={"length_pairs": shorter})
    edges, binned = np.array(load.output_tokens.edges), np.array(load.output_tokens.counts)
    middles = np.maximum(1, np.rint(outputs * (edges[:-1] + edges[1:] - 1) / 2)).astype(int)
    values = np.unique(middles)
    counts = [int(binned[middles == value].sum()) for value in values]
    lengths = Lengths(values=tuple(values.tolist()), counts=tuple(counts))
    return load.model_copy(update={"output_tokens": lengths})


def functions_workload(
    functions: int, rps: float, ranks: Sequence[int], outputs: float, seed: int
) -> Workload:
    """Return functions as adapters, the ranks in turn; the seed draws the functions."""
    adapters = tuple(
        Adapter(name=f"f-{i}", rank=ranks[i % len(ranks)], rate_rps=rps * share)
        for i, share in enumerate(function_shares(functions, seed).tolist())
    )
    return preset_workload(_LENGTHS, outputs).model_copy(update={"adapters": adapters})


def function_shares(functions: int, seed: int) -> NDArray[np.float64]:
    """Return shares of calls like those of the functions of Azure's trace of 2019, by its published facts.

    45 % of the applications are called at most once an hour, 36 % up to once a minute, 16 % up to once a
    second, 3 % more often, over eight decades (Shahrad et al., ATC 2020). Log-uniform within each band; the
    outer ends are assumed.
    """
    given = setting().functions
    rng = np.random.default_rng(seed)
    ends = np.log10(given.ends_rps)
    band = rng.choice(len(given.shares), functions, p=given.shares)
    rates = 10.0 ** rng.uniform(ends[band], ends[band + 1])
    return np.asarray(rates / rates.sum())


def cumulative_workload() -> Workload:
    """Return the requests of Fig. 3."""
    given = setting().cumulative
    names = [f"f-{i}" for i in range(given.requests)]
    arrivals_s = np.arange(len(names)) * given.every_ms / 1e3
    prompts, outputs = ([tokens] * len(names) for tokens in (given.prompt_tokens, given.output_tokens))
    return Workload(
        base_model=setting().small.arch,
        adapters=tuple(Adapter(name=name, rank=given.rank, rate_rps=0.0) for name in names),
        prompt_tokens=Lengths(mean=given.prompt_tokens),
        output_tokens=Lengths(mean=given.output_tokens),
        trace=Trace.from_arrays(arrivals_s, names, prompts, outputs, 10.0),
    )
