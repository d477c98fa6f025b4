"""Setting of LoRAServe: servers on the authors' engine terms, and workloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from pydantic import Field

from capplan.datasets import gpu_sheet, model_arch
from capplan.models import EngineChoice, roofline_profile
from capplan.reproduce._recipe import cached, read_recipe
from capplan.spec import (
    Adapter,
    Coefficient,
    Count,
    FittedModel,
    Kernel,
    Lengths,
    Positive,
    Profile,
    Renewal,
    ShiftingSkew,
    SpecModel,
    Text,
    Trace,
    Workload,
)
from capplan.workload import draw_requests

_MEASURED: Final = ("llama-7b", 4)
"""Model of the authors' runs, and its tensor parallelism, up to which their step holds."""


class Terms(SpecModel):
    """Lines through the authors' sweeps of one model: one request at a time, answers of 128 tokens."""

    tp: Count = Field(description="Tensor parallelism of the sweep.")
    step_ms: Positive = Field(description="Time between tokens.")
    prompt_ms: Positive = Field(description="TTFT of a prompt without tokens, less a step.")
    ms_per_ktoken: Positive
    ms_per_krank: Positive = Field(description="Per 1,000 tokens times rank.")


class Engine(SpecModel):
    """What an engine costs beside time per token and rank, and its largest batch of prompts."""

    step_ms: Positive | None = Field(
        default=None, description="Step of Llama-7B with at most 4 GPUs; absent: that of the sweep."
    )
    batch_tokens: Count
    analytic: bool = Field(default=False, description="Whether all times are those of the roofline.")


class LengthsOf(SpecModel):
    """Lengths of a trace."""

    prompt: Lengths
    output: Lengths


class Mix(SpecModel):
    """Adapters of each rank, and their share of the requests."""

    shares: tuple[Positive, ...]
    adapters: tuple[Count, ...]
    lengths: Text
    swing: float | None = Field(default=None, description="Of `ShiftingSkew`.")
    first: tuple[Positive, ...] | None = Field(
        default=None, description="Shares at the start; absent: always."
    )
    horizon_s: Positive
    dealt: bool = Field(default=False, description="Whether requests of a rank go round its adapters.")


class Setting(SpecModel):
    """Numbers of the setting."""

    gpu: Text
    sweeps: Mapping[str, Terms] = Field(description="By model.")
    engines: Mapping[str, Engine]
    decode_share: Positive = Field(description="Decode time by rank, the sweep's over the roofline's.")
    max_num_seqs: Count
    max_model_len: Count
    ranks: tuple[Count, ...]
    lengths: Mapping[str, LengthsOf]
    mixes: Mapping[str, Mix]
    servers: Count
    bound_s: Positive = Field(description="Of the P95 TTFT.")
    alone_s: Positive = Field(description="Horizon of one server in section III.")
    window_s: Positive = Field(description="Time step of LoRAServe.")
    draws: Count = Field(description="Random placements per seed.")
    precision: Positive = Field(description="Of highest loads.")


@cached
def setting() -> Setting:
    return read_recipe("loraserve").typed(Setting)


@cached
def server(model: str, tp: int, engine: str) -> Profile:
    """Return the profile of a server.

    Time per token is that of the sweeps, carried to this tensor parallelism by the roofline. S-LoRA cuts
    both matrices of an adapter, so work by rank is divided by the GPUs.
    """
    plain, chosen, terms = _roofline(model, tp), setting().engines[engine], setting().sweeps[model]
    if chosen.analytic:
        return plain
    step, swept = plain.step_latency, _roofline(model, terms.tp).step_latency
    cut = terms.tp / tp
    measured = model == _MEASURED[0] and tp <= _MEASURED[1]
    values = {
        "base_ms": (chosen.step_ms if measured else None) or terms.step_ms,
        "ms_per_prefill": terms.prompt_ms,
        "ms_per_ktoken": terms.ms_per_ktoken * _token_ms(step) / _token_ms(swept),
        "ms_per_ktoken_beyond_graphs": 0.0,
        "ms_per_prefill_krank": terms.ms_per_krank * cut,
        "ms_per_decode_krank": setting().decode_share * swept.value("ms_per_decode_krank") * cut,
    }
    return plain.replace(
        name=f"loraserve/{model}-tp{tp}-{engine}",
        step_latency=_with(step, values),
        host=_with(plain.host, {"request_ms": 0.0}),
    )


def _roofline(model: str, tp: int) -> Profile:
    engine = EngineChoice(rules="slora", kernel=Kernel.BGMV)
    return roofline_profile(gpu_sheet(setting().gpu), model_arch(model), engine, tp)


def _token_ms(step: FittedModel) -> float:
    return step.value("ms_per_ktoken") + step.value("ms_per_ktoken_beyond_graphs")


def _with(fitted: FittedModel, values: Mapping[str, float]) -> FittedModel:
    changed = {name: Coefficient(value=value) for name, value in values.items()}
    return fitted.replace(coefficients={**fitted.coefficients, **changed})


def mixed(mix: str, arrivals: str, copies: int, rps: float, seed: int) -> Workload:
    """Return the requests of a mix at a rate, with so many adapters for each of the paper's.

    The seed draws the requests of a mix whose ranks are dealt round robin over their adapters.
    """
    given = setting()
    own = given.mixes[mix]
    by_rank = [rps * share / sum(own.shares) for share in own.shares]
    counts = [copies * count for count in own.adapters]
    adapters = [
        Adapter(name=f"r{rank}-{i}", rank=rank, rate_rps=rate_rps / count)
        for rank, rate_rps, count in zip(given.ranks, by_rank, counts, strict=True)
        for i in range(count)
    ]
    skew = None
    if own.swing is not None:
        skew = ShiftingSkew(from_rank=given.ranks[-1], to_rank=given.ranks[0], swing=own.swing)
    process = Renewal(process=arrivals, modulation=skew)
    load = of_lengths(given.lengths[own.lengths], adapters, process)
    if not own.dealt:
        return load
    ranks = [
        Adapter(name=f"r{rank}", rank=rank, rate_rps=rate_rps)
        for rank, rate_rps in zip(given.ranks, by_rank, strict=True)
    ]
    drawn = draw_requests(
        of_lengths(given.lengths[own.lengths], ranks, process), own.horizon_s, seed, given.max_model_len
    )
    dealt = np.empty(drawn.adapter.size, np.int64)
    for number, (count, first) in enumerate(zip(counts, np.cumsum([0, *counts]), strict=False), start=1):
        own_rows = np.flatnonzero(drawn.adapter == number)
        dealt[own_rows] = first + np.arange(own_rows.size) % count
    names = [adapters[i].name for i in dealt]
    arrival_s = drawn.arrival_ns / 1e9
    trace = Trace.from_arrays(arrival_s, names, drawn.prompt_tokens, drawn.output_tokens, own.horizon_s)
    return load.model_copy(update={"trace": trace})


def of_lengths(lengths: LengthsOf, adapters: Sequence[Adapter], arrivals: Renewal | None = None) -> Workload:
    """Return the workload of adapters whose requests have these lengths; by default Poisson."""
    return Workload(
        base_model="huggyllama/llama-7b",
        adapters=adapters,
        prompt_tokens=lengths.prompt,
        output_tokens=lengths.output,
        arrivals=arrivals or Renewal(),
    )
