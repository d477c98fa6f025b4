"""The calibration example recovers the profile of its tables."""

import runpy

import pandas as pd

from capplan.models.calibration import read_steps
from tests.examples.transcripts import EXAMPLES, recorded

FOLDER = EXAMPLES / "calibrate"


def test_the_record_shows_the_coefficients_of_the_tables() -> None:
    truth = runpy.run_path(str(FOLDER / "make_tables.py"))["TRUTH"]
    (step,) = recorded(FOLDER)
    found = {
        words[0].removeprefix("step_latency."): float(words[1])
        for words in (line.split() for line in step.output.splitlines())
        if words and words[0].startswith("step_latency.")
    }
    for name in ("base_ms", "ms_per_ktoken", "ms_per_slot_rank16", "ms_per_adapter"):
        assert abs(found[name] / truth[name] - 1) < 0.05, name


def test_both_tables_are_of_the_same_runs() -> None:
    steps = read_steps(FOLDER / "steps.csv")
    runs = pd.read_csv(FOLDER / "runs.csv")
    assert set(runs["run"].astype(str)) <= set(steps.run_names)
