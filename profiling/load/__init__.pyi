from ._bench import BenchOptions, LoadProgress, bench
from ._record import RequestFile
from ._requests import LoadSettings, PromptForm, Target
from ._result import BenchResult, LoadMetrics, read_result, write_vllm_bench

__all__ = [
    "BenchOptions",
    "BenchResult",
    "LoadMetrics",
    "LoadProgress",
    "LoadSettings",
    "PromptForm",
    "RequestFile",
    "Target",
    "bench",
    "read_result",
    "write_vllm_bench",
]
