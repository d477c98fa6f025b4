"""Results have short representations, tables and the figures of the reports."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from plotly.graph_objects import Figure

from capplan import InputError, SimulationResult, Slo, load_workload, report, simulate, simulate_detailed
from capplan.planner import SolverComparison, SolverResult
from tests.cli.conftest import ROOT
from tests.cli.examples import small_plan, write_inputs
from tests.cli.test_report import parsed

SETTINGS = {"a_max": 4, "s_max": 16, "duration_s": 60.0}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> SimulationResult:
    from capplan import load_profile

    workload = load_workload(write_inputs(tmp_path_factory.mktemp("inputs")))
    return simulate(workload, load_profile(str(workload.profile)), **SETTINGS)


def test_representations_are_short(result: SimulationResult) -> None:
    comparison = SolverComparison(
        "p", 4, 1, 0.1, 8, 1.0, (1,), 60.0, (SolverResult("capplan", gpus=2, instances=2),)
    )
    for each in (small_plan(), result, comparison):
        assert len(repr(each)) < 400
        assert repr(each).startswith(type(each).__name__ + "(")
        assert each._repr_html_().startswith("<table>")
    assert "gpus=3" in repr(small_plan())
    assert "&lt;b&gt;" in small_plan(base_model="./<b>")._repr_html_()
    assert comparison.to_pandas()["holds"].tolist() == [True]


def test_a_plan_draws_its_groups_against_the_bounds() -> None:
    plan = small_plan(slo=Slo(ttft_p99_s=5.0))
    figure = plan.plot()
    assert isinstance(figure, Figure)
    assert [list(trace.y) for trace in figure.data] == [["g0", "g1"]] * 4
    assert 5.0 in [shape.x0 for shape in figure.layout.shapes]
    table = plan.to_pandas()
    assert table["id"].tolist() == ["g0", "g1"]
    assert table["predicted.ttft_s.p99"].tolist() == [0.35, 0.35]


def test_a_simulation_draws_its_latencies(result: SimulationResult) -> None:
    figure = result.plot()
    assert [title.text for title in figure.layout.annotations] == ["TTFT", "TPOT", "ITL", "E2E"]
    assert figure.data[0].y[0] == result.ttft_s_mean
    assert result.to_pandas()["completed"] == result.completed


def test_results_are_written_as_pages(tmp_path: Path) -> None:
    report(small_plan(), tmp_path / "plan.html")
    assert "load / capacity" in parsed((tmp_path / "plan.html").read_text()).text
    workload = load_workload(write_inputs(tmp_path))
    details = {4: simulate_detailed(workload, str(workload.profile), **SETTINGS)}
    report(details, tmp_path / "simulation.html", workload=workload)
    assert "Over time" in parsed((tmp_path / "simulation.html").read_text()).text
    with pytest.raises(InputError, match="workload: is required"):
        report(details, tmp_path / "other.html")


def test_a_detailed_simulation_draws_its_course(tmp_path: Path) -> None:
    from capplan import load_profile

    workload = load_workload(write_inputs(tmp_path))
    detail = simulate_detailed(workload, load_profile(str(workload.profile)), **SETTINGS)
    assert len(detail.plot().data) == 10
    assert isinstance(detail.to_pandas(), pd.DataFrame)
    assert len(detail.to_pandas()) == detail.result.submitted


def test_results_load_no_figures_until_they_are_drawn() -> None:
    program = (
        "import capplan.planner, capplan.twin, sys; print('plotly' in sys.modules, 'jinja2' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]
