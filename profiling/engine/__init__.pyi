from ._options import EngineProfilingOptions
from ._profiler import EngineProfilingResult, profile_engine

__all__ = [
    "EngineProfilingOptions",
    "EngineProfilingResult",
    "profile_engine",
]
