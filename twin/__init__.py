"""The digital twin: what an engine would do with a workload, without the engine."""

from capplan.twin.metrics import SimulationResult
from capplan.twin.per_request import RequestTable
from capplan.twin.scenario import Scenario, build_scenario
from capplan.twin.simulate import DetailedResult, simulate, simulate_detailed

__all__ = [
    "DetailedResult",
    "RequestTable",
    "Scenario",
    "SimulationResult",
    "build_scenario",
    "simulate",
    "simulate_detailed",
]
