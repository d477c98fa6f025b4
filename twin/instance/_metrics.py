"""Metrics of a simulation: throughput, latencies, starvation, and token gaps as a client measures them.

Under a scheduler and an adapter cache also waits, hits, prefetches and size classes.

Metrics scrapes lengthen the gaps. vLLM's API server keeps one time series for every combination of running
and waiting adapters that has occurred (``vllm:lora_requests_info``). A scrape of ``/metrics`` writes all of
them in the event loop that sends tokens. Tokens that accumulate meanwhile reach the client together, so that
it counts fewer and longer gaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import by_reference, jit
from capplan.errors import InputError
from capplan.serving import int_fields, new_record
from capplan.serving.pooled import RequestSample, clustered_classes
from capplan.spec import (
    PERCENTILES,
    STARVED_BELOW,
    FittedModel,
    LatencyStats,
    Plotted,
    QueueConfig,
    latency_stats,
    latency_stats_in_place,
)
from capplan.twin.instance import _trace as t
from capplan.twin.instance._scenario import NS_PER_MS, NS_PER_S, Scenario
from capplan.twin.instance._trace import NEVER, STATUS_REJECTED, STATUS_RUNNING, TwinTrace
from capplan.workload import Requests

if TYPE_CHECKING:
    import pandas as pd


_NAMES: Final = (
    ("all",),
    ("small", "large"),
    ("small", "medium", "large"),
    ("small", "medium", "large", "largest"),
)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SizeMetrics:
    """Requests of one size class. Latencies and waits: requests finished within the horizon."""

    name: str
    submitted: int
    finished: int
    queue_s: LatencyStats
    """From arrival to first admission."""
    ttft_s: LatencyStats
    e2e_s: LatencyStats
    queue_share: float
    """Sum of queueing times over the sum of E2E; NaN without requests."""
    interruption_count: LatencyStats
    """Pauses of decoding per request."""
    interruption_share: LatencyStats
    """Share of these pauses in E2E."""


@dataclass(frozen=True)
class PoolMetrics:
    """Metrics of scheduler, adapter cache and host link. Waits: requests finished within the horizon."""

    hit_rate: float
    """Share of first admissions whose adapter was loaded, without the base model; NaN without any."""
    hits: int
    misses: int
    load_wait_ms: LatencyStats
    """Adapter loads on the critical path, requests of adapters: from first admission until the adapter is
    loaded; under S-LoRA's rules the wait of its batch."""
    missed_load_wait_ms: LatencyStats
    """The same over the requests that waited."""
    queue_s: LatencyStats
    """From arrival to first admission."""
    queue_share: float
    """Sum of queueing times over the sum of E2E; NaN without requests."""
    sizes: tuple[SizeMetrics, ...]
    """By ascending size: clusters of the weighted sizes of all requests with their true outputs (Chameleon,
    section 4.3), whatever the scheduler."""
    squashes: int
    bypasses: int
    overruns: int
    """Growths of the reservation of a request beyond its predicted output."""
    recomputes: int
    """Preemptions for lack of blocks."""
    prefetches_useful: int
    prefetches_late: int
    """Prefetches still in progress at the first admission of a request for the adapter."""
    prefetches_wasted: int
    """Prefetched adapters that were evicted before any use."""
    evictions: int
    refreshes: int
    """Designs of the queues adopted."""
    refreshes_kept: int
    """Refreshes with too few requests for a design."""
    quotas_scaled: int
    """Designs whose minima exceeded the pool."""
    link_utilization: float
    """Share of the horizon in which the link from host memory copied."""


