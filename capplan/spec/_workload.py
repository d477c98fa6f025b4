"""The workload: adapters, traffic, hardware and objectives; and the schema of workload.yaml."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Strict, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema

from capplan.errors import InputError
from capplan.spec._engine_args import EngineConfig
from capplan.spec._lora_modules import TargetModules, TargetModulesSource
from capplan.spec._requests import LengthPairs, Lengths, TimeUnit, Trace, TraceFormat
from capplan.spec._routing import (
    REBALANCE,
    ROUTER,
    ROUTER_OPTIONS,
    RebalanceSettings,
    RouterName,
    RouterOptions,
    check_router_options,
    stores_everywhere,
)
from capplan.spec._scheduling import (
    CACHE,
    PROMPT_WEIGHT,
    SCHEDULER,
    Cache,
    CacheSource,
    QueueConfig,
    Scheduler,
    SchedulerSource,
    check_pair,
    completed,
)
from capplan.spec._slo import Gpus, Objective, Pool, Slo
from capplan.spec._traffic import ArrivalProcess, Arrivals, Popularity, Stickiness
from capplan.spec._validation import (
    Count,
    Key,
    Many,
    ModelId,
    Name,
    Natural,
    NonNegative,
    Positive,
    Rank,
    SpecModel,
    Text,
    check_unique,
    rule,
    rule_error,
)


def _sequence_of_names(value: Any) -> Any:
    if isinstance(value, str):
        raise rule_error("must be a list of adapter names")
    return value


AdapterNames = Annotated[Many[Name], BeforeValidator(_sequence_of_names)]


class AdapterFields(SpecModel):
    """Fields of an adapter and of an entry of a workload file."""

    name: Name = Field(description="Name of the adapter, as requests give it.")
    rank: Rank = Field(description="LoRA rank, 1 to 512.")
    rate_rps: NonNegative = Field(
        description="Mean arrival rate in requests per second; 0 = idle, but deployed."
    )
    path: Text | None = Field(
        default=None, description="Where the weights are: a folder, a Hugging Face id or a URL."
    )
    target_modules: TargetModules | None = Field(
        default=None,
        description="Layers that the adapter has matrices for, as in PEFT; absent: all linear ones that the "
        "engine adapts.",
    )
    pool: Name | None = Field(default=None, description="Pool the adapter must be served from.")
    max_replicas: Count | None = Field(
        default=None, description="Most GPUs that may share this adapter's traffic."
    )
    apart_from: AdapterNames = Field(default=(), description="Adapters that must not be on the same GPU.")
    together_with: AdapterNames = Field(default=(), description="Adapters that must be on the same GPU.")


class Adapter(AdapterFields):
    """A LoRA adapter and its traffic."""

    prompt_tokens: Lengths | None = Field(default=None, description="Prompt lengths; absent: the workload's.")
    output_tokens: Lengths | None = Field(default=None, description="Output lengths; absent: the workload's.")


class BaseTraffic(SpecModel):
    """Traffic of the base model: requests without an adapter."""

    rate_rps: NonNegative = Field(description="Mean arrival rate in requests per second.")
    prompt_tokens: Lengths | None = Field(default=None, description="Prompt lengths; absent: the workload's.")
    output_tokens: Lengths | None = Field(default=None, description="Output lengths; absent: the workload's.")
    arrivals: ArrivalProcess | None = Field(
        default=None, description="Arrival process; absent: that of an adapter."
    )


LENGTH_CORRELATION = (
    "Correlation of a request's prompt and output length, between their normal scores; 0: independent; "
    "absent: as in the requests that the profile was measured with."
)

STICKINESS = "Requests that repeat a recently used adapter; absent: independent requests."

Correlation = Annotated[
    float, Strict(), Field(gt=-1, lt=1), rule("must be a number above -1 and below 1, such as -0.4")
]

Headroom = Annotated[
    float, Strict(), Field(ge=0, lt=1), rule("must be a number from 0 to below 1, such as 0.1")
]


SloWindow = Annotated[
    float, Strict(), Field(ge=300, le=86_400), rule("must be a number of seconds from 300 to 86400")
]


class PlanningRequirements(SpecModel):
    """Fields of a workload and of a workload file."""

    base_model: ModelId = Field(description="Hugging Face id of the model the adapters belong to.")
    profile: Text | None = Field(
        default=None, description="Name of a shipped profile, or path of a profile JSON."
    )
    gpus: Gpus | None = Field(
        default=None,
        description="GPUs a plan may use, beside profile; absent: up to 8 times the lower bound.",
    )
    pools: Many[Pool] = Field(default=(), description="GPUs of several kinds, instead of profile and gpus.")
    engine: EngineConfig = Field(default=EngineConfig(), description="Engine flags that are fixed.")
    slo: Slo = Field(default=Slo(), description="Service-level objectives.")
    slo_window: SloWindow | None = Field(
        default=None,
        description="Seconds of a trace, or of rates that move over time, in each of which the objectives "
        "hold; absent: 3600.",
    )
    objective: Objective = Field(default=Objective.MIN_GPUS, description="What the plan should optimise.")
    headroom: Headroom = Field(default=0.1, description="Share of each GPU's capacity that stays free.")
    scheduler: SchedulerSource | None = Field(default=None, description=SCHEDULER)
    cache: CacheSource | None = Field(default=None, description=CACHE)
    queues: QueueConfig | None = Field(
        default=None, description="Queues by request size of scheduler chameleon, which this key implies."
    )
    router: RouterName | None = Field(default=None, description=ROUTER)
    router_options: RouterOptions | None = Field(default=None, description=ROUTER_OPTIONS)
    rebalance: RebalanceSettings | None = Field(default=None, description=REBALANCE)
    previous_plan: Text | None = Field(
        default=None, description="Plan in force, to keep adapters where they are."
    )
    move_cost: NonNegative | None = Field(
        default=None,
        description="Cost of moving an adapter of the plan in force, in GPUs, or in USD per hour for "
        "min_cost; absent: 0, so that moves decide among plans of the same cost only.",
    )

    @model_validator(mode="after")
    def _consistent_pools(self) -> Self:
        if self.pools and (self.profile is not None or self.gpus is not None):
            raise rule_error("replaces profile and gpus: give one or the other", key=("pools",))
        check_unique("pools", [pool.name for pool in self.pools])
        if self.pools and self.rebalance is not None:
            raise rule_error("needs equal GPUs: does not go with pools", key=("rebalance",))
        if self.move_cost is not None and self.objective not in (Objective.MIN_GPUS, Objective.MIN_COST):
            raise rule_error("goes with objective min_gpus or min_cost", key=("move_cost",))
        if self.objective is Objective.MIN_COST:
            if not self.pools:
                raise rule_error("min_cost needs pools, each with usd_per_hour", key=("objective",))
            for index, pool in enumerate(self.pools):
                if pool.usd_per_hour is None:
                    raise rule_error(
                        "is required for objective min_cost", key=("pools", index, "usd_per_hour")
                    )
        return self

    @model_validator(mode="after")
    def _options_of_router(self) -> Self:
        check_router_options(self.router_options, self.router, rebalanced=self.rebalance is not None)
        return self

    @model_validator(mode="after")
    def _one_scheduler(self) -> Self:
        if self.queues is not None and self.scheduler is not None:
            raise rule_error("does not go with scheduler: give scheduler.queues", key=("queues",))
        check_pair(self.scheduler, self.cache)
        return self

    @property
    def stores_everywhere(self) -> bool:
        """Whether every GPU stores all adapters that its pool may serve."""
        return stores_everywhere(self.router_options)

    @property
    def scheduling(self) -> tuple[Scheduler, Cache] | None:
        """Scheduler and cache of every GPU; None: the engine's own."""
        if self.queues is not None:
            return completed(Scheduler(policy="chameleon", queues=self.queues), self.cache)
        return completed(self.scheduler, self.cache)


