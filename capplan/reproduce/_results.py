"""Results: what a figure's experiment found, and rows beside the paper's numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final

from pydantic import Field

from capplan.reproduce._recipe import Figure, Recipe, RowRecipe
from capplan.spec import SpecModel, Text

_ROUNDING: Final = 1e-6
"""Of a value, between machines."""


class Curve(SpecModel):
    """Our points of one system, means over seeds."""

    name: Text
    x: tuple[float, ...]
    y: tuple[float | None, ...]


def mean_curve(name: str, x: Sequence[float], y: Iterable[Sequence[float]]) -> Curve:
    """Return the curve of points with a value per seed."""
    return Curve(name=name, x=tuple(x), y=tuple(map(fmean, y)))


@dataclass(frozen=True)
class Findings:
    """What an experiment found: values per seed by row, and curves.

    A statement is a bool, or one per seed. A row whose value is None could not be simulated.
    """

    values: Mapping[str, Sequence[float] | float | bool | None]
    curves: Sequence[Curve] = field(default=())


class Row(SpecModel):
    """One number of a paper beside ours."""

    figure: Text
    id: Text
    text: Text
    paper: float | str
    ours: float | None = Field(description="Mean over seeds; None: not simulated.")
    low: float | None = Field(description="Least over seeds.")
    high: float | None
    unit: str
    seeds: int
    inside: bool | None = Field(description="Whether ours is in the band; None: not judged.")
    reason: str = Field(description="Why it is outside.")
    assumptions: tuple[Text, ...]

    @property
    def key(self) -> str:
        """Name within the paper."""
        return f"{self.figure}/{self.id}"


class Result(SpecModel):
    """A figure as simulated."""

    figure: Text
    rows: tuple[Row, ...]
    curves: tuple[Curve, ...] = ()


class Varied(SpecModel):
    """Judged rows of some figures with other numbers of the setting, by `Row.key`."""

    text: Text
    seeds: int
    ours: Mapping[str, float | None]
    inside: Mapping[str, bool]


class Reproduction(SpecModel):
    """The simulated figures of a paper."""

    paper: Text
    command: Text
    capplan: Text
    date: Text
    results: tuple[Result, ...]
    varied: tuple[Varied, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows, in the order of the recipe."""
        return tuple(row for result in self.results for row in result.rows)

    def only(self, figures: Sequence[str]) -> Reproduction:
        """Return some figures, or all if none is named."""
        kept = tuple(each for each in self.results if not figures or each.figure in figures)
        return self.replace(results=kept)

    @property
    def judged(self) -> tuple[int, int]:
        """Rows inside their bands, and rows with a band."""
        found = [row.inside for row in self.rows if row.inside is not None]
        return sum(found), len(found)


def result_of(recipe: Recipe, figure: Figure, findings: Findings) -> Result:
    """Return the rows of a figure.

    Raises
    ------
    KeyError
        If the experiment lacks a row of the recipe, or has one more.
    """
    ids = {row.id for row in figure.rows}
    if ids != set(findings.values):
        raise KeyError(f"{recipe.paper} {figure.id}: {sorted(ids ^ set(findings.values))}")
    assumed = (*recipe.assumed_by_all, *figure.assumes)
    rows = tuple(_row(figure, row, findings.values[row.id], assumed) for row in figure.rows)
    return Result(figure=figure.id, rows=rows, curves=tuple(findings.curves))


def changed_rows(recipe: Recipe, found: Reproduction, stored: Reproduction) -> list[tuple[Row, float, float]]:
    """Return rows whose mean is farther from the interval over seeds of another run than it is wide, with it.

    Times of a machine are left out. On another machine the same seeds give other means: the last digits of a
    router's fitted model decide between instances that are nearly equal, and so which queue a request is in.
    """
    timed = {figure.id for figure in recipe.figures if figure.timed}
    known = {row.key: row for row in stored.rows if row.figure not in timed}
    changed = []
    for row in found.rows:
        other = known.get(row.key)
        if row.ours is None or other is None or other.low is None or other.high is None:
            continue
        slack = other.high - other.low + _ROUNDING * max(abs(other.low), abs(other.high))
        if not other.low - slack <= row.ours <= other.high + slack:
            changed.append((row, other.low, other.high))
    return changed


def _row(figure: Figure, row: RowRecipe, found: Any, assumed: tuple[str, ...]) -> Row:
    values = _values(found)
    mean = fmean(values) if values else None
    inside = _judged(row, values, mean)
    return Row(
        figure=figure.id,
        id=row.id,
        text=row.text,
        paper=row.paper,
        ours=mean,
        low=min(values, default=None),
        high=max(values, default=None),
        unit=row.unit,
        seeds=len(values),
        inside=inside,
        reason="" if inside is not False else row.reading,
        assumptions=assumed,
    )


def _values(found: Any) -> list[float]:
    if found is None:
        return []
    if isinstance(found, (bool, int, float)):
        return [float(found)]
    return [float(value) for value in found]


def _judged(row: RowRecipe, values: Sequence[float], mean: float | None) -> bool | None:
    if row.statement:
        return bool(values) and min(values) == 1.0
    if row.band is None:
        return None
    return mean is not None and row.band.holds(mean)
