"""Small workloads on a shipped profile."""

from capplan import Adapter, Lengths, Workload, load_profile
from capplan.twin.cluster import Instance

PROFILE = load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5")
OTHER = load_profile("h100-64g/qwen2.5-7b/vllm-0.8.5")


def even(adapters: int, total_rps: float, ranks: tuple[int, ...] = (8,)) -> Workload:
    """Return adapters that share a rate evenly, with these ranks in turn."""
    return Workload(
        base_model="meta-llama/Llama-3.1-8B-Instruct",
        adapters=tuple(
            Adapter(name=f"a{i}", rank=ranks[i % len(ranks)], rate_rps=total_rps / adapters)
            for i in range(adapters)
        ),
        prompt_tokens=Lengths(mean=200, std=150),
        output_tokens=Lengths(mean=100, std=80),
    )


def same(count: int, **settings: object) -> list[Instance]:
    """Return equal instances with all adapters."""
    return [Instance(PROFILE, **{"a_max": 16, "s_max": 64, **settings})] * count
