"""Details of a simulation: the table of requests, metrics of groups, SLO attainment, and time series."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from capplan.serving import Records
from capplan.spec import STARVED_BELOW, LatencyStats, Slo, Workload, grouped_latency_stats, write_bytes_atomic
from capplan.twin.instance import _trace as t
from capplan.twin.instance._metrics import SimulationResult, bound_value, size_classes
from capplan.twin.instance._scenario import NS_PER_MS, NS_PER_S, Scenario
from capplan.workload import Requests

if TYPE_CHECKING:
    import pyarrow as pa


STATUSES: Final = ("finished", "running", "waiting", "rejected", "lost")
"""Ends of requests; lost: ended by a crash of the instance of a cluster."""

FINISHED, RUNNING, WAITING, REJECTED, LOST = range(len(STATUSES))

_BASE_MODEL: Final = ""  # adapter name of base-model requests
_MS_PER_S: Final = 1e3


@dataclass(frozen=True, eq=False)
class RequestTable:
    """Requests in order of arrival, as columns; NaN for events after the end.

    TTFT and E2E include the time outside the engine, as at a client; clock times and waits do not.
    """

    adapters: tuple[str, ...]
    """Names by number; number 0 is the base model."""
    adapter: NDArray[np.int32]
    """Number of each request's adapter."""
    rank: NDArray[np.int32]
    """Rank of each request's adapter; 0 for the base model."""
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    """Generated tokens: as requested, or fewer if max_model_len ends the request."""
    status: NDArray[np.int8]
    """Position in STATUSES: finished, running, waiting (also: to be admitted again), rejected."""
    arrival_s: NDArray[np.float64]
    admitted_s: NDArray[np.float64]
    """Start of its first step."""
    first_token_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    queue_s: NDArray[np.float64]
    """From arrival to first admission, without the wait for its adapter."""
    load_wait_s: NDArray[np.float64]
    """Adapter loads before its first token: the wait for its adapter, or loads inside its steps."""
    ttft_s: NDArray[np.float64]
    tpot_ms: NDArray[np.float64]
    """Finished requests of several output tokens."""
    tpt_ms: NDArray[np.float64]
    interruption_count: NDArray[np.float64]
    """Pauses of its decoding by prompts of others and loads; finished requests."""
    interruption_share: NDArray[np.float64]
    """Share of these pauses in E2E."""
    e2e_s: NDArray[np.float64]
    isolated_s: NDArray[np.float64]
    """E2E of the same request alone on an idle engine with its adapter resident; finished requests."""
    slowdown: NDArray[np.float64]
    """e2e_s / isolated_s (Chameleon section 3.3)."""
    size_class: NDArray[np.int64] | None = None
    """Position in `PoolMetrics.sizes`, -1: rejected; None without scheduler and cache."""

    def __len__(self) -> int:
        return self.arrival_s.size

    def columns(self) -> Mapping[str, NDArray[np.generic]]:
        """Return the columns by name; adapter and status as positions in `adapters` and STATUSES."""
        every = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "adapters"}
        return {name: column for name, column in every.items() if column is not None}

    def to_arrow(self) -> pa.Table:
        """Return the table for Arrow: adapter and status by name, null instead of NaN."""
        import pyarrow as pa

        names = {"adapter": self.adapters, "status": STATUSES}
        columns = {}
        for name, column in self.columns().items():
            if name in names:
                codes = pa.array(column.astype(np.int32))
                columns[name] = pa.DictionaryArray.from_arrays(codes, pa.array(names[name], pa.string()))
            else:
                columns[name] = pa.array(column, from_pandas=True)  # NaN becomes null
        return pa.table(columns)

    def to_parquet(self, path: str) -> None:
        """Write the table as a Parquet file atomically."""
        write_parquet(path, self.to_arrow())


def write_parquet(path: str, table: pa.Table) -> None:
    """Write an Arrow table as a Parquet file atomically, or raise an `InputError`."""
    import pyarrow.parquet as pq

    buffer = BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    write_bytes_atomic(path, buffer.getvalue())


