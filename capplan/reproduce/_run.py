"""Run the experiments of a paper."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Final

from capplan.errors import InputError
from capplan.reproduce import chameleon, joint, loraserve, toppings, twin
from capplan.reproduce._lab import Experiment, Lab
from capplan.reproduce._recipe import Figure, Recipe, read_recipe, vary
from capplan.reproduce._results import Reproduction, Result, Varied, result_of
from capplan.spec import parse_json, validate_document
from capplan.version import installed_version

_EXPERIMENTS: Final[Mapping[str, Mapping[str, Experiment]]] = {
    "twin": twin.EXPERIMENTS,
    "chameleon": chameleon.EXPERIMENTS,
    "loraserve": loraserve.EXPERIMENTS,
    "toppings": toppings.EXPERIMENTS,
    "joint": joint.EXPERIMENTS,
}
"""By paper, the experiment of every figure of its recipe."""


@dataclass(frozen=True)
class Options:
    """How to run experiments; `quick`: only the figures marked so, on their first seeds."""

    folder: Path
    quick: bool = False
    varied: bool = False
    """Also with the other numbers of the setting that the recipe lists."""
    seeds: int | None = None
    traces: Path | None = None
    measured: Path | None = None
    """Published measurements that some figures are compared with."""
    workers: int | None = None
    ray_address: str | None = None
    progress: Callable[[str, int, int], None] | None = None


def reproduce(paper: str, figures: Sequence[str] = (), *, options: Options) -> Reproduction:
    """Simulate figures of a paper.

    Parameters
    ----------
    paper
        Name of a recipe, of `PAPERS`.
    figures
        Their ids; none: all, or the quick ones. Figures whose traces are missing are left out if not named.
    options
        How to run.

    Returns
    -------
    Reproduction
        With the figures in the order of the recipe.

    Raises
    ------
    InputError
        For an unknown paper or figure, or a trace that a named figure lacks.
    """
    recipe = read_recipe(paper)
    chosen = _chosen(recipe, figures, options)
    seeds = options.seeds or (recipe.quick_seeds if options.quick else recipe.seeds)
    results = _simulated(paper, {}, chosen, seeds, options)
    varied = []
    for each in recipe.varied if options.varied else ():
        own = [figure for figure in chosen if figure.id in each.figures]
        used = options.seeds or recipe.varied_seeds
        found = _simulated(paper, each.numbers, own, used, options)
        judged = [row for result in found for row in result.rows if row.inside is not None]
        ours = {row.key: row.ours for row in judged}
        inside = {row.key: bool(row.inside) for row in judged}
        varied.append(Varied(text=each.text, seeds=used, ours=ours, inside=inside))
    return Reproduction(
        paper=paper,
        command=_command(paper, figures, options),
        capplan=installed_version(),
        date=datetime.now(tz=UTC).date().isoformat(),
        results=results,
        varied=tuple(varied),
    )


def _simulated(
    paper: str, numbers: Mapping[str, Any], figures: Sequence[Figure], seeds: int, options: Options
) -> tuple[Result, ...]:
    """Simulate figures with some other numbers of the setting."""
    vary(paper, numbers)
    try:
        recipe = read_recipe(paper)
        lab = Lab(
            recipe,
            options.folder / "cases" / paper,
            tuple(range(seeds)),
            quick=options.quick,
            traces=options.traces,
            measured=options.measured,
            workers=options.workers,
            ray_address=options.ray_address,
            numbers=numbers,
        )
        lab.folder.mkdir(parents=True, exist_ok=True)
        results = []
        for figure in figures:
            on_progress = options.progress and partial(options.progress, f"{paper} {figure.id}")
            findings = _EXPERIMENTS[paper][figure.id](replace(lab, progress=on_progress))
            results.append(result_of(recipe, figure, findings))
        return tuple(results)
    finally:
        vary(paper, {})


def experiments(paper: str) -> Mapping[str, Experiment]:
    """Return the experiments of a paper by figure."""
    return _EXPERIMENTS[paper]


def stored_rows(paper: str) -> Reproduction:
    """Return the full run that ships with the project."""
    file = resources.files("capplan") / "datasets" / "papers" / f"{paper}.rows.json"
    return validate_document(Reproduction, parse_json(file.read_text(encoding="utf-8"), file.name), str)


def _chosen(recipe: Recipe, figures: Sequence[str], options: Options) -> list[Figure]:
    if figures:
        named = [recipe.figure(name) for name in figures]
        for figure in named:
            for flag, rule in _missing(figure, options):
                raise InputError(rule, getattr(options, flag), f"--{flag}")
        return [figure for figure in recipe.figures if figure in named]
    return [figure for figure in _wanted(recipe, options) if not _missing(figure, options)]


def left_out(paper: str, options: Options) -> dict[str, list[str]]:
    """Return the figures that lack traces or measurements, and the rules of the flags that give them."""
    missing = {each.id: _missing(each, options) for each in _wanted(read_recipe(paper), options)}
    return {name: [f"--{flag} {rule}" for flag, rule in each] for name, each in missing.items() if each}


def _wanted(recipe: Recipe, options: Options) -> list[Figure]:
    return [figure for figure in recipe.figures if figure.quick or not options.quick]


def _missing(figure: Figure, options: Options) -> list[tuple[str, str]]:
    folder, measured = options.traces, options.measured
    lacking = [name for name in figure.traces if folder is None or not (folder / name).is_file()]
    rules = [("traces", f"must be a folder that holds {name}") for name in lacking]
    if figure.measured and (measured is None or not measured.is_dir()):
        rules.append(("measured", "must be a folder of published measurements"))
    return rules


def _command(paper: str, figures: Sequence[str], options: Options) -> str:
    words = ["capplan", "reproduce", paper, *figures, *(["--quick"] if options.quick else [])]
    words += ["--varied"] if options.varied else []
    if options.seeds is not None:
        words += ["--seeds", str(options.seeds)]
    for flag in ("traces", "measured"):
        words += [f"--{flag}", "DIR"] if getattr(options, flag) else []
    return shlex.join([*words, "-o", "DIR"])
