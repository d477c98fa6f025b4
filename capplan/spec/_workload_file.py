"""The schema of workload.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Strict, Tag, model_validator

from capplan.spec._lora_modules import TargetModulesSource
from capplan.spec._requests import Lengths, TimeUnit, TraceFormat
from capplan.spec._traffic import ArrivalProcess, Arrivals, Popularity, Stickiness
from capplan.spec._validation import (
    Many,
    Name,
    Natural,
    NonNegative,
    Positive,
    Rank,
    SpecModel,
    Text,
    rule,
    rule_error,
)
from capplan.spec._workload import (
    LENGTH_CORRELATION,
    STICKINESS,
    AdapterFields,
    Correlation,
    PlanningRequirements,
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
