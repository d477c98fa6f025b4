from ._cases import SamplingLimits
from ._measure import KernelProfilingOptions, KernelProfilingResult, measure

__all__ = [
    "KernelProfilingOptions",
    "KernelProfilingResult",
    "SamplingLimits",
    "measure",
]
