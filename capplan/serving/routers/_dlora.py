"""dLoRA: the least loaded holder, with periodic migration of waiting requests.

The reactive migration of the published program (LLMServe/dLoRA-artifact, ``vllm/engine/engine_manager.py``
and ``migration_ilp.py``): every 10 s, if the busiest engine has at least 16 requests more than the mean, the
requests of that engine and of the one with the fewest are redistributed to minimise the longer processing
time of the two; a moved request costs 0.05 s. The integer program has one execution time per adapter,
initially 5 s. With one time for all requests its exact solution is the one below. It does not determine which
waiting requests move; here the latest ones do. Running requests and adapters are not moved.
"""

from __future__ import annotations

from dataclasses import dataclass

from capplan._jit import inner
from capplan.errors import InputError
from capplan.serving.routers._fleet import Fleet, Router
from capplan.serving.routers._least_loaded import least_loaded


@dataclass(frozen=True)
class Dlora:
    """The rule's parameters; defaults as in dLoRA's program.

    Parameters
    ----------
    period_s
        Time between two checks of the loads.
    excess
        Requests above the mean that cause a migration.
    request_s
        Processing time of a request.
    migration_s
        Time of a move, by which the request arrives later.
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
    """Return whether an instance has at least `excess` requests more than the mean."""
    total = 0
    for i in range(fleet.instances.size):
        total += load(fleet, i)
    return bool(load(fleet, instance) - total / fleet.instances.size >= excess)


@inner
def to_move(here: int, there: int, request_s: float, migration_s: float) -> int:
    """Return the number of requests to move from an instance with `here` to one with `there` requests.

    The largest n that decreases ``max((here - n) * request_s, (there + n) * request_s + n * migration_s)``.
    """
    even = (here - there) * request_s / (2.0 * request_s + migration_s)
    n = max(0, int(even))
    if _longer(here, there, n + 1, request_s, migration_s) < _longer(here, there, n, request_s, migration_s):
        n += 1
    return n


@inner
def _longer(here: int, there: int, n: int, request_s: float, migration_s: float) -> float:
    return max((here - n) * request_s, (there + n) * request_s + n * migration_s)


ROUTERS = {
    "dlora": Router(
        least_loaded,
        "least loaded; every 10 s waiting requests migrate from the most to the least loaded instance if it "
        "has 16 more than the mean (`Dlora(...)`)",
        "dLoRA's program, `engine_manager.py`, `migration_ilp.py`",
    )
}
