"""What a router is: its entry in the registry, and its parameters and state in compiled code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import by_reference


@dataclass(frozen=True)
class Router:
    """A router, as its file registers it under its name in `ROUTERS`."""

    choose: Any
    """Function with `@inner` of (rule, fleet, placement, first, last, request) that returns a place, from
    `first` to `last` - 1. A router that does not read instances gets the request's draw in place of the
    request: a random number in [0, 1)."""
    rule: str
    """What it does, in a line of the documentation."""
    source: str = ""
    reads_state: bool = True
    """The three as in `RoutingRule`."""
    reads_ranks: bool = False
    reads_adapter: bool = False
    keeps_credit: bool = False
    """Whether it uses `RoutingRule.credit`."""
    sent_ns: Any = None
    """Function with `@inner` of (rule, fleet, instance, request) that returns the time at which the chosen
    instance gets the request; None: at once."""


@by_reference
class RoutingRule(NamedTuple):
    """A router with its parameters and its state."""

    code: int
    """Its number in the dispatch of `_choose`."""
    reads_state: bool
    """Whether it reads instances, which are then simulated up to the request."""
    reads_ranks: bool
    """Whether it reads the requests and tokens of instances by rank."""
    reads_adapter: bool
    """Whether it reads the state of the request's adapter on each instance."""
    turn: NDArray[np.int64]
    """Shape (1,): the last chosen instance."""
    credit: NDArray[np.float64]
    """Shape (places,) for rules that use smooth shares, else empty."""
    weights: NDArray[np.float64]
    """Weights of the gateway's scores, or parameters of least work left."""
    # -- dLoRA --
    period_ns: int
    """Time between migrations; 0: none."""
    excess: float
    request_s: float
    migration_s: float
    # -- Toppings, least work left --
    kernel: int
    models: NDArray[np.float64]
    """One line per instance."""
    slo_ms: float
    prior_output_tokens: float
    """Mean output tokens assumed before any request has finished; it counts as one request."""
