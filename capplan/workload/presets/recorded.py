"""Public traces as they are, with adapters dealt out, and what they show that the papers' recipes lack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from capplan.workload.presets.base import AZURE_CONVERSATIONS, LLAMA_3_8B, Preset, by_rank, group

RANKS: Final = (8, 16, 32, 64)
_DEALT: Final = "100 adapters, 25 of each rank 8, 16, 32, 64, a Zipf law of 1 within a rank"
_TICKS: Final = "times as published, in steps of 3 s: the batch at each step is the clock's, not the users'"
_TRACES: Final = (  # name, file, source, summary, mean rate of the record in RPS
    ("azure-conversations", AZURE_CONVERSATIONS, "Azure LLM inference trace 2023", "chat, one hour", 5.53),
    ("azure-code", "azure_llm_2023_code.parquet", "Azure LLM inference trace 2023", "code, bursts", 2.566),
    ("mooncake-conversations", "mooncake_conversation.parquet", "Mooncake", "long contexts", 3.401),
    ("mooncake-synthetic", "mooncake_synthetic.parquet", "Mooncake", "long contexts, Poisson", 3.906),
    (
        "servegen-large",
        "servegen_mlarge_day1_3rps_sampled.parquet",
        "ServeGen m-large",
        "a day of many tenants, sampled",
        3.019,
    ),
    (
        "servegen-small",
        "servegen_msmall_2h_15rps_sampled.parquet",
        "ServeGen m-small",
        "two hours of many tenants, sampled",
        14.97,
    ),
    (
        "servegen-reasoning",
        "servegen_deepseekr1_2h_sampled.parquet",
        "ServeGen deepseek-r1",
        "long answers, sampled",
        11.88,
    ),
)


_BURSTY: Final = (  # pool, tenants, Zipf's exponent, cv of gaps; mean and spread of prompt and output tokens
    ("large", 162, 1.14, 3.5, (636, 779), (160, 213)),
    ("mid", 109, 1.52, 12, (334, 501), (58, 87)),
    ("small", 43, 1.46, 3.6, (240, 545), (37, 52)),
)


def presets() -> Iterator[Preset]:
    """Yield the preset of every trace."""
    for name, file, source, what, rps in _TRACES:
        yield Preset(
            name=f"real-{name}",
            source=source,
            summary=f"{what}, {rps:g} RPS as recorded",
            base_model=LLAMA_3_8B,
            trace="{file: $FILE}",
            adapters=by_rank(RANKS, (0.25,) * 4, rps, 25, "{zipf: 1}"),
            assumed=(_DEALT, _TICKS) if name == "mooncake-conversations" else (_DEALT,),
            gpus=4,
            file=file,
        )
    yield Preset(
        name="real-lora-popularity",
        source="GenTD26, a diffusion service's LoRA ids",
        summary="874 adapters, flat popularity, and one request in three repeats the last one's adapter",
        base_model=LLAMA_3_8B,
        requests=(
            "prompt_tokens: {mean: 223, std: 245}",
            "output_tokens: {mean: 194, std: 206}",
            "stickiness: {last: 1, probability: 0.34}",
        ),
        adapters=(group("l", 874, 16, 8.0, "{zipf: 0.92}"),),
        assumed=("rank 16, 8 RPS and chat lengths: the service draws pictures",),
        gpus=4,
    )
    yield Preset(
        name="real-tenants-day",
        source="ServeGen, client rates of 14 days",
        summary="162 tenants whose rates swing over the day, gaps a little burstier than Poisson",
        base_model=LLAMA_3_8B,
        requests=(
            "prompt_tokens: {mean: 636, std: 900}",
            "output_tokens: {mean: 160, std: 250}",
            "arrivals: {process: weibull, cv: 1.3, modulation: {kind: diurnal, amplitude: 0.7}}",
        ),
        adapters=(group("tenant", 162, 16, 3.0, "{zipf: 1.14}"),),
        assumed=(
            "rank 16, the spread of lengths",
            "one swing for all: peak and trough 1.7 and 0.3 of the mean",
        ),
        gpus=4,
    )
    for pool, tenants, zipf, cv, prompt, output in _BURSTY:
        yield Preset(
            name=f"real-tenants-bursty-{pool}",
            source=f"ServeGen m-{pool}, client rates of 14 days",
            summary=f"{tenants} tenants with gaps of cv {cv:g}, as in 10 minutes of their large ones",
            base_model=LLAMA_3_8B,
            requests=(
                f"prompt_tokens: {{mean: {prompt[0]}, std: {prompt[1]}}}",
                f"output_tokens: {{mean: {output[0]}, std: {output[1]}}}",
                f"arrivals: {{process: weibull, cv: {cv:g}}}",
            ),
            adapters=(group("tenant", tenants, 16, 3.0, f"{{zipf: {zipf:g}}}"),),
            assumed=(
                "rank 16, 3 RPS, one distribution of lengths for all tenants"
                + (", its spread of 1.5 times the mean" if pool == "mid" else ""),
                "the mean cv of all requests for every tenant: the median tenant has 1.2 to 1.3",
            ),
            gpus=4,
        )
