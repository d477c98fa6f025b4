"""The digital twin: what an engine would do with a workload, without the engine."""

from capplan.twin.instance._metrics import SimulationResult
from capplan.twin.instance._per_request import RequestTable
from capplan.twin.instance._scenario import Scenario, build_scenario
from capplan.twin.instance._simulate import DetailedResult, simulate, simulate_detailed

__all__ = [
    "DetailedResult",
    "RequestTable",
    "Scenario",
    "SimulationResult",
    "build_scenario",
    "simulate",
    "simulate_detailed",
]
