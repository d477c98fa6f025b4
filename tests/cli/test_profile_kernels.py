"""`capplan profile kernels`: one tiny measurement, and what is refused."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run, error_line
from tests.cli.test_report import figures_of, parsed

pytest.importorskip("torch", reason="kernels are timed with torch (extra `engine`)")

TINY = ("profile", "kernels", "--grid", "tiny", "--hidden", "32")


@pytest.mark.long
def test_timings_fits_and_report_are_written_and_told(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    result = run(*TINY, "-o", folder, "--budget-s", "2", "--tolerance", "1000")
    assert result.exit_code == 0
    assert "toppings-mbgmv *" in result.stdout
    assert "explains it" in result.stdout
    assert {file.name for file in folder.iterdir()} == {
        "kernels.parquet",
        "provenance.json",
        "fits.json",
        "report.html",
    }
    page = (folder / "report.html").read_text()
    assert figures_of(page)
    parsed(page)

    told = json.loads(run(*TINY, "-o", folder, "--budget-s", "0", "--json").stdout)
    assert told["fits"] == json.loads((folder / "fits.json").read_text())
    forms = next(fit["forms"] for fit in told["fits"] if fit["kernel"] == "grouped" and fit["half"] == "both")
    assert {"r2", "held_out_r2", "smape", "held_out_smape", "coefficients"} == set(forms["additive"])
    assert told["spots"] == 44


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("--grid", "papers"), "--grid: must be one of paper"),
        (("--phases", "idle"), "--phases: must be among decode, prefill and crossover"),
        (("--hidden", "4k"), "--hidden: must be whole numbers"),
        (("--kernels", "bmm"), "--kernels: must be one of"),
        (("--dtype", "int4"), "--dtype: must be one of"),
        (("--device", "tpu"), "--device: must be"),
    ],
)
def test_mistakes_are_one_line(run: Run, tmp_path: Path, arguments: tuple[str, str], rule: str) -> None:
    assert rule in error_line(run(*TINY, "-o", tmp_path / "out", *arguments))
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_way_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    assert "must be a directory" in error_line(run(*TINY, "-o", tmp_path / "out"))
