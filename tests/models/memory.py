"""KV memory of a profile by plain numbers."""

from capplan.models import kv_budget
from capplan.spec import DEFAULT_MAX_NUM_BATCHED_TOKENS, EngineLimits, Profile


def kv_tokens(
    profile: Profile,
    a_max: int,
    s_max: int,
    gpu_memory_utilization: float,
    seqs: int,
    batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS,
) -> int:
    limits = EngineLimits(a_max, s_max, seqs, batched_tokens)
    return kv_budget(profile, gpu_memory_utilization).tokens(limits)
