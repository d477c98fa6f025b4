from ._cpu_lora import CpuLoraMeasurement, Invocation, measure_cpu_lora
from ._measure import KernelProfilingOptions, KernelProfilingResult, SamplingLimits, measure

__all__ = [
    "CpuLoraMeasurement",
    "Invocation",
    "KernelProfilingOptions",
    "KernelProfilingResult",
    "SamplingLimits",
    "measure",
    "measure_cpu_lora",
]
