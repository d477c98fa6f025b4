"""Explanation of a plan: slots, utilization, headroom, and other fleet sizes."""

from capplan.planner.explain.explain import Explanation, GroupExplanation, explain
from capplan.planner.explain.headroom import Headroom, ResourceUse
from capplan.planner.explain.knob_curve import KnobCurve, KnobPoint
from capplan.planner.explain.slot_curve import CurvePoint, SlotCurve, slot_curve
from capplan.planner.explain.what_if import PlanOutcome, WhatIf

__all__ = [
    "CurvePoint",
    "Explanation",
    "GroupExplanation",
    "Headroom",
    "KnobCurve",
    "KnobPoint",
    "PlanOutcome",
    "ResourceUse",
    "SlotCurve",
    "WhatIf",
    "explain",
    "slot_curve",
]
