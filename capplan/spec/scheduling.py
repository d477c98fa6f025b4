"""Scheduler and adapter cache of a group: policies, queues by request size, output-length predictor."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, Strict, model_validator

from capplan.errors import InputError
from capplan.spec.validation import (
    Count,
    Flag,
    Fraction,
    Many,
    NonNegative,
    Positive,
    SpecModel,
    Text,
    format_key,
    one_of,
    rule,
    rule_error,
    validate_document,
)

SizeForm: TypeAlias = Literal["degree2", "degree1", "output_only"]

ClusterRule: TypeAlias = Literal["elbow", "wcss", "silhouette"]

QuotaSize: TypeAlias = Literal["max", "p99", "mean"]

RestWeights: TypeAlias = Literal["minimum", "load", "rate"]

AdapterCharge: TypeAlias = Literal["per_request", "none"]

MOST_QUEUES: Final = 4
"""Queues that an engine has room for."""

PROMPT_WEIGHT: Final = 0.4
"""Weight of the prompt in request sizes (Chameleon, section 4.3.1)."""

MaxQueues = Annotated[int, Strict(), Field(ge=1, le=16), rule("must be a whole number from 1 to 16")]

Percentile = Annotated[
    float, Strict(), Field(gt=0, lt=1), rule("must be a number above 0 and below 1, such as 0.99")
]

RefreshPeriod = Annotated[
    float, Strict(), Field(ge=1, le=1e9), rule("must be a number of seconds from 1 to 1e9")
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
    max_queues: MaxQueues = Field(
        default=4, description=f"Most queues of a group; an engine has at most {MOST_QUEUES}."
    )
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
        default="per_request",
        description="Whether a request takes its adapter's weights, counted in tokens, from the quota.",
    )


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


class Queues(SpecModel):
    """Queues by request size."""

    wrs: Wrs = Field(description="How the size of a request is computed.")
    adapter_charge: AdapterCharge = Field(
        default="per_request",
        description="Whether a request takes its adapter's weights, counted in tokens, from the quota, "
        "beside prompt and predicted output.",
    )
    classes: Many[QueueClass] = Field(min_length=1, description="Queues by ascending size.")

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


Model = TypeVar("Model", bound=BaseModel)

PredictorKind: TypeAlias = Literal["oracle", "classes", "learned"]


class Predictor(SpecModel):
    """Prediction of output lengths, which request sizes, charges and shortest-job-first use."""

    kind: Annotated[PredictorKind, one_of(PredictorKind)] = Field(
        default="oracle",
        description="oracle: the output itself; classes: the mean of a length class, which is the right one "
        "with probability accuracy; learned: the model in file.",
    )
    accuracy: Fraction = Field(
        default=1.0, description="Share of requests whose class is right, for kind classes."
    )
    file: Text | None = Field(
        default=None, description="File of a learned predictor, relative to the workload file."
    )

    @model_validator(mode="after")
    def _parameters_of_the_kind(self) -> Self:
        if self.kind != "classes" and self.accuracy != 1.0:
            raise rule_error("goes with kind classes", key=("accuracy",), value=self.accuracy)
        if self.kind == "learned" and self.file is None:
            raise rule_error("is required for kind learned", key=("file",))
        if self.kind != "learned" and self.file is not None:
            raise rule_error("goes with kind learned", key=("file",), value=self.file)
        return self


def _name_of(key: str, schema: Any) -> BeforeValidator:
    """Return a validator that reads a name as a mapping with this `key` alone."""

    def read(value: Any) -> Any:
        return {key: value} if isinstance(value, str) else value

    return BeforeValidator(read, json_schema_input_type=schema)


SchedulerPolicy: TypeAlias = Literal["chameleon", "fifo", "sjf", "static", "slora"]

SLORA_CADENCE: Final = 10
"""Decode steps between admissions of S-LoRA (c1ddf48, ``router/manager.py``)."""

_EVERY_STEP: Final = "slora-every-step"
"""Name of the policy slora with an admission before every step."""


class Scheduler(SpecModel):
    """Order and admission of requests in an instance (Chameleon, sections 4.3 and 5.1).

    Except for the policy slora, loads are asynchronous, and adapters and KV share the memory.
    """

    policy: Annotated[SchedulerPolicy, one_of(SchedulerPolicy, _EVERY_STEP)] = Field(
        description="chameleon: size queues with quotas; static: 4 equal ranges of sizes with equal quotas; "
        "fifo: by arrival; sjf: by predicted output; slora: S-LoRA's own rules, without a cache."
    )
    chunked: Flag = Field(
        default=False,
        description="Whether prompts are computed in chunks beside decodes; otherwise a batch of prompts "
        "pauses decoding.",
    )
    admit_every: Count = Field(
        default=1, description="Decode steps between admissions; default 1, of the policy slora 10."
    )
    refresh_s: RefreshPeriod = Field(
        default=300.0,
        description="Seconds between refreshes of the queues, each from the requests since the last.",
    )
    bypass: Flag = Field(
        default=True,
        description="Whether requests bypass the head of their queue while it does not fit in memory.",
    )
    ageing_s: Positive | None = Field(
        default=None,
        description="Wait of the oldest request from which sjf goes by arrival; absent: never.",
    )
    queues: QueueConfig = Field(
        default=QueueConfig(), description="How chameleon makes its queues, and how static measures size."
    )
    predictor: Annotated[Predictor, _name_of("kind", PredictorKind | Predictor)] = Field(
        default=Predictor(), description="Predictor of output lengths: its kind, or a mapping."
    )

    @model_validator(mode="before")
    @classmethod
    def _cadence_of_slora(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("policy") not in ("slora", _EVERY_STEP):
            return data
        cadence = SLORA_CADENCE if data["policy"] == "slora" else 1
        return {"admit_every": cadence, **data, "policy": "slora"}

    @model_validator(mode="after")
    def _settings_of_the_policy(self) -> Self:
        if self.ageing_s is not None and self.policy != "sjf":
            raise rule_error("goes with policy sjf", key=("ageing_s",), value=self.ageing_s)
        if self.chunked and self.policy == "slora":
            raise rule_error("must be false for policy slora", key=("chunked",), value=True)
        return self

    @property
    def name(self) -> str:
        """Policy, or the name of S-LoRA with an admission before every step."""
        return _EVERY_STEP if self.policy == "slora" and self.admit_every == 1 else self.policy

    @property
    def has_queues(self) -> bool:
        """Whether requests are in queues by size."""
        return self.policy in ("chameleon", "static")


CachePolicy: TypeAlias = Literal["none", "lru", "fairshare", "gdsf", "chameleon"]

Prefetch: TypeAlias = Literal["none", "queue", "histogram"]

CHAMELEON_WEIGHTS: Final[Mapping[str, float]] = {"frequency": 0.45, "recency": 0.10, "size": 0.45}
"""Weights of the score of an adapter (Chameleon, section 4.2.1)."""

_FAIR_WEIGHTS: Final = dict.fromkeys(CHAMELEON_WEIGHTS, 1.0 / 3.0)


class Cache(SpecModel):
    """Idle adapters kept in GPU memory, which one is evicted, and prefetch (Chameleon, section 4.2)."""

    policy: Annotated[CachePolicy, one_of(CachePolicy)] = Field(
        description="none: an adapter is dropped with its last request; lru, gdsf, and the sum of frequency, "
        "recency and size with equal weights (fairshare) or weights (chameleon): the lowest is evicted."
    )
    weights: dict[str, NonNegative] = Field(
        default={},
        description="Weights of frequency, recency and size, for policy chameleon; absent: .45, .10 and .45.",
    )
    prefetch: Annotated[Prefetch, one_of(Prefetch)] = Field(
        default="queue",
        description="Adapters loaded ahead: none, those of waiting requests, or by histogram those that are "
        "expected by their idle times, then those of waiting requests.",
    )

    @model_validator(mode="after")
    def _weights_of_the_score(self) -> Self:
        for name, weight in self.weights.items():
            if name not in CHAMELEON_WEIGHTS:
                names = ", ".join(CHAMELEON_WEIGHTS)
                raise rule_error(f"must be the weight of {names}", key=("weights", name), value=weight)
        if self.weights and self.policy != "chameleon":
            raise rule_error("go with policy chameleon", key=("weights",))
        if not any(self.score_weights):
            raise rule_error("must not all be 0", key=("weights",))
        return self

    @property
    def score_weights(self) -> tuple[float, float, float]:
        """Weights of frequency, recency and size: equal ones for fairshare."""
        weights = _FAIR_WEIGHTS if self.policy == "fairshare" else {**CHAMELEON_WEIGHTS, **self.weights}
        frequency, recency, size = (weights[name] for name in CHAMELEON_WEIGHTS)
        return frequency, recency, size


SchedulerSource: TypeAlias = Annotated[
    Scheduler, _name_of("policy", SchedulerPolicy | Literal["slora-every-step"] | Scheduler)
]

CacheSource: TypeAlias = Annotated[Cache, _name_of("policy", CachePolicy | Cache)]


def scheduler_of(
    value: Scheduler | Mapping[str, Any] | str | None, location: str = "scheduler"
) -> Scheduler | None:
    """Return a scheduler from its name or a mapping; errors call it `location`.

    Raises
    ------
    InputError
        For an unknown name, with the nearest one, or another broken rule.
    """
    return _read(Scheduler, value, location)


def cache_of(value: Cache | Mapping[str, Any] | str | None, location: str = "cache") -> Cache | None:
    """Return a cache from its name or a mapping; errors call it `location`.

    Raises
    ------
    InputError
        For an unknown name, with the nearest one, or another broken rule.
    """
    return _read(Cache, value, location)


def _read(model: type[Model], value: Model | Mapping[str, Any] | str | None, location: str) -> Model | None:
    if value is None or isinstance(value, model):
        return value
    if isinstance(value, str):
        return validate_document(model, {"policy": value}, lambda _: location)
    return validate_document(model, value, lambda key: format_key((location, *key)))


_NO_CACHE: Final = "must be none beside scheduler slora, which has no cache"


def completed(scheduler: Scheduler | None, cache: Cache | None) -> tuple[Scheduler, Cache] | None:
    """Return scheduler and cache, fifo and none for an absent one; None without both: the engine's own.

    Raises
    ------
    InputError
        For a cache beside the scheduler slora.
    """
    if scheduler is None and cache is None:
        return None
    scheduler, cache = scheduler or Scheduler(policy="fifo"), cache or Cache(policy="none")
    if _contradict(scheduler, cache):
        raise InputError(_NO_CACHE, cache.policy, "cache")
    return scheduler, cache


def check_cache(scheduler: Scheduler | None, cache: Cache | None) -> None:
    """Raise the error of a validator for a cache beside the scheduler slora."""
    if scheduler is not None and cache is not None and _contradict(scheduler, cache):
        raise rule_error(_NO_CACHE, key=("cache",), value=cache.policy)


def _contradict(scheduler: Scheduler, cache: Cache) -> bool:
    return scheduler.policy == "slora" and cache.policy != "none"


SCHEDULER: Final = (
    "Scheduler of every GPU, a name (chameleon, static, fifo, sjf, slora, slora-every-step) or a mapping; "
    "absent: the engine's own, unless there is cache or queues."
)

CACHE: Final = (
    "Adapter cache of every GPU, a name (chameleon, fairshare, lru, gdsf, none) or a mapping; absent: the "
    "engine's own, or none beside scheduler."
)
