"""Chameleon's workloads (section 5.1 and 5.4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from capplan.spec.traffic import zipf
from capplan.workload.presets.base import AZURE_CONVERSATIONS, LLAMA_7B, Preset, by_rank, group

RANKS: Final = (8, 16, 32, 64, 128)
_ZIPF: Final = "the power law's exponent is 1, small ranks the popular ones"
_LENGTHS: Final = "lengths as recorded: the paper scales them down by a factor it does not give"
_WHAT: Final = {
    "uu": "ranks and adapters of a rank equally popular",
    "up": "ranks equally popular, adapters of a rank by a power law (the default)",
    "pp": "ranks and adapters of a rank by a power law",
}


def presets() -> Iterator[Preset]:
    """Yield the preset of every workload."""
    for mix in _WHAT:
        yield _mix(f"chameleon-{mix}", mix, 100, 8.0, "medium load, 8 RPS")
    for load, rps in (("low", 6.0), ("high", 9.0)):
        yield _mix(f"chameleon-up-{load}", "up", 100, rps, f"{load} load, {rps:g} RPS")
    for mix in ("up", "pp"):
        for adapters in (10, 50, 100, 150, 200):
            yield _mix(f"chameleon-{mix}-{adapters}", mix, adapters, 9.5, f"{adapters} adapters at 9.5 RPS")
    yield _burst()
    sizes = (("7b", LLAMA_7B, 500), ("13b", "huggyllama/llama-13b", 100), ("30b", "huggyllama/llama-30b", 10))
    for size, model, adapters in sizes:
        summary = f"scale-up on an A100, {size}, {adapters} adapters"
        preset = _mix(f"chameleon-a100-{size}", "up", adapters, 8.0, summary, model)
        yield preset
    for adapters in (1, 50, 500):
        yield Preset(
            name=f"chameleon-pcie-{adapters}",
            source="Chameleon, section 3 (PCIe micro test)",
            summary=f"{adapters} adapters of rank 32, equally popular, 8 RPS",
            base_model=LLAMA_7B,
            requests=("lengths_from: $FILE", "arrivals: poisson"),
            adapters=(group("r32", adapters, 32, 8.0),),
            assumed=(_LENGTHS,),
            file=AZURE_CONVERSATIONS,
        )


def _burst() -> Preset:
    mix = _mix("chameleon-up-burst", "up", 100, 9.5, "a burst at 300 s, 9.5 RPS on average")
    burst = "{kind: burst, factor: 2, every_s: 600, length_s: 30, at_s: 300}"
    return replace(
        mix,
        source="Chameleon, section 5, figure 19",
        requests=("lengths_from: $FILE", f"arrivals: {{modulation: {burst}}}"),
        assumed=(
            *mix.assumed,
            "twice the rate for 30 s, again every 600 s: the paper says only when it comes",
        ),
    )


def _mix(name: str, mix: str, adapters: int, rps: float, summary: str, base_model: str = LLAMA_7B) -> Preset:
    shares = zipf(len(RANKS), 1.0 if mix[0] == "p" else 0.0)
    popularity = "{zipf: 1}" if mix[1] == "p" else "{zipf: 0}"
    assumed = (*((_ZIPF,) if "p" in mix else ()), _LENGTHS)
    if "a100" in name:
        assumed = (*assumed, "8 RPS")
    return Preset(
        name=name,
        source="Chameleon, section 5",
        summary=f"{summary}; {_WHAT[mix]}",
        base_model=base_model,
        requests=("lengths_from: $FILE", "arrivals: poisson"),
        adapters=by_rank(RANKS, shares, rps, adapters // len(RANKS), popularity),
        assumed=assumed,
        slo="{ttft_p99_s: 5.0, itl_p99_ms: 150}",
        file=AZURE_CONVERSATIONS,
    )
