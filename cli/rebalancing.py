"""Options of re-balancing, and its settings from them and a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

import typer

from capplan.errors import InputError
from capplan.spec import RebalanceSettings
from capplan.spec.rebalance import FORECASTS

RebalancePeriod: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--rebalance",
        metavar="SECONDS",
        help="Re-balance the adapters over the GPUs of the plan this often; default: as in the plan.",
    ),
]

ForecastName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--forecast",
        metavar="NAME",
        help=f"Forecast of the demand for --rebalance: {', '.join(FORECASTS)}; default: holt.",
    ),
]

RebalanceSolverName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--rebalance-solver",
        metavar="NAME",
        help="Placement by --rebalance: loraserve (Algorithm 1) or capplan (moves from the placement in "
        "force, with a price on copied bytes); default: loraserve.",
    ),
]

_FLAGS: Final = {"every_s": "--rebalance", "forecast": "--forecast", "solver": "--rebalance-solver"}


@dataclass(frozen=True)
class RebalanceOptions:
    """Options of re-balancing; None: as in the plan."""

    every_s: float | None = None
    forecast: str | None = None
    solver: str | None = None

    @property
    def given(self) -> dict[str, float | str]:
        """The options that are given, by name of the setting."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def require_plan(self) -> None:
        """Raise an `InputError` if one is given, for a command without a plan."""
        for name, value in self.given.items():
            raise InputError("goes with --plan", value, _FLAGS[name])

    def settings(self, planned: RebalanceSettings | None) -> RebalanceSettings | None:
        """Return the settings of a plan, changed by the options; None without re-balancing.

        Raises
        ------
        InputError
            For an invalid value, or options without re-balancing.
        """
        changes = self.given
        if planned is None and self.every_s is None:
            for name, value in changes.items():
                raise InputError("goes with --rebalance", value, _FLAGS[name])
            return None
        try:
            return (planned or RebalanceSettings()).replace(**changes)
        except InputError as error:
            key = error.location.rpartition(".")[2]
            raise InputError(error.rule, error.value, _FLAGS.get(key, error.location)) from None
