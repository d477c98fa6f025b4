from ._components import Hardware, assumed_profile, fit_length_correlation, fit_loading, fit_memory
from ._least_squares import (
    SMAPE_FORMULA,
    LinearProblem,
    clustered_covariance,
    coefficient,
    cross_validate,
    smape,
    uncertainty,
)
from ._step_model import DEFAULT_FOLDS, Residuals, StepCalibration, calibrate_steps
from ._tables import KV_BOUND, KV_FULL, OVERLOADED, QUEUED, SLOT_BOUND, UNQUEUED, MeasuredSteps, read_steps

__all__ = [
    "DEFAULT_FOLDS",
    "KV_BOUND",
    "KV_FULL",
    "OVERLOADED",
    "QUEUED",
    "SLOT_BOUND",
    "SMAPE_FORMULA",
    "UNQUEUED",
    "Hardware",
    "LinearProblem",
    "MeasuredSteps",
    "Residuals",
    "StepCalibration",
    "assumed_profile",
    "calibrate_steps",
    "clustered_covariance",
    "coefficient",
    "cross_validate",
    "fit_length_correlation",
    "fit_loading",
    "fit_memory",
    "read_steps",
    "smape",
    "uncertainty",
]
