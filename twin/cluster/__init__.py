"""The cluster twin: several engines under one clock behind a router."""

from capplan.serving.routers import ROUTERS, Dlora, Gateway, Performance, Toppings
from capplan.twin.cluster.reference import Candidate, PythonRouter, RoutedRequest
from capplan.twin.cluster.routers import NamedRouter
from capplan.twin.cluster.scenario import Instance
from capplan.twin.cluster.simulate import (
    ClusterResult,
    RoutedRequests,
    simulate_cluster,
    simulate_without_adapters,
)

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
