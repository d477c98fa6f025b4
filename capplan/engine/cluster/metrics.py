"""The router's metrics, and those of its instances with one more label."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from typing import Final

import aiohttp
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from capplan.engine.cluster.fleet import Fleet
from capplan.engine.cluster.member import Member
from capplan.engine.cluster.tally import Tally

_TIMEOUT_S: Final = 5.0
_HEADER: Final = re.compile(r"# (HELP|TYPE) (\S+)")
_SAMPLE: Final = re.compile(r"([a-zA-Z_:][\w:]*)(\{)?")


class RouterMetrics:
    """Reads what there is to tell; see `prometheus_client.registry.Collector`."""

    def __init__(self, fleet: Fleet, tally: Tally) -> None:
        self._fleet = fleet
        self._tally = tally
        self._registry = CollectorRegistry()
        self._registry.register(self)

    async def text(self) -> bytes:
        """Return everything in Prometheus' text format, of those instances that answer."""
        pages = await asyncio.gather(*(_page_of(member) for member in self._fleet.members))
        texts = {m.spec.name: page for m, page in zip(self._fleet.members, pages, strict=True)}
        return generate_latest(self._registry) + merged(texts).encode()

    def collect(self) -> Iterator[Metric]:
        """Yield the router's own."""
        members = self._fleet.members
        requests = CounterMetricFamily(
            "capplan:router_requests", "Requests sent to an instance", labels=["instance", "group"]
        )
        restarts = CounterMetricFamily(
            "capplan:instance_restarts", "Starts after an end", labels=["instance", "group"]
        )
        up = GaugeMetricFamily("capplan:instance_up", "Whether it is up", labels=["instance", "group"])
        queued = GaugeMetricFamily(
            "capplan:router_requests_queued", "Requests before an instance", labels=["instance", "group"]
        )
        for member in members:
            labels = [member.spec.name, member.spec.group]
            waiting = 0 if member.link is None or member.link.queues is None else member.link.queues.waiting
            requests.add_metric(labels, self._tally.by_instance[member.spec.name])
            restarts.add_metric(labels, member.restarts)
            up.add_metric(labels, float(member.is_up))
            queued.add_metric(labels, waiting)
        yield from (requests, restarts, up, queued)
        yield GaugeMetricFamily(
            "capplan:instances_up", "Instances that are up", sum(member.is_up for member in members)
        )
        yield GaugeMetricFamily(
            "capplan:router_requests_in_flight", "Requests not answered yet", self._tally.in_flight
        )
        yield CounterMetricFamily(
            "capplan:router_retries", "Requests that went on to another instance", self._tally.retries
        )
        refused = CounterMetricFamily(
            "capplan:router_requests_refused", "Requests that the router refused", labels=["status"]
        )
        for status, count in sorted(self._tally.refusals.items()):
            refused.add_metric([str(status)], count)
        yield refused


async def _page_of(member: Member) -> str:
    if member.link is None:
        return ""
    try:
        return (await member.link.get("/metrics", _TIMEOUT_S)).decode()
    except (aiohttp.ClientError, TimeoutError):
        return ""  # what is missing tells that


def merged(pages: Mapping[str, str]) -> str:
    """Return pages of metrics as one, every sample with the label ``instance``, families together.

    Parameters
    ----------
    pages
        Prometheus' text of each instance, by name.
    """
    headers: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for instance, page in pages.items():
        family = ""
        for line in page.splitlines():
            header = _HEADER.match(line)
            if header is not None:
                family = header[2]
                lines = headers.setdefault(family, [])
                if line not in lines:
                    lines.append(line)
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(_labelled(line, instance))
    return "".join("\n".join([*headers.get(family, ()), *lines]) + "\n" for family, lines in samples.items())


def _labelled(line: str, instance: str) -> str:
    escaped = instance.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    label = f'instance="{escaped}"'

    def with_label(match: re.Match[str]) -> str:
        return f"{match[1]}{{{label}," if match[2] else f"{match[1]}{{{label}}}"

    return _SAMPLE.sub(with_label, line, count=1)
