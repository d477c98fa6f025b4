from ._calibrate import CalibrationOptions, CalibrationResult, CalibrationTables, RunCalibration, calibrate

__all__ = [
    "CalibrationOptions",
    "CalibrationResult",
    "CalibrationTables",
    "RunCalibration",
    "calibrate",
]
