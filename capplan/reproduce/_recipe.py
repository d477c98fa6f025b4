"""Recipes: what a paper reports, on which setting, and what is assumed where it is silent.

A recipe is a file of ``datasets/papers``. Its rows and their bands are fixed before anything is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import lru_cache
from importlib import resources
from typing import Any, Final, TypeVar, cast

from pydantic import BaseModel, Field, model_validator

from capplan.errors import InputError
from capplan.spec import Count, SpecModel, Text, parse_yaml, rule_error, validate_document

PAPERS: Final = ("twin", "chameleon", "loraserve", "toppings", "joint")
"""Names of recipes, in the order of the tables."""

Model = TypeVar("Model", bound=BaseModel)
Cached = TypeVar("Cached", bound=Callable[..., Any])

_varied: dict[str, Mapping[str, Any]] = {}
"""Numbers of settings that this process takes instead of a recipe's, by paper."""
_caches: list[Callable[[], None]] = []


class Band(SpecModel):
    """Values that count as reproduced; an end that is not given is open."""

    low: float | None = None
    high: float | None = None

    def holds(self, value: float) -> bool:
        above = self.low is None or value >= self.low
        return above and (self.high is None or value <= self.high)


class RowRecipe(SpecModel):
    """One number or statement of a figure."""

    id: Text
    text: Text
    paper: float | str = Field(default="", description="What the paper reports; empty: nothing.")
    unit: str = ""
    band: Band | None = Field(default=None, description="Without one the row is shown and not judged.")
    statement: bool = Field(default=False, description="Holds or not: 1 or 0 per seed, and 1 is inside.")
    reading: str = Field(default="", description="Why we are outside.")

    @model_validator(mode="after")
    def _is_judged_once(self) -> RowRecipe:
        if self.statement and self.band is not None:
            raise rule_error("must be absent from a statement", key=("band",))
        return self


class Plot(SpecModel):
    """Axes of a figure's curves, and the points that the paper prints."""

    x: Text
    y: Text
    paper: Mapping[str, tuple[tuple[float, float], ...]] = Field(
        default={}, description="Points by curve; a curve of ours of the same name has the same colour."
    )


class Figure(SpecModel):
    """A figure, a table or a claim of the paper."""

    id: Text = Field(description="On the command line, such as fig11.")
    title: Text
    rows: tuple[RowRecipe, ...] = Field(min_length=1)
    quick: bool = Field(default=False, description="Part of --quick.")
    traces: tuple[Text, ...] = Field(default=(), description="Files of --traces that it needs.")
    timed: bool = Field(
        default=False, description="Holds times of this machine, which are not compared with the shipped run."
    )
    measured: bool = Field(default=False, description="Whether it needs --measured, the measured runs.")
    assumes: tuple[Text, ...] = Field(default=(), description="Keys of `assumed`, beside those of all.")
    plot: Plot | None = None
    note: str = Field(default="", description="Shown below the rows.")


class Free(SpecModel):
    """A parameter that the paper does not print, and the one figure that fixes it."""

    value: float | str
    unit: str = ""
    fixed_by: Text


class Variation(SpecModel):
    """Figures with other numbers of the setting, for what in it could be wrong."""

    text: Text
    numbers: Mapping[str, Any] = Field(description="By key of the setting, with dots between levels.")
    figures: tuple[Text, ...]


class Recipe(SpecModel):
    """What a paper reports, and the setting on which it is simulated."""

    paper: Text
    title: Text
    about: Text = Field(description="The setting in words.")
    seeds: Count = 5
    quick_seeds: Count = 1
    setting: Mapping[str, Any] = Field(description="Numbers of the setting; the paper's module knows them.")
    systems: Mapping[str, Any] = Field(default={}, description="Compared systems by name.")
    free: Mapping[str, Free] = Field(default={})
    assumed: Mapping[str, Text] = Field(default={}, description="What is assumed, by key.")
    assumed_by_all: tuple[Text, ...] = ()
    changed: tuple[Text, ...] = Field(
        default=(), description="What was changed after rows had been seen, and by which words of the paper."
    )
    figures: tuple[Figure, ...] = Field(min_length=1)
    varied: tuple[Variation, ...] = ()
    varied_seeds: Count = 2

    @model_validator(mode="after")
    def _refers_to_what_is_there(self) -> Recipe:
        for number, figure in enumerate(self.figures):
            for key in (*figure.assumes, *self.assumed_by_all):
                if key not in self.assumed:
                    raise rule_error("must be a key of assumed", key=("figures", number, "assumes"))
            ids = [row.id for row in figure.rows]
            if len(set(ids)) < len(ids):
                raise rule_error("must have unique ids", key=("figures", number, "rows"))
        for number, variation in enumerate(self.varied):
            if not {figure.id for figure in self.figures} >= set(variation.figures):
                raise rule_error("must be ids of figures", key=("varied", number, "figures"))
            _with_numbers(self.setting, variation.numbers)
        return self

    def figure(self, name: str) -> Figure:
        """Return a figure by its id.

        Raises
        ------
        InputError
            If there is none.
        """
        for each in self.figures:
            if each.id == name:
                return each
        known = ", ".join(each.id for each in self.figures)
        raise InputError(f"must be a figure of {self.paper}: {known}", name, "FIGURE")

    def typed(self, model: type[Model]) -> Model:
        """Return the setting as a document of the paper's module."""
        return validate_document(model, dict(self.setting), lambda key: f"{self.paper}.yaml: setting: {key}")


def cached(function: Cached) -> Cached:
    """Keep the last results of a function of a setting, until `vary` changes numbers of it."""
    kept = lru_cache(maxsize=64)(function)
    _caches.append(kept.cache_clear)
    return cast("Cached", kept)


def vary(paper: str, numbers: Mapping[str, Any]) -> None:
    """Take these numbers instead of the recipe's in this process; none: the recipe's."""
    if _varied.get(paper, {}) == numbers:
        return
    _varied[paper] = numbers
    for clear in _caches:
        clear()


def _with_numbers(setting: Mapping[str, Any], numbers: Mapping[str, Any]) -> Mapping[str, Any]:
    changed: Any = deepcopy(dict(setting))
    for path, value in numbers.items():
        *parents, last = path.split(".")
        at = changed
        for key in parents:
            at = at.get(key, {}) if isinstance(at, dict) else {}
        if not isinstance(at, dict) or last not in at:
            raise rule_error("must be a key of the setting", key=("varied",), value=path)
        at[last] = value
    return cast("Mapping[str, Any]", changed)


@cached
def read_recipe(paper: str) -> Recipe:
    """Return a recipe by its name, with the numbers of `vary`.

    Raises
    ------
    InputError
        If the name is none of `PAPERS`.
    """
    if paper not in PAPERS:
        raise InputError(f"must be one of {', '.join(PAPERS)}", paper, "PAPER")
    file = resources.files("capplan") / "datasets" / "papers" / f"{paper}.yaml"
    source = parse_yaml(file.read_text(encoding="utf-8"), file.name)
    recipe = validate_document(Recipe, source.data, source.locate)
    return recipe.replace(setting=_with_numbers(recipe.setting, _varied.get(paper, {})))
