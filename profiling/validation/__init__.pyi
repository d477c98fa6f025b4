from ._validate import (
    GroupValidation,
    MetricComparison,
    Tolerances,
    Validation,
    ValidationOptions,
    validate,
)

__all__ = [
    "GroupValidation",
    "MetricComparison",
    "Tolerances",
    "Validation",
    "ValidationOptions",
    "validate",
]
