"""The setting of the digital twin paper, as its recipe has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from capplan.reproduce._recipe import cached, read_recipe
from capplan.spec import Adapter, SpecModel


class Predictable(SpecModel):
    """Scenarios of section 8.2."""

    ranks: tuple[tuple[int, ...], ...]
    adapters: tuple[int, ...]
    slots: tuple[int, ...]


class UnpredictableScenarios(SpecModel):
    """Scenarios of section 8.2 whose arrivals change every five minutes."""

    rank: int
    slots: int
    adapters: tuple[int, ...]


class Training(SpecModel):
    """Training of the surrogates of section 8.3."""

    scenarios: int
    combinations: int
    folds: int


class CurveSetting(SpecModel):
    """One curve of the placement figures."""

    model: str
    gpus: int
    rates: str
    ranks: str
    adapters: tuple[int, ...]


class Load(SpecModel):
    """A workload of Table 5."""

    adapters: int
    total_rps: float


class Placement(SpecModel):
    """Scenarios of section 8.4."""

    rates_rps: Mapping[str, tuple[float, ...]]
    ranks: Mapping[str, tuple[int, ...]]
    curves: Mapping[str, CurveSetting]
    model_len: Mapping[str, int]
    time_limit_s: float
    speed: Mapping[str, Load]
    repeats: int


class Motivation(SpecModel):
    """Llama-2-7B in sections 2.3 and 5.1 and in appendix A."""

    prompt_tokens: int
    output_tokens: int
    slora_output_tokens: int
    batched_tokens: int
    model_len: int
    slora_profile: str
    slora: Mapping[str, int]
    saturating_rps: float
    saturated_s: float
    memory_step: int
    scheduler_rps: float
    scheduler_s: float


class Setting(SpecModel):
    """All of the setting."""

    horizon_s: float
    models: Mapping[str, str]
    fitted_on: str
    judged_on: str
    rates_rps: Mapping[str, tuple[float, ...]]
    predictable: Predictable
    unpredictable: UnpredictableScenarios
    training: Training
    grids: Mapping[str, Mapping[str, tuple[Mapping[str, tuple[Any, ...]], ...]]]
    placement: Placement
    motivation: Motivation


@cached
def setting() -> Setting:
    """Return the setting of the recipe."""
    return read_recipe("twin").typed(Setting)


def system(name: str) -> Mapping[str, str]:
    """Return solver and estimator of a system of the recipe."""
    found: Mapping[str, str] = read_recipe("twin").systems[name]
    return found


def numbered(ranks: Iterable[int], rates_rps: Iterable[float]) -> tuple[Adapter, ...]:
    """Return adapters a0, a1, ... of these ranks and rates."""
    pairs = zip(ranks, rates_rps, strict=True)
    return tuple(
        Adapter(name=f"a{i}", rank=int(rank), rate_rps=float(rate)) for i, (rank, rate) in enumerate(pairs)
    )
