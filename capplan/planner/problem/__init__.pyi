from ._problem import (
    AdapterShare,
    Assignment,
    Estimate,
    Estimator,
    GpuPool,
    Problem,
    distinct_adapters,
    whole_adapters,
)
from ._setup import planned_workload
from ._splitting import split_hot_adapters

__all__ = [
    "AdapterShare",
    "Assignment",
    "Estimate",
    "Estimator",
    "GpuPool",
    "Problem",
    "distinct_adapters",
    "planned_workload",
    "split_hot_adapters",
    "whole_adapters",
]
