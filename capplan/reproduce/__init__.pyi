from ._lab import Lab
from ._recipe import PAPERS, Figure, Plot, Recipe, RowRecipe, read_recipe
from ._results import Curve, Findings, Reproduction, Result, Row, changed_rows, result_of
from ._run import Options, experiments, left_out, reproduce, stored_rows

__all__ = [
    "PAPERS",
    "Curve",
    "Figure",
    "Findings",
    "Lab",
    "Options",
    "Plot",
    "Recipe",
    "Reproduction",
    "Result",
    "Row",
    "RowRecipe",
    "changed_rows",
    "experiments",
    "left_out",
    "read_recipe",
    "reproduce",
    "result_of",
    "stored_rows",
]
