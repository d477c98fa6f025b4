"""The plan document: groups of identical GPUs, predictions, verification.

Mean and percentiles of latencies are for simulations and measurements alike.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    Field,
    JsonValue,
    model_validator,
)

from capplan.errors import InputError
from capplan.spec._display import Plotted
from capplan.spec._engine_args import EngineArgs
from capplan.spec._files import parse_json, parse_yaml, read_text, write_text_atomic
from capplan.spec._lora_modules import TargetModules
from capplan.spec._routing import (
    MEAN_LENGTHS,
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
    Cache,
    CacheSource,
    Queues,
    Scheduler,
    SchedulerSource,
    check_pair,
    completed,
)
from capplan.spec._slo import Objective, Slo
from capplan.spec._validation import (
    LORA_RANKS,
    Count,
    Flag,
    Fraction,
    Key,
    Line,
    Many,
    ModelId,
    Name,
    Natural,
    NonNegative,
    Rank,
    SeedNumber,
    Sha256,
    Share,
    SparseModel,
    SpecModel,
    Text,
    beyond,
    check_unique,
    format_key,
    input_limits,
    rule_error,
    validate_document,
)

if TYPE_CHECKING:
    import pandas as pd


PERCENTILES: Final = (50, 90, 95, 99)
_LOOKED_AT: Final = 256
"""Values by which the way to the percentiles is chosen."""


@dataclass(frozen=True)
class LatencyStats:
    """Mean and percentiles, interpolated linearly; NaN without any value."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


def latency_stats(values: NDArray[np.float64]) -> LatencyStats:
    """Return the statistics of values; NaN among them does not count."""
    return latency_stats_in_place(values[~np.isnan(values)])


