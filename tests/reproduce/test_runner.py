"""Recipes, the rows that ship, and the pages made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.errors import InputError
from capplan.reports.tables import overview_markdown, reproduction_markdown
from capplan.reproduce import (
    PAPERS,
    Findings,
    Options,
    Recipe,
    changed_rows,
    experiments,
    read_recipe,
    reproduce,
    result_of,
    stored_rows,
)

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
CHEAP = ("chameleon", "fig5")
"""A figure that needs no trace and takes no time."""
VARIED = ("loraserve", "points")
"""A figure that is simulated with other numbers of the setting, and needs no trace."""


@pytest.mark.parametrize("paper", PAPERS)
def test_a_recipe_has_an_experiment_per_figure_and_ships_with_all_rows(paper: str) -> None:
    recipe, stored = read_recipe(paper), stored_rows(paper)
    assert list(experiments(paper)) == [figure.id for figure in recipe.figures]
    wanted = [(figure.id, row.id) for figure in recipe.figures for row in figure.rows]
    assert [(row.figure, row.id) for row in stored.rows] == wanted


@pytest.mark.parametrize("paper", PAPERS)
def test_shipped_rows_are_judged_by_the_bands_of_the_recipe(paper: str) -> None:
    recipe, stored = read_recipe(paper), stored_rows(paper)
    for row in stored.rows:
        of = next(each for each in recipe.figure(row.figure).rows if each.id == row.id)
        if of.statement:
            assert row.inside == (row.low == 1.0)
        elif of.band is None:
            assert row.inside is None
        else:
            assert row.inside == (row.ours is not None and of.band.holds(row.ours))
        assert row.paper == of.paper
        assert row.inside is not False or row.reason, f"{row.key} is outside and says nothing of it"
        assert row.inside is False or not row.reason


@pytest.mark.parametrize("paper", PAPERS)
def test_the_results_page_is_made_of_the_shipped_rows(paper: str) -> None:
    page = (RESULTS / f"{paper}.md").read_text(encoding="utf-8")
    assert page == reproduction_markdown(read_recipe(paper), stored_rows(paper))


def test_the_table_of_all_papers_is_made_of_the_shipped_rows() -> None:
    every = [(read_recipe(paper), stored_rows(paper)) for paper in PAPERS]
    assert (RESULTS / "reproduction.md").read_text(encoding="utf-8") == overview_markdown(every)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5))
def test_a_mean_is_between_its_seeds_and_a_run_agrees_with_itself(values: list[float]) -> None:
    recipe = read_recipe(CHEAP[0])
    figure = next(each for each in recipe.figures if not any(row.statement for row in each.rows))
    result = result_of(recipe, figure, Findings({row.id: values for row in figure.rows}))
    stored = stored_rows(CHEAP[0])
    run = stored.replace(results=(result,))
    assert changed_rows(recipe, run, run) == []
    for row in result.rows:
        assert row.low is not None
        assert row.ours is not None
        assert row.high is not None
        assert row.low <= row.ours + 1e-9 * abs(row.ours)
        assert row.ours <= row.high + 1e-9 * abs(row.high)
    wide = max(values) - min(values)
    beyond = result.rows[0].replace(ours=max(values) + wide + 1.0 + abs(max(values)))
    moved = run.replace(results=(result.replace(rows=(beyond, *result.rows[1:])),))
    assert [row.key for row, _, _ in changed_rows(recipe, moved, run)] == [beyond.key]


def test_findings_lack_no_row() -> None:
    recipe = read_recipe(CHEAP[0])
    with pytest.raises(KeyError):
        result_of(recipe, recipe.figures[0], Findings({}))


@pytest.mark.long
def test_kept_cases_are_not_simulated_again(tmp_path: Path) -> None:
    paper, figure = "joint", next(each.id for each in read_recipe("joint").figures if each.quick)
    options = Options(tmp_path, quick=True, workers=1)
    first = reproduce(paper, (figure,), options=options)
    files = sorted((tmp_path / "cases" / paper).iterdir())
    times = [file.stat().st_mtime_ns for file in files]
    assert files
    assert reproduce(paper, (figure,), options=options).results == first.results
    assert [file.stat().st_mtime_ns for file in files] == times
    files[0].unlink()
    assert reproduce(paper, (figure,), options=options).results == first.results
    assert files[0].exists()


@pytest.mark.long
def test_other_numbers_of_the_setting_change_rows_and_last_for_a_variation(tmp_path: Path) -> None:
    options = Options(tmp_path, seeds=1, workers=1)
    paper, figure = VARIED
    plain = reproduce(paper, (figure,), options=options)
    found = reproduce(paper, (figure,), options=replace(options, varied=True))
    assert found.results == plain.results == reproduce(paper, (figure,), options=options).results
    assert {each.seeds for each in found.varied} == {1}
    judged = {row.key: row.ours for row in plain.rows if row.inside is not None}
    varied = [each.ours for each in found.varied if each.ours]
    assert varied
    assert all(set(each) == set(judged) for each in varied)
    assert any(each != judged for each in varied)


@pytest.mark.parametrize("numbers", [{"no": 1}, {"load_ms.no": 1}, {"other_lengths.no.slo_s": 1}])
def test_a_variation_names_numbers_of_the_setting(numbers: dict[str, float]) -> None:
    recipe = read_recipe("chameleon").model_dump()
    recipe["varied"] = [{"text": "other", "numbers": numbers, "figures": []}]
    with pytest.raises(ValueError, match="must be a key of the setting"):
        Recipe.model_validate(recipe)


@pytest.mark.long
@pytest.mark.parametrize("paper", PAPERS)
def test_a_quick_run_agrees_with_the_shipped_rows(
    paper: str, tmp_path: Path, traces_dir: Path, reference_dir: Path
) -> None:
    options = Options(
        tmp_path, quick=True, traces=traces_dir, measured=reference_dir / "vllm_h100", workers=1
    )
    found = reproduce(paper, options=options)
    assert found.rows
    assert changed_rows(read_recipe(paper), found, stored_rows(paper)) == []


def test_an_unknown_recipe_is_an_input_error() -> None:
    with pytest.raises(InputError, match="must be one of"):
        read_recipe("nobody")
