"""`capplan reproduce`: the papers' figures, simulated beside the papers' numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from capplan.cli.options import AsJson, Quiet, RayAddress, Workers, command
from capplan.cli.output import write_json
from capplan.cli.progress import announce_compilation, progress_bars
from capplan.errors import InputError
from capplan.reports import Table, print_json, print_table
from capplan.spec import write_text_atomic

if TYPE_CHECKING:
    from capplan.reproduce import Reproduction

_ALL: Final = "all"
_LIST: Final = "list"


@dataclass(frozen=True, kw_only=True)
class ReproduceArgs:
    """Options of `capplan reproduce`."""

    paper: str = typer.Argument(
        ..., metavar="PAPER", help="twin, chameleon, loraserve, toppings, joint or all; or list."
    )
    figures: list[str] | None = typer.Argument(
        None, metavar="FIGURE", help="Figures of the paper; default: all of them."
    )
    output: str | None = typer.Option(
        None, "--output", "-o", metavar="DIR", help="Folder to write; a run that was interrupted goes on."
    )
    shipped: bool = typer.Option(
        False, "--shipped", help="Show the run that ships with capplan, and simulate nothing."
    )
    quick: bool = typer.Option(False, "--quick", help="Some figures on their first seed, in minutes.")
    varied: bool = typer.Option(
        False, "--varied", help="Also with the other numbers of the setting that the recipe lists."
    )
    seeds: int | None = typer.Option(None, metavar="N", min=1, max=100, help="Instead of the recipe's.")
    traces: str | None = typer.Option(None, metavar="DIR", help="Folder of the public traces.")
    measured: str | None = typer.Option(
        None, metavar="DIR", help="Folder of the published measurements that some figures are compared with."
    )
    workers: Workers = None
    ray_address: RayAddress = None
    as_json: AsJson = False
    quiet: Quiet = False


@command
def reproduce(args: ReproduceArgs) -> None:
    """Simulate the papers' figures on the papers' own settings, beside the papers' numbers.

    Writes per paper its rows (JSON) and a document (Markdown), one table of all, and an HTML page with the
    plots. Rows are compared with the run that ships with capplan. Exit status 1: a row is farther from
    that run's interval over its seeds than the interval is wide.
    """
    from capplan.reproduce import PAPERS

    if args.paper == _LIST:
        _show_list(args)
        return
    papers = PAPERS if args.paper == _ALL else (args.paper,)
    if args.figures and args.paper == _ALL:
        raise InputError("goes with one paper", args.figures[0], "FIGURE")
    if args.output is None:
        raise InputError("is required; it names the folder to write", location="--output")
    found = _shipped(args, papers) if args.shipped else _simulated(args, papers)
    _write_all(found, Path(args.output))
    changed = [line for each in found for line in _changes(each)]
    if args.as_json:
        print_json([{"paper": each.paper, **row.model_dump()} for each in found for row in each.rows])
    elif not args.quiet:
        _show(found)
    for line in changed:
        typer.echo(line, err=True)
    if changed:
        raise typer.Exit(1)


def _shipped(args: ReproduceArgs, papers: Sequence[str]) -> list[Reproduction]:
    from capplan.reproduce import stored_rows

    found = [stored_rows(paper).only(args.figures or ()) for paper in papers]
    for each in found:
        _write(each, Path(str(args.output)))
    return found


def _simulated(args: ReproduceArgs, papers: Sequence[str]) -> list[Reproduction]:
    from capplan.reproduce import Options, left_out, reproduce

    folder = Path(str(args.output))
    found = []
    announce_compilation(quiet=args.quiet)
    with progress_bars(quiet=args.quiet) as progress:
        options = Options(
            folder,
            quick=args.quick,
            varied=args.varied,
            seeds=args.seeds,
            traces=None if args.traces is None else Path(args.traces),
            measured=None if args.measured is None else Path(args.measured),
            workers=args.workers,
            ray_address=args.ray_address,
            progress=progress,
        )
        for paper in papers:
            lacking = {} if args.figures else left_out(paper, options)
            for figure, rules in lacking.items():
                typer.echo(f"left out: {paper} {figure}: {', '.join(rules)}", err=True)
            found.append(reproduce(paper, args.figures or (), options=options))
            _write(found[-1], folder)
    return found


def _write(found: Reproduction, folder: Path) -> None:
    """Write the rows of a paper."""
    from capplan.reports.tables import reproduction_markdown
    from capplan.reproduce import read_recipe

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{found.paper}.json", found.model_dump())
    write_text_atomic(folder / f"{found.paper}.md", reproduction_markdown(read_recipe(found.paper), found))


def _write_all(found: Sequence[Reproduction], folder: Path) -> None:
    """Write the table and the page of all papers."""
    from capplan.reports.pages import reproduction_page
    from capplan.reports.tables import overview_markdown
    from capplan.reproduce import read_recipe

    every = [(read_recipe(each.paper), each) for each in found]
    write_text_atomic(folder / "reproduction.md", overview_markdown(every))
    write_text_atomic(folder / "index.html", reproduction_page(every))


def _changes(found: Reproduction) -> list[str]:
    """Return a line per row that differs from the run that ships."""
    from capplan.reproduce import changed_rows, read_recipe, stored_rows

    return [
        f"{found.paper} {row.key}: {row.ours:.4g} is far from {low:.4g} to {high:.4g}, the shipped run"
        for row, low, high in changed_rows(read_recipe(found.paper), found, stored_rows(found.paper))
    ]


def _show(found: Sequence[Reproduction]) -> None:
    from capplan.reports.tables import judged, reproduction_table
    from capplan.reproduce import read_recipe

    for each in found:
        print_table(reproduction_table(read_recipe(each.paper), each.results))
        typer.echo(f"{each.paper}: {judged(each)}")


def _show_list(args: ReproduceArgs) -> None:
    from capplan.reproduce import PAPERS, read_recipe

    recipes = [read_recipe(name) for name in PAPERS]
    if args.as_json:
        print_json([recipe.model_dump() for recipe in recipes])
        return
    rows = [
        (
            recipe.paper,
            figure.id,
            figure.title,
            "yes" if figure.quick else "",
            str(len(figure.rows)),
        )
        for recipe in recipes
        for figure in recipe.figures
    ]
    print_table(Table(["paper", "figure", "title", "quick", "rows"], rows, numbers_from=4))
