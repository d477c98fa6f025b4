"""The cluster twin: many engines under one clock, and the router in front of them."""

from capplan.serving.routing import ROUTERS, Dlora, Gateway, Performance, Toppings
from capplan.twin.cluster.readable import Candidate, PythonRouter, RoutedRequest
from capplan.twin.cluster.result import ClusterResult, RoutedRequests
from capplan.twin.cluster.rules import NamedRouter
from capplan.twin.cluster.scenario import Instance
from capplan.twin.cluster.simulate import simulate_cluster, simulate_without_adapters

__all__ = [
    "ROUTERS",
    "Candidate",
    "ClusterResult",
    "Dlora",
    "Gateway",
    "Instance",
    "NamedRouter",
    "Performance",
    "PythonRouter",
    "RoutedRequest",
    "RoutedRequests",
    "Toppings",
    "simulate_cluster",
    "simulate_without_adapters",
]
