"""Routers: which instance gets a request. Rules over flat arrays, each in a file of its own."""

from capplan.serving.routing.choose import ROUTERS, router_code
from capplan.serving.routing.dlora import Dlora
from capplan.serving.routing.fleet import Fleet, Placement
from capplan.serving.routing.gateway import Gateway
from capplan.serving.routing.toppings import Performance, Toppings

__all__ = ["ROUTERS", "Dlora", "Fleet", "Gateway", "Performance", "Placement", "Toppings", "router_code"]
