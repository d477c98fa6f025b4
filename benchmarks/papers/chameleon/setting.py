"""Chameleon's setting (sections 3 and 5): GPUs, S-LoRA's engine and the workload.

What the paper gives is restated. What it does not give is fixed here, from S-LoRA's published behaviour and
code alone:

- GPU: datasheets, with the shares of their peaks that `capplan profile roofline` assumes for bandwidth and
  host link. Arithmetic reaches `COMPUTE_SHARE` of its peak, as S-LoRA's measured prefill on an H100 does. A
  step takes the longer of reading the weights and arithmetic: a roofline's chord between them, which fits
  graphs of up to 512 tokens, adds a third to a prompt of 180.
- Host: the shipped profile of S-LoRA on an H100, fitted to measured runs. Its time per prompt, per request
  and step, and per request outside the engine is kept; so is its base time of a step less the time to read
  the weights there (7.6 ms).
- Loading: S-LoRA (c1ddf48, ``infer_adapter.py``) copies A and B of a layer together, once for A and once for
  B. So an adapter crosses the link twice, in two copies per layer. The fixed part is what the link leaves of
  the 30 ms that a load takes (Fig. 14; rank 128, the largest). With tensor parallelism every GPU is copied
  to in turn (section 3.2).
- Adapter kernels in prefill: of the TTFT of a medium prompt at rank 128 on an idle engine, 17.5 % is loading
  and 60 % loading and adapter (Fig. 2). With a load of 30 ms that is 69 ms of base model, which gives the
  length of the prompt, and 73 ms of adapter. On other GPUs and models these kernels scale with arithmetic and
  with the elements of an adapter.
- Adapter kernels in decode: each request reads its rows of A and B (true rank).
- Lengths: Azure's times `LENGTH_FACTOR`, with which 5 x the mean time of a request alone, its load included,
  is the SLO of 5 s (``--part settle``).
- Memory: `MEMORY_SHARE` of the GPU, less the weights, is for KV and adapters. The paper's S-LoRA violates the
  SLO "well before it can fully utilize all the available GPU memory", so memory is not what bounds it.
- Popularity inside a rank: Zipf's law with exponent 1, small ranks the popular ones where ranks differ.

Two earlier versions were settled by S-LoRA's knee of 8.6 RPS: one by the memory (6,900 tokens), which
contradicted the sentence about memory and bound Chameleon's batch, since its quotas charge every request its
whole output and its adapter; one by the share of arithmetic (0.345, with the chord). Nothing is settled by a
knee any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from benchmarks.common import preset_workload
from capplan import EngineArgs, Profile, Workload, load_profile
from capplan.datasets import gpu_sheet, model_arch
from capplan.models import ADDITIVE, TABLE, Assumptions, Efficiencies, EngineChoice, roofline_profile
from capplan.models._memory import LOADING_FORM, MEMORY_FORM, assumed_model
from capplan.models._step_latency import GRAPH_TOKENS
from capplan.profiling.load._requests import scaled
from capplan.serving import adapter_bytes, kv_bytes_per_token, weight_bytes
from capplan.spec import ATTENTION_MODULES, Kernel, LengthPairs, ModelArch, StepTable

SLORA_H100: Final = "h100-64g/llama-2-7b/s-lora-c1ddf48"
H100_BYTES_PER_S: Final = 2.0e12
"""Memory bandwidth of the GPU of `SLORA_H100`, rounded."""
TRACE: Final = "azure_llm_2023_conv.parquet"

SLO_S: Final = 5.0
SLO_FACTOR: Final = 5.0
SLORA_KNEE_RPS: Final = 8.6
LOAD_MS: Final = 30.0
LOAD_SHARE: Final = 0.175
ADAPTER_SHARE: Final = 0.60 - LOAD_SHARE
LARGEST_RANK: Final = 128

COMPUTE_SHARE: Final = 0.39
LENGTH_FACTOR: Final = 0.150
LMSYS: Final = "lmsys"
LMSYS_SLO_S: Final = 3.5
LMSYS_FACTOR: Final = 0.109
"""As `LENGTH_FACTOR`, for the SLO of that trace (Fig. 21)."""
MEMORY_SHARE: Final = 0.9
"""Of a GPU's memory, for weights, KV and adapters."""
MAX_MODEL_LEN: Final = 2048
"""Positions of Llama-7B."""
MAX_NUM_SEQS: Final = 1000
LEAST_BATCH_TOKENS: Final = 3072
"""S-LoRA's ``running_max_req_size`` and ``max_req_total_len``; a batch of prompts has at most the larger of
that and a sixth of the pool."""


