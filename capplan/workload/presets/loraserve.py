"""LoRAServe's workloads (section V-E)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from capplan.spec.traffic import exponential, zipf
from capplan.workload.presets.base import (
    AZURE_CONVERSATIONS,
    LLAMA_7B,
    Preset,
    by_rank,
    group,
    in_turn,
)

RANKS: Final = (8, 16, 32, 64, 128)
_TOP_CLIENTS: Final = (0.2988, 0.2190, 0.1072, 0.0881, 0.0568)  # shares of ServeGen m-small's first five
_LENGTHS: Final = "lengths of the Azure 2023 conversations: the 2024 trace is not at hand"
_SLO: Final = "{ttft_p95_s: 10.0}"


def presets() -> Iterator[Preset]:
    """Yield the preset of every workload."""
    for adapters in (50, 100, 200):
        yield _production(adapters)
    for arrivals, written in (("uniform", "deterministic"), ("poisson", "poisson")):
        for skew in ("uniform", "shifting", "exponential"):
            yield _azure(arrivals, written, skew)
    for servers in (8, 12):
        yield _scaled_out(servers)
    for label, alpha in (("third", 1 / 3), ("1", 1.0), ("2", 2.0), ("3", 3.0)):
        yield Preset(
            name=f"loraserve-rankskew-{label}",
            source="LoRAServe, section V-E (rank-skew sensitivity)",
            summary=f"100 adapters at 36 RPS, popularity of ranks by a power law of {alpha:.3g}",
            base_model=LLAMA_7B,
            requests=("lengths_from: $FILE", "arrivals: poisson"),
            adapters=by_rank(RANKS, zipf(5, alpha), 36.0, 20, "{zipf: 0}"),
            assumed=("equal popularity within a rank", _LENGTHS),
            gpus=4,
            slo=_SLO,
            file=AZURE_CONVERSATIONS,
        )
    for rank in RANKS:
        yield _micro(f"loraserve-micro-{rank}", f"rank {rank} alone", (group("a", 1, rank, 4.0),))
    both = (group("r8", 1, 8, 2.0), group("r128", 1, 128, 2.0))
    yield _micro("loraserve-micro-8-128", "ranks 8 and 128 served together, half of it each", both)
    yield from _facts()


def _production(adapters: int) -> Preset:
    total = sum(_TOP_CLIENTS)
    shares = [client / total for client in _TOP_CLIENTS]
    return Preset(
        name=f"loraserve-production-{adapters}",
        source="LoRAServe, section V-E (production trace)",
        summary=f"recorded requests at 8.685 RPS, {adapters} adapters, a power law of 1 within each rank",
        base_model=LLAMA_7B,
        trace="{file: $FILE, rate_rps: 8.685}",
        adapters=by_rank(RANKS, shares, 8.685, adapters // 5, "{zipf: 1}"),
        assumed=(
            "requests of ServeGen m-small instead of the trace, which is not public",
            "shares of the ranks are those of its five largest clients, rank 8 the largest",
        ),
        gpus=4,
        slo=_SLO,
        file="servegen_msmall_2h_15rps_sampled.parquet",
    )


def _azure(arrivals: str, written: str, skew: str) -> Preset:
    shares = {"uniform": (0.2,) * 5, "exponential": exponential(5, 1.0)}
    # Means over the shift: rank 128 falls from 1/2 to 1/8, rank 8 rises likewise.
    means = shares.get(skew, (0.3125, 0.125, 0.125, 0.125, 0.3125))
    process = f"arrivals: {written}"
    if skew == "shifting":
        shift = "{kind: shifting_skew, from_rank: 128, to_rank: 8, swing: 0.6}"
        process = f"arrivals: {{process: {written}, modulation: {shift}}}"
    assumed = ["5 adapters of each rank, equally popular within it", "32 RPS on 4 servers", _LENGTHS]
    if skew == "exponential":
        assumed.append("the exponential's rate is 1")
    if arrivals == "uniform":
        assumed.append("uniform arrivals are equal gaps of each adapter")
    return Preset(
        name=f"loraserve-{arrivals}-{skew}",
        source="LoRAServe, section V-E (annotated Azure traces)",
        summary=f"25 adapters, {arrivals} arrivals, {skew} popularity of ranks",
        base_model=LLAMA_7B,
        requests=("lengths_from: $FILE", process),
        adapters=by_rank(RANKS, means, 32.0, 5, "{zipf: 0}"),
        assumed=tuple(assumed),
        gpus=4,
        slo=_SLO,
        file=AZURE_CONVERSATIONS,
    )


def _scaled_out(servers: int) -> Preset:
    adapters, rps = 25 * servers // 4, 8.0 * servers
    return Preset(
        name=f"loraserve-scaleout-{servers}",
        source="LoRAServe, section V-G (scalability, figure 21)",
        summary=f"{servers} servers, {adapters} adapters, {rps:g} RPS: both grow with the servers",
        base_model=LLAMA_7B,
        requests=("lengths_from: $FILE", "arrivals: poisson"),
        adapters=by_rank(RANKS, (0.2,) * 5, rps, adapters // 5, "{zipf: 0}"),
        assumed=("25 adapters per 4 servers, Poisson, all equally popular", _LENGTHS),
        gpus=servers,
        slo=_SLO,
        file=AZURE_CONVERSATIONS,
    )


def _micro(name: str, what: str, adapters: tuple[str, ...]) -> Preset:
    return Preset(
        name=name,
        source="LoRAServe, section II and III (micro tests)",
        summary=f"4 RPS, 512 tokens in, 128 out; {what}",
        base_model=LLAMA_7B,
        requests=("prompt_tokens: {mean: 512}", "output_tokens: {mean: 128}", "arrivals: poisson"),
        adapters=adapters,
        assumed=("one adapter of each rank",),
        slo="{ttft_p95_s: 20.0}",
    )


def _facts() -> Iterator[Preset]:
    """Yield what the section on a production cluster tells: popularity, and shapes over time."""
    source = "LoRAServe, section III (production facts)"
    shapes = {
        "popularity": ("1000 adapters, the first five with 72 % of all requests", "poisson"),
        "trend": (
            "100 adapters whose rate rises threefold in 45 minutes",
            "{modulation: {kind: steps, steps: [[0, 1], [900, 1.5], [1800, 2.25], [2700, 3]]}}",
        ),
        "surge": (
            "100 adapters of near constant rate with a late surge",
            "{modulation: {kind: burst, factor: 3, every_s: 3600, length_s: 600, at_s: 2700}}",
        ),
        "diurnal": (
            "100 adapters whose rate swings over the day",
            "{modulation: {kind: diurnal, amplitude: 0.6, period_s: 86400}}",
        ),
    }
    for name, (summary, arrivals) in shapes.items():
        adapters = 1000 if name == "popularity" else 100
        assumed = ["8.685 RPS, as in the production trace", "ranks 8 to 128 in turn", _LENGTHS]
        if name != "popularity":
            assumed.append("the size of the swing: the paper shows it in a figure only")
        yield Preset(
            name=f"loraserve-facts-{name}",
            source=source,
            summary=summary,
            base_model=LLAMA_7B,
            requests=("lengths_from: $FILE", f"arrivals: {arrivals}"),
            adapters=in_turn(RANKS, zipf(adapters, 1.557), 8.685),
            assumed=tuple(assumed),
            gpus=4,
            slo=_SLO,
            file=AZURE_CONVERSATIONS,
        )