def pool_metrics(scenario: Scenario, trace: TwinTrace, overhead_s: float) -> PoolMetrics | None:
    """Return the metrics of a simulation; None without scheduler and cache.

    Parameters
    ----------
    scenario, trace
        Input and record of the simulation.
    overhead_s
        Time of a request outside the engine, part of its TTFT and E2E.
    """
    if scenario.pool is None:
        return None
    requests, counts = scenario.requests, trace.pool
    done = np.flatnonzero((trace.finish_ns != NEVER) & (trace.finish_ns <= scenario.horizon_ns))
    arrival_ns = requests.arrival_ns[done]
    queue_s = (trace.admitted_ns[done] - arrival_ns) / NS_PER_S
    e2e_s = (trace.finish_ns[done] - arrival_ns) / NS_PER_S + overhead_s
    interrupted_s = trace.interrupted_ns[done] / NS_PER_S
    finished = {
        "queue_s": queue_s,
        "ttft_s": (trace.first_ns[done] - arrival_ns) / NS_PER_S + overhead_s,
        "e2e_s": e2e_s,
        "interruption_count": trace.interruptions[done].astype(np.float64),
        "interruption_share": np.divide(interrupted_s, e2e_s, out=np.zeros(done.size), where=e2e_s > 0.0),
    }
    wait_ms = trace.held_up_ns[done[requests.adapter[done] > 0]] / NS_PER_MS
    size = size_classes(scenario, trace)
    names = _NAMES[max(0, int(size.max(initial=0)))]
    hits, misses = int(counts.hits), int(counts.misses)
    return PoolMetrics(
        hit_rate=hits / (hits + misses) if hits + misses else float("nan"),
        hits=hits,
        misses=misses,
        load_wait_ms=latency_stats(wait_ms),
        missed_load_wait_ms=latency_stats(wait_ms[wait_ms > 0]),
        queue_s=latency_stats(queue_s),
        queue_share=_share(queue_s, e2e_s),
        sizes=_by_size(names, size, size[done], finished) if size.size else (),
        squashes=int(counts.squashes),
        bypasses=int(counts.bypasses),
        overruns=int(counts.overruns),
        recomputes=int(counts.recomputes),
        prefetches_useful=int(counts.useful_prefetches),
        prefetches_late=int(counts.late_prefetches),
        prefetches_wasted=int(counts.wasted_prefetches),
        evictions=int(counts.evictions),
        refreshes=int(counts.refreshes),
        refreshes_kept=int(counts.kept_queues),
        quotas_scaled=int(counts.scaled_quotas),
        link_utilization=min(1.0, float(counts.link_ns) / scenario.horizon_ns),
    )


def size_classes(scenario: Scenario, trace: TwinTrace) -> NDArray[np.int64]:
    """Return the size class of each request, from 0; -1: rejected."""
    requests, pool = scenario.requests, scenario.pool
    size = np.full(requests.arrival_ns.size, -1, np.int64)
    taken = np.flatnonzero(trace.status != STATUS_REJECTED)
    if pool is None or taken.size == 0:
        return size
    sample = RequestSample(
        prompt_tokens=requests.prompt_tokens[taken].astype(np.int64, copy=False),
        output_tokens=requests.output_tokens[taken].astype(np.int64, copy=False),
        adapter=requests.adapter[taken].astype(np.int64, copy=False),
        execution_s=np.full(taken.size, np.nan),
        adapter_bytes=pool.adapter_bytes,
        adapter_tokens=pool.adapter_tokens,
    )
    size[taken] = clustered_classes(sample, QueueConfig()).queue
    return size


def _by_size(
    names: Sequence[str],
    submitted: NDArray[np.int64],
    finished: NDArray[np.int64],
    values: Mapping[str, Floats],
) -> tuple[SizeMetrics, ...]:
    """Return the metrics of each size class from the classes and values of finished requests."""
    found = []
    for number, name in enumerate(names):
        mine = {metric: each[finished == number] for metric, each in values.items()}
        found.append(
            SizeMetrics(
                name=name,
                submitted=int(np.count_nonzero(submitted == number)),
                finished=mine["e2e_s"].size,
                queue_share=_share(mine["queue_s"], mine["e2e_s"]),
                **{metric: latency_stats_in_place(each) for metric, each in mine.items()},
            )
        )
    return tuple(found)


def _share(part_s: Floats, whole_s: Floats) -> float:
    return float(part_s.sum() / whole_s.sum()) if part_s.size else float("nan")


