from ._api import observe
from ._fit import FitReport, FitRow, fit_report
from ._observation import DEFAULT_MEMORY_BYTES, MOST_ADAPTERS, Dropped, Observation, ObservedAdapter, Tail
from ._requests import REQUIRED

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
