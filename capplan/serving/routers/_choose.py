"""Routers by name, and the compiled dispatch to them."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import by_reference, inner, jit
from capplan.errors import InputError
from capplan.serving.routers._first_fit import first_fit
from capplan.serving.routers._fleet import ArrivingRequest, Fleet, Placement, note_waiting
from capplan.serving.routers._gateway import highest_score
from capplan.serving.routers._least_loaded import least_loaded
from capplan.serving.routers._least_tokens import fewest_tokens
from capplan.serving.routers._least_work_left import least_added_work, turn_ns
from capplan.serving.routers._lora_affinity import nearest
from capplan.serving.routers._plan_shares import by_share
from capplan.serving.routers._random_holder import any_holder
from capplan.serving.routers._round_robin import next_holder
from capplan.serving.routers._smooth_shares import by_credit
from capplan.serving.routers._toppings import rank_aware
from capplan.serving.routers._two_choices import less_loaded_of_two

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
TWO_CHOICES = 10
LEAST_TOKENS = 11
LEAST_WORK_LEFT = 12


class RouterEntry(NamedTuple):
    """A router in the registry."""

    code: int
    """Code in compiled code."""
    rule: str
    source: str = ""


_GATEWAY_SOURCE: Final = "kubernetes-sigs/gateway-api-inference-extension"

ROUTERS: Final = MappingProxyType(
    {
        "plan-shares": RouterEntry(PLAN_SHARES, "random by the adapter's shares", "LoRAServe IV"),
        "smooth-shares": RouterEntry(
            SMOOTH_SHARES, "the same shares by smooth weighted round robin", "nginx"
        ),
        "random": RouterEntry(RANDOM, "any holder", "Toppings 7.4"),
        "round-robin": RouterEntry(ROUND_ROBIN, "the next holder"),
        "least-loaded": RouterEntry(LEAST_LOADED, "fewest requests, running and waiting; ties go round"),
        "least-tokens": RouterEntry(
            LEAST_TOKENS,
            "fewest tokens of waiting prompts and running requests; ties go round",
            "Chameleon 4.4",
        ),
        "two-choices": RouterEntry(
            TWO_CHOICES,
            "the one with fewer requests of two holders drawn at random",
            "Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001",
        ),
        "first-fit": RouterEntry(
            FIRST_FIT,
            "the first holder with room in batch and memory; none: the least loaded",
            "Toppings 7.4",
        ),
        "lora-affinity": RouterEntry(
            LORA_AFFINITY,
            "instances running the adapter, else with a free slot, else that wait for it; ties: queue length",
            f"`lora-affinity-scorer` of {_GATEWAY_SOURCE}",
        ),
        "inference-gateway": RouterEntry(
            GATEWAY,
            "sum of the scores for queue, KV cache and LoRA (`Gateway(queue, kv_cache, lora)`; 1 each)",
            f"{_GATEWAY_SOURCE}, `pkg/epp/scheduling/framework/plugins/scorer`",
        ),
        "dlora": RouterEntry(
            DLORA,
            "least loaded; every 10 s waiting requests migrate from the most to the least loaded instance if "
            "it has 16 more than the mean (`Dlora(...)`)",
            "dLoRA's program, `engine_manager.py`, `migration_ilp.py`",
        ),
        "toppings": RouterEntry(
            TOPPINGS,
            "the holder with the least predicted slowdown, from the ranks it serves (`Toppings(...)`)",
            "Toppings 5, Algorithm 1",
        ),
        "toppings-rank-blind": RouterEntry(
            TOPPINGS,
            "the same with one rank for all adapters (`Toppings(rank_aware=False)`)",
            "LoRAServe V-D, which compares with it",
        ),
        "least-work-left": RouterEntry(
            LEAST_WORK_LEFT,
            "the holder whose expected work grows the least, weighted by the work that it has; without "
            "recent state `smooth-shares` (`LeastWorkLeft(...)`)",
            "Harchol-Balter, Performance Modeling and Design of Computer Systems, 2013, chapter 24",
        ),
    }
)
"""Routers by name."""

BLIND: Final = (PLAN_SHARES, SMOOTH_SHARES, RANDOM, ROUND_ROBIN)
"""Routers that do not read the state of instances."""

ASK_RANKS: Final = (FIRST_FIT, TOPPINGS, LEAST_TOKENS, LEAST_WORK_LEFT)
"""Routers that read the requests and their tokens by rank."""

ASK_ADAPTER: Final = (LORA_AFFINITY, GATEWAY, LEAST_WORK_LEFT)
"""Routers that read whether instances run, hold or await the request's adapter."""


