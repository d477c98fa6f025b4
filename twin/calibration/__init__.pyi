from ._calibrate import CalibrationOptions, CalibrationResult, CalibrationTables, calibrate
from ._fit import RunCalibration

__all__ = [
    "CalibrationOptions",
    "CalibrationResult",
    "CalibrationTables",
    "RunCalibration",
    "calibrate",
]
