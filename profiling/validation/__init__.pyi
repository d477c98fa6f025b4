from ._compare import GroupValidation, MetricComparison, Tolerances
from ._validate import Validation, ValidationOptions, validate

__all__ = [
    "GroupValidation",
    "MetricComparison",
    "Tolerances",
    "Validation",
    "ValidationOptions",
    "validate",
]
