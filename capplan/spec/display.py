"""Short representations and plots of results, for the terminal and notebooks.

Figures are made by the reports of the command line, which sit above all other packages. Results load them on
first use, as pandas loads matplotlib.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from html import escape
from typing import Any, Final

_PLOTTING_BACKEND: Final = "capplan.reports.pages.figures"


def plot(figure: str, result: object) -> Any:
    """Return the Plotly figure that a function of the plotting backend makes of a result."""
    return getattr(importlib.import_module(_PLOTTING_BACKEND), figure)(result)


class Displayed(ABC):
    """Mixin of results with a short ``repr`` and a table in notebooks."""

    @abstractmethod
    def display_facts(self) -> Mapping[str, object]:
        """Return the names and values that represent the result."""

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={_text(value)}" for name, value in self.display_facts().items())
        return f"{type(self).__name__}({facts})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(_text(value))}</td></tr>"
            for name, value in self.display_facts().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
