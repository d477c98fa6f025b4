"""Figures of papers: rows beside the paper's numbers, for the terminal, for pages and as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from capplan.reports._console import DASH, Cell, Mark, Table, counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from capplan.reproduce import Figure, Recipe, Reproduction, Result, Row, RowRecipe

HEAD: Final = ("", "paper", "ours", "over seeds", "band", "inside")


def reproduction_table(recipe: Recipe, results: Sequence[Result]) -> Table:
    """Return all rows of some figures, with the figure's id before each."""
    rows = [
        (row.figure, *cells(recipe.figure(result.figure), row)) for result in results for row in result.rows
    ]
    return Table(("figure", *HEAD), rows, numbers_from=2)


def cells(figure: Figure, row: Row) -> tuple[Cell, ...]:
    """Return the cells of a row, under `HEAD`."""
    of = next(each for each in figure.rows if each.id == row.id)
    band = DASH
    if of.statement:
        band = "yes"
    elif of.band is not None:
        low, high = of.band.low, of.band.high
        band = f"{short(low)} to {short(high)}" if low is not None and high is not None else ""
        band = band or (f"at least {short(low)}" if high is None else f"at most {short(high)}")
    return (row.text, _paper(row), ours(row, statement=of.statement), _spread(row), band, inside(row))


def judged(reproduction: Reproduction) -> str:
    """Return how many rows are inside, in words."""
    inside_, all_ = reproduction.judged
    return f"{inside_} of {counted(all_, 'row')} with a band inside"


def inside(row: Row) -> Cell:
    """Return whether a row is inside its band."""
    if row.inside is None:
        return DASH
    return Mark("yes", "good") if row.inside else Mark("no", "bad")


def ours(row: Row, *, statement: bool) -> str:
    """Return the mean over seeds with its unit."""
    if row.ours is None:
        return DASH
    if statement:
        return "yes" if row.low == 1.0 else "no"
    return _with_unit(short(row.ours), row.unit)


def short(value: float | None) -> str:
    """Return three digits of a number."""
    if value is None:
        return DASH
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _spread(row: Row) -> str:
    if row.low is None or short(row.low) == short(row.high):
        return ""
    return f"{short(row.low)} to {short(row.high)}"


def _paper(row: Row) -> str:
    if isinstance(row.paper, str):
        return row.paper or DASH
    return _with_unit(short(row.paper), row.unit)


def _with_unit(text: str, unit: str) -> str:
    return text + (unit if unit == "x" else f" {unit}" if unit else "")


def reproduction_markdown(recipe: Recipe, reproduction: Reproduction) -> str:
    """Return the results of a paper as a Markdown document."""
    free = [(name, f"{each.value} {each.unit}".strip(), each.fixed_by) for name, each in recipe.free.items()]
    lines = [
        f"# {recipe.title}",
        "",
        f"Simulated by the digital twin; nothing here ran on a GPU. `{reproduction.command}`, "
        f"{reproduction.date}. **{judged(reproduction)}**, by the mean over seeds; rows without a band are "
        "not judged. Bands were fixed before the first run.",
        "",
        "## Setting",
        "",
        recipe.about.strip(),
        "",
    ]
    if free:
        lines += ["What the paper does not print, each fixed by one of its numbers:", ""]
        lines += [*_table(("", "value", "fixed by"), free), ""]
    if recipe.assumed:
        lines += ["Assumed:", "", *(f"- {text.strip()}" for text in recipe.assumed.values()), ""]
    if recipe.changed:
        lines += ["Changed after rows had been seen, by the paper's words:", ""]
        lines += [*(f"- {text.strip()}" for text in recipe.changed), ""]
    for result in reproduction.results:
        lines += _figure(recipe.figure(result.figure), result)
    if reproduction.varied:
        lines += _varied(recipe, reproduction)
    return "\n".join(lines).rstrip() + "\n"


def overview_markdown(found: Sequence[tuple[Recipe, Reproduction]]) -> str:
    """Return one table of all rows that are judged, and how many are inside by paper."""
    counts = [each.judged for _, each in found]
    names = [f"[{recipe.title}]({recipe.paper}.md)" for recipe, _ in found]
    counts.append((sum(each for each, _ in counts), sum(each for _, each in counts)))
    totals = [
        (name, str(inside_), str(all_), f"{100 * inside_ / max(1, all_):.0f} %")
        for name, (inside_, all_) in zip([*names, "all"], counts, strict=True)
    ]
    rows = [
        (recipe.paper, row.figure, *map(str, cells(recipe.figure(result.figure), row)))
        for recipe, each in found
        for result in each.results
        for row in result.rows
        if row.inside is not None
    ]
    lines = ["# Figures of the papers", "", *_table(("", "inside", "rows", "share"), totals), ""]
    return "\n".join([*lines, *_table(("paper", "figure", *HEAD), rows)]) + "\n"


def _figure(figure: Figure, result: Result) -> list[str]:
    rows = [[str(cell) for cell in cells(figure, row)] for row in result.rows]
    used = [i for i, name in enumerate(HEAD) if name != "over seeds" or any(row[i] for row in rows)]
    table = _table([HEAD[i] for i in used], [[row[i] for i in used] for row in rows])
    readings: dict[str, list[str]] = {}
    for row in result.rows:
        if row.reason:
            readings.setdefault(row.reason.strip(), []).append(row.text)
    notes = [f"- **Outside**: {'; '.join(texts)}. {reason}" for reason, texts in readings.items()]
    paragraphs = [each for each in (figure.note.strip(), "\n".join(notes)) if each]
    return [f"## {figure.title} (`{figure.id}`)", "", *table, "", *(f"{each}\n" for each in paragraphs)]


def _varied(recipe: Recipe, reproduction: Reproduction) -> list[str]:
    """Return the rows that other numbers of the setting bring inside or outside."""
    totals, rows = [], []
    judged_rows = {row.key: row for row in reproduction.rows}
    for number, each in enumerate(reproduction.varied, start=1):
        before = sum(bool(judged_rows[key].inside) for key in each.inside)
        counts = (number, each.text, len(each.inside), before, sum(each.inside.values()))
        totals.append([str(field) for field in counts])
    for key, row in judged_rows.items():
        if any(each.inside.get(key, row.inside) != row.inside for each in reproduction.varied):
            of = next(each for each in recipe.figure(row.figure).rows if each.id == row.id)
            found = [(row.ours, bool(row.inside))]
            found += [(each.ours.get(key), each.inside.get(key, False)) for each in reproduction.varied]
            rows.append((row.figure, row.text, *(_varied_cell(of, *each) for each in found)))
    return [
        "## Settings varied",
        "",
        "Figures again with other numbers of the setting, on "
        f"{counted(reproduction.varied[0].seeds, 'seed')}: how many of their rows are inside.",
        "",
        *_table(("", "setting", "rows with a band", "inside above", "inside"), totals),
        "",
        "Rows that a change brings inside (**bold**) or outside, by its number:",
        "",
        *_table(("figure", "row", "above", *(number for number, *_ in totals)), rows),
        "",
    ]


def _varied_cell(row: RowRecipe, value: float | None, is_inside: bool) -> str:
    if value is None:
        return ""
    text = ("yes" if is_inside else "no") if row.statement else _with_unit(short(value), row.unit)
    return f"**{text}**" if is_inside else text


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *escaped)]
