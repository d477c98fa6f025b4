"""The routers by name, and the one compiled function that asks whichever was chosen."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.compile import by_reference, inner
from capplan.errors import InputError
from capplan.serving.routers.first_fit import first_fit
from capplan.serving.routers.fleet import Fleet, Placement
from capplan.serving.routers.gateway import highest_score
from capplan.serving.routers.least_loaded import least_loaded
from capplan.serving.routers.lora_affinity import nearest
from capplan.serving.routers.plan_shares import by_share
from capplan.serving.routers.random_holder import any_holder
from capplan.serving.routers.round_robin import next_holder
from capplan.serving.routers.smooth_shares import by_credit
from capplan.serving.routers.toppings import rank_aware

PLAN_SHARES = 0
SMOOTH_SHARES = 1
RANDOM = 2
ROUND_ROBIN = 3
LEAST_LOADED = 4
FIRST_FIT = 5
LORA_AFFINITY = 6
DLORA = 7
TOPPINGS = 8
GATEWAY = 9

ROUTERS: Final = MappingProxyType(
    {
        "plan-shares": PLAN_SHARES,
        "smooth-shares": SMOOTH_SHARES,
        "random": RANDOM,
        "round-robin": ROUND_ROBIN,
        "least-loaded": LEAST_LOADED,
        "first-fit": FIRST_FIT,
        "lora-affinity": LORA_AFFINITY,
        "inference-gateway": GATEWAY,
        "dlora": DLORA,
        "toppings": TOPPINGS,
    }
)
"""Names of the routers, with their codes in compiled code."""

BLIND: Final = (PLAN_SHARES, SMOOTH_SHARES, RANDOM, ROUND_ROBIN)
"""Routers that do not look at instances."""

ASK_RANKS: Final = (FIRST_FIT, TOPPINGS)
"""Routers that ask for requests by rank."""

ASK_ADAPTER: Final = (LORA_AFFINITY, GATEWAY)
"""Routers that ask how instances stand to the request's adapter."""


@by_reference
class RoutingRule(NamedTuple):
    """A router: which one, its parameters, and what it remembers."""

    code: int
    looks: bool
    """Whether instances must be at the time of the request."""
    asks_adapter: bool
    """Whether to look up how each stands to the request's adapter."""
    turn: NDArray[np.int64]
    """Shape (1,): the instance that was chosen last."""
    credit: NDArray[np.float64]
    """Shape (places,) for smooth shares, else empty."""
    weights: NDArray[np.float64]
    """Of the gateway's scores."""
    # -- dLoRA --
    period_ns: int
    """Time between migrations; 0: none."""
    excess: float
    request_s: float
    migration_s: float
    # -- Toppings --
    kernel: int
    models: NDArray[np.float64]
    slo_ms: float
    first_answer: float
    """What the mean output is taken to be before any request has finished; it counts like one request."""


def router_code(name: str) -> int:
    """Return the code of a router.

    Raises
    ------
    InputError
        When there is none of that name; the message lists the names.
    """
    if name not in ROUTERS:
        raise InputError(f"must be one of {', '.join(ROUTERS)}", name, "router")
    return ROUTERS[name]


@inner
def choose_blindly(rule: RoutingRule, fleet: Fleet, placement: Placement, adapter: int, draw: float) -> int:
    """Return the place that gets a request of an adapter, for routers that do not look.

    Parameters
    ----------
    rule, fleet, placement
        The router, the instances, and who holds what.
    adapter
        The request's adapter.
    draw
        A number drawn for this request, uniform in [0, 1).
    """
    first, last = placement.start[adapter], placement.start[adapter + 1]
    if rule.code == PLAN_SHARES:
        place = by_share(placement, first, last, draw)
    elif rule.code == SMOOTH_SHARES:
        place = by_credit(placement, first, last, rule.credit)
    elif rule.code == RANDOM:
        place = any_holder(first, last, draw)
    else:
        place = next_holder(fleet, placement, first, last, rule.turn[0])
    rule.turn[0] = placement.instance[place]
    return place


@inner
def choose_by_looking(
    rule: RoutingRule,
    fleet: Fleet,
    placement: Placement,
    adapter: int,
    rank: int,
    prompt: int,
    mean_answer: float,
) -> int:
    """Return the place that gets a request, for routers that look at the instances as they are now.

    Parameters
    ----------
    rule, fleet, placement
        The router, the instances, and who holds what.
    adapter, rank, prompt
        The request: its adapter, that one's rank, and its prompt tokens.
    mean_answer
        Mean output tokens of a request, as far as known.
    """
    first, last = placement.start[adapter], placement.start[adapter + 1]
    turn = rule.turn[0]
    if rule.code == FIRST_FIT:
        place = first_fit(fleet, placement, first, last, prompt, turn)
    elif rule.code == LORA_AFFINITY:
        place = nearest(fleet, placement, first, last, turn)
    elif rule.code == GATEWAY:
        place = highest_score(fleet, placement, first, last, turn, rule.weights)
    elif rule.code == TOPPINGS:
        models, slo_ms = rule.models, rule.slo_ms
        place = rank_aware(
            fleet, placement, first, last, rank, prompt, turn, rule.kernel, models, slo_ms, mean_answer
        )
    else:
        place = least_loaded(fleet, placement, first, last, turn)
    rule.turn[0] = placement.instance[place]
    return place
