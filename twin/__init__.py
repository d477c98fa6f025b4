"""The digital twin: what an engine would do with a workload, without the engine."""

from capplan.twin.details import DetailedResult
from capplan.twin.request_table import RequestTable
from capplan.twin.result import SimulationResult
from capplan.twin.scenario import Scenario, build_scenario
from capplan.twin.simulate import simulate, simulate_detailed

__all__ = [
    "DetailedResult",
    "RequestTable",
    "Scenario",
    "SimulationResult",
    "build_scenario",
    "simulate",
    "simulate_detailed",
]
