from ._curve import CurvePoint, CurveRuns, SettingCurve, SlotCurve, slot_curve
from ._explain import Explanation, GroupExplanation, explain
from ._headroom import Headroom
from ._loading import LoadingPoint
from ._what_if import PlanOutcome

__all__ = [
    "CurvePoint",
    "CurveRuns",
    "Explanation",
    "GroupExplanation",
    "Headroom",
    "LoadingPoint",
    "PlanOutcome",
    "SettingCurve",
    "SlotCurve",
    "explain",
    "slot_curve",
]