@dataclass(frozen=True, repr=False)
class SimulationResult(Plotted):
    """One simulated GPU over one horizon. Latencies: requests completed within it, NaN without any."""

    throughput_tok_s: float
    """Input and output tokens of completed requests over the horizon."""
    input_tok_s: float
    output_tok_s: float
    offered_tok_s: float
    """Input and output tokens of submitted requests over the horizon."""
    itl_ms_mean: float
    """Mean gap between tokens at the client, equally weighted."""
    itl_ms_p50: float
    itl_ms_p90: float
    itl_ms_p95: float
    itl_ms_p99: float
    """Percentiles are over the gaps of all requests including unfinished ones, exact to half a percent."""
    ttft_s_mean: float
    ttft_s_p50: float
    ttft_s_p90: float
    ttft_s_p95: float
    ttft_s_p99: float
    ttft_s_mean_charged: float
    """Over every submitted request; an unfinished one is charged the whole horizon."""
    tpot_ms_mean: float
    """(E2E - TTFT) / (output tokens - 1), requests equally weighted."""
    tpot_ms_p50: float
    tpot_ms_p90: float
    tpot_ms_p95: float
    tpot_ms_p99: float
    e2e_s_mean: float
    e2e_s_p50: float
    e2e_s_p90: float
    e2e_s_p95: float
    e2e_s_p99: float
    tpt_ms_mean: float
    """E2E / output tokens (Toppings section 7.1)."""
    tpt_ms_p50: float
    tpt_ms_p90: float
    tpt_ms_p95: float
    tpt_ms_p99: float
    interruption_count_mean: float
    """Times that others' prompts or loads pause a request's decoding (Toppings section 2.3)."""
    interruption_count_p50: float
    interruption_count_p90: float
    interruption_count_p95: float
    interruption_count_p99: float
    interruption_share_mean: float
    """Share of these pauses in E2E."""
    interruption_share_p50: float
    interruption_share_p90: float
    interruption_share_p95: float
    interruption_share_p99: float
    served_fraction: float
    """Tokens of completed over submitted requests, without those in execution at the end."""
    starved: bool
    completed: int
    submitted: int
    rejected: int
    preemptions: int
    adapter_loads: int
    disk_loads: int
    load_s: float
    """Time that steps spent waiting for adapter loads."""
    steps: int
    busy_fraction: float
    """Share of the horizon in which a step ran."""
    running_mean: float
    """Mean over busy time, as are the next three."""
    waiting_mean: float
    kv_tokens_mean: float
    adapters_mean: float
    running_max: int
    waiting_max: int
    kv_tokens: int
    """KV capacity."""
    duration_s: float
    wall_s: float = 0.0
    """Seconds of computing, drawing of requests included."""
    kv_tokens_max: int = 0
    """Most KV tokens in use."""
    step_tokens_max: int = 0
    """Most tokens computed in one step."""
    pool: PoolMetrics | None = None
    """Metrics of scheduler and adapter cache; None under the engine's own rules."""

    def display_facts(self) -> Mapping[str, object]:
        """Return throughput, the verdict on starvation and tail latencies."""
        names = (
            *("throughput_tok_s", "offered_tok_s", "served_fraction", "starved", "ttft_s_p99", "tpot_ms_p99"),
            *("completed", "submitted", "duration_s"),
        )
        return {name: getattr(self, name) for name in names}

    def document(self) -> dict[str, Any]:
        """Return all metrics by name for JSON, `pool` only if it is not None."""
        return {name: value for name, value in asdict(self).items() if name != "pool" or value is not None}

    def to_pandas(self) -> pd.Series[Any]:
        """Return all metrics by name."""
        import pandas as pd

        return pd.Series(self.document())


def bound_value(result: SimulationResult, bound: str) -> float:
    """Return the metric that a bound such as ``ttft_p99_s`` is on."""
    kind, statistic, unit = bound.split("_")
    value: float = getattr(result, f"{kind}_{unit}_{statistic}")
    return value


