"""Routers that workloads and plans name.

Settings of re-balancing, in workloads and plans.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Field, Strict

from capplan.spec._validation import Flag, NonNegative, Positive, SpecModel, rule, rule_error

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


PLAN_ROUTER: Final = "smooth-shares"
"""Router of a plan that names none: smooth weighted round robin over the plan's shares."""

STATE_PERIOD_S: Final = 0.25
"""Time between reports of an instance to the router of `capplan serve PLAN`, and of the verification."""

BYTES_PER_TOKEN: Final = 4
"""Bytes of the body of a request per token of its prompt, an estimate before it is tokenized."""

MEAN_LENGTHS: Final = ("mean_prompt_tokens", "mean_output_tokens")
"""Entries of a plan's provenance by which the models of its router are fitted."""

ROUTER_NAMES: Final = (
    *("plan-shares", "smooth-shares", "random", "round-robin", "least-loaded", "least-tokens", "two-choices"),
    *("first-fit", "lora-affinity", "inference-gateway", "dlora", "toppings", "toppings-rank-blind"),
    "least-work-left",
)


def _known(value: Any) -> Any:
    if isinstance(value, str) and value not in ROUTER_NAMES:
        raise rule_error(f"must be one of {', '.join(ROUTER_NAMES)}", value=value)
    return value


RouterName = Annotated[str, BeforeValidator(_known)]

BY_SHARES: Final = ("plan-shares", "smooth-shares")
"""Routers that send nothing to a holder whose share is 0."""
_OF_LEAST_WORK_LEFT: Final = ("off_plan", "rank_raise", "turn_s")
_PREFERENCE: Final = MappingProxyType({"off_plan": 1.25, "rank_raise": 1.5})
"""Parameters of least-work-left that are not given, where all GPUs store all adapters."""

ScoreFactor = Annotated[float, Strict(), Field(ge=1), rule("must be a number >= 1, such as 1.25")]


class RouterOptions(SpecModel):
    """Options of the router that a workload or plan names."""

    holders: Literal["placed", "all"] = Field(
        default="placed",
        description="GPUs that store an adapter: those on which it is placed, or all, among which the router "
        "chooses by their state.",
    )
    off_plan: ScoreFactor | None = Field(
        default=None,
        description="For least-work-left: factor on the score of GPUs on which the adapter is not placed; "
        "absent: 1.25 with holders all.",
    )
    rank_raise: ScoreFactor | None = Field(
        default=None,
        description="For least-work-left: further factor there if the adapter's rank is above those of all "
        "requests; absent: 1.5 with holders all.",
    )
    turn_s: NonNegative | None = Field(
        default=None,
        description="For least-work-left, where kernels pad: time between turns of requests whose ranks are "
        "above those of most others at their GPU; absent: 0, all are sent at once.",
    )

    @property
    def given(self) -> dict[str, Any]:
        """Parameters of `capplan.serving.routers.LeastWorkLeft` that are given."""
        return {name: value for name in _OF_LEAST_WORK_LEFT if (value := getattr(self, name)) is not None}

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of `capplan.serving.routers.LeastWorkLeft`."""
        return self.given if self.holders == "placed" else {**_PREFERENCE, **self.given}


def stores_everywhere(options: RouterOptions | None) -> bool:
    """Tell whether all GPUs store all adapters, by the options of a workload or plan."""
    return options is not None and options.holders == "all"


def check_router_options(options: RouterOptions | None, router: str | None, *, rebalanced: bool) -> None:
    """Check that options go with the router, at their keys."""
    if options is None:
        return
    for name, value in options.given.items():
        if router != "least-work-left":
            at = ("router_options", name)
            raise rule_error("goes with router least-work-left", key=at, value=value)
    if options.holders == "all":
        at = ("router_options", "holders")
        if router is None or router in BY_SHARES:
            raise rule_error("all goes with a router that reads more than shares", key=at, value=router)
        if rebalanced:
            raise rule_error("all does not go with rebalance, which moves adapters", key=at, value="all")


ROUTER: Final = (
    "Router in front of the GPUs, a name in `capplan.serving.routers.ROUTERS`; absent: smooth-shares, the "
    "plan's shares by smooth weighted round robin."
)

ROUTER_OPTIONS: Final = "Options of the router; absent: adapters are stored where they are placed."
