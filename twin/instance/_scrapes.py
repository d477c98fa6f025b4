"""Effect of metrics scrapes on the inter-token latency that clients observe.

vLLM's API server keeps one time series for every combination of running and waiting adapters that has
occurred (``vllm:lora_requests_info``). A scrape of ``/metrics`` writes all of them in the event loop that
sends tokens. Tokens that accumulate meanwhile reach the client together, so that it counts fewer and longer
gaps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from capplan.spec import FittedModel
from capplan.twin.instance import _trace as t
from capplan.twin.instance._scenario import NS_PER_S, Scenario

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

    Parameters
    ----------
    host
        Host model. ``client_itl_factor`` always applies. Scrapes multiply it if ``scrape_interval_s`` is
        above 0.
    scenario, trace
        Input and record of the simulation.
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
    """Return the factor by which scrapes lengthen the mean gap.

    From one scrape to the next, ``interval_s + blocked_s``, a client receives the tokens of ``interval_s``
    one by one and those of ``blocked_s`` together: the mean gap grows from ``step_s`` to ``(interval_s +
    blocked_s) / (interval_s / step_s + 1)``. Batches of more than `SMALL_BATCH` requests are sent in parts
    that alternate with a scrape and are not delayed.

    Parameters
    ----------
    interval_s
        Pause between scrapes.
    blocked_s
        Time for which a scrape delays tokens; without effect if shorter than a step.
    step_s
        Mean step.
    small_share
        Share of the tokens in small batches.
    """
    if blocked_s <= step_s:
        return 1.0
    return 1.0 + small_share * ((interval_s + blocked_s) / (interval_s + step_s) - 1.0)


def mean_series(scenario: Scenario, step_s: float, adapters: float, served_s: float) -> float:
    """Return the number of adapter combinations that have occurred, averaged over the serving time.

    Adapters arrive and leave independently, so the number of likely combinations is about e to the entropy of
    the running and waiting sets. A server that shows c combinations per second has met
    ``S * (1 - exp(-c * t / S))`` of S after t seconds.

    Parameters
    ----------
    scenario
        Source of the rate of each adapter and of the mean output length.
    step_s
        Mean step.
    adapters
        Mean number of adapters in the batch, an upper bound of the running ones.
    served_s
        Seconds from the start of the server to its end.
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
