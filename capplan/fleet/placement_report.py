"""Placement in force and re-balancing, as documents and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.metrics_core import Metric

from capplan.fleet.rebalancing import RebalanceLoop
from capplan.fleet.supervisor import InstanceFleet
from capplan.server.metrics import metric_family


def placement_document(fleet: InstanceFleet) -> dict[str, Any]:
    """Return the shares in force by instance, and the state of re-balancing; null if there is none."""
    shares, base = fleet.router.shares()
    placement = {
        each.spec.name: {"state": each.state, "base_share": base[i], "adapters": shares[i]}
        for i, each in enumerate(fleet.instances)
    }
    return {"placement": placement, "rebalancing": fleet.rebalancing and _rebalancing(fleet.rebalancing)}


def _rebalancing(loop: RebalanceLoop) -> dict[str, Any]:
    return {
        "every_s": loop.every_s,
        "done": loop.done,
        "failed": loop.failed,
        "moved_bytes": loop.moved_bytes,
        "unpermuted_bytes": loop.unpermuted_bytes,
        "failed_posts": loop.updates.failures,
        "last": None if loop.last is None else asdict(loop.last),
    }


def rebalancing_metrics(loop: RebalanceLoop) -> Iterator[Metric]:
    """Yield the metrics of re-balancing."""
    outcomes = [(("done",), float(loop.done)), (("failed",), float(loop.failed))]
    yield metric_family(Counter, "capplan:rebalances", "Rounds of re-balancing", ("outcome",), outcomes)
    last = loop.last
    for kind, name, help_text, value in (
        (Counter, "rebalance_moved_bytes", "Bytes of adapters at new instances", loop.moved_bytes),
        (
            Counter,
            "rebalance_unpermuted_bytes",
            "The same without the permutation of instances",
            loop.unpermuted_bytes,
        ),
        (Counter, "rebalance_failed_posts", "Posts of shares that failed", loop.updates.failures),
        (Gauge, "rebalance_seconds", "Time of the last round", 0.0 if last is None else last.duration_s),
    ):
        yield metric_family(kind, f"capplan:{name}", help_text, (), [((), float(value))])
    if loop.target is not None:
        help_text = "Expected demand relative to what the instances sustain; above 1: overload"
        yield metric_family(Gauge, "capplan:rebalance_target", help_text, (), [((), loop.target)])