def latency_stats_in_place(values: NDArray[np.float64]) -> LatencyStats:
    """Return the statistics of values without NaN, and reorder them, which takes linear time."""
    if values.size == 0:
        return LatencyStats(*[math.nan] * (1 + len(PERCENTILES)))
    found = [float(values.mean())]
    # Where most values are the least one, such as no wait at all, NumPy's selection takes ten times as long
    # as elsewhere, and its sorting less than a selection.
    some = values[:: values.size // _LOOKED_AT + 1]
    is_sorted = 2 * np.count_nonzero(some == some.min()) > some.size
    if is_sorted:
        values.sort()
    last = values.size - 1
    above, skipped = values, 0  # the values from the last percentile on, and how many are below
    for percent in PERCENTILES:
        at = percent / 100 * last
        below = int(at) - skipped
        if not is_sorted:
            above.partition(below)
        above, skipped = above[below:], int(at)
        low = float(above[0])
        high = float(above[1:].min()) if above.size > 1 else low
        found.append(low + (at - skipped) * (high - low))
    return LatencyStats(*found)


def grouped_latency_stats(
    values: NDArray[np.float64], group: NDArray[np.int64], groups: int
) -> list[LatencyStats]:
    """Return the statistics of each group; NaN among the values does not count.

    Parameters
    ----------
    values, group
        Values and their group numbers, shape (values,).
    groups
        Number of groups.
    """
    known = ~np.isnan(values)
    values, group = values[known], group[known]
    ordered = values[np.lexsort((values, group))]
    sizes = np.bincount(group, minlength=groups)
    starts = np.cumsum(sizes) - sizes
    stats = np.full((groups, 1 + len(PERCENTILES)), np.nan)
    some = sizes > 0
    stats[some, 0] = np.bincount(group, values, minlength=groups)[some] / sizes[some]
    last = (sizes - 1)[some]
    for at, percent in enumerate(PERCENTILES, start=1):
        place = percent / 100 * last
        below = place.astype(np.int64)
        low = ordered[starts[some] + below]
        high = ordered[starts[some] + np.minimum(below + 1, last)]
        stats[some, at] = low + (place - below) * (high - low)
    return [LatencyStats(*row) for row in stats.tolist()]


class Percentiles(SpecModel):
    """Distribution of a latency over completed requests; null where none completed."""

    mean: NonNegative | None = Field(default=None, description="Mean.")
    p50: NonNegative | None = Field(default=None, description="Median.")
    p95: NonNegative | None = Field(default=None, description="95th percentile.")
    p99: NonNegative | None = Field(default=None, description="99th percentile.")


class SizePrediction(SpecModel):
    """Predicted metrics of one size class of requests."""

    name: Text = Field(description="Class: small, medium, large, largest, or all.")
    ttft_p99_s: NonNegative | None = Field(
        default=None, description="99th percentile of the time to first token; null where none completed."
    )
    queue_share: Fraction | None = Field(
        default=None,
        description="Queueing time / time from arrival to last token; null where none completed.",
    )
    queue_mean_s: NonNegative | None = Field(
        default=None, description="Mean time from arrival to first admission; null where none completed."
    )
    interruption_mean_count: NonNegative | None = Field(
        default=None, description="Mean pauses of a request's decoding; null where none completed."
    )
    interruption_mean_share: Fraction | None = Field(
        default=None, description="Mean share of these pauses in a request's time; null where none completed."
    )


class SchedulingPrediction(SpecModel):
    """Predicted metrics of scheduler and adapter cache; means over the seeds."""

    hit_rate: Fraction | None = Field(
        default=None,
        description="Share of requests whose adapter was loaded at admission; null without adapters.",
    )
    load_wait_ms: NonNegative | None = Field(
        default=None, description="Mean wait of an admitted request for its adapter, in ms."
    )
    sizes: Many[SizePrediction] = Field(default=(), description="Size classes, ascending.")


class Predicted(SparseModel):
    """Predicted metrics of one GPU of the group."""

    _optional_keys = ("scheduling",)

    throughput_tok_s: NonNegative = Field(
        description="Input + output tokens of completed requests per second."
    )
    low_tok_s: NonNegative | None = Field(
        default=None,
        description="Lower end of the 90 % interval of an hour's throughput, over seeds and the uncertainty "
        "of the profile; null after one seed.",
    )
    high_tok_s: NonNegative | None = Field(default=None, description="Upper end of that interval.")
    ttft_s: Percentiles = Field(default=Percentiles(), description="Time to first token, in seconds.")
    tpot_ms: Percentiles = Field(
        default=Percentiles(), description="Time per output token after the first, in ms."
    )
    intervals: dict[str, tuple[NonNegative, NonNegative]] = Field(
        default={},
        description="90 % intervals of latencies by the names of their bounds, such as ttft_p99_s.",
    )
    bounded: dict[str, NonNegative] = Field(
        default={}, description="Latencies that the workload bounds, by the names of their bounds."
    )
    served_fraction: Fraction = Field(description="Tokens of completed requests / tokens submitted.")
    kv_tokens: Natural = Field(description="Tokens the KV cache holds.")
    waiting_max: Natural | None = Field(
        default=None,
        description="Longest queue of waiting requests over the seeds; null in plans of before it was kept.",
    )
    load_over_capacity: NonNegative | None = Field(
        default=None, description="Offered load / sustainable load."
    )
    source: Text = Field(description="Where the numbers come from, such as twin or surrogate.")
    scheduling: SchedulingPrediction | None = Field(
        default=None, description="Metrics of scheduler and adapter cache; absent without them."
    )

    def latency(self, bound: str) -> float | None:
        """Return the latency that a bound such as ``ttft_p99_s`` is on; None if it is not in the plan."""
        if bound in self.bounded:
            return self.bounded[bound]
        metric, statistic, unit = bound.split("_")
        value: float | None = getattr(getattr(self, f"{metric}_{unit}", None), statistic, None)
        return value

    @model_validator(mode="after")
    def _ordered_interval(self) -> Self:
        low, high = self.low_tok_s, self.high_tok_s
        if low is not None and high is not None and low > high:
            raise rule_error("must not be below low_tok_s", key=("high_tok_s",), value=self.high_tok_s)
        return self


class PlanEngine(SparseModel):
    """The serving engine a plan is made for."""

    _optional_keys = ("target_modules", "fully_sharded_loras", "quantization", "kv_cache_dtype")

    name: Text = Field(description="Name of the engine, such as vllm.")
    version: Text = Field(description="Version of the engine.")
    rules: Text = Field(description="Serving rules the twin followed, such as vllm-0.8.")
    target_modules: TargetModules | None = Field(
        default=None, description="Linear layers for which slots hold space; absent: all."
    )
    fully_sharded_loras: bool = Field(
        default=False, description="Whether tensor parallelism shards both matrices of every layer."
    )
    quantization: Line | None = Field(
        default=None,
        description="Dtype into which the engine quantizes the weights of the base model on loading; absent: "
        "they are as in its files.",
    )
    kv_cache_dtype: Line | None = Field(
        default=None, description="Dtype of keys and values, such as fp8; absent: that of the model."
    )


class PlanAdapter(SparseModel):
    """An adapter on a group, with the share of its traffic that goes there."""

    _optional_keys = ("target_modules",)

    name: Name = Field(description="Name of the adapter.")
    rank: Rank = Field(description="LoRA rank.")
    rate_rps: NonNegative = Field(
        description="Rate of all the adapter's requests, over all groups, per second."
    )
    path: Text | None = Field(default=None, description="Where the weights are.")
    target_modules: TargetModules | None = Field(
        default=None, description="Linear layers that the adapter has matrices for; absent: all."
    )
    share: Fraction = Field(
        description="Share of the adapter's requests that goes to this group; 0: it is stored there, for the "
        "router to choose by the state of the GPUs."
    )


class PlanBase(SpecModel):
    """Traffic of the base model in a group."""

    rate_rps: NonNegative = Field(description="Mean arrival rate of the base model over all groups.")
    share: Share = Field(description="Share of the base model's requests that goes to this group.")


class Binds(SpecModel):
    """The constraint that keeps a group from serving more."""

    resource: Literal["kv", "slots", "compute", "slo"] = Field(description="What runs out first.")
    value: float = Field(strict=True, description="The number that binds; note says what it is.")
    note: Line = Field(description="The constraint in words.")


class Group(SparseModel):
    """Identical GPUs that serve the same adapters and share of the base model's traffic."""

    _optional_keys = ("scheduler",)

    id: Name = Field(description="Identity of the group within the plan.")
    replicas: Count = Field(description="How many identical instances.")
    pool: Name | None = Field(default=None, description="Pool the GPUs come from; null without pools.")
    gpu: Text = Field(description="Kind of GPU.")
    tp: Count = Field(default=1, description="GPUs per instance (tensor parallelism).")
    profile: Text = Field(description="Profile the predictions rest on.")
    engine: PlanEngine | None = Field(
        default=None,
        description="Engine of the group's profile if it is not that of the plan; null: the plan's.",
    )
    engine_args: EngineArgs = Field(description="Engine flags.")
    adapters: Many[PlanAdapter] = Field(
        description="Adapters served, with their shares; may be empty beside base."
    )
    base: PlanBase | None = Field(
        default=None, description="Traffic of the base model; null: none is sent to this group."
    )
    scheduler: SchedulerSource | None = Field(
        default=None,
        description="Order and admission of requests; absent: the engine's own.",
    )
    queues: Queues | None = Field(
        default=None, description="Queues by request size at the start; null: one queue."
    )
    cache: CacheSource | None = Field(
        default=None, description="Idle adapters kept in GPU memory; null: the engine's own."
    )
    predicted: Predicted = Field(description="What one instance is predicted to do.")
    binds: Binds | None = Field(
        default=None, description="What keeps the group from serving more; null: nothing in sight."
    )

    @property
    def placed(self) -> tuple[PlanAdapter, ...]:
        """The adapters that have a share here; the others are only stored."""
        return tuple(adapter for adapter in self.adapters if adapter.share > 0)

    @property
    def scheduling(self) -> tuple[Scheduler, Cache] | None:
        """Scheduler and cache of an instance; None: the engine's own."""
        implied = Scheduler(policy="chameleon") if self.queues is not None else None
        return completed(self.scheduler or implied, self.cache)

    @model_validator(mode="after")
    def _scheduling_fits(self) -> Self:
        if self.queues is not None and self.scheduler is not None and not self.scheduler.has_queues:
            raise rule_error("go with scheduler chameleon or static", key=("queues",))
        check_pair(self.scheduler, self.cache)
        return self

    @model_validator(mode="after")
    def _adapters_fit(self) -> Self:
        if not self.adapters and self.base is None:
            raise rule_error("must not be empty, unless there is base traffic", key=("adapters",))
        check_unique("adapters", (adapter.name for adapter in self.adapters))
        limit = self.engine_args.max_lora_rank
        if limit not in LORA_RANKS and self.engine_args.max_loras > 0:
            ranks = ", ".join(map(str, LORA_RANKS))
            rank_at = ("engine_args", "max_lora_rank")
            raise rule_error(f"must be one of vLLM's ranks {ranks}", key=rank_at, value=limit)
        for index, adapter in enumerate(self.adapters):
            if adapter.rank > limit:
                at = ("adapters", index, "rank")
                raise rule_error(
                    f"must not exceed engine_args.max_lora_rank, which is {limit}", key=at, value=adapter.rank
                )
        return self


class Totals(SpecModel):
    """Size and price of the plan."""

    gpus: Count = Field(description="GPUs used.")
    lower_bound_gpus: Natural = Field(description="No plan can use fewer GPUs than this.")
    usd_per_hour: NonNegative | None = Field(default=None, description="Price per hour; null without prices.")


class Move(SpecModel):
    """A change from the plan in force: an adapter placed, taken away, or moved."""

    adapter: Name = Field(description="Name of the adapter.")
    from_group: Name | None = Field(default=None, description="Group it leaves; null: newly placed.")
    to_group: Name | None = Field(default=None, description="Group it goes to; null: taken away.")
    share: Share = Field(default=1.0, description="Share of the adapter's requests that moves.")


_UNSET_IN_VERIFICATION: Final = (
    *("digest", "reason", "deciding_duration_s", "window_start_s", "least_share_of_seeds"),
)
OUT_OF_TIME: Final = "the time limit ended the verification"
"""Beginning of the note on a group whose verification is incomplete."""


class GroupVerification(SpecModel):
    """Verdict of the twin on one group."""

    id: Name = Field(description="Group the verdict is on.")
    ok: Flag = Field(description="Whether every rule held on every seed.")
    served_fraction: Fraction = Field(description="Least over the seeds.")
    throughput_tok_s: NonNegative = Field(description="Mean over the seeds.")
    ttft_p99_s: NonNegative | None = Field(
        default=None, description="Largest over the seeds; null if none completed."
    )
    note: Line = Field(default="", description="What failed, in words.")


Verdict: TypeAlias = Literal["verified", "undecided", "failed"]


def _without_default(schema: dict[str, Any]) -> None:
    """Leave the default of a field out of its schema: the value of another field decides."""
    schema.pop("default", None)


class Verification(SparseModel):
    """Verdict of the twin on the plan, on seeds not used in the search."""

    _optional_keys = _UNSET_IN_VERIFICATION

    ok: Flag = Field(description="Whether the verdict is verified.")
    verdict: Verdict = Field(
        default="failed",
        json_schema_extra=_without_default,
        description="verified: every bound held wherever it was simulated, and that decides; undecided: no "
        "bound broke in simulations that do not decide; failed: a bound broke. Absent: by ok.",
    )
    reason: str = Field(default="", description="Why the plan is not verified, in words.")
    deciding_duration_s: NonNegative | None = Field(
        default=None, description="Simulated seconds per seed that would decide; null: another limit."
    )
    window_start_s: NonNegative | None = Field(
        default=None,
        description="Beginning of the simulated seconds in the trace, whose worst window they are; null: no "
        "trace.",
    )
    seeds: Many[SeedNumber] = Field(description="Seeds used.")
    least_share_of_seeds: Fraction | None = Field(
        default=None,
        description="Least share of further seeds on which every bound holds, with a probability of 90 %: "
        "0.1^(1 / n) after n seeds without a broken bound; null: not verified.",
    )
    duration_s: NonNegative = Field(description="Simulated seconds per seed.")
    min_served_fraction: Fraction = Field(description="Least over groups and seeds.")
    groups: Many[GroupVerification] = Field(default=(), description="Verdict per group.")
    drawn_profiles: Natural = Field(
        default=0, description="Profiles drawn from the uncertainty of the fit, for the intervals."
    )
    not_simulated: Many[Text] = Field(
        default=(),
        description="Settings of the plan that the verification did not simulate, such as queues of earlier "
        "versions; if there are any, the plan is not ok.",
    )
    digest: Sha256 | None = Field(
        default=None,
        description="Digest of the verified plan, by which later changes are found; null: not verified.",
    )

    @model_validator(mode="before")
    @classmethod
    def _verdict_by_ok(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and "verdict" not in value and isinstance(value.get("ok"), bool):
            return {**value, "verdict": "verified" if value["ok"] else "failed"}
        return value

    @model_validator(mode="after")
    def _ok_if_simulated(self) -> Self:
        if self.ok != (self.verdict == "verified"):
            words = "true" if self.verdict == "verified" else "false"
            raise rule_error(f"must be {words} if the verdict is {self.verdict}", key=("ok",), value=self.ok)
        if self.ok and self.not_simulated:
            settings = ", ".join(self.not_simulated)
            raise rule_error(f"must be false, because {settings} were not simulated", key=("ok",), value=True)
        return self


def not_simulated(groups: Iterable[Group]) -> tuple[str, ...]:
    """Return the settings of groups that were not simulated: those of plans without a scheduler."""
    parts = [(group.queues, group.cache) for group in groups if group.scheduler is None]
    has_queues = any(queues is not None for queues, _ in parts)
    has_cache = any(cache is not None for _, cache in parts)
    return (*(["queues"] if has_queues else []), *(["cache"] if has_cache else []))


_SHARE_TOLERANCE = 1e-6
_VERIFIED: Final = (
    *("base_model", "engine", "objective", "slo", "workload_digest", "groups", "router"),
    *("router_options", "rebalance", "verification"),
)
"""Fields that the digest of a plan covers."""
_VERIFIED_NOTES: Final = (
    *("profile", "profile_kind", "pools", "headroom", "extrapolations", "trace_speed", *MEAN_LENGTHS),
    *("trace_notes", "gpus_per_link", "knobs", "robust", "seed"),
)
"""Entries of the provenance that it covers: those on which the verdict rests, or that simulations read."""
_MAX_LOCATED: Final = 2**20  # characters of a plan whose errors have a line: it is parsed a second time


class Plan(Plotted, SparseModel):
    """A serving plan. Routing is the shares: there is no second table."""

    _optional_keys = ("router", "router_options", "rebalance")

    schema_version: Literal[1] = Field(default=1, description="Version of this format.")
    created_by: Text = Field(description="Program and version that made the plan.")
    base_model: ModelId = Field(description="Hugging Face id of the base model.")
    engine: PlanEngine = Field(description="Serving engine the plan is made for.")
    objective: Objective = Field(description="What the plan optimises.")
    slo: Slo = Field(default=Slo(), description="Objectives the plan was verified against.")
    workload_digest: Sha256 = Field(description="Digest of the workload the plan is for.")
    groups: Many[Group] = Field(min_length=1, description="Groups of identical instances.")
    totals: Totals = Field(description="Size and price.")
    moves: Many[Move] = Field(default=(), description="Changes from the plan in force.")
    router: RouterName | None = Field(default=None, description=ROUTER)
    router_options: RouterOptions | None = Field(default=None, description=ROUTER_OPTIONS)
    rebalance: RebalanceSettings | None = Field(default=None, description=REBALANCE)
    provenance: dict[str, JsonValue] = Field(
        default={}, description="Where the numbers and the plan come from."
    )
    verification: Verification = Field(description="Verdict of the twin.")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        ids = check_unique("groups", (group.id for group in self.groups), field="id")
        instances, most = sum(group.replicas for group in self.groups), input_limits().max_instances
        if instances > most:
            rule = beyond(most, "instances", "--max-instances")
            raise rule_error(rule, key=("groups",), value=instances)
        for index, verdict in enumerate(self.verification.groups):
            if verdict.id not in ids:
                raise rule_error(
                    "must be a group", key=("verification", "groups", index, "id"), value=verdict.id
                )
        gpus = sum(group.replicas * group.tp for group in self.groups)
        if gpus != self.totals.gpus:
            raise rule_error(
                f"must equal the sum over groups, {gpus}", key=("totals", "gpus"), value=self.totals.gpus
            )
        self._check_adapters()
        check_router_options(self.router_options, self.router, rebalanced=self.rebalance is not None)
        return self

    def _check_adapters(self) -> None:
        stores_all = stores_everywhere(self.router_options)
        shares: dict[str, list[float]] = {}
        common: dict[str, tuple[int, float]] = {}
        for i, group in enumerate(self.groups):
            for j, adapter in enumerate(group.adapters):
                if adapter.share == 0 and not stores_all:
                    zero_at = ("groups", i, "adapters", j, "share")
                    rule = "must be a number above 0 and at most 1, without router_options.holders all"
                    raise rule_error(rule, key=zero_at, value=adapter.share)
                shares.setdefault(adapter.name, []).append(adapter.share)
                facts = (adapter.rank, adapter.rate_rps)
                if common.setdefault(adapter.name, facts) != facts:
                    at = ("groups", i, "adapters", j)
                    raise rule_error(
                        "must have the rank and rate of its other entries", key=at, value=adapter.name
                    )
        for name, parts in shares.items():
            _require_sum_of_1(f"adapter {name!r}", parts)
        based = [(i, group.base) for i, group in enumerate(self.groups) if group.base is not None]
        for i, base in based:
            if base.rate_rps != based[0][1].rate_rps:
                rate_at = ("groups", i, "base", "rate_rps")
                raise rule_error("must be the rate of the other groups", key=rate_at, value=base.rate_rps)
        if based:
            _require_sum_of_1("the base model", [base.share for _, base in based])

    @property
    def adapters(self) -> dict[str, PlanAdapter]:
        """Adapters by name, each once."""
        return {each.name: each for group in self.groups for each in group.adapters}

    def shares_of(self, group: Group) -> dict[str, float]:
        """Return the share of each adapter's requests that goes to a group; the base model under its name."""
        shares = {adapter.name: adapter.share for adapter in group.adapters}
        return shares if group.base is None else {**shares, self.base_model: group.base.share}

    def engine_of(self, group: Group) -> PlanEngine:
        """Return the engine that serves a group of the plan."""
        return group.engine or self.engine

    def digest(self) -> str:
        """Return the SHA-256 of the settings and predictions of the plan, and of its verdict, in hexadecimal.

        It covers what `capplan serve`, `export` and `simulate` read, as canonical JSON. Left out are the
        paths of adapters, which differ between machines, the size, price and moves of the plan, and other
        notes. Fields that came later count when they are given.
        """
        document = self.model_dump(mode="json", include=set(_VERIFIED), exclude_none=True)
        document["verification"].pop("digest", None)
        for group in document["groups"]:
            for adapter in group["adapters"]:
                adapter.pop("path", None)
        notes = self.provenance
        document["provenance"] = {name: notes[name] for name in _VERIFIED_NOTES if name in notes}
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def with_digest(self) -> Self:
        """Return the plan with its digest in the verification, which must be of this very plan."""
        return self.replace(verification=self.verification.replace(digest=self.digest()))

    @property
    def is_verified(self) -> bool:
        """Whether the verification passed with every setting of the plan as it is."""
        return not self._broken_rule()

    def changed_after_verification(self) -> str:
        """Return that the verdict is not on this plan, as text; empty if it is."""
        verified = self.verification.digest
        if verified is None:
            return "the plan has no digest of its verification" if self.verification.ok else ""
        return "the plan was changed after its verification" if verified != self.digest() else ""

    def require_verified(self) -> None:
        """Check that the verification passed with every setting of the plan as it is.

        Raises
        ------
        InputError
            If it did not; the message says why.
        """
        if broken := self._broken_rule():
            raise InputError(*broken)

    def _broken_rule(self) -> tuple[str, object, str] | None:
        """Return rule, value and key of what is wrong with the verification; None if nothing is."""
        check = self.verification
        missing = not_simulated(self.groups)
        failed = [verdict.id for verdict in check.groups if not verdict.ok]
        reasons = [f"{' and '.join(missing)} not simulated"] if missing else []
        reasons += [f"group {', '.join(failed)} failed"] if failed else []
        if not check.ok or reasons:
            why = "; ".join(reasons) or check.reason
            why = why or ("failed" if check.seeds else "planned without verification")
            return f"must be true to use the plan ({why})", False, "verification.ok"
        if changed := self.changed_after_verification():
            rule = f"must be that of the plan to use it ({changed})"
            return rule, check.digest and f"{check.digest[:12]}...", "verification.digest"
        return None

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the plan as JSON text, and write it to ``path`` if given: all of it or nothing.

        Raises
        ------
        InputError
            When the file cannot be written.
        """
        text = json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        if path is not None:
            write_text_atomic(path, text)
        return text

    def display_facts(self) -> Mapping[str, object]:
        """Return the size of the plan and its verdict."""
        totals = self.totals
        return {
            "base_model": self.base_model,
            "gpus": totals.gpus,
            "lower_bound_gpus": totals.lower_bound_gpus,
            "groups": len(self.groups),
            "adapters": len(self.adapters),
            "verified": self.is_verified,
        }

    __str__ = Plotted.__repr__

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per group: engine arguments and predictions, nested keys joined by dots."""
        import pandas as pd

        left_out = {"adapters", "queues", "cache"}
        rows = [
            {**g.model_dump(mode="json", exclude=left_out), "adapters": len(g.adapters)} for g in self.groups
        ]
        return pd.json_normalize(rows)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file.

        Raises
        ------
        InputError
            For the first broken rule, as ``FILE:LINE: key: rule (got VALUE)``.
        """
        name = os.fspath(path)
        text = read_text(path)
        return validate_document(cls, parse_json(text, name), lambda key: _locate(text, name, key))


def _require_sum_of_1(whose: str, shares: Sequence[float]) -> None:
    total = math.fsum(shares)
    if abs(total - 1) > _SHARE_TOLERANCE:
        raise rule_error(f"shares of {whose} must sum to 1 over groups", key=("groups",), value=total)


def _locate(text: str, name: str, key: Key) -> str:
    """Return the place of a key in JSON text, which a YAML parser reads too, with line numbers."""
    try:
        return (
            f"{name}: {format_key(key)}" if len(text) > _MAX_LOCATED else parse_yaml(text, name).locate(key)
        )
    except InputError:  # a corner where YAML is not a superset of JSON: the key alone must do
        return f"{name}: {format_key(key)}"