def request_table(
    workload: Workload,
    scenario: Scenario,
    trace: t.TwinTrace,
    overhead_s: float,
    alone_s: NDArray[np.float64],
) -> RequestTable:
    """Return the table of a detailed run.

    `overhead_s` is the time of a request outside the engine, `alone_s` that of each finished request in the
    engine alone, in their order.
    """
    requests, horizon_ns = scenario.requests, scenario.horizon_ns
    status = request_status(trace, horizon_ns)
    prompt = requests.prompt_tokens.astype(np.int64)
    room = np.maximum(scenario.limits.max_model_len - prompt, 1)
    output = requests.output_tokens.astype(np.int64)
    output = np.where(status == REJECTED, output, np.minimum(output, room))
    arrival_s = requests.arrival_ns / NS_PER_S
    admitted_s = _seconds(trace.admitted_ns, horizon_ns)
    first_s = _seconds(trace.first_ns, horizon_ns)
    finish_s = _seconds(trace.finish_ns, horizon_ns)
    skipped_s = trace.skipped_ns / NS_PER_S
    e2e_s = finish_s - arrival_s + overhead_s
    isolated_s = np.full(status.size, np.nan)
    isolated_s[status == FINISHED] = alone_s + overhead_s
    ranks = np.array([0, *(adapter.rank for adapter in workload.adapters)], np.int32)
    return RequestTable(
        adapters=(_BASE_MODEL, *(adapter.name for adapter in workload.adapters)),
        adapter=requests.adapter.astype(np.int32),
        rank=ranks[requests.adapter],
        prompt_tokens=prompt,
        output_tokens=output,
        status=status,
        arrival_s=arrival_s,
        admitted_s=admitted_s,
        first_token_s=first_s,
        finish_s=finish_s,
        queue_s=admitted_s - arrival_s - skipped_s,
        load_wait_s=np.where(np.isnan(first_s), np.nan, skipped_s + trace.held_up_ns / NS_PER_S),
        ttft_s=first_s - arrival_s + overhead_s,
        tpot_ms=_MS_PER_S * (finish_s - first_s) / np.where(output > 1, output - 1, np.nan),
        tpt_ms=_MS_PER_S * e2e_s / output,
        interruption_count=np.where(np.isnan(finish_s), np.nan, trace.interruptions),
        interruption_share=trace.interrupted_ns / NS_PER_S / e2e_s,
        e2e_s=e2e_s,
        isolated_s=isolated_s,
        slowdown=e2e_s / isolated_s,
        size_class=None if scenario.pool is None else size_classes(scenario, trace),
    )


def request_status(trace: t.TwinTrace, horizon_ns: int) -> NDArray[np.int8]:
    """Return the status of each request at the end, as a position in STATUSES."""
    status = np.full(trace.finish_ns.size, WAITING, np.int8)
    status[trace.status == t.STATUS_REJECTED] = REJECTED
    status[trace.status == t.STATUS_LOST] = LOST
    ended = trace.finish_ns != t.NEVER
    status[ended] = FINISHED
    # Requests of a step that ends after the horizon were in execution at the end.
    status[(trace.status == t.STATUS_RUNNING) | (ended & (trace.finish_ns > horizon_ns))] = RUNNING
    return status


def _seconds(clock_ns: NDArray[np.int64], horizon_ns: int) -> NDArray[np.float64]:
    happened = (clock_ns != t.NEVER) & (clock_ns <= horizon_ns)
    return np.where(happened, clock_ns / NS_PER_S, np.nan)


def several_tables(tables: Mapping[int, RequestTable], by: str) -> pa.Table:
    """Concatenate the tables; the first column `by` holds the keys."""
    import pyarrow as pa

    parts: Sequence[pa.Table] = [
        table.to_arrow().add_column(0, by, pa.array(np.full(len(table), key, np.int32)))
        for key, table in tables.items()
    ]
    return pa.concat_tables(parts, promote_options="default").unify_dictionaries()


