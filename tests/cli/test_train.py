"""`capplan train` writes a surrogate that can be read for its profile, and the same one for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

from capplan import load_profile
from capplan.models.surrogates.files import read_surrogate
from tests.cli.conftest import Run
from tests.cli.examples import profile_document


def test_training_writes_a_surrogate_of_the_profile(run: Run, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(profile_document()))
    files = [tmp_path / "one.npz", tmp_path / "two.npz"]
    for file in files:
        made = run("train", str(profile), "-o", str(file), "--scenarios", "64", "--workers", "1", "--json")
        assert made.exit_code == 0, made.stderr
        report = json.loads(made.stdout)
        assert 0 < report["scenarios"] <= 64
    first, second = (read_surrogate(file, load_profile(profile)) for file in files)
    assert all((a == b).all() for a, b in zip(first.throughput, second.throughput, strict=True))
    assert all((a == b).all() for a, b in zip(first.starvation, second.starvation, strict=True))


def test_nothing_is_simulated_for_a_file_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(profile_document()))
    refused = run("train", str(profile), "-o", str(tmp_path / "missing" / "x.npz"), "--scenarios", "1000000")
    assert refused.exit_code == 2
    assert "x.npz: cannot be written" in refused.stderr


def test_a_profile_cannot_lead_out_of_the_folder_of_surrogates(run: Run, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({**profile_document(), "name": "../../outside"}))
    refused = run("train", str(profile), "--scenarios", "64")
    assert refused.exit_code == 2
    assert "profile: name" in refused.stderr
    assert "../../outside" in refused.stderr
