"""How long a step lasts with a batch of a given size, and a request that runs in such steps."""

from __future__ import annotations

from capplan.compile import jit
from capplan.models.fluid.inputs import Gpu, Load
from capplan.models.step_latency import StepFeatures, StepRanks, rank_ms, step_ms


@jit
def step_s(gpu: Gpu, load: Load, batch: float, adapters: float, waiting: float) -> float:
    """Return the seconds of a step of `batch` requests of `adapters` adapters while `waiting` queue."""
    tokens = batch * (1.0 + load.prompt / load.output)
    step = StepFeatures(
        tokens=tokens,
        requests=batch,
        kv_tokens=batch * load.held,
        adapters=adapters,
        a_max=gpu.a_max,
        s_max=gpu.s_max,
        waiting=waiting,
        slots_per_adapter=min(1.0, gpu.a_max / load.adapters),
    )
    return (step_ms(gpu.form, gpu.k, step) + _ranks_ms(gpu, load, batch)) / 1000.0


@jit
def life_s(gpu: Gpu, load: Load, step_s: float) -> float:
    """Return how long a request runs: a step per output token, and one per piece of a long prompt."""
    return step_s * (load.output + max(0.0, load.prompt / gpu.token_budget - 1.0))


@jit
def _ranks_ms(gpu: Gpu, load: Load, batch: float) -> float:
    # A request is prefilled once in `output` steps: below that batch, only some steps hold a prefill.
    prefills = max(1.0, batch / load.output)
    decoding = StepRanks(
        decodes=batch,
        prefills=0.0,
        lora_decodes=batch,
        lora_prefills=0.0,
        lora_prefill_tokens=0.0,
        max_rank=load.max_rank,
        decode_rank_sum=batch * load.mean_rank,
        prefill_rank_sum=0.0,
        prefill_rank_tokens=0.0,
    )
    prefilling = StepRanks(
        decodes=0.0,
        prefills=prefills,
        lora_decodes=0.0,
        lora_prefills=prefills,
        lora_prefill_tokens=prefills * load.prompt,
        max_rank=load.max_rank,
        decode_rank_sum=0.0,
        prefill_rank_sum=prefills * load.mean_rank,
        prefill_rank_tokens=prefills * load.prompt * load.mean_rank,
    )
    share = min(1.0, batch / load.output)
    prefill_ms = rank_ms(gpu.form, gpu.k, gpu.s_max, prefilling)
    return rank_ms(gpu.form, gpu.k, gpu.s_max, decoding) + share * prefill_ms
