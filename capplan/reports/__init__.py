"""Presentation of results: tables, words, figures and HTML pages.

Its import gives plans and simulations their ``plot`` method.
"""

from typing import Any

import lazy_loader

from capplan.spec import Plotted

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def _draw(result: Plotted) -> Any:
    from capplan.reports.pages import figure_of

    return figure_of(result)


Plotted.draw = staticmethod(_draw)
