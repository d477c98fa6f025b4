"""Chameleon's setting (sections 3 and 5): GPUs, S-LoRA's engine and the workload. Numbers are in the recipe.

- Arithmetic reaches `Setting.compute_share` of a GPU's peak, and a step takes the longer of reading the
  weights and arithmetic: a roofline's chord between them, which fits graphs of up to 512 tokens, adds a third
  to a prompt of 180.
- Host: the shipped profile of S-LoRA on an H100, fitted to measured runs. Its time per prompt, per request
  and step, and per request outside the engine is kept; so is its base time of a step less the time to read
  the weights there.
- Loading: `Setting.load_ms` for the largest rank on the A40, of which a part is fixed. S-LoRA copies each
  layer by itself, so the fixed part goes by layers, the rest by bytes and the GPU's link. With tensor
  parallelism every GPU is copied to in turn (section 3.2).
- Adapter kernels in prefill: of the TTFT of a medium prompt at rank 128 on an idle engine,
  `Setting.load_share` is loading and `Setting.adapter_share` the adapter (Fig. 2). On other GPUs and models
  they scale with arithmetic and with the elements of an adapter. In decode each request reads its rows of A
  and B (true rank).
- Memory: `Setting.pool_tokens` on the A40; on others `Setting.memory_share` of the GPU, less the weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from capplan.datasets import gpu_sheet, load_profile, model_arch
from capplan.models import (
    ADDITIVE,
    GRAPH_TOKENS,
    LOADING_FORM,
    MEMORY_FORM,
    TABLE,
    Assumptions,
    Efficiencies,
    EngineChoice,
    StepFeatures,
    StepRanks,
    assumed_model,
    coefficient_array,
    gpu_load_ms,
    latency_code,
    rank_ms,
    roofline_profile,
    step_ms,
)
from capplan.reproduce._recipe import Recipe, cached, read_recipe
from capplan.serving import adapter_bytes, kv_bytes_per_token, weight_bytes
from capplan.spec import (
    ATTENTION_MODULES,
    BaseTraffic,
    EngineArgs,
    Kernel,
    LengthPairs,
    ModelArch,
    Profile,
    SpecModel,
    StepTable,
    Workload,
)
from capplan.twin.instance import NS_PER_S, build_scenario, run
from capplan.workload import load_workload, preset

TRACE: Final = "azure_llm_2023_conv.parquet"
BASELINE: Final = "slora"
_ALONE_RPS: Final = 0.02
_ALONE_S: Final = 100_000.0
_PRECISION: Final = 0.002
"""Of a length factor that is solved for."""


class OtherLengths(SpecModel):
    """Log-normal lengths: mean and spread of the logarithm."""

    prompt: tuple[float, float]
    output: tuple[float, float]
    slo_s: float
    """The paper's SLO, which the factor on lengths is solved for."""


class Setting(SpecModel):
    """Numbers of the recipe."""

    gpu: str
    model: str
    mix: str
    """Preset workload of most figures, ``chameleon-`` and this."""
    ranks: tuple[int, ...]
    slo_over_alone: float
    slora_knee_rps: float
    loads_rps: Mapping[str, float]
    load_share: float
    adapter_share: float
    compute_share: float
    load_ms: float
    pool_tokens: int
    length_factor: float
    other_lengths: Mapping[str, OtherLengths]
    host_profile: str
    host_gpu_bytes_per_s: float
    max_num_seqs: int
    least_batch_tokens: int
    """S-LoRA's ``max_req_total_len``; a batch of prompts has at most that or a sixth of the pool."""
    max_model_len: int
    load_fixed_share: float
    memory_share: float
    horizon_s: float
    warm_up_s: float

    @property
    def largest_rank(self) -> int:
        return max(self.ranks)


@dataclass(frozen=True)
class System:
    """Scheduler and cache as in a workload file."""

    scheduler: Mapping[str, Any]
    cache: Mapping[str, Any]


@cached
def recipe() -> Recipe:
    return read_recipe("chameleon")


