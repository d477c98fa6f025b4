"""The cluster twin: several engines under one clock behind a router."""

from capplan.serving.routers import (
    ROUTERS,
    Dlora,
    Gateway,
    LeastWorkLeft,
    Performance,
    Toppings,
    WorkModel,
)
from capplan.twin.cluster.reference import Candidate, PythonRouter, RoutedRequest
from capplan.twin.cluster.routers import NamedRouter, served_router
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
    "LeastWorkLeft",
    "NamedRouter",
    "Performance",
    "PythonRouter",
    "RoutedRequest",
    "RoutedRequests",
    "Toppings",
    "WorkModel",
    "served_router",
    "simulate_cluster",
    "simulate_without_adapters",
]
