"""The digital twin paper: fidelity, surrogates and placement."""

from collections.abc import Mapping
from typing import Final

from capplan.reproduce._lab import Experiment
from capplan.reproduce.twin._fidelity import fig8, fig9, table1, table2, table3, table4, unpredictable
from capplan.reproduce.twin._motivation import fig1, fig4, fig5, fig6, fig7, figa13
from capplan.reproduce.twin._placement import fig10, fig11, fig12, table5

EXPERIMENTS: Final[Mapping[str, Experiment]] = {
    each.__name__: each
    for each in (
        table1,
        unpredictable,
        fig9,
        table2,
        table3,
        table4,
        table5,
        fig1,
        figa13,
        fig4,
        fig5,
        fig6,
        fig7,
        fig8,
        fig10,
        fig11,
        fig12,
    )
}
