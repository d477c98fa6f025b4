"""Prometheus metrics of a server, under vLLM's names where they exist.

The event loop counts plain numbers as steps arrive. The engine core reports the gauges at collection.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from capplan.engine import CoreReady, Ended, Gauges, PoolGauges, StepRecord
from capplan.server._async_engine import RequestState
from capplan.version import installed_version

_TTFT_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
    *(480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_FINISH_REASONS: Final = ("stop", "length", "abort", "error")
_LABELS: Final = ("model_name", "engine")


MetricKind = type[Counter] | type[Gauge]


def metric_family(
    kind: MetricKind,
    name: str,
    help_text: str,
    labels: Sequence[str],
    rows: Iterable[tuple[Sequence[str], float]],
) -> Metric:
    """Return a metric from rows of label values and value."""
    family = kind(name, help_text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


class Histogram:
    """Counts of values by upper bound, which is included; one more bucket is above the last."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return (bound, number of values up to it), as in Prometheus."""
        names = [*(str(bound) for bound in self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))


class Metrics:
    """Prometheus collector of an engine; `answers` are finished requests, with `answer_tokens` in sum."""

    def __init__(self, model_name: str, ready: CoreReady) -> None:
        self._labels = (model_name, "0")
        self._ready = ready
        self._gauges = Gauges(0, 0, 0.0)
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._preemptions = 0
        self.answers = self.answer_tokens = 0
        self._finished = dict.fromkeys(_FINISH_REASONS, 0)
        self._step_tokens = Histogram(_STEP_TOKENS)
        self._probes, self._probe_s = 0, 0.0
        self._ttft_s = Histogram(_TTFT_S)
        self._itl_s = Histogram(_ITL_S)
        self._tpot_s = Histogram(_ITL_S)
        self._e2e_s = Histogram(_REQUEST_S)
        self._queue_s = Histogram(_REQUEST_S)
        self._refused: Mapping[int, int] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def register(self, collector: Collector) -> None:
        """Export the metrics of a collector, too."""
        self._registry.register(collector)

    def on_step(self, record: StepRecord, states: Sequence[RequestState]) -> None:
        """Count a step and its tokens."""
        self._preemptions += record.preemptions
        self._step_tokens.observe(record.tokens)
        self._generation_tokens += len(states)
        if record.probe_ms:
            self._probes += 1
            self._probe_s += 1e-3 * record.probe_ms
        end_ns = record.begin_ns + record.duration_ns
        for state in states:
            if state.last_token_ns is not None:
                self._itl_s.observe((end_ns - state.last_token_ns) * 1e-9)
            else:
                self._prompt_tokens += len(state.prompt)
                self._ttft_s.observe((end_ns - state.stream.arrival_ns) * 1e-9)

    def on_ended(self, state: RequestState, ended: Ended) -> None:
        """Count a request and its latencies."""
        self._finished[ended.reason] += 1
        first_ns, last_ns, arrival_ns = state.first_token_ns, state.last_token_ns, state.stream.arrival_ns
        if ended.admitted_ns is not None:
            self._queue_s.observe((ended.admitted_ns - arrival_ns) * 1e-9)
        if first_ns is not None and last_ns is not None and ended.reason in ("stop", "length"):
            self.answers += 1
            self.answer_tokens += state.token_count
            self._e2e_s.observe((last_ns - arrival_ns) * 1e-9)
            if state.token_count > 1:
                self._tpot_s.observe((last_ns - first_ns) * 1e-9 / (state.token_count - 1))

    def text(self, gauges: Gauges | None, refused: Mapping[int, int]) -> bytes:
        """Return all metrics in Prometheus' text format.

        Without gauges they are as last known. Refused requests are by status.
        """
        self._gauges = gauges or self._gauges
        self._refused = refused
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric; see `prometheus_client.registry.Collector`."""
        yield from self._values()
        yield self._lora_info()
        yield self._core_info()
        yield self._engine_info()
        speed = SummaryMetricFamily(
            "capplan:speed_probe_seconds", "Time of a fixed piece of work between steps"
        )
        speed.add_metric((), count_value=self._probes, sum_value=self._probe_s)
        yield speed
        if self._gauges.pool is not None:
            yield from _pool_metrics(self._gauges.pool)
        for name, help_text, histogram in (
            ("iteration_tokens_total", "Tokens of each step", self._step_tokens),
            ("time_to_first_token_seconds", "Time to first token", self._ttft_s),
            ("inter_token_latency_seconds", "Time between tokens", self._itl_s),
            ("time_per_output_token_seconds", "The same under its older name", self._itl_s),
            ("request_time_per_output_token_seconds", "Mean time per token after the first", self._tpot_s),
            ("e2e_request_latency_seconds", "Time from arrival to last token", self._e2e_s),
            ("request_queue_time_seconds", "Time from arrival to admission", self._queue_s),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", help_text, labels=_LABELS)
            family.add_metric(self._labels, histogram.buckets(), histogram.sum)
            yield family

    def _values(self) -> Iterator[Metric]:
        gauges = self._gauges
        for kind, name, help_text, value in (
            (Gauge, "num_requests_running", "Requests running", gauges.running),
            (Gauge, "num_requests_waiting", "Requests waiting", gauges.waiting),
            (Gauge, "kv_cache_usage_perc", "Share of KV blocks in use; 1 is all", gauges.kv_used),
            (Counter, "prompt_tokens", "Prompt tokens computed", self._prompt_tokens),
            (Counter, "generation_tokens", "Tokens generated", self._generation_tokens),
            (Counter, "num_preemptions", "Preempted requests", self._preemptions),
        ):
            yield metric_family(kind, f"vllm:{name}", help_text, _LABELS, [(self._labels, float(value))])
        finished = [((*self._labels, reason), count) for reason, count in self._finished.items()]
        labels = (*_LABELS, "finished_reason")
        yield metric_family(Counter, "vllm:request_success", "Requests finished", labels, finished)
        refused = [((str(status),), count) for status, count in self._refused.items()]
        yield metric_family(Counter, "capplan:requests_refused", "Requests refused", ("status",), refused)

    def _lora_info(self) -> Metric:
        """Return running and waiting adapters as labels, as vLLM does; the value is the time."""
        gauges = self._gauges
        names = (
            str(self._ready.args.max_loras),
            ",".join(gauges.waiting_adapters),
            ",".join(gauges.running_adapters),
        )
        labels = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        rows = [(names, time.time())]
        return metric_family(Gauge, "vllm:lora_requests_info", "Adapters with requests", labels, rows)

    def _core_info(self) -> Metric:
        """Return the CPUs of the engine core as a label, so that clients on this machine can use others."""
        rows = [((",".join(map(str, self._ready.cpus)),), 1.0)]
        return metric_family(Gauge, "capplan:engine_core_info", "CPUs of the engine core", ("cpus",), rows)

    def _engine_info(self) -> Metric:
        """Return version and device as labels, which load tests compare with a profile."""
        rows = [((installed_version(), self._ready.device), 1.0)]
        labels = ("version", "device")
        return metric_family(Gauge, "capplan:engine_info", "Version and device of the engine", labels, rows)


_POOL_COUNTERS: Final = (
    ("adapter_cache_hits", "Requests admitted whose adapter was in memory", "hits"),
    ("adapter_cache_misses", "Requests admitted whose adapter was not in memory", "misses"),
    ("adapter_evictions", "Adapters evicted", "evictions"),
    ("bypasses", "Requests admitted before the head of their queue", "bypasses"),
    ("squashes", "Bypassing requests taken back for the head of their queue", "squashes"),
    ("overruns", "Reservations that a request has outgrown", "overruns"),
    ("recomputes", "Preemptions for lack of memory", "recomputes"),
    ("queue_refreshes", "Designs of the queues adopted", "refreshes"),
    ("queue_refreshes_kept", "Refreshes with too few requests for a design", "kept_queues"),
    ("queue_quotas_scaled", "Designs whose minima exceeded the memory", "scaled_quotas"),
)
_PREFETCHES: Final = ("useful", "late", "wasted")


def _pool_metrics(pool: PoolGauges) -> Iterator[Metric]:
    """Yield the metrics of a scheduler whose adapters and KV share the memory."""
    numbered = [((str(number),), queue) for number, queue in enumerate(pool.queues)]
    for name, help_text, field in (
        ("queue_requests_waiting", "Requests waiting in a queue, 0 being that of the smallest", "waiting"),
        ("queue_quota_tokens", "Tokens that a queue may have in execution", "quota_tokens"),
        ("queue_outstanding_tokens", "Tokens of its quota in execution", "outstanding_tokens"),
    ):
        rows = [(labels, float(getattr(queue, field))) for labels, queue in numbered]
        yield metric_family(Gauge, f"capplan:{name}", help_text, ("queue",), rows)
    for kind, name, help_text, value in (
        (Gauge, "adapters_cached", "Idle adapters in memory", pool.cached_adapters),
        *((Counter, name, text, pool.counts[field]) for name, text, field in _POOL_COUNTERS),
    ):
        yield kind(f"capplan:{name}", help_text, value)
    outcomes = [((each,), float(pool.counts[f"{each}_prefetches"])) for each in _PREFETCHES]
    help_text = "Prefetched adapters by outcome"
    yield metric_family(Counter, "capplan:adapter_prefetches", help_text, ("outcome",), outcomes)
