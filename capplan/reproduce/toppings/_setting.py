"""Numbers of the recipe, typed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import Field

from capplan.datasets import model_arch
from capplan.reproduce._recipe import cached, read_recipe
from capplan.spec import Cache, Count, ModelArch, Positive, Rank, Share, SpecModel, Text

PAPER: Final = "toppings"


class Server(SpecModel):
    """A base model and its GPUs."""

    arch: Text
    gpus: Count

    @property
    def model(self) -> ModelArch:
        """The model's architecture."""
        return model_arch(self.arch)


class PrefillTime(SpecModel):
    """Time of a prompt."""

    tokens: Count
    ms: Positive


class DecodeTime(SpecModel):
    """Time of an iteration of requests of one rank, by LoRA kernel."""

    requests: Count
    rank: Rank
    bgmv_ms: Positive
    mbgmv_ms: Positive


class PrefillRatio(SpecModel):
    """Prefill with adapters of one rank over that with another."""

    tokens: Count
    low_rank: Rank
    high_rank: Rank
    ratio: Positive


class CpuPrefill(SpecModel):
    """Prefills whose adapter is on CPU cores alone."""

    prefill: tuple[PrefillTime, PrefillTime]
    rank: Rank
    cores: Count
    tokens_per_task: Count


class Functions(SpecModel):
    """Shares of functions by their calls per second."""

    ends_rps: tuple[Positive, ...]
    shares: tuple[Share, ...]


class Production(SpecModel):
    """Functions of one server, and their calls."""

    adapters: Count
    rps: Positive


class Motivation(SpecModel):
    """Functions of one server at several loads."""

    adapters: Count
    rps: tuple[Positive, ...]


class Cumulative(SpecModel):
    """Equal requests at equal distances, each of an adapter of its own."""

    requests: Count
    rank: Rank
    prompt_tokens: Count
    output_tokens: Count
    every_ms: Positive


class Routing(SpecModel):
    """One request to be routed."""

    slo_ms: Positive
    new_rank: Rank


class Cluster(SpecModel):
    """Instances at several loads."""

    instances: Count
    rps: tuple[Positive, ...]
    duration_s: Positive


class Simulation(SpecModel):
    """Instances that serve all functions."""

    instances: Count
    rps: Positive
    adapters: Count
    ranks: tuple[Rank, ...]
    duration_s: Positive


class Setting(SpecModel):
    """Numbers of the paper's setting. Copies are those of an adapter of rank 64, to all GPUs."""

    gpu: Text
    modules: tuple[Text, ...]
    small: Server
    large: Server
    prefill: tuple[PrefillTime, PrefillTime]
    decode: tuple[DecodeTime, DecodeTime]
    prefill_ratio: PrefillRatio
    cpu: CpuPrefill
    compute_share: Share = Field(description="Of the GPU's peak, in prefills.")
    copy_ms: Positive
    slora_copy_ms: Positive
    large_copy_ms: Positive
    outputs: Positive = Field(description="Output lengths over those of the data card.")
    cluster_outputs: Positive
    max_model_len: Count
    max_adapters_rank: Rank
    duration_s: Positive
    functions: Functions
    function_rank: Rank
    production: tuple[Production, ...]
    cumulative: Cumulative
    motivation: Motivation
    compression: Count
    routing: Routing
    cluster: Cluster
    simulation: Simulation
    slo_factor: Positive


class System(SpecModel):
    """A compared server; nothing is kept without a request, or loaded ahead."""

    loading: Text
    slora_copies: bool = False
    cores: Count | None = None
    dlora: bool = False

    def cache(self) -> Cache:
        """Return the settings of the twin."""
        loads = {} if self.loading in ("cached", "resident") else {"prefetch": "none"}
        cores = {} if self.cores is None else {"cpu_workers": self.cores}
        return Cache.model_validate({"policy": "none", "loading": self.loading, **loads, **cores})


@cached
def setting() -> Setting:
    """Return the setting."""
    return read_recipe(PAPER).typed(Setting)


@cached
def systems() -> Mapping[str, System]:
    """Return the compared servers by name."""
    return {name: System.model_validate(given) for name, given in read_recipe(PAPER).systems.items()}