def summarize(
    scenario: Scenario, trace: t.TwinTrace, request_overhead_ms: float, client_itl_factor: float = 1.0
) -> SimulationResult:
    """Reduce a trace to its metrics.

    Parameters
    ----------
    scenario, trace
        Input and record of the simulation.
    request_overhead_ms
        Time of a request outside the engine's steps before its first token (HTTP, tokenizer).
    client_itl_factor
        Mean gap between tokens at a client relative to the gap in the engine: two tokens in one chunk are one
        gap for two steps.

    Raises
    ------
    InputError
        If the step model gave no step a time above 0.
    """
    if trace.counts.steps > 0 and trace.sums.busy_ns <= 0:
        rule = "must give steps a time above 0 ms"
        raise InputError(rule, float(trace.sums.busy_ns) / 1e6, "profile: step_latency")
    horizon_s = scenario.horizon_ns / NS_PER_S
    reduced = reduce_trace(
        scenario.requests,
        trace,
        scenario.horizon_ns,
        scenario.limits.max_model_len,
        request_overhead_ms / 1e3,
    )
    completed, _, tokens, executing_tokens, input_tokens, output_tokens, decoding_ns = reduced.totals.tolist()
    submitted = scenario.requests.arrival_ns.size
    completed_tokens = input_tokens + output_tokens
    answerable = tokens - executing_tokens
    served = completed_tokens / answerable if answerable > 0 else 1.0
    gaps = output_tokens - completed
    itl_ms = decoding_ns / NS_PER_MS / gaps if gaps else float("nan")
    itl_stats = LatencyStats(itl_ms, *t.gap_percentiles_ms(trace.gaps, PERCENTILES))
    charged_s = float(reduced.ttft_s.sum()) + (submitted - completed) * horizon_s
    busy = float(trace.sums.busy_ns)

    def mean_over_busy(integral: float) -> float:
        return float(integral) / busy if busy else 0.0

    return SimulationResult(
        throughput_tok_s=completed_tokens / horizon_s,
        input_tok_s=input_tokens / horizon_s,
        output_tok_s=output_tokens / horizon_s,
        offered_tok_s=tokens / horizon_s,
        ttft_s_mean_charged=charged_s / submitted if submitted else float("nan"),
        **_named("itl_ms", itl_stats, client_itl_factor),
        **_named("ttft_s", latency_stats_in_place(reduced.ttft_s)),
        **_named("tpot_ms", latency_stats_in_place(reduced.tpot_ms)),
        **_named("e2e_s", latency_stats_in_place(reduced.e2e_s)),
        **_named("tpt_ms", latency_stats_in_place(reduced.tpt_ms)),
        **_named("interruption_count", latency_stats_in_place(reduced.interruption_count)),
        **_named("interruption_share", latency_stats_in_place(reduced.interruption_share)),
        served_fraction=served,
        starved=served < STARVED_BELOW,
        completed=completed,
        submitted=submitted,
        load_s=float(trace.counts.load_ns) / NS_PER_S,
        rejected=int(trace.counts.rejected),
        preemptions=int(trace.counts.preemptions) - int(trace.pool.squashes),
        adapter_loads=int(trace.counts.adapter_loads),
        disk_loads=int(trace.counts.disk_loads),
        steps=int(trace.counts.steps),
        busy_fraction=min(1.0, busy / scenario.horizon_ns),
        running_mean=mean_over_busy(trace.sums.running_ns),
        waiting_mean=mean_over_busy(trace.sums.waiting_ns),
        kv_tokens_mean=mean_over_busy(trace.sums.kv_token_ns),
        adapters_mean=mean_over_busy(trace.sums.adapter_ns),
        running_max=int(trace.counts.max_running),
        waiting_max=int(trace.counts.max_waiting),
        kv_tokens=scenario.num_blocks * scenario.limits.block_size,
        duration_s=horizon_s,
        kv_tokens_max=int(trace.counts.max_kv_tokens),
        step_tokens_max=int(trace.counts.max_step_tokens),
        pool=pool_metrics(scenario, trace, request_overhead_ms / 1e3),
    )


def _named(metric: str, stats: LatencyStats, factor: float = 1.0) -> dict[str, float]:
    """Return the statistics, times `factor`, under their field names."""
    return {f"{metric}_{name}": factor * value for name, value in vars(stats).items()}


_TOTALS = int_fields(
    "completed",
    "several",  # completed requests of two output tokens or more
    "tokens",  # of all requests
    "executing_tokens",  # of requests in execution at the end
    "prompt_tokens",  # of completed requests
    "output_tokens",
    "decoding_ns",  # first to last token, completed requests
)


