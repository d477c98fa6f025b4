"""Requests over time: arrivals and lengths drawn from a workload, or replayed from its trace."""

from capplan.spec.traffic import exponential, power_law, zipf
from capplan.workload.lengths import LengthTable, length_table
from capplan.workload.requests import Requests, draw_requests

__all__ = [
    "LengthTable",
    "Requests",
    "draw_requests",
    "exponential",
    "length_table",
    "power_law",
    "zipf",
]
