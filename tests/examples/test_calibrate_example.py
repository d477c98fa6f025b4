"""The calibration example prints its recorded output and recovers the profile of its tables."""

import runpy

import pandas as pd
import pytest

from capplan.models.calibration import read_steps
from tests.examples.test_examples import EXAMPLES, assert_as_recorded, printed

pytestmark = pytest.mark.process

FOLDER = EXAMPLES / "calibrate"
MODEL = ("--model-config", "examples/calibrate/config.json", "--base-model", "example/3b")
GPU = ("--gpu", "Example 24GB", "--gpu-memory-gib", "24")


def test_the_example_prints_the_recorded_calibration() -> None:
    table = ("--steps", "examples/calibrate/steps.csv", "-o", "/dev/null")
    output = printed("-m", "capplan", "calibrate", *MODEL, *GPU, *table)
    assert_as_recorded(FOLDER / "calibrate.out", output)


def test_the_record_shows_the_coefficients_of_the_tables() -> None:
    truth = runpy.run_path(str(FOLDER / "make_tables.py"))["TRUTH"]
    record = (FOLDER / "calibrate.out").read_text(encoding="utf-8")
    found = {
        words[0].removeprefix("step_latency."): float(words[1])
        for words in (line.split() for line in record.splitlines())
        if words and words[0].startswith("step_latency.")
    }
    for name in ("base_ms", "ms_per_ktoken", "ms_per_slot_rank16", "ms_per_adapter"):
        assert abs(found[name] / truth[name] - 1) < 0.05, name


def test_both_tables_are_of_the_same_runs() -> None:
    steps = read_steps(FOLDER / "steps.csv")
    runs = pd.read_csv(FOLDER / "runs.csv")
    assert set(runs["run"].astype(str)) <= set(steps.run_names)