@by_reference
class Reduced(NamedTuple):
    """Latencies of completed requests, in the order of arrival, and totals."""

    ttft_s: NDArray[np.float64]
    e2e_s: NDArray[np.float64]
    tpt_ms: NDArray[np.float64]
    interruption_count: NDArray[np.float64]
    interruption_share: NDArray[np.float64]
    tpot_ms: NDArray[np.float64]
    """Requests of several output tokens only."""
    totals: np.record
    """Fields as in `_TOTALS`."""


def reduce_trace(
    requests: Requests, trace: TwinTrace, horizon_ns: int, max_model_len: int, overhead_s: float
) -> Reduced:
    """Reduce a trace to latencies and totals.

    A request that ended after the horizon was in execution then. One ends at `max_model_len` prompt and
    output tokens. `overhead_s` is the time of a request outside the engine, part of its TTFT and E2E.
    """
    n = requests.arrival_ns.size
    # Untouched pages take no memory, even if most requests are rejected.
    latencies = {name: np.empty(n) for name in Reduced._fields if name != "totals"}
    totals = new_record(_TOTALS)
    _reduce(requests, trace, horizon_ns, max_model_len, overhead_s, Reduced(**latencies, totals=totals))
    ends = dict.fromkeys(latencies, int(totals.completed)) | {"tpot_ms": int(totals.several)}
    return Reduced(**{name: values[: ends[name]] for name, values in latencies.items()}, totals=totals)


@jit
def _reduce(
    requests: Requests, trace: TwinTrace, horizon_ns: int, max_model_len: int, overhead_s: float, out: Reduced
) -> None:
    completed = several = tokens = executing = prompts = outputs = decoding_ns = 0
    for i in range(requests.arrival_ns.size):
        prompt: int = requests.prompt_tokens[i]
        output: int = min(requests.output_tokens[i], max(max_model_len - prompt, 1))
        tokens += prompt + output
        finish_ns: int = trace.finish_ns[i]
        if finish_ns == NEVER:
            if trace.status[i] == STATUS_RUNNING:
                executing += prompt + output
            continue
        if finish_ns > horizon_ns:
            executing += prompt + output
            continue
        prompts += prompt
        outputs += output
        arrival_ns, first_ns = requests.arrival_ns[i], trace.first_ns[i]
        e2e_s = (finish_ns - arrival_ns) / 1e9 + overhead_s
        out.ttft_s[completed] = (first_ns - arrival_ns) / 1e9 + overhead_s
        out.e2e_s[completed] = e2e_s
        out.tpt_ms[completed] = e2e_s * 1e3 / output
        out.interruption_count[completed] = trace.interruptions[i]
        interrupted_ns = trace.interrupted_ns[i]
        out.interruption_share[completed] = interrupted_ns / 1e9 / e2e_s if interrupted_ns > 0 else 0.0
        completed += 1
        if output > 1:
            decoding_ns += finish_ns - first_ns
            out.tpot_ms[several] = (finish_ns - first_ns) / 1e6 / (output - 1)
            several += 1
    out.totals.completed = completed
    out.totals.several = several
    out.totals.tokens = tokens
    out.totals.executing_tokens = executing
    out.totals.prompt_tokens = prompts
    out.totals.output_tokens = outputs
    out.totals.decoding_ns = decoding_ns


_MAX_NATS = 40.0  # of the entropy: more combinations than any server reaches


@dataclass(frozen=True)
class ScrapeLoad:
    """Quantities of a simulated run that determine the cost of a scrape."""

    step_s: float
    """Mean step that a running request sees."""
    adapters: float
    """Mean number of adapters in the batch."""
    small_share: float
    """Share of requests times steps in steps of at most `SMALL_BATCH` requests."""
    series: float
    """Mean number of time series of the server."""


def scrape_load(scenario: Scenario, trace: t.TwinTrace) -> ScrapeLoad | None:
    """Return the scrape load of a simulated run; None if no request ran."""
    request_steps = float(trace.counts.request_steps)
    if request_steps == 0:
        return None
    step_s = float(trace.sums.running_ns) / NS_PER_S / request_steps
    adapters = float(trace.sums.adapter_ns / trace.sums.busy_ns)
    return ScrapeLoad(
        step_s=step_s,
        adapters=adapters,
        small_share=float(trace.counts.small_request_steps) / request_steps,
        series=mean_series(scenario, step_s, adapters, scenario.horizon_ns / NS_PER_S),
    )


