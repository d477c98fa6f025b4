from ._curve import CurvePoint, CurveRuns, SettingCurve, SlotCurve, slot_curve
from ._explain import Explanation, GroupExplanation, Headroom, LoadingPoint, PlanOutcome, SizeGain, explain

__all__ = [
    "CurvePoint",
    "CurveRuns",
    "Explanation",
    "GroupExplanation",
    "Headroom",
    "LoadingPoint",
    "PlanOutcome",
    "SettingCurve",
    "SizeGain",
    "SlotCurve",
    "explain",
    "slot_curve",
]
