from ._lab import Lab
from ._recipe import PAPERS, Figure, Recipe, read_recipe
from ._results import Curve, Findings, Reproduction, Result, Row
from ._run import Options, missing_traces, reproduce, stored_rows

__all__ = [
    "PAPERS",
    "Curve",
    "Figure",
    "Findings",
    "Lab",
    "Options",
    "Recipe",
    "Reproduction",
    "Result",
    "Row",
    "missing_traces",
    "read_recipe",
    "reproduce",
    "stored_rows",
]
