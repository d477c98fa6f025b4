from ._python_loop import Candidate, PythonRouter, RoutedRequest
from ._rebalancing import Crash, Faults, FleetMoves, Rebalancing, TransferLink
from ._routers import MODELLED, NamedRouter, served_router, served_rule, workload_of
from ._scenario import Instance
from ._simulate import ClusterResult, simulate_cluster, simulate_without_adapters

__all__ = [
    "MODELLED",
    "Candidate",
    "ClusterResult",
    "Crash",
    "Faults",
    "FleetMoves",
    "Instance",
    "NamedRouter",
    "PythonRouter",
    "Rebalancing",
    "RoutedRequest",
    "TransferLink",
    "served_router",
    "served_rule",
    "simulate_cluster",
    "simulate_without_adapters",
    "workload_of",
]