class Workload(PlanningRequirements):
    """Input of a planner, self-contained and immutable.

    Rates are long-run means of ``arrivals``, unless a trace is given, which is then replayed.
    """

    adapters: Many[Adapter] = Field(description="Adapters to serve; may be empty beside base.")
    base: BaseTraffic | None = Field(
        default=None, description="Traffic of the base model; absent: every request names an adapter."
    )
    prompt_tokens: Lengths = Field(description="Prompt lengths of adapters without their own.")
    output_tokens: Lengths = Field(description="Output lengths of adapters without their own.")
    arrivals: ArrivalProcess = Field(default=Arrivals.POISSON, description="Arrival process of each adapter.")
    stickiness: Stickiness | None = Field(default=None, description=STICKINESS)
    length_correlation: Correlation | None = Field(default=None, description=LENGTH_CORRELATION)
    shared_prefix_tokens: Natural = Field(
        default=0, description="Tokens all prompts of an adapter begin with."
    )
    length_pairs: SkipJsonSchema[LengthPairs | None] = Field(
        default=None, description="Lengths drawn in pairs, for adapters without any lengths of their own."
    )
    trace: SkipJsonSchema[Trace | None] = Field(
        default=None, description="Recorded requests, replayed instead of drawing."
    )

    if TYPE_CHECKING:  # a list of adapters becomes a tuple

        def __init__(
            self,
            /,
            *,
            base_model: str,
            adapters: Sequence[Adapter],
            prompt_tokens: Lengths,
            output_tokens: Lengths,
            **fields: Any,
        ) -> None: ...

    else:

        def __init__(self, /, *, base_rate_rps: float | None = None, **fields: Any) -> None:
            if base_rate_rps is not None:
                if fields.get("base") is not None:
                    raise InputError("does not go with base", base_rate_rps, "Workload.base_rate_rps")
                fields["base"] = {"rate_rps": base_rate_rps}
            super().__init__(**fields)

        __init__.__pydantic_base_init__ = True

    @model_validator(mode="after")
    def _consistent_adapters(self) -> Self:
        if not self.adapters and self.base is None:
            raise rule_error("must not be empty, unless there is base traffic", key=("adapters",))
        names = check_unique("adapters", [adapter.name for adapter in self.adapters])
        if self.base is not None and self.base_model in names:
            at = ("adapters", [adapter.name for adapter in self.adapters].index(self.base_model), "name")
            raise rule_error("must differ from base_model", key=at, value=self.base_model)
        pools = {pool.name for pool in self.pools}
        for index, adapter in enumerate(self.adapters):
            _check_references(("adapters", index), adapter, names)
            if adapter.pool is not None and adapter.pool not in pools:
                raise rule_error(
                    "must be the name of a pool", key=("adapters", index, "pool"), value=adapter.pool
                )
            for field in ("max_replicas", "apart_from"):
                if self.stores_everywhere and getattr(adapter, field):
                    rule = "does not go with router_options.holders all, which stores it on all GPUs"
                    raise rule_error(rule, key=("adapters", index, field), value=getattr(adapter, field))
            largest = self.engine.max_lora_rank
            if largest is not None and adapter.rank > largest:
                at = ("adapters", index, "rank")
                raise rule_error(
                    f"must not exceed engine.max_lora_rank, which is {largest}", key=at, value=adapter.rank
                )
        return self

    @model_validator(mode="after")
    def _one_dependence_of_lengths(self) -> Self:
        if self.length_pairs is not None and self.length_correlation:
            key = ("length_correlation",)
            raise rule_error("does not go with length_pairs", key=key, value=self.length_correlation)
        return self

    @model_validator(mode="after")
    def _trace_of_these_adapters(self) -> Self:
        if self.trace is not None:
            unknown = set(self.trace.names) - {adapter.name for adapter in self.adapters}
            if self.base is not None:
                unknown.discard(self.base_model)
            if unknown:
                raise rule_error(
                    "holds requests of an adapter that is not in adapters", key=("trace",), value=min(unknown)
                )
        return self

    @property
    def total_rate_rps(self) -> float:
        """Sum of the rates of all adapters and of the base model, in requests per second."""
        return math.fsum([*(adapter.rate_rps for adapter in self.adapters), self.base_rate_rps])

    @property
    def base_rate_rps(self) -> float:
        """Rate of the base model's traffic in requests per second; 0 without any."""
        return 0.0 if self.base is None else self.base.rate_rps

    @property
    def traffic(self) -> Mapping[str, Adapter | BaseTraffic]:
        """Everything that has requests, by its name in them: the adapters, then the base model."""
        every: dict[str, Adapter | BaseTraffic] = {adapter.name: adapter for adapter in self.adapters}
        return every if self.base is None else {**every, self.base_model: self.base}

    def at_rates_times(self, factor: float) -> Workload:
        """Return the workload with every rate multiplied; a trace stays as it is."""
        # Copied without validation: other rates break no rule.
        adapters = tuple(a.model_copy(update={"rate_rps": a.rate_rps * factor}) for a in self.adapters)
        base = self.base and self.base.model_copy(update={"rate_rps": self.base.rate_rps * factor})
        return self.model_copy(update={"adapters": adapters, "base": base})

    def at_load(self, factor: float) -> Workload:
        """Return the workload with every rate times `factor`; a trace is replayed faster."""
        trace = self.trace
        if trace is not None and factor != 1.0:
            arrival_ns = (trace.arrival_ns / factor).astype(trace.arrival_ns.dtype)
            arrival_ns.setflags(write=False)
            trace = replace(trace, arrival_ns=arrival_ns, duration_s=trace.duration_s / factor)
        return self.at_rates_times(factor).model_copy(update={"trace": trace})

    def with_length_pairs(self, pairs: LengthPairs) -> Workload:
        """Return the workload with these common lengths."""
        return self.model_copy(update=pairs.as_fields())

    def lengths_of(self, adapter: Adapter | BaseTraffic) -> tuple[Lengths, Lengths]:
        """Return prompt and output lengths of an adapter or of the base model: its own or the workload's."""
        return adapter.prompt_tokens or self.prompt_tokens, adapter.output_tokens or self.output_tokens

    def subset(self, names: Iterable[str], shares: Mapping[str, float] | None = None) -> Workload:
        """Return the workload of one GPU: only these adapters, in this workload's order.

        Parameters
        ----------
        names : iterable of str
            Adapters to keep, and the name of the base model to keep its traffic. Constraints on an adapter
            left out (apart_from, together_with) are dropped.
        shares : mapping of str to float, optional
            Share of each one's requests, above 0 and at most 1; 1 where not given. A trace is thinned evenly.

        Raises
        ------
        InputError
            For a name that is not in the workload, no name at all, or a share out of range.
        """
        wanted = set(names)
        share_of = dict.fromkeys(wanted, 1.0) | dict(shares or {})
        unknown = (wanted | share_of.keys()) - self.traffic.keys()
        if unknown or not wanted or share_of.keys() - wanted:
            culprit = min(unknown or share_of.keys() - wanted, default=())
            raise InputError(
                "must name adapters of the workload, at least one", culprit, "Workload.subset: names"
            )
        for name, share in share_of.items():
            if not 0 < share <= 1:
                raise InputError("must be above 0 and at most 1", share, f"Workload.subset: shares[{name!r}]")
        # Every rule that held for the whole holds for the part, so the copies are not checked again.
        adapters = tuple(
            _adapter_share(a, share_of[a.name], wanted) for a in self.adapters if a.name in wanted
        )
        base = self.base if self.base_model in wanted else None
        if base is not None and share_of[self.base_model] < 1:
            base = base.model_copy(update={"rate_rps": base.rate_rps * share_of[self.base_model]})
        trace = None if self.trace is None else self.trace.subset(share_of)
        return self.model_copy(update={"adapters": adapters, "base": base, "trace": trace})

    def horizon_s(self, otherwise_s: float) -> float:
        """Return the simulated time: the length of the trace, or `otherwise_s` without one."""
        return otherwise_s if self.trace is None else self.trace.duration_s

    def digest(self) -> str:
        """Return the SHA-256 of the canonical JSON, in hexadecimal; the same on every machine.

        The plan in force, the cost of moves and the paths of adapters are left out, and of the path of a
        profile or predictor only the file name counts. Fields that came after the first release count when
        they are given: plans of before keep their digests.
        """
        document = self.model_dump(mode="json", exclude={"previous_plan", "move_cost"}, exclude_none=True)
        for adapter in document["adapters"]:
            adapter.pop("path", None)
        for holder in (document, *document["pools"]):
            holder["profile"] = _machine_independent(holder.get("profile"))
        scheduler = document.get("scheduler", {})
        for queues in (document.get("queues"), scheduler.get("queues")):
            if queues is not None and queues.get("prompt_weight") == PROMPT_WEIGHT:
                del queues["prompt_weight"]
        predictor = scheduler.get("predictor", {})
        if "file" in predictor:
            predictor["file"] = PurePath(predictor["file"]).name
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()


