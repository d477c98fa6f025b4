"""Workload generators of other systems: S-LoRA, dLoRA, AlpaServe, vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from capplan.spec.traffic import power_law
from capplan.workload.presets.base import LLAMA_3_8B, LLAMA_7B, SHAREGPT, Preset, group, in_turn

LLAMA_13B: Final = "huggyllama/llama-13b"
_LENGTHS: Final = (
    "prompt_tokens: {edges: [8, 512], counts: [1]}",
    "output_tokens: {edges: [8, 512], counts: [1]}",
)
_PER_ADAPTER: Final = "one gamma process per adapter, where the generator has one for all and then deals out"
_SETTINGS: Final = (
    ("s1", LLAMA_7B, (8,)),
    ("s2", LLAMA_7B, (64, 32, 16, 8)),
    ("s3", LLAMA_13B, (16,)),
    ("s4", LLAMA_13B, (64, 32, 16)),
)


def presets() -> Iterator[Preset]:
    """Yield the preset of every workload."""
    for name, model, ranks in _SETTINGS:
        yield _slora(name, model, ranks)
    for alpha in (0.1, 0.3, 0.6, 1.0):
        yield _slora(f"alpha-{alpha:g}", alpha=alpha)
    for cv in (1, 2, 4, 6, 8):
        yield _slora(f"cv-{cv}", cv=cv)
    for adapters in (1, 20, 50, 100, 200):
        yield _slora(f"n-{adapters}", adapters=adapters)
    yield _slora("a100", LLAMA_13B, (64, 32, 16), adapters=400, rps=6.0)
    yield _slora("table", LLAMA_7B, (8,), adapters=2000, rps=10.0)
    yield _slora("table-1000", LLAMA_7B, (8,), adapters=1000, rps=10.0)
    for rps in (1, 2, 4, 6, 8, 10):
        yield Preset(
            name=f"dlora-{rps}",
            source="dLoRA artifact, scripts of figure 9",
            summary=f"128 adapters, Azure Functions skew, gamma gaps of cv 1, {rps} RPS",
            base_model=LLAMA_7B,
            requests=(*SHAREGPT, "arrivals: {process: gamma, cv: 1}"),
            adapters=(group("a", 128, 8, rps, "{zipf: 1.44}"),),
            assumed=(
                "rank 8",
                "a Zipf law of 1.44, the same all the time, for shares that change every hour",
                "ShareGPT's mean lengths",
            ),
        )
    for cv in (1, 2, 4, 8):
        yield Preset(
            name=f"alpaserve-cv-{cv}",
            source="AlpaServe, alpa_serve/trace",
            summary=f"128 adapters, Azure Functions skew, gamma gaps of cv {cv}, 8 RPS",
            base_model=LLAMA_7B,
            requests=(*SHAREGPT, f"arrivals: {{process: gamma, cv: {cv}}}"),
            adapters=(group("a", 128, 8, 8.0, "{zipf: 1.44}"),),
            assumed=(
                "128 adapters of rank 8, 8 RPS, the cv: the generator takes a factor for rate and cv",
                "a Zipf law of 1.44 and one cv, the same all the time, for fits to every 10 to 60 minutes",
                "ShareGPT's mean lengths",
            ),
        )
    yield Preset(
        name="vllm-hot-adapter",
        source="vLLM, benchmarks of LoRA popularity",
        summary="one hot adapter with most of the requests, the others share the rest",
        base_model=LLAMA_3_8B,
        requests=SHAREGPT,
        adapters=("{name: hot, rank: 8, rate_rps: 6.4}", group("cold", 31, 8, 1.6)),
        assumed=("a hot ratio of 0.8, 32 adapters of rank 8, 8 RPS, ShareGPT's mean lengths",),
    )


def _slora(
    name: str,
    base_model: str = LLAMA_7B,
    ranks: Sequence[int] = (64, 32, 16, 8),
    *,
    alpha: float = 0.3,
    cv: float = 1,
    adapters: int = 200,
    rps: float = 2.0,
) -> Preset:
    size = "7B" if base_model == LLAMA_7B else "13B"
    return Preset(
        name=f"slora-{name}",
        source="S-LoRA, benchmarks/trace.py and exp_suite.py",
        summary=f"{size}, {adapters} adapters of rank {'/'.join(map(str, ranks))}, {rps:g} RPS, "
        f"alpha {alpha:g}, cv {cv:g}",
        base_model=base_model,
        requests=(*_LENGTHS, f"arrivals: {{process: gamma, cv: {cv:g}}}"),
        adapters=in_turn(ranks, power_law(adapters, alpha), rps),
        assumed=(_PER_ADAPTER, "a bound on the 99th percentile instead of S-LoRA's attainment"),
        slo="{ttft_p99_s: 6.0}",
    )
