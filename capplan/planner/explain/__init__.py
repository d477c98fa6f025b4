"""Explanation of a plan: slots, utilization, headroom, and other fleet sizes."""

from capplan.planner.explain._curve import CurvePoint, CurveRuns, SettingCurve, SlotCurve, slot_curve
from capplan.planner.explain._explain import Explanation, GroupExplanation, explain
from capplan.planner.explain._headroom import Headroom, ResourceUse
from capplan.planner.explain._what_if import PlanOutcome, WhatIf

__all__ = [
    "CurvePoint",
    "CurveRuns",
    "Explanation",
    "GroupExplanation",
    "Headroom",
    "PlanOutcome",
    "ResourceUse",
    "SettingCurve",
    "SlotCurve",
    "WhatIf",
    "explain",
    "slot_curve",
]