def is_profile_path(profile: str) -> bool:
    """Return whether ``profile`` is a path (starts with ./, ../ or /, or ends in .json) or a shipped name."""
    return profile.startswith(("./", "../", "/")) or profile.endswith(".json")


def _machine_independent(profile: str | None) -> str | None:
    return PurePath(profile).name if profile is not None and is_profile_path(profile) else profile


def _adapter_share(adapter: Adapter, share: float, names: set[str]) -> Adapter:
    if share == 1 and not adapter.apart_from and not adapter.together_with:
        return adapter
    return adapter.model_copy(
        update={
            "rate_rps": adapter.rate_rps * share,
            "apart_from": tuple(name for name in adapter.apart_from if name in names),
            "together_with": tuple(name for name in adapter.together_with if name in names),
        }
    )


def _check_references(at: Key, adapter: Adapter, names: set[str]) -> None:
    for field in ("apart_from", "together_with"):
        for index, other in enumerate(getattr(adapter, field)):
            if other not in names or other == adapter.name:
                raise rule_error(
                    "must name another adapter of the workload", key=(*at, field, index), value=other
                )
    both = set(adapter.apart_from) & set(adapter.together_with)
    if both:
        raise rule_error(
            "must not name an adapter of apart_from", key=(*at, "together_with"), value=min(both)
        )