def client_itl_factor(host: FittedModel, scenario: Scenario, trace: t.TwinTrace) -> float:
    """Return the mean gap between tokens at a client relative to the gap in the engine.

    The host model's ``client_itl_factor`` always applies. Scrapes multiply it if ``scrape_interval_s`` is
    above 0.
    """
    return itl_factor(host, scrape_load(scenario, trace) if is_scraped(host) else None)


def is_scraped(host: FittedModel) -> bool:
    """Return whether the host model includes scrapes."""
    return "scrape_interval_s" in host.coefficients and host.value("scrape_interval_s") > 0.0


def itl_factor(host: FittedModel, load: ScrapeLoad | None) -> float:
    """Return `client_itl_factor` for a known scrape load; None: without scrapes."""
    constant = host.value("client_itl_factor")
    if load is None or not is_scraped(host):
        return constant
    per_series_us = (
        host.value("scrape_us_per_series") + host.value("scrape_us_per_series_adapter") * load.adapters
    )
    blocked_s = host.value("scrape_share") * (load.series * per_series_us / 1e6)
    return constant * stretch(host.value("scrape_interval_s"), blocked_s, load.step_s, load.small_share)


def stretch(interval_s: float, blocked_s: float, step_s: float, small_share: float) -> float:
    """Return the factor by which scrapes, with pauses of `interval_s` between them, lengthen the mean gap.

    From one scrape to the next, ``interval_s + blocked_s``, a client receives the tokens of ``interval_s``
    one by one and those of ``blocked_s``, for which a scrape delays tokens, together: the mean gap grows from
    ``step_s`` to ``(interval_s + blocked_s) / (interval_s / step_s + 1)``. A delay shorter than a step has no
    effect. Batches of more than `SMALL_BATCH` requests are sent in parts that alternate with a scrape and are
    not delayed; `small_share` of the tokens are in smaller ones.
    """
    if blocked_s <= step_s:
        return 1.0
    return 1.0 + small_share * ((interval_s + blocked_s) / (interval_s + step_s) - 1.0)


def mean_series(scenario: Scenario, step_s: float, adapters: float, served_s: float) -> float:
    """Return the number of adapter combinations that have occurred, averaged over the serving time.

    Adapters arrive and leave independently, so the number of likely combinations is about e to the entropy of
    the running and waiting sets. A server that shows c combinations per second has met
    ``S * (1 - exp(-c * t / S))`` of S after t seconds. `step_s` is the mean step, `adapters` the mean number
    of adapters in the batch, an upper bound of the running ones, and `served_s` the seconds from the start of
    the server to its end.
    """
    requests = scenario.requests
    arrivals = np.bincount(requests.adapter, minlength=scenario.adapters + 1)[1:]
    rates = arrivals / (scenario.horizon_ns / NS_PER_S)
    lifetime_s = float(requests.output_tokens.mean()) * step_s
    running = -np.expm1(-rates * lifetime_s)
    demanded = float(running.sum())
    if demanded > adapters:
        running *= adapters / demanded
    waiting = -np.expm1(-rates * step_s)
    changes_per_s = 2.0 * float(rates.sum()) + 2.0 * float(rates @ (1.0 - running))
    shown_per_s = -np.expm1(-changes_per_s * step_s) / step_s  # one combination per step at most
    likely = float(np.exp(min(_MAX_NATS, _entropy(running) + _entropy(waiting))))
    met = shown_per_s * served_s / likely
    return float(likely * (1.0 + np.expm1(-met) / met)) if met > 1e-6 else shown_per_s * served_s / 2.0


def _entropy(p: NDArray[np.float64]) -> float:
    """Return the entropy, in nats, of independent events of these probabilities."""
    p = np.clip(p, 1e-12, 1.0 - 1e-12)
    return float(-np.sum(p * np.log(p) + (1.0 - p) * np.log1p(-p)))