@cached
def setting() -> Setting:
    return recipe().typed(Setting)


def system(name: str) -> System:
    return System(**recipe().systems[name])


@dataclass(frozen=True)
class Platform:
    """GPUs that one engine runs on, and the model it serves; by default those of most figures."""

    gpu: str = "a40"
    model: str = "llama-7b"
    tp: int = 1
    memory_gib: float | None = None
    """Memory of a GPU; None: as on the datasheet."""

    @property
    def mix(self) -> str:
        return setting().mix if self == A40 else f"a100-{self.model.removeprefix('llama-')}"

    def pool(self) -> int:
        """Return the tokens of KV and adapters."""
        if self.gpu == setting().gpu:
            return setting().pool_tokens
        arch = model_arch(self.model)
        room = setting().memory_share * self.memory_bytes() - weight_bytes(arch, self.tp)
        return int(room // kv_bytes_per_token(arch, self.tp))

    def memory_bytes(self) -> int:
        if self.memory_gib is None:
            return gpu_sheet(self.gpu).memory_bytes
        return round(self.memory_gib * 2**30)

    def args(self, adapters: int) -> EngineArgs:
        """Return the settings of an engine that serves so many adapters."""
        numbers = setting()
        return EngineArgs(
            max_loras=adapters,
            max_lora_rank=numbers.largest_rank,
            max_num_seqs=numbers.max_num_seqs,
            max_num_batched_tokens=max(self.pool() // 6, numbers.least_batch_tokens),
            max_model_len=numbers.max_model_len,
            gpu_memory_utilization=1.0,
        )


A40: Final = Platform()
"""Where most figures are measured."""


@cached
def profile(platform: Platform = A40) -> Profile:
    """Return the profile of S-LoRA on a platform."""
    sheet, arch, tp = gpu_sheet(platform.gpu), model_arch(platform.model), platform.tp
    measured, source = load_profile(setting().host_profile), "assumed: see Chameleon's recipe"
    physics = _physics()
    engine = EngineChoice(rules="slora", kernel=Kernel.MBGMV)
    plain = roofline_profile(sheet, arch, engine, tp, Assumptions(physics=physics), source)
    steps = {name: each.value for name, each in plain.step_latency.coefficients.items()}
    steps["ms_per_prefill_krank"] = _prefill_ms_per_krank(platform)
    roof = _roof(platform)
    steps["base_ms"] -= roof.read_ms
    steps["ms_per_ktoken"] -= roof.chord_ms_per_ktoken
    steps["ms_per_ktoken_beyond_graphs"] = 0.0
    for name in ("ms_per_request", "ms_per_prefill"):
        steps[name] = measured.step_latency.value(name)
    taken = platform.memory_bytes() - weight_bytes(arch, tp)
    reserved = float(taken - (platform.pool() + 0.5) * kv_bytes_per_token(arch, tp))
    memory = {"slot_factor": 1.0, "slot_overhead_bytes": 0.0, "bytes_per_seq": 0.0, "seqs_in_reserve": 0.0}
    request = {"request_ms": measured.host.value("request_ms"), "client_itl_factor": 1.0}
    return plain.replace(
        name=f"chameleon/{platform}",
        gpu=plain.gpu.replace(memory_bytes=platform.memory_bytes()),
        step_latency=assumed_model(ADDITIVE.name, steps, source).replace(
            form=TABLE.name, tables=roof.tables()
        ),
        memory=assumed_model(MEMORY_FORM, {**memory, "reserved_bytes": reserved}, source),
        loading=assumed_model(LOADING_FORM, _loading(platform), source),
        host=assumed_model(plain.host.form, request, source),
    )


@dataclass(frozen=True)
class _Roof:
    """Time of the base model's products in a step: the longer of reading weights and arithmetic."""

    read_ms: float
    ms_per_ktoken: float

    @property
    def chord_ms_per_ktoken(self) -> float:
        """Slope of the roofline's chord, which the tables replace."""
        return max(0.0, self.ms_per_ktoken - 1e3 * self.read_ms / GRAPH_TOKENS)

    def tables(self) -> dict[str, StepTable]:
        crossing = 1e3 * self.read_ms / self.ms_per_ktoken
        points = [1.0, crossing, 2.0 * crossing]
        none = {"requests": (1.0, 2.0), "kv_tokens": (1.0, 2.0)}
        return {
            "tokens_ms": StepTable.of({"tokens": points}, [self.read_ms, self.read_ms, 2.0 * self.read_ms]),
            "requests_ms": StepTable.of(none, [[0.0, 0.0], [0.0, 0.0]]),
        }


def _roof(platform: Platform) -> _Roof:
    sheet, arch, physics = gpu_sheet(platform.gpu), model_arch(platform.model), _physics()
    embedding = arch.dtype_bytes * arch.vocab_size * arch.hidden_size / platform.tp
    read = weight_bytes(arch, platform.tp) - embedding  # one row per token of the embeddings
    operations = 2e3 * read / arch.dtype_bytes
    return _Roof(
        read_ms=1e3 * read / (physics.bandwidth * sheet.bytes_per_s),
        ms_per_ktoken=1e3 * operations / (physics.compute * sheet.flop_per_s),
    )


@cached
def _physics() -> Efficiencies:
    """Return the roofline's shares, with S-LoRA's host time of a step instead of kernel launches."""
    measured = load_profile(setting().host_profile)
    read_ms = 1e3 * weight_bytes(measured.model) / (Efficiencies.bandwidth * setting().host_gpu_bytes_per_s)
    host_ms = measured.step_latency.value("base_ms") - read_ms
    return Efficiencies(compute=setting().compute_share, kernel_us=0.0, step_ms=host_ms)


def _loading(platform: Platform) -> dict[str, float]:
    numbers, reference = setting(), A40
    arch, reference_arch = model_arch(platform.model), model_arch(reference.model)
    links = gpu_sheet(reference.gpu).host_bytes_per_s / gpu_sheet(platform.gpu).host_bytes_per_s
    by_rank = (1.0 - numbers.load_fixed_share) * numbers.load_ms / numbers.largest_rank
    fixed = numbers.load_fixed_share * numbers.load_ms
    return {
        "serving_factor": 1.0,
        "gpu_base_ms": platform.tp * fixed * arch.layers / reference_arch.layers,
        "gpu_ms_per_rank": by_rank * links * _rank_bytes(arch) / _rank_bytes(reference_arch),
        "gpu_padding_ms": 0.0,
        "disk_base_ms": 0.0,
        "disk_ms_per_rank": 0.0,
    }


def _rank_bytes(arch: ModelArch) -> int:
    return adapter_bytes(arch, 1, ATTENTION_MODULES)


def _prefill_ms_per_krank(platform: Platform) -> float:
    """Return the cost of adapters in prefill: that of the A40, scaled by arithmetic and elements."""
    numbers, reference = setting(), A40
    ttft_ms = numbers.load_ms / numbers.load_share
    on_reference = ttft_ms * numbers.adapter_share / (medium_ktokens() * numbers.largest_rank)
    work = _rank_bytes(model_arch(platform.model)) / _rank_bytes(model_arch(reference.model)) / platform.tp
    return on_reference * work * gpu_sheet(reference.gpu).flop_per_s / gpu_sheet(platform.gpu).flop_per_s


def medium_ktokens() -> float:
    """Return the prompt whose prefill, bound by arithmetic, has the base model's share of Fig. 2."""
    numbers = setting()
    base_ms = numbers.load_ms / numbers.load_share * (1.0 - numbers.load_share - numbers.adapter_share)
    return (base_ms - _physics().step_ms) / _roof(A40).ms_per_ktoken


def prefill_ms(platform: Platform, tokens: float, rank: float) -> float:
    """Return the prefill of one prompt on an idle engine with a resident adapter; rank 0: without one."""
    served, largest = profile(platform), float(setting().largest_rank)
    form = latency_code(served.step_latency.form, served.engine.kernel)
    coefficients = coefficient_array(served.step_latency)
    features = StepFeatures(tokens, 1.0, 0.0, 1.0, 1.0, largest, 0.0, 1.0, 1.0)
    ranks = StepRanks(0.0, 1.0, 0.0, 1.0, tokens, rank, 0.0, rank, tokens * rank)
    return step_ms(form, coefficients, features) + rank_ms(form, coefficients, largest, ranks)


def load_ms(platform: Platform, rank: int) -> float:
    return gpu_load_ms(profile(platform).loading, rank, setting().largest_rank)


def load_share(platform: Platform, rank: int, tokens: float | None = None) -> float:
    """Return the share of TTFT that the load of an adapter takes; None: for the medium prompt of Fig. 2."""
    load = load_ms(platform, rank)
    return load / (load + prefill_ms(platform, tokens or 1e3 * medium_ktokens(), rank))


@cached
def workload(mix: str, traces: str, factor: float | None = None) -> Workload:
    """Return a preset workload of the paper, ``chameleon-`` and `mix`, with scaled lengths.

    A mix of `Setting.other_lengths` has the adapters of ``up``, and ``base`` has its requests without them.
    `factor` None: that of the setting.
    """
    if mix == "base":
        found = workload("up", traces)
        idle = found.at_rates_times(0.0).adapters
        return found.model_copy(update={"adapters": idle, "base": BaseTraffic(rate_rps=found.total_rate_rps)})
    other = setting().other_lengths.get(mix)
    if other is None:
        found = _preset(f"chameleon-{mix}", traces)
        pairs, own = cast("LengthPairs", found.length_pairs), setting().length_factor
    else:
        found, pairs = workload("up", traces), _log_normal(other)
        own = 1.0 if factor else _factor_for(other.slo_s, mix, traces)
    return found.with_length_pairs(pairs.scaled(factor or own))


def _preset(name: str, traces: str) -> Workload:
    text = preset(name).yaml(profile=setting().host_profile, traces=traces)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.yaml"
        path.write_text(text, encoding="utf-8")
        return load_workload(path)


def _log_normal(lengths: OtherLengths) -> LengthPairs:
    rng, settings = np.random.default_rng(0), ((lengths.prompt, 8192), (lengths.output, 2048))
    drawn = (np.clip(np.rint(rng.lognormal(*of, 20_000)), 1, most).astype(np.int64) for of, most in settings)
    return LengthPairs.from_arrays(*drawn)


def _factor_for(slo_s: float, mix: str, traces: str) -> float:
    """Return the factor on lengths for which the SLO is `slo_s`."""
    low, high = 0.02, 1.0
    while high / low > 1.0 + _PRECISION:
        middle = (low * high) ** 0.5
        within = _slo_s(workload(mix, traces, middle), A40) <= slo_s
        low, high = (middle, high) if within else (low, middle)
    return low


@cached
def slo_s(platform: Platform, mix: str, traces: str) -> float:
    """Return the SLO on the P99 of TTFT: a multiple of the mean time of a request alone."""
    return _slo_s(workload(mix, traces), platform)


def _slo_s(load: Workload, platform: Platform) -> float:
    """Return the SLO from 2,000 requests that are alone in the engine, loads included."""
    served, args = profile(platform), platform.args(len(load.adapters))
    alone = at_rate(load, _ALONE_RPS)
    scenario = build_scenario(alone, served, args, duration_s=_ALONE_S, seed=0)
    trace = run(scenario)
    ended = trace.finish_ns >= 0
    in_engine_s = (trace.finish_ns - scenario.requests.arrival_ns)[ended] / NS_PER_S
    return setting().slo_over_alone * (float(np.mean(in_engine_s)) + overhead_s(platform))


def overhead_s(platform: Platform) -> float:
    """Return the time of a request outside the engine."""
    return profile(platform).host.value("request_ms") / 1e3


def at_rate(load: Workload, rps: float) -> Workload:
    return load.at_rates_times(rps / load.total_rate_rps)
