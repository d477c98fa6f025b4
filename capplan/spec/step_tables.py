"""Tables of a step model: milliseconds over a grid of quantities of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Annotated, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, Strict, model_validator

from capplan.errors import InputError
from capplan.spec.validation import Line, Many, SpecModel, rule_error

TABLE_FORM: Final = "table"
"""Name of the form of a step model that has tables."""

TABLE_AXES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"tokens_ms": ("tokens",), "requests_ms": ("requests", "kv_tokens")}
)
"""Tables of that form and their axes, fields of `capplan.models.step_latency.StepFeatures`."""

MAX_POINTS: Final = 512
MAX_VALUES: Final = 16_384

_MIN_GAP: Final = 1e-3
"""Between points, which are counts: smaller ones give slopes beyond any number."""

_Amount = Annotated[float, Strict(), Field(ge=0, le=1e12)]


class TableAxis(SpecModel):
    """One axis of a step table."""

    name: Line = Field(description="Quantity of a step: tokens, requests or kv_tokens.")
    points: Many[_Amount] = Field(description="Grid values, strictly increasing; 2 to 512 of them.")

    @model_validator(mode="after")
    def _increasing(self) -> Self:
        if not 2 <= len(self.points) <= MAX_POINTS:
            raise rule_error(f"must hold 2 to {MAX_POINTS} values", key=("points",), value=len(self.points))
        for at, (before, point) in enumerate(pairwise(self.points), start=1):
            if point <= before:
                raise rule_error(f"must increase, and follows {before:g}", key=("points", at), value=point)
            if point - before < _MIN_GAP:
                words = f"must increase by at least {_MIN_GAP:g}, and follows {before:g}"
                raise rule_error(words, key=("points", at), value=point)
        return self


class StepTable(SpecModel):
    """Milliseconds over a grid of one or two quantities of a step, linear between its points.

    Below the first point of an axis the value there applies. Beyond the last point the last slope goes on.
    """

    axes: Annotated[tuple[TableAxis, ...], Field(min_length=1, max_length=2)] = Field(
        description="Axes of the grid, in the order of `values`."
    )
    values: Many[_Amount] = Field(
        description="Milliseconds at each point of the grid, not decreasing along any axis; the last axis "
        "varies fastest. At most 16,384 of them."
    )

    @classmethod
    def of(cls, axes: Mapping[str, Sequence[float]], values: ArrayLike) -> Self:
        """Return the table of an array of values, whose axes are named in their order.

        Parameters
        ----------
        axes
            Grid values of each axis.
        values
            Milliseconds, of the shape of the grid.

        Raises
        ------
        InputError
            Unless the shapes agree, the axes increase, and the values are finite, not negative and not
            decreasing.
        """
        array = np.asarray(values, float)
        named = tuple(TableAxis(name=name, points=tuple(map(float, points))) for name, points in axes.items())
        shape = tuple(len(axis.points) for axis in named)
        if array.shape != shape:
            raise InputError(f"must have the shape of the axes, {shape}", array.shape, "StepTable.values")
        return cls(axes=named, values=tuple(array.ravel().tolist()))

    @property
    def shape(self) -> tuple[int, ...]:
        """Points of each axis."""
        return tuple(len(axis.points) for axis in self.axes)

    @property
    def grid_ms(self) -> NDArray[np.float64]:
        """Values as an array with one dimension per axis."""
        return np.array(self.values).reshape(self.shape)

    def scaled(self, factor: float) -> Self:
        """Return the table with every time multiplied."""
        return self.replace(values=tuple((factor * self.grid_ms).ravel().tolist()))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = " x ".join(f"{len(axis.points)} {axis.name}" for axis in self.axes)
        if len(self.values) != prod(self.shape):
            words = f"must hold one value per point of {names}"
            raise rule_error(words, key=("values",), value=len(self.values))
        if len(self.values) > MAX_VALUES:
            words = f"must hold at most {MAX_VALUES:,} values"
            raise rule_error(words, key=("values",), value=len(self.values))
        grid_ms = self.grid_ms
        for at, axis in enumerate(self.axes):
            falls = np.argwhere(np.diff(grid_ms, axis=at) < 0.0)
            if falls.size:
                low = tuple(falls[0].tolist())
                high = tuple(low[i] + (i == at) for i in range(len(low)))
                words = f"must not decrease along {axis.name}, and follows {grid_ms[low]:g}"
                position = int(np.ravel_multi_index(high, self.shape))
                raise rule_error(words, key=("values", position), value=float(grid_ms[high]))
        return self


def check_tables(form: str, tables: Mapping[str, StepTable]) -> None:
    """Check that a model has the tables of its form, with their axes; raise for a validator of `tables`."""
    required = TABLE_AXES if form == TABLE_FORM else {}
    for name in tables:
        if name not in required:
            known = f"one of {', '.join(required)}" if required else f"absent with the form {form!r}"
            raise rule_error(f"must be {known}", key=("tables", name))
    for name, axes in required.items():
        if name not in tables:
            raise rule_error(f"is required by the form {form!r}", key=("tables", name))
        own = tuple(axis.name for axis in tables[name].axes)
        if own != axes:
            words = f"must be the axes {', '.join(axes)} in this order"
            raise rule_error(words, key=("tables", name, "axes"), value=", ".join(own))