GroupCount = Annotated[
    int, Strict(), Field(ge=1, le=100_000), rule("must be a whole number from 1 to 100000")
]


class LengthsFile(SpecModel):
    """Lengths taken from one column of a file."""

    file: Text = Field(
        description="Parquet or CSV file with one request per row, relative to the workload file."
    )
    column: Text = Field(description="Column that holds the lengths, in tokens.")


def _lengths_tag(value: Any) -> str:
    if isinstance(value, Mapping):
        return "<file>" if "file" in value or "column" in value else "<lengths>"
    return "<file>" if isinstance(value, LengthsFile) else "<lengths>"


LengthsSource: TypeAlias = Annotated[
    Annotated[Lengths, Tag("<lengths>")] | Annotated[LengthsFile, Tag("<file>")],
    Discriminator(_lengths_tag),
]


class AdapterEntry(AdapterFields):
    """One adapter, or with ``count`` a group of them; ``{i}`` in a text stands for 0, 1, ... count - 1."""

    count: GroupCount | None = Field(default=None, description="How many adapters this entry stands for.")
    rank: Rank | None = Field(  # type: ignore[assignment]
        default=None, description="LoRA rank, 1 to 512; absent: that of the folder at path."
    )
    rate_rps: NonNegative = Field(
        default=0.0,
        description="Mean arrival rate of each in requests per second; required without popularity.",
    )
    target_modules: TargetModulesSource | None = Field(  # type: ignore[assignment]
        default=None,
        description="Linear layers that the adapter has matrices for, as in PEFT; adapter_config.json: those "
        "in that file of its path; absent: all that the engine adapts.",
    )
    popularity: Popularity | None = Field(
        default=None, description="How the group shares total_rate_rps out, instead of rate_rps."
    )
    total_rate_rps: NonNegative | None = Field(
        default=None, description="Mean arrival rate of the group in requests per second, beside popularity."
    )
    prompt_tokens: LengthsSource | None = Field(
        default=None, description="Prompt lengths; absent: those of requests."
    )
    output_tokens: LengthsSource | None = Field(
        default=None, description="Output lengths; absent: those of requests."
    )

    @model_validator(mode="after")
    def _numbered_names(self) -> Self:
        if self.count is None and "{i}" in self.name:
            raise rule_error("goes with count, which is absent", key=("name",), value=self.name)
        if (self.count or 1) > 1 and "{i}" not in self.name:
            raise rule_error("must contain {i}, so that names differ", key=("name",), value=self.name)
        return self

    @model_validator(mode="after")
    def _one_source_of_rates(self) -> Self:
        given = "rate_rps" in self.model_fields_set
        if self.popularity is None and self.total_rate_rps is None:
            if not given:
                raise rule_error("is required", key=("rate_rps",))
            return self
        if given:
            raise rule_error("does not go with popularity", key=("rate_rps",), value=self.rate_rps)
        for name in ("popularity", "total_rate_rps"):
            if getattr(self, name) is None:
                raise rule_error("is required: popularity and total_rate_rps go together", key=(name,))
        return self

    def rates_rps(self) -> tuple[float, ...]:
        """Return the rate of each adapter this entry stands for, in requests per second."""
        if self.popularity is None or self.total_rate_rps is None:
            return (self.rate_rps,) * (self.count or 1)
        total_rps = self.total_rate_rps
        return tuple(share * total_rps for share in self.popularity.shares(self.count or 1))


