"""Routers by name, and the compiled dispatch to them.

A router is the file of this folder that registers it in its `ROUTERS`, and its name in
`capplan.spec.ROUTER_NAMES`. Compiled code takes its number: numba does not cache functions with functions as
arguments. The dispatch is a chain of comparisons with the numbers, which LLVM makes a jump.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from capplan._jit import inner, jit
from capplan.errors import InputError
from capplan.serving.routers._fleet import (
    ArrivingRequest,
    Fleet,
    Placement,
    Router,
    RoutingRule,
    note_waiting,
)
from capplan.spec import ROUTER_NAMES


def _registered() -> dict[str, Router]:
    """Return the routers that the files of this folder register, in the order of their names in documents."""
    found: dict[str, Router] = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        own = getattr(import_module(f"{__package__}.{module.name}"), "ROUTERS", {})
        if twice := found.keys() & own.keys():
            raise TypeError(f"{module.name}: another file registers {', '.join(twice)}, too")
        found |= own
    if found.keys() != set(ROUTER_NAMES):
        raise TypeError(f"not both a file and a name in ROUTER_NAMES: {found.keys() ^ set(ROUTER_NAMES)}")
    return {name: found[name] for name in ROUTER_NAMES}


ROUTERS: Final[Mapping[str, Router]] = MappingProxyType(_registered())
"""Routers by name."""

_NUMBERS: Final = MappingProxyType(
    {function: code for code, function in enumerate(dict.fromkeys(each.choose for each in ROUTERS.values()))}
)


def router_code(name: str) -> int:
    """Return the number of a router in compiled code; routers with one function have one number.

    Raises
    ------
    InputError
        If there is none of that name; the message lists the names.
    """
    if name not in ROUTERS:
        raise InputError(f"must be one of {', '.join(ROUTERS)}", name, "router")
    return _NUMBERS[ROUTERS[name].choose]


def _one_of(functions: Iterable[Any]) -> Any:
    """Return the function that calls that of the rule's number; the last one for all others."""
    *others, last = dict.fromkeys(functions)
    chosen = last
    for function in reversed(others):
        chosen = _either(_NUMBERS[function], function, chosen)
    return chosen


def _either(code: int, function: Any, otherwise: Any) -> Any:
    @inner
    def chosen(
        rule: RoutingRule, fleet: Fleet, placement: Placement, first: int, last: int, request: Any
    ) -> int:
        if rule.code == code:
            return int(function(rule, fleet, placement, first, last, request))
        return int(otherwise(rule, fleet, placement, first, last, request))

    return chosen


_choose_blind = _one_of(each.choose for each in ROUTERS.values() if not each.reads_state)
_choose_seeing = _one_of(each.choose for each in ROUTERS.values() if each.reads_state)


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
    place = _choose_blind(rule, fleet, placement, first, last, draw)
    rule.turn[0] = placement.instance[place]
    return int(place)


@inner
def choose_by_state(rule: RoutingRule, fleet: Fleet, placement: Placement, request: ArrivingRequest) -> int:
    """Return the place that gets a request, for routers that read the instances."""
    first, last = placement.start[request.adapter], placement.start[request.adapter + 1]
    place = _choose_seeing(rule, fleet, placement, first, last, request)
    rule.turn[0] = placement.instance[place]
    return int(place)


@inner
def _at_once(_rule: RoutingRule, _fleet: Fleet, _instance: int, request: ArrivingRequest) -> int:
    return int(request.now_ns)


def _or_sent(code: int, function: Any, otherwise: Any) -> Any:
    @inner
    def sent(rule: RoutingRule, fleet: Fleet, instance: int, request: ArrivingRequest) -> int:
        if rule.code == code:
            return int(function(rule, fleet, instance, request))
        return int(otherwise(rule, fleet, instance, request))

    return sent


sent_ns = _at_once
"""Compiled: (rule, fleet, instance, request) to the time at which the chosen instance gets the request."""
for _router in ROUTERS.values():
    if _router.sent_ns is not None:
        sent_ns = _or_sent(_NUMBERS[_router.choose], _router.sent_ns, sent_ns)