_BATCH = 100_000
_LAST_NS = 2**62
_BITS = 25  # of a length in tokens


def isolated_s(
    scenario: Scenario,
    ranks: NDArray[np.int32],
    rows: NDArray[np.int64],
    runner: Callable[[Scenario], t.TwinTrace],
) -> NDArray[np.float64]:
    """Return the seconds from arrival to last token of requests alone in the engine.

    The twin serves them one by one under the rules and costs of the scenario, requests of one rank and the
    same lengths once. `ranks` are those of adapters by number, shape (adapters + 1,); `rows` numbers of
    requests, none that the engine would reject.
    """
    chosen = _take(scenario.requests, rows)
    rank = ranks[chosen.adapter].astype(np.int64)
    kind = (rank << 2 * _BITS) | (chosen.prompt_tokens.astype(np.int64) << _BITS) | chosen.output_tokens
    _, one_of_each, which = np.unique(kind, return_index=True, return_inverse=True)
    alone_ns = [
        _alone_ns(scenario, _take(chosen, one_of_each[start : start + _BATCH]), runner)
        for start in range(0, one_of_each.size, _BATCH)
    ]
    return np.concatenate([np.zeros(0), *alone_ns])[which] / NS_PER_S


def _alone_ns(
    scenario: Scenario, requests: Requests, runner: Callable[[Scenario], t.TwinTrace]
) -> NDArray[np.float64]:
    """Serve requests one by one; if two overlap, again with longer breaks between them."""
    count = requests.arrival_ns.size
    costs = scenario.costs
    idle = scenario._replace(
        costs=costs._replace(load_ns=np.zeros_like(costs.load_ns), disk_ns=np.zeros_like(costs.disk_ns)),
        max_in_flight=count,
        shared_prefix_tokens=0,  # nothing of a prompt is cached yet
        buckets=0,
        scheduler=None,  # queues make no difference to a request alone
    )
    apart_ns = 100 * NS_PER_S
    while True:
        arrival_ns = np.arange(count, dtype=np.int64) * apart_ns
        trace = runner(
            idle._replace(requests=requests._replace(arrival_ns=arrival_ns), horizon_ns=count * apart_ns)
        )
        alone_ns = np.where(trace.finish_ns == t.NEVER, np.inf, trace.finish_ns - arrival_ns)
        if bool(np.all(alone_ns <= apart_ns)) or apart_ns > _LAST_NS // (10 * count):
            return alone_ns
        apart_ns *= 10


def _take(requests: Requests, rows: NDArray[np.int64]) -> Requests:
    return Requests(
        requests.arrival_ns[rows],
        requests.adapter[rows],
        requests.prompt_tokens[rows],
        requests.output_tokens[rows],
    )


_ENDS: Final = (FINISHED, RUNNING, WAITING, REJECTED)
"""Statuses of the requests of one engine, which does not crash."""


@dataclass(frozen=True)
class GroupMetrics:
    """Metrics of a group of requests. Latencies and waits: requests finished within the horizon."""

    name: str
    submitted: int
    finished: int
    running: int
    waiting: int
    rejected: int
    offered_tok_s: float
    """Input and output tokens of submitted requests over the horizon."""
    throughput_tok_s: float
    """Input and output tokens of finished requests over the horizon."""
    served_fraction: float
    """Tokens of finished over submitted requests, without those in execution at the end."""
    starved: bool
    ttft_s: LatencyStats
    tpot_ms: LatencyStats
    tpt_ms: LatencyStats
    interruption_count: LatencyStats
    """Pauses of a request's decoding by prompts of others and loads."""
    interruption_share: LatencyStats
    """Share of these pauses in E2E."""
    e2e_s: LatencyStats
    slowdown: LatencyStats
    """E2E over the E2E of the same request alone on an idle engine, its adapter resident."""
    queue_s: LatencyStats
    load_wait_s: LatencyStats
    """Adapter loads before the first token."""
    itl_ms_mean: float
    admissions: int
    """Preempted requests count again; first admissions under a scheduler and an adapter cache."""
    hit_rate: float
    """Share of admissions whose adapter was resident; NaN without any."""
    adapter_loads: int
    load_s: float
    """Duration of those loads."""
    slo_share: float
    """Share of requests that met every latency bound of the SLO, of those that met all or violated one."""


