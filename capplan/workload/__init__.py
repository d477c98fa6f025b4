"""Requests over time: arrivals and lengths drawn from a workload, or replayed from its trace."""

from capplan.workload.length_tables import LengthTable, length_table
from capplan.workload.requests import Requests, draw_requests

__all__ = ["LengthTable", "Requests", "draw_requests", "length_table"]
