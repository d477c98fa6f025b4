"""Settings a workload may fix: latency objectives, engine flags, GPUs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Self

from pydantic import Field, Strict, model_validator

from capplan.spec._validation import (
    Count,
    Flag,
    Name,
    NonNegative,
    Positive,
    Share,
    SparseModel,
    SpecModel,
    Text,
    rule,
    rule_error,
)

Ratio = Annotated[float, Strict(), Field(ge=1), rule("must be a finite number >= 1")]


class Objective(StrEnum):
    """Objective that a plan optimises."""

    MIN_GPUS = "min_gpus"
    MIN_COST = "min_cost"
    MIN_LATENCY = "min_latency"
    MAX_THROUGHPUT = "max_throughput"


def _bound(metric: str, statistic: str, unit: str) -> Any:
    which = {"mean": "Mean", "p50": "Median"}.get(statistic, f"{statistic[1:]}th percentile")
    return Field(default=None, description=f"Upper bound: {which.lower()} {metric}, in {unit}.")


STARVED_BELOW: Final = 0.9
"""Served fraction under which a GPU counts as starved (adapter-caching paper, sections 2.3 and 6)."""

STABLE_TTFT_P99_S: Final = 30.0
"""Bound on TTFT p99 of stable queues, unless others are longer: 1 % of overload breaks it in an hour."""


class Slo(SparseModel):
    """Service-level objectives; every bound given must hold on every GPU.

    TTFT = time to first token; E2E = arrival to last token; TPOT = (E2E - TTFT) / (output tokens - 1);
    TPT = E2E / output tokens; ITL = gap between consecutive tokens; interruptions = pauses of a request's
    decoding by batches of others' prompts and by loads.
    """

    _optional_keys = tuple(
        f"interruption_{statistic}_{unit}"
        for unit in ("count", "share")
        for statistic in ("mean", "p50", "p95", "p99")
    )

    ttft_mean_s: Positive | None = _bound("time to first token", "mean", "s")
    ttft_p50_s: Positive | None = _bound("time to first token", "p50", "s")
    ttft_p95_s: Positive | None = _bound("time to first token", "p95", "s")
    ttft_p99_s: Positive | None = _bound("time to first token", "p99", "s")
    e2e_mean_s: Positive | None = _bound("time from arrival to last token", "mean", "s")
    e2e_p50_s: Positive | None = _bound("time from arrival to last token", "p50", "s")
    e2e_p95_s: Positive | None = _bound("time from arrival to last token", "p95", "s")
    e2e_p99_s: Positive | None = _bound("time from arrival to last token", "p99", "s")
    tpot_mean_ms: Positive | None = _bound("time per output token after the first", "mean", "ms")
    tpot_p50_ms: Positive | None = _bound("time per output token after the first", "p50", "ms")
    tpot_p95_ms: Positive | None = _bound("time per output token after the first", "p95", "ms")
    tpot_p99_ms: Positive | None = _bound("time per output token after the first", "p99", "ms")
    tpt_mean_ms: Positive | None = _bound("end-to-end time per output token", "mean", "ms")
    tpt_p50_ms: Positive | None = _bound("end-to-end time per output token", "p50", "ms")
    tpt_p95_ms: Positive | None = _bound("end-to-end time per output token", "p95", "ms")
    tpt_p99_ms: Positive | None = _bound("end-to-end time per output token", "p99", "ms")
    itl_mean_ms: Positive | None = _bound("inter-token latency", "mean", "ms")
    itl_p50_ms: Positive | None = _bound("inter-token latency", "p50", "ms")
    itl_p95_ms: Positive | None = _bound("inter-token latency", "p95", "ms")
    itl_p99_ms: Positive | None = _bound("inter-token latency", "p99", "ms")
    interruption_mean_count: Positive | None = _bound("pauses of a request's decoding", "mean", "number")
    interruption_p50_count: Positive | None = _bound("pauses of a request's decoding", "p50", "number")
    interruption_p95_count: Positive | None = _bound("pauses of a request's decoding", "p95", "number")
    interruption_p99_count: Positive | None = _bound("pauses of a request's decoding", "p99", "number")
    interruption_mean_share: Share | None = _bound("share of these pauses in E2E", "mean", "0 to 1")
    interruption_p50_share: Share | None = _bound("share of these pauses in E2E", "p50", "0 to 1")
    interruption_p95_share: Share | None = _bound("share of these pauses in E2E", "p95", "0 to 1")
    interruption_p99_share: Share | None = _bound("share of these pauses in E2E", "p99", "0 to 1")
    tpt_over_base: Ratio | None = Field(
        default=None,
        description="A request is good when its TPT is at most this multiple of the mean TPT without LoRA.",
    )
    attainment: Share | None = Field(
        default=None, description="Least share of good requests; goes with tpt_over_base."
    )
    served_fraction: Share = Field(
        default=STARVED_BELOW,
        description="Least tokens of completed requests / tokens submitted; below it a GPU starves.",
    )
    stable: Flag = Field(
        default=True,
        description="Whether queues must not grow: TTFT p99 within 30 s, or within the longest bound on TTFT "
        "or E2E, and no requests of an adapter left behind; false: served_fraction alone, as in the papers.",
    )

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if (self.tpt_over_base is None) != (self.attainment is None):
            raise rule_error("tpt_over_base and attainment go together: give both or neither")
        return self

    def latency_bounds(self) -> dict[str, float]:
        """Return the latency bounds that are set: key (``"ttft_p99_s"``) to value, in the key's unit."""
        units = ("_s", "_ms", "_count", "_share")
        bounds = {name: getattr(self, name) for name in type(self).model_fields if name.endswith(units)}
        return {name: value for name, value in bounds.items() if value is not None}

    @property
    def longest_wait_s(self) -> float:
        """Longest wait for a first token that stable queues allow."""
        waits = (bound for name, bound in self.latency_bounds().items() if name.startswith(("ttft", "e2e")))
        return max((STABLE_TTFT_P99_S, *waits))

    def latency_limits(self) -> dict[str, float]:
        """Return the latency bounds that are set, and the bound on TTFT p99 that stable queues imply."""
        bounds = self.latency_bounds()
        return {"ttft_p99_s": self.longest_wait_s, **bounds} if self.stable else bounds


def describe_latency(bound: str) -> tuple[str, str]:
    """Return the latency that a bound such as ``ttft_p99_s`` is on, as text, and its unit."""
    metric, statistic, unit = bound.split("_")
    if metric == "interruption":
        return (
            (f"interruptions {statistic}", "") if unit == "count" else (f"interrupted {statistic}", "of E2E")
        )
    return f"{metric.upper()} {statistic}", unit


class Gpus(SpecModel):
    """GPUs of one kind that a plan may use."""

    count: Count = Field(description="How many GPUs a plan may use.")


class Pool(SpecModel):
    """GPUs of one kind among several, with their own profile and price."""

    name: Name = Field(description="Name of the pool, which adapters refer to.")
    profile: Text = Field(description="Name of a shipped profile, or path of a profile JSON.")
    count: Count | None = Field(
        default=None,
        description="How many GPUs of this pool a plan may use; absent: up to 8 times the lower bound of the "
        "load on this pool alone.",
    )
    usd_per_hour: NonNegative | None = Field(
        default=None, description="Price of one GPU in US dollars per hour."
    )
