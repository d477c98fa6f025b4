from ._lengths import LengthTable, length_table
from ._load import load_workload
from ._requests import Requests, draw_requests
from ._trace_files import read_length_pairs, read_trace

__all__ = [
    "LengthTable",
    "Requests",
    "draw_requests",
    "length_table",
    "load_workload",
    "read_length_pairs",
    "read_trace",
]
