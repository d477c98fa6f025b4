"""Toppings (USENIX ATC 2025): its engine, servers by loading policy, routers of a cluster."""

from collections.abc import Mapping
from typing import Final

from capplan.reproduce._lab import Experiment
from capplan.reproduce.toppings import _cluster, _servers
from capplan.reproduce.toppings._cluster import simulation
from capplan.reproduce.toppings._engine import profile

__all__ = ["EXPERIMENTS", "profile", "simulation"]

EXPERIMENTS: Final[Mapping[str, Experiment]] = {
    "fig3": _servers.fig3,
    "fig4": _servers.fig4,
    "fig6": _cluster.fig6,
    "fig8": _servers.fig8,
    "fig11": _servers.fig11,
    "micro": _servers.micro,
    "fig13": _servers.fig13,
    "fig14": _servers.fig14,
    "fig15": _servers.fig15,
    "fig16": _servers.fig16,
    "fig16-s4": _servers.fig16_s4,
    "fig18": _cluster.fig18,
    "fig19": _cluster.fig19,
}
"""By figure of the recipe."""
