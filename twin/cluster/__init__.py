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
from capplan.twin.cluster._python_loop import Candidate, PythonRouter, RoutedRequest
from capplan.twin.cluster._rebalancing import FleetMoves, RebalanceRound, Rebalancing
from capplan.twin.cluster._routers import NamedRouter, served_router
from capplan.twin.cluster._scenario import Instance
from capplan.twin.cluster._simulate import (
    ClusterResult,
    RoutedRequests,
    simulate_cluster,
    simulate_without_adapters,
)
from capplan.twin.cluster._transfers import Crash, Faults, StorageEvent, TransferLink

__all__ = [
    "ROUTERS",
    "Candidate",
    "ClusterResult",
    "Crash",
    "Dlora",
    "Faults",
    "FleetMoves",
    "Gateway",
    "Instance",
    "LeastWorkLeft",
    "NamedRouter",
    "Performance",
    "PythonRouter",
    "RebalanceRound",
    "Rebalancing",
    "RoutedRequest",
    "RoutedRequests",
    "StorageEvent",
    "Toppings",
    "TransferLink",
    "WorkModel",
    "served_router",
    "simulate_cluster",
    "simulate_without_adapters",
]
