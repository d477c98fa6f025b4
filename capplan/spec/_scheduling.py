"""Scheduler and adapter cache of a group: policies, queues by request size, output-length predictor.

Queues are settings of their design in workloads, and the queues themselves in plans (Chameleon, section 4.3).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, TypeVar, get_args

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    Strict,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)

from capplan.errors import InputError
from capplan.spec._validation import (
    Count,
    Flag,
    Fraction,
    Many,
    NonNegative,
    Positive,
    SparseModel,
    SpecModel,
    Text,
    format_key,
    input_error,
    one_of,
    refuse_unread,
    rule,
    rule_error,
    unknown_name,
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


RefreshPeriod = Annotated[
    float, Strict(), Field(ge=1, le=1e9), rule("must be a number of seconds from 1 to 1e9")
]

Source = TypeVar("Source")


def _listed(names: Sequence[str]) -> str:
    """Return names as text, such as ``a, b or c``."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _named(key: str, schema: Any, names: Any, *aliases: str) -> BeforeValidator:
    """Return a validator that reads a name as a mapping with this `key` alone.

    `schema` is that of names and mappings; `names` is a ``Literal``, `aliases` are further names.
    """
    valid = (*get_args(names), *aliases)

    def read(value: Any) -> Any:
        if isinstance(value, str):
            if value not in valid:
                raise rule_error(unknown_name(value, valid))
            return {key: value}
        if not isinstance(value, Mapping | SpecModel):
            raise rule_error("must be a name or a mapping of keys to values")
        return value

    return BeforeValidator(read, json_schema_input_type=schema)


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

    @property
    def _unread(self) -> Mapping[str, str]:
        """Keys without effect, with the rule for each."""
        kinds = {"accuracy": "classes", "file": "learned"}
        return {key: f"goes with kind {kind}" for key, kind in kinds.items() if kind != self.kind}

    @model_validator(mode="after")
    def _parameters_of_the_kind(self) -> Self:
        if self.kind == "learned" and self.file is None:
            raise rule_error("is required for kind learned", key=("file",))
        return refuse_unread(self, self._unread)

    @model_serializer(mode="wrap")
    def _read_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_keys(handler(self), self._unread)


SchedulerPolicy: TypeAlias = Literal["chameleon", "fifo", "sjf", "static", "slora"]

SLORA_CADENCE: Final = 10
"""Decode steps between admissions of S-LoRA (c1ddf48, ``router/manager.py``)."""

_EVERY_STEP: Final = "slora-every-step"
"""Name of the policy slora with an admission before every step."""

_USERS: Final[Mapping[str, tuple[str, ...]]] = {
    "chunked": ("chameleon", "static", "fifo", "sjf"),
    "refresh_s": ("chameleon", "static", "fifo", "sjf"),
    "bypass": ("chameleon", "static"),
    "ageing_s": ("sjf",),
    "merging": ("fifo",),
    "queues": ("chameleon", "static"),
    "predictor": ("chameleon", "static", "sjf"),
}
"""Policies that read a key of a scheduler, if not all do."""

_CLUSTERING: Final = ("policy", "clusters", "max_queues", "quota_size", "percentile", "rest")
"""Keys of queues that static ones, equal ranges with equal quotas, do not read."""