def group_metrics(
    table: RequestTable,
    group: NDArray[np.int64],
    names: Sequence[str],
    adapters: Records,
    kept_slo: NDArray[np.int8],
    duration_s: float,
    client_itl_factor: float,
) -> tuple[GroupMetrics, ...]:
    """Return the metrics of each group.

    `group` is the number of each request's group, shape (requests,); `adapters` is `TwinTrace.adapters`
    summed over the adapters of each group, shape (groups,); `kept_slo` is KEPT, BROKEN or OPEN for each
    request and the SLO; `client_itl_factor` is the mean gap between tokens at a client relative to the
    engine.
    """
    count = len(names)

    def per_group(weights: NDArray[Any] | None = None) -> NDArray[np.float64]:
        summed: NDArray[np.float64] = np.bincount(group, weights, minlength=count).astype(np.float64)
        return summed

    tokens = table.prompt_tokens + table.output_tokens
    finished = table.status == FINISHED
    done = per_group(tokens * finished)
    answerable = per_group(tokens * (table.status != RUNNING))
    served = np.divide(done, answerable, out=np.ones(count), where=answerable > 0)
    gaps, decoding_ms = map(per_group, _token_gaps(table))
    latencies = (
        *("ttft_s", "tpot_ms", "tpt_ms", "interruption_count", "interruption_share"),
        *("e2e_s", "slowdown", "queue_s", "load_wait_s"),
    )
    columns: dict[str, NDArray[Any]] = {
        "submitted": per_group().astype(int),
        **{STATUSES[code]: per_group(table.status == code).astype(int) for code in _ENDS},
        "offered_tok_s": per_group(tokens) / duration_s,
        "throughput_tok_s": done / duration_s,
        "served_fraction": served,
        "starved": served < STARVED_BELOW,
        "itl_ms_mean": client_itl_factor * _ratio(decoding_ms, gaps),
        "admissions": adapters.admissions,
        "hit_rate": _ratio(adapters.hits, adapters.admissions),
        "adapter_loads": adapters.loads,
        "load_s": adapters.load_ns / NS_PER_S,
        "slo_share": _ratio(per_group(kept_slo > 0), per_group(kept_slo != 0)),
    }
    values = {name: column.tolist() for name, column in columns.items()} | {
        name: grouped_latency_stats(getattr(table, name)[finished], group[finished], count)
        for name in latencies
    }
    return tuple(
        GroupMetrics(name=name, **{key: column[i] for key, column in values.items()})
        for i, name in enumerate(names)
    )


