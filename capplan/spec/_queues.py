"""Queues by request size: settings of their design, and the queues of a plan (Chameleon, section 4.3)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import Field, SerializerFunctionWrapHandler, Strict, model_serializer, model_validator

from capplan.errors import InputError
from capplan.spec._validation import (
    Count,
    Fraction,
    Many,
    NonNegative,
    SparseModel,
    SpecModel,
    refuse_unread,
    rule,
    rule_error,
    without_keys,
)

SizeForm: TypeAlias = Literal["degree2", "degree1", "output_only"]

ClusterRule: TypeAlias = Literal["elbow", "wcss", "silhouette"]

QuotaSize: TypeAlias = Literal["max", "p99", "mean"]

RestWeights: TypeAlias = Literal["minimum", "load", "rate"]

AdapterCharge: TypeAlias = Literal["per_request", "shared", "none"]

MOST_QUEUES: Final = 4
"""Queues that an engine has room for."""

PROMPT_WEIGHT: Final = 0.4
"""Weight of the prompt in request sizes (Chameleon, section 4.3.1)."""

MaxQueues = Annotated[
    int, Strict(), Field(ge=1, le=MOST_QUEUES), rule(f"must be a whole number from 1 to {MOST_QUEUES}")
]

Percentile = Annotated[
    float, Strict(), Field(gt=0, lt=1), rule("must be a number above 0 and below 1, such as 0.99")
]


class QueueConfig(SpecModel):
    """Queues by request size and their quotas (Chameleon, section 4.3); defaults are the paper's."""

    policy: Literal["chameleon"] = Field(default="chameleon", description="How queues are made.")
    size: SizeForm = Field(
        default="degree2",
        description="How size is computed: degree2 multiplies lengths by the adapter, degree1 adds it, "
        "output_only counts nothing but the output.",
    )
    prompt_weight: Fraction = Field(
        default=PROMPT_WEIGHT,
        description="Weight of the prompt in the size; that of the predicted output is the rest.",
    )
    clusters: ClusterRule = Field(
        default="elbow",
        description="What chooses the number of queues: elbow, wcss (the paper's words, which always give "
        "max_queues) or silhouette.",
    )
    max_queues: MaxQueues = Field(default=MOST_QUEUES, description="Most queues of a group.")
    quota_size: QuotaSize = Field(
        default="max",
        description="Size that stands for those of a queue: the largest, the 99th percentile, or the mean.",
    )
    percentile: Percentile | None = Field(
        default=None,
        description="Share of requests that the bound on time is for; absent: the bound is on the mean.",
    )
    rest: RestWeights = Field(
        default="minimum",
        description="What the tokens left go by: the minima, the mean load, or the rate of each queue.",
    )
    adapter_charge: AdapterCharge = Field(
        default="shared",
        description="Who takes an adapter's weights, counted in tokens, from the quota: every request, the "
        "first of those in execution that share it, or none.",
    )

    @property
    def _unread(self) -> Mapping[str, str]:
        """Keys without effect, with the rule for each."""
        return {"prompt_weight": "goes with size degree2 or degree1"} if self.size == "output_only" else {}

    @model_validator(mode="after")
    def _only_read_keys(self) -> Self:
        return refuse_unread(self, self._unread)

    @model_serializer(mode="wrap")
    def _read_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_keys(handler(self), self._unread)


class Wrs(SpecModel):
    """Weighted request size, from lengths = a * prompt / max + b * output / max and adapter = bytes / max.

    degree2 is lengths * adapter, degree1 (lengths + adapter) / 2, and output_only lengths alone. Ratios end
    at 1; requests for the base model count as requests for the smallest adapter of the group.
    """

    form: SizeForm = Field(default="degree2", description="How lengths and adapter are combined.")
    a: NonNegative = Field(description="Weight of the prompt.")
    b: NonNegative = Field(description="Weight of the predicted output.")
    max_prompt_tokens: Count = Field(description="Prompt length that counts as 1, in tokens.")
    max_output_tokens: Count = Field(description="Output length that counts as 1, in tokens.")
    max_adapter_bytes: Count = Field(description="Adapter size that counts as 1, in bytes.")


class QueueClass(SpecModel):
    """One queue: requests up to a size, and the tokens it may have in execution."""

    upper_wrs: NonNegative | None = Field(description="Sizes of this queue are below this; null in the last.")
    quota_tokens: Count = Field(description="Tokens this queue may have in execution.")


class Queues(SparseModel):
    """Queues by request size."""

    _optional_keys = ("missing_tokens",)

    wrs: Wrs = Field(description="How the size of a request is computed.")
    adapter_charge: AdapterCharge = Field(
        default="shared",
        description="Who takes an adapter's weights, counted in tokens, from the quota, beside prompt and "
        "predicted output: every request, the first of those in execution that share it, or none.",
    )
    classes: Many[QueueClass] = Field(min_length=1, description="Queues by ascending size.")
    missing_tokens: Count | None = Field(
        default=None,
        description="Tokens by which the minimum quotas for the bound on E2E exceed the KV memory, by a "
        "queueing model; the quotas are scaled down, and the verification decides.",
    )

    @model_validator(mode="after")
    def _ascending_and_open(self) -> Self:
        uppers = [queue.upper_wrs for queue in self.classes]
        if uppers[-1] is not None:
            raise rule_error("must be null in the last class", key=("classes", len(uppers) - 1, "upper_wrs"))
        for index, (low, high) in enumerate(itertools.pairwise([-1.0, *uppers[:-1]])):
            if low is None or high is None or high <= low:
                raise rule_error(
                    "must be a number above the class before", key=("classes", index, "upper_wrs"), value=high
                )
        return self


def require_room(queues: Queues, location: str) -> None:
    """Check that an engine has room for queues.

    Raises
    ------
    InputError
        For more queues than `MOST_QUEUES`.
    """
    if len(queues.classes) > MOST_QUEUES:
        raise InputError(f"must be at most {MOST_QUEUES} classes", len(queues.classes), location)
