"""Why a plan is as it is: the twin is asked about other slots, more load, and one instance fewer or more."""

from capplan.planner.explaining.explain import Explanation, GroupExplanation, explain
from capplan.planner.explaining.room import Room
from capplan.planner.explaining.slot_curve import CurvePoint, SlotCurve, slot_curve
from capplan.planner.explaining.use import Use
from capplan.planner.explaining.what_if import Outcome, WhatIf

__all__ = [
    "CurvePoint",
    "Explanation",
    "GroupExplanation",
    "Outcome",
    "Room",
    "SlotCurve",
    "Use",
    "WhatIf",
    "explain",
    "slot_curve",
]
