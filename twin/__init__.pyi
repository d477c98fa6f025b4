from ._sweep import Job, cores, in_parallel, sweep, sweep_detailed
from .instance._details import RequestTable
from .instance._metrics import SimulationResult
from .instance._scenario import Scenario, build_scenario
from .instance._simulate import DetailedResult, simulate, simulate_detailed

__all__ = [
    "DetailedResult",
    "Job",
    "RequestTable",
    "Scenario",
    "SimulationResult",
    "build_scenario",
    "cores",
    "in_parallel",
    "simulate",
    "simulate_detailed",
    "sweep",
    "sweep_detailed",
]
