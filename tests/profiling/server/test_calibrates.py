"""From windows of a toy engine to a profile: what a step takes comes out, and nothing is said of loads."""

from pathlib import Path

import numpy as np
import pandas as pd

from capplan.profiling.server.windows import window_rows
from capplan.spec import Profile
from capplan.twin.calibration import CalibrationOptions, CalibrationTables, calibrate
from tests.cli.examples import profile_document
from tests.profiling.server.test_windows import RANKS, ToyEngine


def test_steps_seen_from_outside_become_a_profile(tmp_path: Path) -> None:
    fixed = {"a_max": 4, "s_max": 16, "adapters_served": 3, "waiting": 0.0, "load_ms": 0.0}
    rows = []
    for streams in (4, 5, 6, 8, 10, 12, 14, 16, 20, 24):
        answered, _, _ = ToyEngine(streams).run(5.0, streams)
        found = window_rows(answered, np.linspace(0.5, 4.5, 4), RANKS, 512)
        rows += [{**fixed, **row, "run": f"b{streams}"} for row in found]
    pd.DataFrame(rows).to_parquet(tmp_path / "steps.parquet")
    base = Profile.model_validate(profile_document())
    made = calibrate(
        base, CalibrationTables(steps=str(tmp_path / "steps.parquet")), CalibrationOptions(workers=1)
    )
    assert made.steps is not None
    assert made.steps.score.held_out_error < 1.0
    assert made.profile.loading.value("serving_factor") == base.loading.value("serving_factor")
