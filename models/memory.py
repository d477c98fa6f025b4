"""How many KV tokens an engine has left beside its weights and adapter slots."""

from __future__ import annotations

from dataclasses import dataclass

from capplan.errors import InfeasibleError
from capplan.serving.memory import kv_bytes_per_token, slot_bytes, weight_bytes
from capplan.spec import Profile

FORM = "slots-and-reserve"
"""``gpu_memory * utilization - weights - reserved - a_max * (slot_factor * slot_bytes(s_max) + slot_overhead)
- bytes_per_seq * max(0, max_num_seqs - seqs_in_reserve)``: vLLM's start-up run samples for max_num_seqs
requests, and beyond some number the logits of that run, not its activations, set the peak.
"""


@dataclass(frozen=True)
class KvBudget:
    """What decides about KV tokens on one GPU of a profile, for those who ask about many settings."""

    memory_bytes: float
    """Of the GPU, as far as the engine may take it."""
    weight_bytes: int
    reserved_bytes: float
    slot_bytes_per_rank: int
    slot_factor: float
    slot_overhead_bytes: float
    bytes_per_seq: float
    seqs_in_reserve: float
    block_bytes: int
    block_tokens: int

    def tokens(self, a_max: int, s_max: int, max_num_seqs: int) -> int:
        """Return the KV tokens that fit beside so many slots; see `kv_tokens`."""
        slot = self.slot_factor * (s_max * self.slot_bytes_per_rank)
        taken = (
            self.weight_bytes
            + self.reserved_bytes
            + a_max * (slot + self.slot_overhead_bytes)
            + self.bytes_per_seq * max(0.0, max_num_seqs - self.seqs_in_reserve)
        )
        return max(0, int((self.memory_bytes - taken) // self.block_bytes)) * self.block_tokens


def kv_budget(profile: Profile, gpu_memory_utilization: float) -> KvBudget:
    """Return what a profile says of memory."""
    memory, engine = profile.memory, profile.engine
    return KvBudget(
        memory_bytes=profile.gpu.memory_bytes * gpu_memory_utilization,
        weight_bytes=weight_bytes(profile.model, profile.tp),
        reserved_bytes=memory.value("reserved_bytes"),
        slot_bytes_per_rank=slot_bytes(profile.model, engine, 1, profile.tp),
        slot_factor=memory.value("slot_factor"),
        slot_overhead_bytes=memory.value("slot_overhead_bytes"),
        bytes_per_seq=memory.value("bytes_per_seq"),
        seqs_in_reserve=memory.value("seqs_in_reserve"),
        block_bytes=kv_bytes_per_token(profile.model, profile.tp) * engine.block_size,
        block_tokens=engine.block_size,
    )


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
    return kv_budget(profile, gpu_memory_utilization).tokens(a_max, s_max, max_num_seqs)


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
