"""Workloads of the digital-twin paper on adapter caching (sections 2 and 8)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Final

from capplan.workload.presets.base import LLAMA_3_8B, SHAREGPT, SHAREGPT_SPREAD, Preset, at_random, group

HIGH: Final = (1.6, 0.8, 0.4)
LOW: Final = (0.1, 0.05, 0.025)
_CACHING_RATES: Final = {
    "high": (2.4, 1.2, 0.6, 0.3, 0.15),
    "low": (0.075, 0.0375, 0.01875, 0.009375, 0.0046875),
    "mixed": (0.6, 0.3, 0.15, 0.075, 0.0375),
}
_CACHING_SIZES: Final = {"high": (32,), "low": (8,), "mixed": (8, 16, 32)}
_TRAINING_RATES: Final = {
    "fast": (3.2, 1.6, 0.8),
    "mixed": (3.2, 0.1, 0.003125),
    "slow": (0.0125, 0.00625, 0.003125),
}
_PREDICTABLE: Final = (8, 16, 32, 64, 128, 192, 256, 320, 384)  # adapters
_CACHING_ADAPTERS: Final = ((4, 192), (1, 48))  # GPUs, adapters
_LENGTHS: Final = {  # what the paper calls them: end of the name, lengths, in words
    "Mean": ("", SHAREGPT, "every request at the mean lengths of cleaned ShareGPT (the paper's mode Mean)"),
    "Original": (
        "-original",
        SHAREGPT_SPREAD,
        "gamma lengths with mean and spread of the published runs, where the paper's mode Original has pairs",
    ),
}
_PICKED: Final = "which adapter has which size and rate: picked once at random"


def presets() -> Iterator[Preset]:
    """Yield the preset of every workload."""
    figure = _preset(
        "dt-figure1",
        "section 2, figure 1",
        "128 adapters of rank 8 at 0.05 RPS each",
        (group("a", 128, 8, 6.4),),
        assumed=("128 adapters: the figure varies them",),
    )
    yield replace(figure, requests=("prompt_tokens: {mean: 250}", "output_tokens: {mean: 231}"))
    for name, rates in (("high", HIGH), ("low", LOW)):
        for sizes in ((8, 16), (8, 16, 32)):
            for adapters, mode in product(_PREDICTABLE, _LENGTHS):
                label = "-".join(map(str, sizes))
                yield _preset(
                    f"dt-predictable-{name}-r{label}-n{adapters}",
                    "section 8.2",
                    f"{adapters} adapters of ranks {label}, {name} rates, Poisson",
                    at_random(sizes, rates, adapters),
                    mode=mode,
                )
    for client in ("unpredictable", "published-client"):
        for name, rates in (("high", HIGH), ("low", LOW)):
            for adapters, mode in product((32, 64, 128), _LENGTHS):
                yield _unpredictable(client, name, rates, adapters, mode)
    for name, rates in _TRAINING_RATES.items():
        yield _preset(
            f"dt-training-{name}",
            "section 8.3",
            f"128 adapters of ranks 8, 16, 32; training rates {', '.join(f'{r:g}' for r in rates)}",
            at_random((8, 16, 32), rates, 128),
            assumed=(_PICKED, "which three of the ten rates, and 128 adapters: the paper takes all"),
        )
    for rate_name, all_rates in _CACHING_RATES.items():
        for (size_name, all_sizes), (gpus, adapters) in product(_CACHING_SIZES.items(), _CACHING_ADAPTERS):
            where = "one GPU" if gpus == 1 else f"{gpus} GPUs"
            yield _preset(
                f"dt-caching-{rate_name}-{size_name}" + ("-1gpu" if gpus == 1 else ""),
                "section 8.4",
                f"{adapters} adapters on {where}, {rate_name} rates, {size_name} sizes",
                at_random(all_sizes, all_rates, adapters),
                assumed=(_PICKED, f"{adapters} adapters: the paper varies them"),
                gpus=gpus,
            )


def _unpredictable(client: str, name: str, rates: Sequence[float], adapters: int, mode: str) -> Preset:
    published = client == "published-client"
    settings = "clip: 7.5, " + (
        "factor: 1.5, lognormal_gaps: published_client" if published else "factor: 2, sigma: 1"
    )
    told = "as the published program draws them" if published else "as the text says"
    unsaid = () if published else ("log-normal gaps of sigma 1 that keep the mean", "rates stay within 7.5 x")
    return _preset(
        f"dt-{client}-{name}-{adapters}",
        "section 8.2",
        f"{adapters} adapters of rank 8, {name} first rates that change every 5 minutes, {told}",
        at_random((8,), rates, adapters),
        assumed=(_PICKED, *unsaid),
        requests=(f"arrivals: {{process: unpredictable, every_s: 300, {settings}}}",),
        mode=mode,
        engine="{max_loras: 32}",
    )


def _preset(
    name: str,
    where: str,
    summary: str,
    adapters: tuple[str, ...],
    assumed: tuple[str, ...] = (_PICKED,),
    requests: tuple[str, ...] = (),
    gpus: int = 1,
    engine: str = "",
    mode: str = "Mean",
) -> Preset:
    ending, lengths, in_words = _LENGTHS[mode]
    return Preset(
        name=name + ending,
        source=f"Digital twin for adapter caching, {where}",
        summary=summary + (", lengths that vary" if ending else ""),
        base_model=LLAMA_3_8B,
        requests=(*lengths, *requests),
        adapters=adapters,
        assumed=(*assumed, in_words),
        gpus=gpus,
        engine=engine,
        slo="{served_fraction: 0.9}",
    )
