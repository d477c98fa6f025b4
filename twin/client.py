"""What a client sees between tokens that the engine does not: scrapes of ``/metrics`` hold tokens back.

vLLM's API server keeps one time series for every combination of running and waiting adapters that it has
ever shown (``vllm:lora_requests_info``), and a scrape writes them all in the very loop that hands out tokens.
Tokens that pile up meanwhile reach the client as one, so it counts fewer and longer gaps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from capplan.spec import FittedModel
from capplan.twin import trace as t
from capplan.twin.scenario import NS_PER_S, Scenario

SERIES_US = "scrape_us_per_series"
SERIES_ADAPTER_US = "scrape_us_per_series_adapter"
SHARE = "scrape_share"
INTERVAL_S = "scrape_interval_s"

_MOST_NATS = 40.0  # more combinations than any server will see


def client_itl_factor(host: FittedModel, scenario: Scenario, trace: t.Trace) -> float:
    """Return how much longer the gaps between tokens are for a client than in the engine.

    Parameters
    ----------
    host
        Host model: ``client_itl_factor``, which always holds, times what scrapes do, for models that say how
        often somebody scrapes (``scrape_interval_s``; absent or 0: nobody does).
    scenario, trace
        What was simulated and what it left.
    """
    constant = host.value("client_itl_factor")
    interval_s = _optional(host, INTERVAL_S)
    if interval_s <= 0.0 or trace.counts[t.REQUEST_STEPS] == 0:
        return constant
    step_s, adapters = mean_step_s(trace), mean_adapters(trace)
    series = mean_series(scenario, step_s, adapters, scenario.horizon_ns / NS_PER_S)
    scrape_s = series * (host.value(SERIES_US) + host.value(SERIES_ADAPTER_US) * adapters) / 1e6
    return constant * stretch(interval_s, host.value(SHARE) * scrape_s, step_s, small_share(trace))


def _optional(host: FittedModel, name: str) -> float:
    return host.value(name) if name in host.coefficients else 0.0


def stretch(interval_s: float, held_s: float, step_s: float, small: float) -> float:
    """Return by what factor scrapes lengthen the mean gap.

    From one scrape to the next, ``interval_s + held_s``, a client sees the tokens of ``interval_s`` one by
    one and those of ``held_s`` as one: the mean gap grows from ``step_s`` to
    ``(interval_s + held_s) / (interval_s / step_s + 1)``. Batches of more than `SMALL_BATCH` requests are
    handed out in parts that take turns with a scrape; they see nothing of it.

    Parameters
    ----------
    interval_s
        Pause between scrapes.
    held_s
        Time for which each holds tokens back; less than a step is not seen.
    step_s
        Mean step.
    small
        Share of the tokens in small batches.
    """
    if held_s <= step_s:
        return 1.0
    return 1.0 + small * ((interval_s + held_s) / (interval_s + step_s) - 1.0)


def mean_step_s(trace: t.Trace) -> float:
    """Return the mean step that a running request sees, in seconds."""
    return float(trace.sums[t.RUNNING_NS]) / NS_PER_S / float(trace.counts[t.REQUEST_STEPS])


def mean_adapters(trace: t.Trace) -> float:
    """Return the mean number of adapters in the batch."""
    return float(trace.sums[t.ADAPTER_NS] / trace.sums[t.BUSY_NS])


def small_share(trace: t.Trace) -> float:
    """Return the share of requests times steps that lies in steps of at most `SMALL_BATCH` requests."""
    return float(trace.counts[t.SMALL_REQUEST_STEPS] / trace.counts[t.REQUEST_STEPS])


def mean_series(scenario: Scenario, step_s: float, adapters: float, served_s: float) -> float:
    """Return how many combinations of adapters the server has shown, averaged over the time it serves.

    Adapters come and go independently, so the combinations that are at all likely number about e to the
    entropy of who runs and who waits; a server that shows c of them per second has met
    ``S * (1 - exp(-c * t / S))`` of S after t seconds.

    Parameters
    ----------
    scenario
        Gives the rate of each adapter and the mean output.
    step_s, adapters
        Mean step, and mean number of adapters in the batch: more than that cannot run, however many ask.
    served_s
        Seconds from the start of the server to its end.
    """
    requests = scenario.requests
    counted = np.bincount(requests.adapter, minlength=scenario.adapters + 1)[1:]
    rates = counted / (scenario.horizon_ns / NS_PER_S)
    life_s = float(requests.output_tokens.mean()) * step_s
    runs = -np.expm1(-rates * life_s)
    asked = float(runs.sum())
    if asked > adapters:
        runs *= adapters / asked
    waits = -np.expm1(-rates * step_s)
    changes_per_s = 2.0 * float(rates.sum()) + 2.0 * float(rates @ (1.0 - runs))
    shown_per_s = -np.expm1(-changes_per_s * step_s) / step_s  # one combination per step at most
    likely = float(np.exp(min(_MOST_NATS, _nats(runs) + _nats(waits))))
    met = shown_per_s * served_s / likely
    return float(likely * (1.0 + np.expm1(-met) / met)) if met > 1e-6 else shown_per_s * served_s / 2.0


def _nats(p: NDArray[np.float64]) -> float:
    """Return the entropy of independent events of these probabilities."""
    p = np.clip(p, 1e-12, 1.0 - 1e-12)
    return float(-np.sum(p * np.log(p) + (1.0 - p) * np.log1p(-p)))