class RegistryEntry(SpecModel):
    """Adapters of a registry: all of the base model, by name, with rates of this file."""

    registry: Text = Field(
        description="Adapter registry: SQLite file, relative to the workload file, or URL of PostgreSQL."
    )
    rate_rps: NonNegative | None = Field(
        default=None, description="Mean arrival rate of each in requests per second."
    )
    rates_rps: dict[Name, NonNegative] | None = Field(
        default=None, description="Rates of single adapters by name; the others have rate_rps, or 0."
    )
    total_rate_rps: NonNegative | None = Field(
        default=None, description="Mean arrival rate of all in requests per second, instead of rate_rps."
    )
    popularity: Popularity | None = Field(
        default=None, description="How the adapters share total_rate_rps out; absent: equal shares."
    )

    @model_validator(mode="after")
    def _one_source_of_rates(self) -> Self:
        if self.popularity is not None and self.total_rate_rps is None:
            raise rule_error("is required beside popularity", key=("total_rate_rps",))
        for name in ("rate_rps", "rates_rps"):
            if self.total_rate_rps is not None and getattr(self, name) is not None:
                raise rule_error("does not go with total_rate_rps", key=(name,))
        return self

    @property
    def has_rates(self) -> bool:
        """Whether there are rates."""
        return any(each is not None for each in (self.rate_rps, self.rates_rps, self.total_rate_rps))

    def rates_of(self, names: Sequence[str]) -> list[float]:
        """Return the rate of each adapter, in requests per second; without rates equal ones."""
        if self.total_rate_rps is not None:
            equal = [1 / len(names)] * len(names)
            shares = equal if self.popularity is None else self.popularity.shares(len(names))
            return [share * self.total_rate_rps for share in shares]
        default = self.rate_rps if self.rate_rps is not None else 0.0 if self.rates_rps else 1.0
        return [(self.rates_rps or {}).get(name, default) for name in names]


