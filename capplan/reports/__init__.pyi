from ._console import DASH, Table, console, counted, finite, number, percent, print_json, print_table
from ._report import report

__all__ = [
    "DASH",
    "Table",
    "console",
    "counted",
    "finite",
    "number",
    "percent",
    "print_json",
    "print_table",
    "report",
]
