"""How many KV tokens an engine has left beside its weights and adapter slots."""

from __future__ import annotations

from capplan.errors import InfeasibleError
from capplan.serving.memory import kv_bytes_per_token, slot_bytes, weight_bytes
from capplan.spec import Profile

FORM = "slots-and-reserve"
"""``gpu_memory * utilization - weights - reserved - a_max * (slot_factor * slot_bytes(s_max) + slot_overhead)
- bytes_per_seq * max(0, max_num_seqs - seqs_in_reserve)``: vLLM's start-up run samples for max_num_seqs
requests, and beyond some number the logits of that run, not its activations, set the peak.
"""


def kv_tokens(
    profile: Profile, a_max: int, s_max: int, gpu_memory_utilization: float, max_num_seqs: int
) -> int:
    """Return the KV tokens that fit on one GPU, a multiple of the block size; 0 when nothing is left.

    Parameters
    ----------
    profile
        Hardware, model and engine.
    a_max
        Adapter slots (vLLM ``--max-loras``).
    s_max
        Rank that every slot is sized for (``--max-lora-rank``).
    gpu_memory_utilization
        Share of the GPU's memory that the engine may take.
    max_num_seqs
        Most running requests.
    """
    memory = profile.memory
    slot = memory.value("slot_factor") * slot_bytes(profile.model, profile.engine, s_max, profile.tp)
    taken = (
        weight_bytes(profile.model, profile.tp)
        + memory.value("reserved_bytes")
        + a_max * (slot + memory.value("slot_overhead_bytes"))
        + memory.value("bytes_per_seq") * max(0.0, max_num_seqs - memory.value("seqs_in_reserve"))
    )
    left = profile.gpu.memory_bytes * gpu_memory_utilization - taken
    block_bytes = kv_bytes_per_token(profile.model, profile.tp) * profile.engine.block_size
    return max(0, int(left // block_bytes)) * profile.engine.block_size


def require_kv_tokens(
    profile: Profile,
    a_max: int,
    s_max: int,
    gpu_memory_utilization: float,
    max_num_seqs: int,
    max_model_len: int,
) -> int:
    """Return the KV tokens, where one request of `max_model_len` fits.

    Raises
    ------
    InfeasibleError
        With reason ``memory`` when it does not: the engine would refuse to start.
    """
    tokens = kv_tokens(profile, a_max, s_max, gpu_memory_utilization, max_num_seqs)
    if tokens < max_model_len:
        raise InfeasibleError(
            f"memory: weights, {a_max} adapter slots of rank {s_max} and max_num_seqs {max_num_seqs} "
            f"leave {tokens} KV tokens in {gpu_memory_utilization:g} of a {profile.gpu.name}, fewer than one "
            f"request of max_model_len {max_model_len}",
            reason="memory",
        )
    return tokens
