"""Toppings (USENIX ATC 2025): its engine, servers by loading policy, routers of a cluster."""

from capplan.reproduce.toppings._figures import EXPERIMENTS, simulation
from capplan.reproduce.toppings._setting import profile

__all__ = ["EXPERIMENTS", "profile", "simulation"]
