"""Short representations of results, for the terminal and notebooks, and the plots of those that have one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from html import escape
from typing import Any, ClassVar

from capplan.errors import InputError


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


class Plotted(Displayed):
    """Mixin of results with a Plotly figure, which `capplan.reports` makes once it is imported."""

    draw: ClassVar[Callable[[Any], Any] | None] = None
    """Set by `capplan.reports`."""

    def plot(self) -> Any:
        """Return a Plotly figure of the result.

        Raises
        ------
        InputError
            If `capplan.reports` was not imported.
        """
        if Plotted.draw is None:
            raise InputError("is made by capplan.reports; import it first", location="plot")
        return Plotted.draw(self)


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