class BaseEntry(SpecModel):
    """Requests of the base model itself, without an adapter."""

    rate_rps: NonNegative = Field(description="Mean arrival rate in requests per second.")
    prompt_tokens: LengthsSource | None = Field(
        default=None, description="Prompt lengths; absent: those of requests."
    )
    output_tokens: LengthsSource | None = Field(
        default=None, description="Output lengths; absent: those of requests."
    )
    arrivals: ArrivalProcess | None = Field(
        default=None, description="Arrival process; absent: that of requests."
    )


class TraceColumns(SpecModel):
    """Columns of a file of requests that have other names than its format says."""

    arrival_s: Text | None = Field(default=None, description="Column of the arrival times, in any unit.")
    prompt_tokens: Text | None = Field(default=None, description="Column of the prompt lengths, in tokens.")
    output_tokens: Text | None = Field(default=None, description="Column of the output lengths, in tokens.")
    adapter: Text | None = Field(default=None, description="Column of the names of adapters.")

    def given(self) -> dict[str, str]:
        """Return the given columns of the file by our names."""
        return self.model_dump(exclude_none=True)


class LengthPairsFile(SpecModel):
    """Pairs of lengths taken from a file of requests."""

    file: Text = Field(description="File in a format that trace reads, relative to the workload file.")
    format: TraceFormat | None = Field(
        default=None, description="Layout of the file; absent: the one whose columns it has."
    )
    columns: TraceColumns = Field(
        default=TraceColumns(), description="Columns with other names than those of the format."
    )
    scale: Positive = Field(
        default=1.0, description="Factor on both lengths of every pair, rounded, at least 1 token."
    )


