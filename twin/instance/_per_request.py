"""Per-request table of timestamps and latencies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from io import BytesIO
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from capplan.spec import Workload, write_bytes_atomic
from capplan.twin.instance import _trace as t
from capplan.twin.instance._metrics import size_classes
from capplan.twin.instance._scenario import NS_PER_S, Scenario
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

    Parameters
    ----------
    workload, scenario, trace
        Input and record of the simulation.
    overhead_s
        Time of a request outside the engine.
    alone_s
        Time of each finished request in the engine alone, in their order.
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
    same lengths once.

    Parameters
    ----------
    ranks
        Rank of each adapter by number, shape (adapters + 1,).
    rows
        Numbers of the requests; none that the engine would reject.
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
