"""How long a request takes alone: the same engine, idle, with the request's adapter resident."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from capplan.twin import trace as t
from capplan.twin.scenario import NS_PER_S, Scenario
from capplan.workload import Requests

_BATCH = 100_000
_LAST_NS = 2**62
_BITS = 25  # a length in tokens fits in so many


def isolated_s(
    scenario: Scenario,
    ranks: NDArray[np.int32],
    rows: NDArray[np.int64],
    runner: Callable[[Scenario], t.Trace],
) -> NDArray[np.float64]:
    """Return how long some requests take in the engine alone, in seconds, from arrival to last token.

    The twin itself serves them one after the other, each long after the one before ended, so every rule and
    cost is the one of the scenario. Requests of one rank and the same lengths are served once.

    Parameters
    ----------
    scenario
        The engine, and the requests.
    ranks
        Rank of each adapter by number, shape (adapters + 1,).
    rows
        Which requests; none that the engine would refuse.
    runner
        The twin.
    """
    asked = _take(scenario.requests, rows)
    rank = ranks[asked.adapter].astype(np.int64)
    kind = (rank << 2 * _BITS) | (asked.prompt_tokens.astype(np.int64) << _BITS) | asked.output_tokens
    _, one_of_each, which = np.unique(kind, return_index=True, return_inverse=True)
    alone_ns = [
        _alone_ns(scenario, _take(asked, one_of_each[start : start + _BATCH]), runner)
        for start in range(0, one_of_each.size, _BATCH)
    ]
    return np.concatenate([np.zeros(0), *alone_ns])[which] / NS_PER_S


def _alone_ns(
    scenario: Scenario, requests: Requests, runner: Callable[[Scenario], t.Trace]
) -> NDArray[np.float64]:
    """Serve requests one by one; if one runs into the next, once more with longer breaks between them."""
    count = requests.arrival_ns.size
    costs = scenario.costs
    idle = scenario._replace(
        costs=costs._replace(load_ns=np.zeros_like(costs.load_ns), disk_ns=np.zeros_like(costs.disk_ns)),
        max_in_flight=count,
        shared_prefix_tokens=0,  # nothing of a prompt is cached yet
        buckets=0,
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
