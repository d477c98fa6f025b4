"""Settings of re-balancing, in workloads and plans."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

from pydantic import Field

from capplan.spec.validation import Flag, NonNegative, Positive, SpecModel

Forecast: TypeAlias = Literal["holt", "last", "ewma", "linear", "gamma-poisson"]
FORECASTS: Final[tuple[Forecast, ...]] = get_args(Forecast)

RebalanceSolver: TypeAlias = Literal["loraserve", "capplan"]
REBALANCE_SOLVERS: Final[tuple[RebalanceSolver, ...]] = get_args(RebalanceSolver)


class RebalanceSettings(SpecModel):
    """Periodic re-balancing of adapters over the GPUs that serve a plan."""

    every_s: Positive = Field(
        default=300.0, description="Time between two re-balancings, and length of a window of demand."
    )
    forecast: Forecast = Field(
        default="holt",
        description="Forecast of the demand: holt (smoothed level and trend), last (the last window), ewma "
        "(smoothed level), linear (line through the last 12 windows) or gamma-poisson (the last window, "
        "shrunk to the mean of the last 12 by its number of requests).",
    )
    permute: Flag = Field(
        default=True, description="Whether GPUs are permuted such that the fewest bytes are copied."
    )
    solver: RebalanceSolver = Field(
        default="loraserve",
        description="loraserve: Algorithm 1 of LoRAServe; capplan: moves from the placement in force.",
    )
    price_per_gb: NonNegative = Field(
        default=0.01,
        description="For capplan: least gain of a move per GB to copy, in utilization of the GPU "
        "that it relieves.",
    )


REBALANCE: Final = "Periodic re-balancing of the adapters; absent: they stay where the plan places them."
