"""What a user may ask of queues by request size."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, Strict

from capplan.spec.base import SpecModel
from capplan.spec.types import rule

SizeForm: TypeAlias = Literal["degree2", "degree1", "output_only"]
ClusterRule: TypeAlias = Literal["elbow", "wcss", "silhouette"]
QuotaSize: TypeAlias = Literal["max", "p99", "mean"]
RestWeights: TypeAlias = Literal["minimum", "load", "rate"]
AdapterCharge: TypeAlias = Literal["per_request", "none"]

MaxQueues = Annotated[int, Strict(), Field(ge=1, le=16), rule("must be a whole number from 1 to 16")]
Percentile = Annotated[
    float, Strict(), Field(gt=0, lt=1), rule("must be a number above 0 and below 1, such as 0.99")
]


class QueueWishes(SpecModel):
    """Queues by request size and their quotas (Chameleon, section 4.3); defaults are the paper's."""

    policy: Literal["chameleon"] = Field("chameleon", description="How queues are made.")
    size: SizeForm = Field(
        "degree2",
        description="How size is computed: degree2 multiplies lengths by the adapter, degree1 adds it, "
        "output_only counts nothing but the output.",
    )
    clusters: ClusterRule = Field(
        "elbow",
        description="What chooses the number of queues: elbow, wcss (the paper's words, which always give "
        "max_queues) or silhouette.",
    )
    max_queues: MaxQueues = Field(4, description="Most queues of a group.")
    quota_size: QuotaSize = Field(
        "max",
        description="Size that stands for those of a queue: the largest, the 99th percentile, or the mean.",
    )
    percentile: Percentile | None = Field(
        None, description="Share of requests that the bound on time is for; absent: the bound is on the mean."
    )
    rest: RestWeights = Field(
        "minimum",
        description="What the tokens left go by: the minima, the mean load, or the rate of each queue.",
    )
    adapter_charge: AdapterCharge = Field(
        "per_request",
        description="Whether a request takes its adapter's weights, counted in tokens, from the quota.",
    )
