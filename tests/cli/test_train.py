"""`capplan train`: data made or taken as it is, surrogates that can be read, or one line and nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest

from capplan import load_profile
from capplan.cli.train import DataOptions, data_folder
from capplan.models.surrogates._files import read_surrogate
from capplan.models.training import read_tables
from capplan.twin.dataset import generate_dataset
from tests.cli.conftest import Run, error_line
from tests.cli.examples import profile_document
from tests.cli.test_report import parsed

pytestmark = pytest.mark.long

Make: TypeAlias = Callable[..., Path]
DESIGNS = ("paper-grid", "space-filling", "near-starvation")
QUICK = ("--models", "forest", "--budget", 1, "--workers", 1)


@pytest.fixture
def make(profile: Path, tmp_path: Path) -> Make:
    """Make finished data of short simulations, which `capplan train` has no option for."""

    def made(scenarios: int, duration_s: float) -> Path:
        folder = tmp_path / "data"
        folder.mkdir()
        for design in DESIGNS:
            generate_dataset(
                folder / design,
                load_profile(profile),
                design=design,
                scenarios=scenarios,
                duration_s=duration_s,
                workers=1,
            )
        return folder

    return made


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
def test_a_profile_becomes_three_surrogates_and_a_report(
    run: Run, make: Make, profile: Path, tmp_path: Path
) -> None:
    data, out, page = make(120, 60.0), tmp_path / "made" / "here", tmp_path / "report.html"
    before = bytes_of(data)
    places = ("--data", data, "--output", out, "--html", page)
    done = run("train", profile, *places, *QUICK[:2], "--budget", 2, *QUICK[4:], "--json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert done.stderr.splitlines()[-1].startswith("some data is not of 3,600 s")
    (data / "search-seed0.journal").unlink()
    assert bytes_of(data) == before
    loaded = load_profile(profile)
    known = read_tables([data / design for design in DESIGNS])
    assert sorted(path.name for path in out.iterdir()) == ["best.npz", "forest.npz", "tree.json"]
    for kind, file in told["files"].items():
        assert Path(file["path"]).stat().st_size == file["bytes"]
        surrogate = read_surrogate(Path(file["path"]), loaded, kind)
        assert surrogate.report == told["report"]
        answers = surrogate.predict_many(known.features)
        assert answers.in_range.all()
        right = (answers.starvation_probability >= 0.5) == known.starved
        assert right.mean() > max(known.starved.mean(), 1 - known.starved.mean())
    assert sum(told["report"]["scenarios"].values()) == len(known)
    assert list(told["data"]) == [str(data / design) for design in DESIGNS]
    text = parsed(page.read_text(encoding="utf-8")).text
    for shown in (loaded.name, "physics", "near the edge, space-filling", "throughput = "):
        assert shown in text
    assert "Not all were simulated for 3,600 s" in text


@pytest.mark.long
def test_only_the_kinds_asked_for_are_trained(run: Run, make: Make, profile: Path, tmp_path: Path) -> None:
    data, out = make(120, 60.0), tmp_path / "out"
    flags = ("--data", data, "--output", out, "--kinds", "best", "--models", "xgboost", "--json")
    done = run("train", profile, *flags, "--budget", 1, "--workers", 1)
    assert done.exit_code == 0, done.stderr
    assert [path.name for path in out.iterdir()] == ["best.npz"]
    assert {each["name"] for each in json.loads(done.stdout)["report"]["models"]} == {"xgboost", "physics"}
    assert read_surrogate(out / "best.npz", load_profile(profile), "best").report["front"] == {}


def test_data_is_made_where_there_is_none_and_then_stays(run: Run, profile: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    numbers = ("--scenarios", 3, "--grid-scenarios", 2, "--edge-scenarios", 4)
    more = (*numbers, "--seed", 5, "--output", out, *QUICK)
    for _ in range(2):
        few = error_line(run("train", profile, "--data", data, *more))
        assert "at least 200 rows are needed to train" in few
        found = {design: json.loads((data / design / "manifest.json").read_text()) for design in DESIGNS}
        asked = {design: each["asked"] for design, each in found.items()}
        assert [each["answered"] is None for each in found.values()] == [False] * 3
        assert {design: each["scenarios"] for design, each in asked.items()} == {
            "paper-grid": 2,
            "space-filling": 3,
            "near-starvation": 4,
        }
        assert all((each["seed"], each["duration_s"]) == (5, 3600.0) for each in asked.values())
        before = bytes_of(data)
    assert bytes_of(data) == before
    assert not out.exists()


def test_each_profile_and_seed_has_data_of_its_own(profile: Path, tmp_path: Path) -> None:
    loaded = load_profile(profile)
    options = DataOptions(None, {}, seed=0)
    slower = loaded.step_latency.coefficients["base_ms"].value + 1.0
    document = profile_document()
    document["step_latency"]["coefficients"]["base_ms"]["value"] = slower
    (tmp_path / "slower.json").write_text(json.dumps(document))
    other = load_profile(tmp_path / "slower.json")
    folders = [data_folder(each, replace(options, seed=seed)) for each in (loaded, other) for seed in (0, 1)]
    assert len(set(folders)) == 4
    assert len({folder.parent for folder in folders}) == 1
    assert data_folder(loaded, replace(options, folder=tmp_path)) == tmp_path


def _another_profile(data: Path, profile: Path) -> None:
    document = profile_document()
    document["step_latency"]["coefficients"]["base_ms"]["value"] = 9.0
    profile.write_text(json.dumps(document))


def _damage(data: Path, profile: Path) -> None:
    shard = data / "space-filling" / "part-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-20])


def _nothing(data: Path, profile: Path) -> None:
    pass


def _as_one_dataset(data: Path, profile: Path) -> None:
    (data / "manifest.json").write_bytes((data / "paper-grid" / "manifest.json").read_bytes())


@pytest.mark.parametrize(
    ("change", "more", "told"),
    [
        (_nothing, (), "at least 200 rows are needed to train"),
        (_another_profile, (), "was made with another profile"),
        (_damage, (), "part-00000.parquet: damaged"),
        (_nothing, ("--scenarios", 40), "duration_s is 5.0 there"),
        (_as_one_dataset, (), "is a dataset itself; give the directory that holds paper-grid, space"),
    ],
)
def test_data_that_does_not_do_is_one_line_and_nothing_is_written(
    run: Run,
    make: Make,
    profile: Path,
    tmp_path: Path,
    change: Callable[[Path, Path], None],
    more: tuple[object, ...],
    told: str,
) -> None:
    data = make(20, 5.0)
    change(data, profile)
    before = bytes_of(tmp_path)
    places = ("--output", tmp_path / "out", "--html", tmp_path / "report.html")
    assert told in error_line(run("train", profile, "--data", data, *places, *QUICK, *more))
    assert bytes_of(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--models", "forest,lasso"), "--models: must be of forest, xgboost (got 'lasso')"),
        (("--models", "knn"), "--models: must be of forest, xgboost; compared by capplan reproduce twin"),
        (("--paper-space",), "--paper-space: the paper's grids are searched by capplan reproduce twin"),
        (("--kinds", "best,worst"), "--kinds: must be of best, forest, tree (got 'worst')"),
        (("--kinds", "best", "--html", "x.html"), "--kinds: must be left out with --html"),
        (("--html", "missing/x.html"), "x.html: cannot be written: No such file"),
        (("--html", "best.npz"), "--html: must be another file than a surrogate's"),
        (("--output", "profile.json"), "best.npz: cannot be written"),
        (("--data", "profile.json"), "profile.json"),
    ],
)
def test_nothing_is_simulated_for_what_cannot_be_done(
    run: Run,
    profile: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = bytes_of(tmp_path)
    refused = run("train", profile, "--data", "data", "--output", ".", "--scenarios", 10**9, *options)
    assert told in error_line(refused)
    assert bytes_of(tmp_path) == before


def test_a_profile_cannot_lead_out_of_the_folder_of_surrogates(run: Run, profile: Path) -> None:
    profile.write_text(json.dumps({**profile_document(), "name": "../../outside"}))
    line = error_line(run("train", profile))
    assert "profile: name" in line
    assert "../../outside" in line
