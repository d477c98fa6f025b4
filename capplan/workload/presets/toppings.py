"""Toppings' workloads (sections 2.3 and 7)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from capplan.workload.presets.base import LLAMA_2_7B, Preset, group, lognormal_bins

LLAMA_2_70B: Final = "meta-llama/Llama-2-70b-hf"
_MAF: Final = "{zipf: 1.44}"
_SKEW: Final = "popularity by a Zipf law of 1.44, fitted to Azure's functions of 2021; 2019's are not at hand"
_LMSYS: Final = "log-normal lengths with the means of LMSYS-Chat-1M's data card"
_SLO: Final = "{tpt_over_base: 1.5, attainment: 0.99}"
_CYCLE: Final = (
    "every adapter in a fixed random cycle: equal gaps and random phases, near Poisson together, so that "
    "each request finds its adapter least recently used"
)
_SYNTHETIC: Final = (  # name, model, adapters, rank, RPS
    ("s1", LLAMA_2_7B, 200, 32, 9.0),
    ("s2", LLAMA_2_7B, 200, 64, 6.0),
    ("s3", LLAMA_2_7B, 200, 64, 9.0),
    ("s4", LLAMA_2_7B, 50, 256, 3.0),
    ("s5", LLAMA_2_70B, 200, 32, 3.0),
    ("s6", LLAMA_2_70B, 200, 64, 3.0),
)


def lmsys() -> tuple[str, ...]:
    """Return lengths like those of LMSYS-Chat-1M."""
    prompt, output = lognormal_bins(3.396, 1.3, 8192), lognormal_bins(4.8, 1.07, 2048)
    return (f"prompt_tokens: {prompt}", f"output_tokens: {output}")


def presets() -> Iterator[Preset]:
    """Yield the preset of every workload."""
    for adapters, rps in ((128, 1.5), (256, 3.6), (512, 7.7)):
        summary = f"scaled production: {adapters} adapters of rank 64 on one server, {rps:g} RPS"
        yield _maf(f"toppings-maf-{adapters}", "section 7.1", summary, adapters, rps)
    for rps in (3.0, 6.0, 9.0):
        summary = f"motivation: 512 adapters of rank 64, {rps:g} RPS"
        yield _maf(f"toppings-motivation-{rps:g}", "section 2.3", summary, 512, rps)
    for name, model, adapters, rank, rps in _SYNTHETIC:
        long = name == "s4"
        yield Preset(
            name=f"toppings-{name}",
            source="Toppings, section 7.1, Table 2",
            summary=f"{adapters} adapters of rank {rank}, every request another one, {rps:g} RPS"
            + (", QMSum's long prompts" if long else ""),
            base_model=model,
            requests=(*(("lengths_from: $FILE",) if long else lmsys()), "arrivals: deterministic"),
            adapters=(group("a", adapters, rank, rps),),
            assumed=(_CYCLE,) if long else (_CYCLE, _LMSYS),
            slo=_SLO,
            file="qmsum_lengths.parquet" if long else "",
        )
    for rps in (30.0, 40.0, 50.0):
        yield Preset(
            name=f"toppings-cluster-{rps:g}",
            source="Toppings, section 7.4",
            summary=f"8 GPUs, four ranks, {rps:g} RPS",
            base_model=LLAMA_2_7B,
            requests=(*lmsys(), "arrivals: poisson"),
            adapters=tuple(group(f"r{rank}", 128, rank, rps / 4, _MAF) for rank in (8, 16, 32, 64)),
            assumed=("ranks 8, 16, 32 and 64, 128 adapters of each", _SKEW, _LMSYS),
            gpus=8,
            slo=_SLO,
        )
    summary = "simulation: 40,000 functions as adapters, 340 RPS, 60 servers"
    yield _maf("toppings-simulation", "section 7.5", summary, 40_000, 340.0, gpus=60)


def _maf(name: str, where: str, summary: str, adapters: int, rps: float, gpus: int = 1) -> Preset:
    return Preset(
        name=name,
        source=f"Toppings, {where} (Azure Functions)",
        summary=summary,
        base_model=LLAMA_2_7B,
        requests=(*lmsys(), "arrivals: poisson"),
        adapters=(group("f", adapters, 64, rps, _MAF),),
        assumed=(_SKEW, _LMSYS),
        gpus=gpus,
        slo=_SLO,
    )
