"""dLoRA: requests go to the least loaded holder; now and then waiting ones move to where less is going on.

The reactive migration of its published program (LLMServe/dLoRA-artifact, ``vllm/engine/engine_manager.py``
and ``migration_ilp.py``): every 10 s, when the busiest engine has at least 16 requests more than the mean,
the requests of that engine and of the one with the fewest are shared out anew, so that the longer of the two
needs as little time as possible; a request that moves costs 0.05 s. Its integer program knows one execution
time per adapter, 5 s before it has seen any. With one time for all requests that program has the solution
below, which is exact; which of the waiting move is then open, and the latest ones do. Running requests stay,
and adapters stay where the plan has put them.
"""

from __future__ import annotations

from dataclasses import dataclass

from capplan.compile import inner
from capplan.errors import InputError
from capplan.serving.routers.fleet import Fleet


@dataclass(frozen=True)
class Dlora:
    """The rule's parameters; defaults as in dLoRA's program.

    Parameters
    ----------
    period_s
        Time between two looks at the loads.
    excess
        How many requests above the mean are too many.
    request_s
        Time that a request takes.
    migration_s
        Time that it takes to move one; it arrives so much later.
    """

    period_s: float = 10.0
    excess: float = 16.0
    request_s: float = 5.0
    migration_s: float = 0.05

    def __post_init__(self) -> None:
        for name in ("period_s", "request_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError("must be a finite number > 0", getattr(self, name), f"Dlora.{name}")
        for name in ("excess", "migration_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError("must be a finite number >= 0", getattr(self, name), f"Dlora.{name}")


@inner
def busiest(fleet: Fleet) -> int:
    """Return the instance with most requests, the first one of several."""
    chosen = 0
    for i in range(1, fleet.instances.size):
        if load(fleet, i) > load(fleet, chosen):
            chosen = i
    return chosen


@inner
def idlest(fleet: Fleet) -> int:
    """Return the instance with the fewest requests, the first one of several."""
    chosen = 0
    for i in range(1, fleet.instances.size):
        if load(fleet, i) < load(fleet, chosen):
            chosen = i
    return chosen


@inner
def load(fleet: Fleet, instance: int) -> int:
    """Return the requests at an instance."""
    return int(fleet.instances.running[instance] + fleet.instances.queued[instance])


@inner
def is_excessive(fleet: Fleet, instance: int, excess: float) -> bool:
    """Tell whether an instance has so many requests more than the mean."""
    total = 0
    for i in range(fleet.instances.size):
        total += load(fleet, i)
    return bool(load(fleet, instance) - total / fleet.instances.size >= excess)


@inner
def to_move(here: int, there: int, request_s: float, migration_s: float) -> int:
    """Return how many of `here` requests should move to where `there` are.

    The largest number by which the busier one of both ends sooner: one more would make
    ``max((here - n) * request_s, (there + n) * request_s + n * migration_s)`` grow.
    """
    even = (here - there) * request_s / (2.0 * request_s + migration_s)
    n = max(0, int(even))
    if _longer(here, there, n + 1, request_s, migration_s) < _longer(here, there, n, request_s, migration_s):
        n += 1
    return n


@inner
def _longer(here: int, there: int, n: int, request_s: float, migration_s: float) -> float:
    return max((here - n) * request_s, (there + n) * request_s + n * migration_s)