@dataclass(frozen=True)
class Platform:
    """GPUs that one engine runs on, and the model it serves."""

    gpu: str = "a40"
    model: str = "llama-7b"
    tp: int = 1
    memory_gib: float | None = None
    """Memory of a GPU; None: as on the datasheet."""
    compute: float = COMPUTE_SHARE
    """Share of the peak of arithmetic that prefill reaches."""

    @property
    def name(self) -> str:
        memory = "" if self.memory_gib is None else f"-{self.memory_gib:g}g"
        return f"{self.gpu}{memory}-{self.model}-tp{self.tp}"

    def pool(self) -> int:
        """Return the tokens of KV and adapters."""
        arch = model_arch(self.model)
        room = MEMORY_SHARE * self.memory_bytes() - weight_bytes(arch, self.tp)
        return int(room // kv_bytes_per_token(arch, self.tp))

    def memory_bytes(self) -> int:
        if self.memory_gib is None:
            return gpu_sheet(self.gpu).memory_bytes
        return round(self.memory_gib * 2**30)

    def args(self, adapters: int) -> EngineArgs:
        """Return the settings of an engine that serves so many adapters."""
        return EngineArgs(
            max_loras=adapters,
            max_lora_rank=LARGEST_RANK,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=max(self.pool() // 6, LEAST_BATCH_TOKENS),
            max_model_len=MAX_MODEL_LEN,
            gpu_memory_utilization=1.0,
        )


A40: Final = Platform()


@lru_cache(maxsize=32)
def profile(platform: Platform = A40) -> Profile:
    """Return the profile of S-LoRA on a platform."""
    sheet, arch, tp = gpu_sheet(platform.gpu), model_arch(platform.model), platform.tp
    measured = load_profile(SLORA_H100)
    physics = physics_of(platform)
    engine = EngineChoice(rules="slora", kernel=Kernel.MBGMV)
    plain = roofline_profile(
        sheet, arch, engine, tp, Assumptions(physics=physics), "python -m benchmarks.papers.chameleon"
    )
    steps = {name: each.value for name, each in plain.step_latency.coefficients.items()}
    steps["ms_per_prefill_krank"] = _prefill_ms_per_krank(platform, physics)
    roof = _roof(platform, physics)
    steps["base_ms"] -= roof.read_ms
    steps["ms_per_ktoken"] -= roof.chord_ms_per_ktoken
    steps["ms_per_ktoken_beyond_graphs"] = 0.0
    for name in ("ms_per_request", "ms_per_prefill"):
        steps[name] = measured.step_latency.value(name)
    source = "see benchmarks/papers/chameleon/setting.py"
    taken = platform.memory_bytes() - weight_bytes(arch, tp)
    reserved = float(taken - (platform.pool() + 0.5) * kv_bytes_per_token(arch, tp))
    memory = {"slot_factor": 1.0, "slot_overhead_bytes": 0.0, "bytes_per_seq": 0.0, "seqs_in_reserve": 0.0}
    request = {"request_ms": measured.host.value("request_ms"), "client_itl_factor": 1.0}
    return plain.replace(
        name=f"chameleon/{platform.name}",
        gpu=plain.gpu.replace(memory_bytes=platform.memory_bytes()),
        step_latency=assumed_model(ADDITIVE.name, steps, source).replace(
            form=TABLE.name, tables=roof.tables()
        ),
        memory=assumed_model(MEMORY_FORM, {**memory, "reserved_bytes": reserved}, source),
        loading=assumed_model(LOADING_FORM, _loading(platform, physics), source),
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


def _roof(platform: Platform, physics: Efficiencies) -> _Roof:
    sheet, arch = gpu_sheet(platform.gpu), model_arch(platform.model)
    embedding = arch.dtype_bytes * arch.vocab_size * arch.hidden_size / platform.tp
    read = weight_bytes(arch, platform.tp) - embedding  # one row per token of the embeddings
    operations = 2e3 * read / arch.dtype_bytes
    return _Roof(
        read_ms=1e3 * read / (physics.bandwidth * sheet.bytes_per_s),
        ms_per_ktoken=1e3 * operations / (physics.compute * sheet.flop_per_s),
    )


def physics_of(platform: Platform) -> Efficiencies:
    """Return the roofline's shares, with S-LoRA's host time of a step instead of kernel launches."""
    measured = load_profile(SLORA_H100)
    read_ms = 1e3 * weight_bytes(measured.model) / (Efficiencies.bandwidth * H100_BYTES_PER_S)
    host_ms = measured.step_latency.value("base_ms") - read_ms
    return Efficiencies(compute=platform.compute, kernel_us=0.0, step_ms=host_ms)


def _loading(platform: Platform, physics: Efficiencies) -> dict[str, float]:
    """Return the coefficients of adapter loading; see the docstring of the module."""
    arch = model_arch(platform.model)
    ms_per_rank = _link_ms_per_rank(platform, arch, physics)
    reference = model_arch(A40.model)
    fixed_ms = LOAD_MS - LARGEST_RANK * _link_ms_per_rank(A40, reference, physics)
    return {
        "serving_factor": 1.0,
        "gpu_base_ms": platform.tp * fixed_ms * arch.layers / reference.layers,
        "gpu_ms_per_rank": ms_per_rank,
        "gpu_padding_ms": 0.0,
        "disk_base_ms": 0.0,
        "disk_ms_per_rank": 0.0,
    }


def _link_ms_per_rank(platform: Platform, arch: ModelArch, physics: Efficiencies) -> float:
    """Return the time on the link: twice the adapter, in shards one after the other."""
    bytes_per_ms = 1e-3 * physics.host_link * gpu_sheet(platform.gpu).host_bytes_per_s
    return 2.0 * adapter_bytes(arch, 1, ATTENTION_MODULES) / bytes_per_ms


def _prefill_ms_per_krank(platform: Platform, physics: Efficiencies) -> float:
    """Return the cost of adapters in prefill: that of the A40, scaled by arithmetic and elements."""
    sheet, arch = gpu_sheet(A40.gpu), model_arch(A40.model)
    on_a40 = LOAD_MS * ADAPTER_SHARE / LOAD_SHARE / (medium_ktokens(physics) * LARGEST_RANK)
    served, elements = gpu_sheet(platform.gpu), model_arch(platform.model)
    work = adapter_bytes(elements, 1, ATTENTION_MODULES) / adapter_bytes(arch, 1, ATTENTION_MODULES)
    return on_a40 * work / platform.tp * sheet.flop_per_s / served.flop_per_s


def medium_ktokens(physics: Efficiencies) -> float:
    """Return the prompt whose prefill, bound by arithmetic, has the base model's share of Fig. 2."""
    base_ms = LOAD_MS * (1.0 - LOAD_SHARE - ADAPTER_SHARE) / LOAD_SHARE
    return (base_ms - physics.step_ms) / _roof(A40, physics).ms_per_ktoken


def workload(mix: str = "up", factor: float | None = None, *, traces: str) -> Workload:
    """Return a preset workload of the paper, ``chameleon-`` and `mix`, with scaled lengths.

    The mix `LMSYS` has the adapters of ``up``. `factor` None: that of the mix.
    """
    is_lmsys = mix == LMSYS
    found = preset_workload(f"chameleon-{'up' if is_lmsys else mix}", traces=traces)
    pairs = _lmsys_pairs() if is_lmsys else found.length_pairs
    assert pairs is not None
    own = LMSYS_FACTOR if is_lmsys else LENGTH_FACTOR
    return found.with_length_pairs(pairs.scaled(factor or own))


def _lmsys_pairs() -> LengthPairs:
    """Return log-normal lengths with the means of LMSYS-Chat-1M's data card, as Toppings' presets have."""
    rng = np.random.default_rng(0)
    drawn = (
        np.clip(np.rint(rng.lognormal(mu, sigma, 20_000)), 1, most).astype(np.int64)
        for mu, sigma, most in ((3.396, 1.3, 8192), (4.8, 1.07, 2048))
    )
    return LengthPairs.from_arrays(*drawn)


def at_rate(load: Workload, rps: float) -> Workload:
    return scaled(load, rps / load.total_rate_rps)