def _file_of_name(value: Any) -> Any:
    return {"file": value} if isinstance(value, str) else value


PairsFile: TypeAlias = Annotated[
    LengthPairsFile, BeforeValidator(_file_of_name, json_schema_input_type=Text | LengthPairsFile)
]


class RequestsEntry(SpecModel):
    """Requests of all adapters."""

    prompt_tokens: LengthsSource | None = Field(
        default=None, description="Prompt lengths, in tokens; required without a trace."
    )
    output_tokens: LengthsSource | None = Field(
        default=None, description="Output lengths, in tokens; required without a trace."
    )
    lengths_from: PairsFile | None = Field(
        default=None,
        description="File of requests whose prompt and output lengths are drawn together, in pairs.",
    )
    arrivals: ArrivalProcess = Field(default=Arrivals.POISSON, description="Arrival process of each adapter.")
    stickiness: Stickiness | None = Field(default=None, description=STICKINESS)
    length_correlation: Correlation | None = Field(default=None, description=LENGTH_CORRELATION)
    shared_prefix_tokens: Natural = Field(
        default=0, description="Tokens all prompts of an adapter begin with."
    )


class TraceEntry(SpecModel):
    """Recorded requests to replay."""

    file: Text = Field(
        description="Parquet, CSV or JSON file with columns arrival_s, adapter, prompt_tokens, output_tokens "
        "or of another format; without adapters, requests are dealt out to those of adapters by their rates."
    )
    format: TraceFormat | None = Field(
        default=None, description="Layout of the file; absent: the one whose columns it has."
    )
    time_unit: TimeUnit | None = Field(
        default=None,
        description="Unit of the arrival times; absent: that of the format, checked against values and rate.",
    )
    columns: TraceColumns = Field(
        default=TraceColumns(), description="Columns with other names than those of the format."
    )
    ranks: Text | None = Field(
        default=None,
        description="CSV file with columns name, rank and, if wanted, path: the adapters of the trace, "
        "unless adapters are given.",
    )
    duration_s: Positive | None = Field(
        default=None, description="Length of the recording in seconds; absent: until the last arrival."
    )
    rate_rps: Positive | None = Field(
        default=None,
        description="Mean rate to replay at: times are scaled in proportion; absent: as recorded.",
    )
    seed: Natural = Field(default=0, description="Seed of dealing requests out to adapters.")


