"""The digital twin: what an engine would do with a workload, without the engine."""

from capplan.twin.result import SimulationResult
from capplan.twin.scenario import Scenario, build_scenario
from capplan.twin.simulate import simulate

__all__ = ["Scenario", "SimulationResult", "build_scenario", "simulate"]