def _token_gaps(table: RequestTable) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the gaps between tokens of each finished request, and their sum in milliseconds."""
    several = (table.status == FINISHED) & (table.output_tokens > 1)
    decoding_ms = np.where(several, 1e3 * (table.finish_s - table.first_token_s), 0.0)
    return (table.output_tokens - 1) * several, decoding_ms


def _ratio(part: NDArray[Any], whole: NDArray[Any]) -> NDArray[np.float64]:
    """Return part / whole, NaN if whole is 0."""
    ratio = np.full(part.shape, np.nan)
    np.divide(part, whole, out=ratio, where=whole > 0)
    return ratio


KEPT, OPEN, BROKEN = 1, 0, -1


@dataclass(frozen=True)
class Attainment:
    """Number of requests that meet a bound.

    A rejected request violates every bound. An unfinished one violates a bound on TTFT, E2E or TPT once it
    has taken longer, and is open before. Bounds on TPOT and ITL ignore requests of one output token.
    """

    bound: str
    """Key of the SLO, ``"tpt_over_base"``, or ``"all"`` for every latency bound together."""
    limit: float
    """In the unit of the key; NaN for all together."""
    value: float
    """Statistic of the key, such as the 99th percentile; NaN for bounds on shares."""
    kept: int
    broken: int
    open: int

    @property
    def share(self) -> float:
        """Share of requests that met the bound, of those that met or violated it; NaN without any."""
        decided = self.kept + self.broken
        return self.kept / decided if decided else float("nan")


def attainment(
    slo: Slo,
    result: SimulationResult,
    table: RequestTable,
    overhead_s: float,
    client_itl_factor: float,
    base_tpt_ms: float | None,
) -> tuple[tuple[Attainment, ...], NDArray[np.int8]]:
    """Return the attainment of each latency bound, all together last, and KEPT, OPEN or BROKEN per request.

    `overhead_s` is the time of a request outside the engine. `client_itl_factor` is the mean gap between
    tokens at a client relative to the engine; the ITL of a request is its mean gap. `base_tpt_ms` is the mean
    TPT of the same requests without adapters, which ``tpt_over_base`` refers to.
    """
    limits: dict[str, float] = slo.latency_bounds()
    if slo.tpt_over_base is not None and base_tpt_ms is not None:
        limits["tpt_over_base"] = slo.tpt_over_base * base_tpt_ms
    measured = _measured(table, result.duration_s + overhead_s, client_itl_factor)
    rejected = table.status == REJECTED
    together = np.full(len(table), KEPT if limits else OPEN, np.int8)
    found = []
    for bound, limit in limits.items():
        kind, _, unit = bound.split("_")
        value, at_least = measured[kind] if unit in ("s", "ms", "base") else measured[unit]
        verdict = np.full(len(table), OPEN, np.int8)
        verdict[value <= limit] = KEPT
        verdict[(value > limit) | (at_least > limit) | rejected] = BROKEN
        counted = (table.output_tokens > 1) | rejected if kind in ("tpot", "itl") else slice(None)
        together[counted] = np.minimum(together[counted], verdict[counted])
        statistic = float("nan") if bound == "tpt_over_base" else bound_value(result, bound)
        found.append(_counted(bound, limit, statistic, verdict[counted]))
    if len(limits) > 1:
        found.append(_counted("all", float("nan"), float("nan"), together))
    return tuple(found), together


def _measured(
    table: RequestTable, end_s: float, client_itl_factor: float
) -> Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return each metric of each request, NaN if unknown, and its lower bound."""
    so_far_s = np.where(table.status == FINISHED, np.nan, end_s - table.arrival_s)
    nothing = np.full(len(table), np.nan)
    return {
        "ttft": (table.ttft_s, np.where(np.isnan(table.ttft_s), so_far_s, np.nan)),
        "e2e": (table.e2e_s, so_far_s),
        "tpt": (table.tpt_ms, 1e3 * so_far_s / table.output_tokens),
        "tpot": (table.tpot_ms, nothing),
        "itl": (client_itl_factor * table.tpot_ms, nothing),
        "count": (table.interruption_count, nothing),
        "share": (table.interruption_share, nothing),
    }


def _counted(bound: str, limit: float, value: float, verdict: NDArray[np.int8]) -> Attainment:
    kept, broken = int((verdict == KEPT).sum()), int((verdict == BROKEN).sum())
    return Attainment(bound, limit, value, kept, broken, verdict.size - kept - broken)


BUCKETS = 600
_SHORTEST_NS = NS_PER_S // 2
_LARGEST_SUM = 2**62