def _adapters_tag(value: Any) -> str:
    if isinstance(value, Mapping | RegistryEntry):
        return "<registry>"
    return "<csv>" if isinstance(value, str) else "<list>"


AdaptersSource: TypeAlias = Annotated[
    Annotated[Many[AdapterEntry], Tag("<list>")]
    | Annotated[Text, Tag("<csv>")]
    | Annotated[RegistryEntry, Tag("<registry>")],
    Discriminator(_adapters_tag),
]


class WorkloadFile(PlanningRequirements):
    """A workload file as it is written; :func:`~capplan.workload._load.load_workload` resolves it."""

    version: Literal[1] = Field(default=1, description="Version of this format.")
    requests: RequestsEntry = Field(
        default=RequestsEntry(),
        description="Lengths, arrivals and shared prefix; adapters may have lengths of their own.",
    )
    adapters: AdaptersSource | None = Field(
        default=None,
        description="List of adapters, name of a CSV file with columns name, rank, rate_rps[, path], or a "
        "registry of adapters.",
    )
    base: BaseEntry | None = Field(
        default=None, description="Traffic of the base model; adapters or trace may then be absent."
    )
    trace: TraceEntry | None = Field(
        default=None, description="Recorded requests, replayed as they were instead of drawing."
    )

    @model_validator(mode="after")
    def _one_source_of_each(self) -> Self:
        if not self.pools and self.profile is None:
            name = self.base_model.rpartition("/")[2]
            hint = f"`capplan profiles --model {name}` lists those of it"
            rule = f"is required, unless pools are given; {hint}"
            raise rule_error(rule, key=("profile",))
        if self.trace is None and self.adapters is None and self.base is None:
            raise rule_error("must give adapters or trace, one of the two, or base")
        if self.trace is not None:
            self._check_trace(self.trace)
        else:
            self._check_lengths()
        return self

    def _check_trace(self, trace: TraceEntry) -> None:
        if self.adapters is not None and trace.ranks is not None:
            raise rule_error("must give adapters or trace, one of the two, where trace has ranks")
        if self.adapters is None and self.base is None and trace.ranks is None:
            raise rule_error("is required, unless adapters are given", key=("trace", "ranks"))
        neutral = RequestsEntry(shared_prefix_tokens=self.requests.shared_prefix_tokens)
        for name in RequestsEntry.model_fields:
            if getattr(self.requests, name) != getattr(neutral, name):
                raise rule_error("does not go with trace, which holds the requests", key=("requests", name))
        for index, entry in enumerate(self.adapters if isinstance(self.adapters, tuple) else ()):
            for name in ("prompt_tokens", "output_tokens"):
                if getattr(entry, name) is not None:
                    at = ("adapters", index, name)
                    raise rule_error("does not go with trace, which holds the lengths", key=at)
        for name in ("prompt_tokens", "output_tokens", "arrivals"):
            if self.base is not None and getattr(self.base, name) is not None:
                raise rule_error("does not go with trace, which holds the requests", key=("base", name))

    def _check_lengths(self) -> None:
        if isinstance(self.adapters, RegistryEntry) and not self.adapters.has_rates:
            raise rule_error("is required, or total_rate_rps or rates_rps", key=("adapters", "rate_rps"))
        joint = self.requests.lengths_from is not None
        if joint and self.requests.length_correlation:
            at = ("requests", "length_correlation")
            raise rule_error("does not go with lengths_from", key=at, value=self.requests.length_correlation)
        for name in ("prompt_tokens", "output_tokens"):
            given = getattr(self.requests, name) is not None
            if given and joint:
                raise rule_error("does not go with lengths_from", key=("requests", name))
            if not given and not joint and not self._only_base_has(name):
                raise rule_error("is required", key=("requests", name))

    def _only_base_has(self, name: str) -> bool:
        """Return whether the base model has lengths of its own and there is nothing else."""
        return not self.adapters and self.base is not None and getattr(self.base, name) is not None
