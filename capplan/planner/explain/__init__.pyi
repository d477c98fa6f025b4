from ._curve import CurvePoint, CurveRuns, SettingCurve, SlotCurve, slot_curve
from ._explain import Explanation, GroupExplanation, explain
from ._headroom import Headroom
from ._loading import LoadingPoint
from ._queue_gains import SizeGain
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
    "SizeGain",
    "SlotCurve",
    "explain",
    "slot_curve",
]