@dataclass(frozen=True, eq=False)
class TimeSeries:
    """Arrays with one entry per bucket of time; a step belongs to the bucket of its end.

    Means are over the time of steps; 0 without any, except resident adapters, which stay.
    """

    bucket_s: float
    """Length of a bucket."""
    time_s: NDArray[np.float64]
    """Middle of each bucket."""
    running: NDArray[np.float64]
    waiting: NDArray[np.float64]
    kv_share: NDArray[np.float64]
    """KV tokens held over KV capacity."""
    active_adapters: NDArray[np.float64]
    """Distinct adapters of running requests."""
    resident_adapters: NDArray[np.float64]
    """Adapters in GPU slots."""
    busy_share: NDArray[np.float64]
    """Time of steps over time; above 1 if a step began in an earlier bucket."""
    step_ms: NDArray[np.float64]
    """Mean duration of a step; NaN without any."""
    loads_per_s: NDArray[np.float64]
    """Adapter loads started."""
    load_share: NDArray[np.float64]
    """Time that steps waited for loads over time."""
    computed_tok_s: NDArray[np.float64]
    """Computed tokens of prefill and decode, including recomputation after preemptions."""
    completed_tok_s: NDArray[np.float64]
    """Input and output tokens of the completed requests."""
    arrivals_rps: NDArray[np.float64]


def bucket_count(scenario: Scenario) -> int:
    """Return the number of buckets: about 600, none much shorter than a step."""
    buckets = max(1, min(BUCKETS, scenario.horizon_ns // _SHORTEST_NS))
    # Sums over a bucket must fit into 64 bits.
    kv_tokens = scenario.num_blocks * scenario.limits.block_size
    most = max(kv_tokens, scenario.requests.arrival_ns.size, scenario.adapters, 1)
    return max(buckets, -(-scenario.horizon_ns * most // _LARGEST_SUM))


def time_series(scenario: Scenario, trace: t.TwinTrace, table: RequestTable) -> TimeSeries:
    """Return the time series of a detailed run."""
    bucket_ns = int(trace.counts.bucket_ns)
    count = trace.series.size
    bucket_s = bucket_ns / NS_PER_S
    series = trace.series
    busy_ns, steps = series.busy_ns.astype(np.float64), series.steps
    kv_tokens = scenario.num_blocks * scenario.limits.block_size

    def mean(integral: NDArray[np.int64]) -> NDArray[np.float64]:
        means: NDArray[np.float64] = np.zeros(count)
        np.divide(integral, busy_ns, out=means, where=busy_ns > 0)
        return means

    def per_second(seconds: NDArray[np.float64], weights: NDArray[np.int64] | None) -> NDArray[np.float64]:
        bucket = np.minimum((seconds / bucket_s).astype(np.int64), count - 1)
        return np.bincount(bucket, weights, minlength=count) / bucket_s

    finished = table.status == FINISHED
    tokens = table.prompt_tokens + table.output_tokens
    return TimeSeries(
        bucket_s=bucket_s,
        time_s=bucket_s * (np.arange(count, dtype=np.float64) + 0.5),
        running=mean(series.running_ns),
        waiting=mean(series.waiting_ns),
        kv_share=mean(series.kv_token_ns) / kv_tokens,
        active_adapters=mean(series.active_ns),
        resident_adapters=_carried(mean(series.resident_ns), busy_ns > 0),
        busy_share=busy_ns / bucket_ns,
        step_ms=np.divide(busy_ns / NS_PER_MS, steps, out=np.full(count, np.nan), where=steps > 0),
        loads_per_s=series.loads / bucket_s,
        load_share=series.load_ns / bucket_ns,
        computed_tok_s=series.tokens / bucket_s,
        completed_tok_s=per_second(table.finish_s[finished], tokens[finished]),
        arrivals_rps=per_second(table.arrival_s, None),
    )


def _carried(values: NDArray[np.float64], known: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the values with the last known one where unknown, and 0 before the first."""
    last = np.maximum.accumulate(np.where(known, np.arange(values.size), -1))
    carried: NDArray[np.float64] = np.where(last >= 0, values[np.maximum(last, 0)], 0.0)
    return carried
