"""Prometheus metrics of a server's part of the distributed adapter pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.metrics_core import Metric

from capplan.server._metrics import MetricKind, metric_family


class PoolCounters:
    """Counts of transfers, checks and removals.

    Attributes
    ----------
    transfers
        By kind of source and outcome.
    moved_bytes, moved_s
        By kind of source.
    checks
        Reads of own copies by outcome.
    removed
        Copies that other servers keep, or that the registry does not know any more.
    """

    def __init__(self) -> None:
        self.transfers: Counter[tuple[str, str]] = Counter()
        self.moved_bytes: Counter[str] = Counter()
        self.moved_s: dict[str, float] = {}
        self.checks = dict.fromkeys(("intact", "broken"), 0)
        self.removed = 0

    def on_transfer(self, kind: str, size_bytes: int, took_s: float) -> None:
        """Count a complete transfer."""
        self.transfers[kind, "done"] += 1
        self.moved_bytes[kind] += size_bytes
        self.moved_s[kind] = self.moved_s.get(kind, 0.0) + took_s

    def collect(self, copies: int, stored_bytes: int, max_bytes: int) -> Iterator[Metric]:
        """Yield the metrics.

        Parameters
        ----------
        copies, stored_bytes, max_bytes
            Adapters that the server stores, their bytes, and the limit of these.
        """
        yield _family(Gauge, "adapters_stored", "Adapters stored by this server", copies)
        yield _family(Gauge, "adapters_stored_bytes", "Bytes of these adapters", stored_bytes)
        yield _family(Gauge, "adapters_stored_bytes_limit", "Limit of these bytes", max_bytes)
        outcomes = [(labels, float(count)) for labels, count in sorted(self.transfers.items())]
        help_text = "Transfers of adapters to this server"
        labels = ("source", "outcome")
        yield metric_family(CounterMetricFamily, "capplan:adapter_transfers", help_text, labels, outcomes)
        for counts, name, help_text in (
            (self.moved_bytes, "bytes", "Bytes of adapters transferred to this server"),
            (self.moved_s, "seconds", "Time of these transfers, with checks and writing"),
        ):
            rows = [((source,), float(count)) for source, count in sorted(counts.items())]
            name = f"capplan:adapter_transfer_{name}"
            yield metric_family(CounterMetricFamily, name, help_text, ("source",), rows)
        checks = [((outcome,), float(count)) for outcome, count in self.checks.items()]
        help_text = "Copies of this server whose bytes were compared with their digest"
        name = "capplan:adapter_copy_checks"
        yield metric_family(CounterMetricFamily, name, help_text, ("outcome",), checks)
        help_text = "Copies of adapters removed from this server"
        yield _family(CounterMetricFamily, "adapter_copies_removed", help_text, self.removed)


def _family(kind: MetricKind, name: str, help_text: str, value: float) -> Metric:
    return metric_family(kind, f"capplan:{name}", help_text, (), [((), float(value))])