@by_reference
class RoutingRule(NamedTuple):
    """A router with its parameters and its state."""

    code: int
    reads_state: bool
    """Whether it reads instances, which are then simulated up to the request."""
    asks_adapter: bool
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


def router_code(name: str) -> int:
    """Return the code of a router.

    Raises
    ------
    InputError
        If there is none of that name; the message lists the names.
    """
    if name not in ROUTERS:
        raise InputError(f"must be one of {', '.join(ROUTERS)}", name, "router")
    return ROUTERS[name].code


@jit
def route(rule: RoutingRule, fleet: Fleet, placement: Placement, request: ArrivingRequest) -> tuple[int, int]:
    """Return the place that gets a request, and when; add the request to the state of the instance there.

    Parameters
    ----------
    rule, fleet, placement
        The router, the reported state of the instances, and the holders of each adapter.
    request
        The request.
    """
    if not rule.reads_state:
        return choose_blindly(rule, fleet, placement, request.adapter, request.draw), request.now_ns
    place = choose_by_state(rule, fleet, placement, request)
    at_ns = sent_ns(rule, fleet, placement.instance[place], request)
    note_waiting(fleet, placement, place, request.rank, 1, request.prompt_tokens)
    return place, at_ns


@jit
def note(
    fleet: Fleet, placement: Placement, place: int, rank: int, requests: int, prompt_tokens: int
) -> None:
    """Add requests of the adapter at a place to the reported state of the instance there."""
    note_waiting(fleet, placement, place, rank, requests, prompt_tokens)


@inner
def choose_blindly(rule: RoutingRule, fleet: Fleet, placement: Placement, adapter: int, draw: float) -> int:
    """Return the place that gets a request of an adapter, for routers that do not read instances."""
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
def choose_by_state(rule: RoutingRule, fleet: Fleet, placement: Placement, request: ArrivingRequest) -> int:
    """Return the place that gets a request, for routers that read the instances."""
    first, last = placement.start[request.adapter], placement.start[request.adapter + 1]
    turn, models, prompt = rule.turn[0], rule.models, request.prompt_tokens
    if rule.code == FIRST_FIT:
        place = first_fit(fleet, placement, first, last, prompt, turn)
    elif rule.code == LEAST_TOKENS:
        place = fewest_tokens(fleet, placement, first, last, turn)
    elif rule.code == TWO_CHOICES:
        place = less_loaded_of_two(fleet, placement, first, last, request.draw)
    elif rule.code == LORA_AFFINITY:
        place = nearest(fleet, placement, first, last, turn)
    elif rule.code == GATEWAY:
        place = highest_score(fleet, placement, first, last, turn, rule.weights)
    elif rule.code == TOPPINGS:
        rank, answer, slo_ms = request.rank, request.mean_answer, rule.slo_ms
        place = rank_aware(
            fleet, placement, first, last, rank, prompt, turn, rule.kernel, models, slo_ms, answer
        )
    elif rule.code == LEAST_WORK_LEFT:
        place = least_added_work(fleet, placement, first, last, request, models, rule.weights, rule.credit)
    else:
        place = least_loaded(fleet, placement, first, last, turn)
    rule.turn[0] = placement.instance[place]
    return place


@inner
def sent_ns(rule: RoutingRule, fleet: Fleet, instance: int, request: ArrivingRequest) -> int:
    """Return the time at which the chosen instance gets a request; now, unless a rule holds requests."""
    if rule.code == LEAST_WORK_LEFT:
        return turn_ns(fleet, instance, request, rule.models, rule.weights)
    return int(request.now_ns)
