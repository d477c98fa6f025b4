"""Routers: which instance gets a request. Rules over flat arrays, each in a file of its own."""

from capplan.serving.routers._choose import ROUTERS, router_code
from capplan.serving.routers._dlora import Dlora
from capplan.serving.routers._fleet import Fleet, Placement
from capplan.serving.routers._gateway import Gateway
from capplan.serving.routers._least_work_left import LeastWorkLeft, WorkModel
from capplan.serving.routers._toppings import Performance, Toppings

__all__ = [
    "ROUTERS",
    "Dlora",
    "Fleet",
    "Gateway",
    "LeastWorkLeft",
    "Performance",
    "Placement",
    "Toppings",
    "WorkModel",
    "router_code",
]
