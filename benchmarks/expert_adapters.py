"""Throughput of mixtures of experts with adapters over that without, by composed profiles.

    python -m benchmarks.expert_adapters [PROFILE ...]

Four adapters of rank 16 in four slots, against the base model alone, at a constant number of running
requests. Ratios that engines were measured with are of other models and unstated GPUs (SGLang pull request
28091: 0.74 to 0.79 with four adapters at four batch sizes). They stand beside these, and bound nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.common import command_line, emit, equal_adapters, records_table, user_errors
from capplan import Lengths, Profile, Workload, load_profile, simulate

PROFILES: Final = ("h100-80g/qwen3-30b-a3b-fp8/vllm-0.19.0-fp8_block", "h200/qwen3-30b-a3b/vllm-0.19.0")
_IN_FLIGHT: Final = (8, 16, 32, 64)
_ADAPTERS: Final = 4
_RANK: Final = 16
_RATE_RPS: Final = 100.0
"""More than any of these engines serves."""
_DURATION_S: Final = 300.0
_LENGTHS: Final = {"prompt_tokens": Lengths(mean=1024), "output_tokens": Lengths(mean=256)}


def ratios(profile: Profile) -> Iterator[dict[str, object]]:
    """Yield output tokens per second without and with adapters by requests in flight."""
    base_model = profile.model.hf_ids[0]
    adapters = equal_adapters(_ADAPTERS, _RANK, _RATE_RPS)
    workloads = (
        Workload(base_model=base_model, adapters=[], base_rate_rps=_RATE_RPS, **_LENGTHS),
        Workload(base_model=base_model, adapters=adapters, **_LENGTHS),
    )
    for in_flight in _IN_FLIGHT:
        base, lora = (
            simulate(
                workload,
                profile,
                a_max=len(workload.adapters),
                duration_s=_DURATION_S,
                max_num_seqs=in_flight,
                max_num_batched_tokens=8192,
            ).output_tok_s
            for workload in workloads
        )
        yield {
            "profile": profile.name,
            "in flight": in_flight,
            "base, tok/s": f"{base:.0f}",
            "four adapters, tok/s": f"{lora:.0f}",
            "ratio": f"{lora / base:.2f}",
        }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("profiles", nargs="*", default=PROFILES)
    args = parser.parse_args()
    with user_errors():
        emit(records_table(row for each in args.profiles for row in ratios(load_profile(each))) + "\n")


if __name__ == "__main__":
    main()