class Merging(SpecModel):
    """Merging of one adapter into the base model while its requests alone are served (dLoRA).

    All but `switch_ms` decides alone; the durations of steps are the profile's.
    """

    merged_ms: Positive = Field(default=15.0, description="Assumed duration of a step of a merged adapter.")
    unmerged_ms: Positive = Field(default=27.0, description="Assumed duration of a step of any adapters.")
    switch_ms: NonNegative = Field(
        default=20.0, description="Duration of a merge, and of its end; defaults: dLoRA's for Llama-7B."
    )

    @model_validator(mode="after")
    def _merged_steps_are_shorter(self) -> Self:
        if self.merged_ms >= self.unmerged_ms:
            rule = f"must be below unmerged_ms, {self.unmerged_ms:g}"
            raise rule_error(rule, key=("merged_ms",), value=self.merged_ms)
        return self


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
    merging: Merging | None = Field(
        default=None,
        description="dLoRA's batches, for policy fifo in the simulation of resident adapters: steps of any "
        "adapters, or of the one that is merged into the base model; {}: with its times. Absent: none.",
    )
    queues: QueueConfig = Field(
        default=QueueConfig(), description="How chameleon makes its queues, and how static measures size."
    )
    predictor: Annotated[Predictor, _named("kind", PredictorKind | Predictor, PredictorKind)] = Field(
        default=Predictor(), description="Predictor of output lengths: its kind, or a mapping."
    )

    @model_validator(mode="before")
    @classmethod
    def _cadence_of_slora(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("policy") not in ("slora", _EVERY_STEP):
            return data
        cadence = SLORA_CADENCE if data["policy"] == "slora" else 1
        if data["policy"] == _EVERY_STEP and data.get("admit_every", 1) != 1:
            rule = f"must be 1 for policy {_EVERY_STEP}"
            raise rule_error(rule, key=("admit_every",), value=data["admit_every"])
        return {"admit_every": cadence, **data, "policy": "slora"}

    @property
    def _unread(self) -> Mapping[str, str]:
        """Keys without effect, with the rule for each."""
        return {
            key: f"goes with policy {_listed(policies)}"
            for key, policies in _USERS.items()
            if self.policy not in policies
        }

    @model_validator(mode="after")
    def _settings_of_the_policy(self) -> Self:
        if self.policy == "static":
            refuse_unread(self.queues, dict.fromkeys(_CLUSTERING, "goes with policy chameleon"), ("queues",))
        return refuse_unread(self, self._unread)

    @model_serializer(mode="wrap")
    def _read_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = without_keys(handler(self), self._unread)
        if not self.has_queues and "refresh_s" not in self.model_fields_set:
            fields.pop("refresh_s", None)  # read by caches that count uses alone
        if self.merging is None:
            fields.pop("merging", None)  # documents without the key mean the same
        if self.policy == "static" and "queues" in fields:
            fields["queues"] = without_keys(fields["queues"], _CLUSTERING)
        return fields

    @property
    def name(self) -> str:
        """Policy, or the name of S-LoRA with an admission before every step."""
        return _EVERY_STEP if self.policy == "slora" and self.admit_every == 1 else self.policy

    def with_absolute_paths(self) -> Self:
        """Return the scheduler with the path of a learned predictor that does not depend on a folder."""
        if self.predictor.file is None:
            return self
        return self.replace(predictor=self.predictor.replace(file=str(Path(self.predictor.file).absolute())))

    @property
    def has_queues(self) -> bool:
        """Whether requests are in queues by size."""
        return self.policy in ("chameleon", "static")


CachePolicy: TypeAlias = Literal["none", "lru", "fairshare", "gdsf", "chameleon"]

Loading: TypeAlias = Literal["asynchronous", "on-demand", "assisted", "resident", "cached"]

_STRAWMAN: Final = "strawman"
"""Toppings' name of asynchronous loading."""


def _read_strawman(value: Any) -> Any:
    return "asynchronous" if value == _STRAWMAN else value


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
    loading: Annotated[Loading, BeforeValidator(_read_strawman), one_of(Loading, _STRAWMAN)] = Field(
        default="asynchronous",
        description="asynchronous (strawman): decoding goes on, and a prompt waits for its adapter; "
        "on-demand: the batch of prompts waits, and decoding with it; assisted: prompts begin at once, and "
        "CPU cores compute the layers that are not copied yet; resident: all adapters are loaded at the "
        "start; cached: the same in memory beside that of KV, an ideal to compare with.",
    )
    cpu_workers: Count | None = Field(
        default=None,
        description="CPU cores that compute for adapters being loaded, for loading assisted; absent: as "
        "many as the profile's cpu_lora was measured with.",
    )

    @model_validator(mode="after")
    def _weights_of_the_score(self) -> Self:
        for name, weight in self.weights.items():
            if name not in CHAMELEON_WEIGHTS:
                names = ", ".join(CHAMELEON_WEIGHTS)
                raise rule_error(f"must be the weight of {names}", key=("weights", name), value=weight)
        if not any(self.score_weights):
            raise rule_error("must not all be 0", key=("weights",))
        return refuse_unread(self, self._unread)

    @property
    def _unread(self) -> Mapping[str, str]:
        """Keys without effect, with the rule for each."""
        unread = {} if self.policy == "chameleon" else {"weights": "goes with policy chameleon"}
        if not self.loads:
            unread["prefetch"] = f"does not go with loading {self.loading}, which loads nothing later"
        if self.loading != "assisted":
            unread["cpu_workers"] = "goes with loading assisted"
        return unread

    @model_serializer(mode="wrap")
    def _read_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        unread = set(self._unread)
        if self.loading == "asynchronous":
            unread.add("loading")  # documents without the key mean the same
        if self.cpu_workers is None:
            unread.add("cpu_workers")
        return without_keys(handler(self), unread)

    @property
    def loads(self) -> bool:
        """Whether adapters are loaded while the engine serves."""
        return self.loading not in ("resident", "cached")

    @property
    def counts_uses(self) -> bool:
        """Whether scores depend on the uses of adapters since the last refresh."""
        return self.policy in ("chameleon", "fairshare", "gdsf")

    @property
    def score_weights(self) -> tuple[float, float, float]:
        """Weights of frequency, recency and size: equal ones for fairshare."""
        weights = _FAIR_WEIGHTS if self.policy == "fairshare" else {**CHAMELEON_WEIGHTS, **self.weights}
        frequency, recency, size = (weights[name] for name in CHAMELEON_WEIGHTS)
        return frequency, recency, size


SchedulerSource: TypeAlias = Annotated[
    Scheduler,
    _named(
        "policy",
        SchedulerPolicy | Literal["slora-every-step"] | Scheduler,
        SchedulerPolicy,
        _EVERY_STEP,
    ),
]

CacheSource: TypeAlias = Annotated[Cache, _named("policy", CachePolicy | Cache, CachePolicy)]

_SCHEDULERS: Final[TypeAdapter[Scheduler | None]] = TypeAdapter(SchedulerSource | None)
_CACHES: Final[TypeAdapter[Cache | None]] = TypeAdapter(CacheSource | None)


def scheduler_of(
    value: Scheduler | Mapping[str, Any] | str | None, location: str = "scheduler"
) -> Scheduler | None:
    """Return a scheduler from its name or a mapping; errors call it `location`.

    Raises
    ------
    InputError
        For an unknown name, with the nearest one, or another broken rule.
    """
    return _read(_SCHEDULERS, value, location)


def cache_of(value: Cache | Mapping[str, Any] | str | None, location: str = "cache") -> Cache | None:
    """Return a cache from its name or a mapping; errors call it `location`.

    Raises
    ------
    InputError
        For an unknown name, with the nearest one, or another broken rule.
    """
    return _read(_CACHES, value, location)


def _read(source: TypeAdapter[Source], value: object, location: str) -> Source:
    try:
        return source.validate_python(value)
    except ValidationError as error:
        raise input_error(error, lambda key: format_key((location, *key))) from None


def completed(
    scheduler: Scheduler | None,
    cache: Cache | None,
    locations: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Scheduler, Cache] | None:
    """Return scheduler and cache, fifo and none for an absent one; None without both: the engine's own.

    `locations` are the names of ``scheduler`` and ``cache`` in errors, if others.

    Raises
    ------
    InputError
        For settings of one that do not go with the other.
    """
    if scheduler is None and cache is None:
        return None
    pair = scheduler or Scheduler(policy="fifo"), cache or Cache(policy="none")
    broken = _contradiction(*pair)
    if broken is not None:
        (name, *rest), words, value = broken
        raise InputError(words, value, format_key((locations.get(name, name), *rest)))
    return pair


def check_pair(scheduler: Scheduler | None, cache: Cache | None) -> None:
    """Raise the error of a validator for settings of a scheduler that do not go with the cache."""
    if scheduler is None and cache is None:
        return
    broken = _contradiction(scheduler or Scheduler(policy="fifo"), cache or Cache(policy="none"))
    if broken is not None:
        key, words, value = broken
        raise rule_error(words, key=key, value=value)


def _contradiction(scheduler: Scheduler, cache: Cache) -> tuple[tuple[str, ...], str, object] | None:
    """Return key, rule and value of a setting that does not go with the others, or None."""
    if scheduler.policy == "slora":
        if cache.policy != "none":
            return ("cache",), "must be none beside scheduler slora, which has no cache", cache.policy
        if cache.prefetch != "queue":
            words = "must be queue beside scheduler slora, which loads adapters of waiting requests ahead"
            return ("cache", "prefetch"), words, cache.prefetch
        if cache.loading != "asynchronous":
            words = "must be asynchronous beside scheduler slora, which loads by its own rules"
            return ("cache", "loading"), words, cache.loading
    elif scheduler.chunked and cache.loading in ("on-demand", "assisted"):
        words = "must be asynchronous, resident or cached beside chunked prompts, which never pause decoding"
        return ("cache", "loading"), words, cache.loading
    elif "refresh_s" in scheduler.model_fields_set and not (scheduler.has_queues or cache.counts_uses):
        words = "goes with policy chameleon or static, or cache chameleon, fairshare or gdsf"
        return ("scheduler", "refresh_s"), words, scheduler.refresh_s
    return None


SCHEDULER: Final = (
    "Scheduler of every GPU, a name (chameleon, static, fifo, sjf, slora, slora-every-step) or a mapping; "
    "absent: the engine's own, unless there is cache or queues."
)

CACHE: Final = (
    "Adapter cache of every GPU, a name (chameleon, fairshare, lru, gdsf, none) or a mapping; absent: the "
    "engine's own, or none beside scheduler."
)
