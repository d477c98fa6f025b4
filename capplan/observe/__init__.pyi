from ._api import observe
from ._fit import FitReport, FitRow, fit_report
from ._observation import DEFAULT_MEMORY_BYTES, MOST_ADAPTERS, Observation, ObservedAdapter, Tail
from ._requests import REQUIRED, Dropped

__all__ = [
    "DEFAULT_MEMORY_BYTES",
    "MOST_ADAPTERS",
    "REQUIRED",
    "Dropped",
    "FitReport",
    "FitRow",
    "Observation",
    "ObservedAdapter",
    "Tail",
    "fit_report",
    "observe",
]
