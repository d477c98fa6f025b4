"""The threshold between token-wise and tiled LoRA kernels, from tables of timings to the profile."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import InputError, load_profile
from capplan.models import COLUMNS, crossover
from capplan.profiling.validation._loop import ClosedLoop, LoopSettings
from capplan.spec import Profile
from capplan.twin.calibration import CalibrationTables, calibrate
from tests.models.test_kernel_fits import batches

TOKENS = (1, 2, 4, 8, 16, 32, 64)
TIMES = st.lists(st.tuples(st.floats(1.0, 100.0), st.floats(1.0, 100.0)), min_size=7, max_size=7)


def timings(times_us: list[tuple[float, float]], phase: str = "crossover") -> pd.DataFrame:
    """Return a table of (MBGMV, SGMV) times by tokens per adapter, half of each in each half."""
    rows = batches(0, number=len(TOKENS)).assign(
        phase=phase, case=[str(each) for each in TOKENS], adapters=2, tokens=[2 * each for each in TOKENS]
    )
    halves = [
        rows.assign(kernel=kernel, half=half, median_us=[pair[at] / 2 for pair in times_us])
        for at, kernel in enumerate(("mbgmv", "sgmv"))
        for half in ("shrink", "expand")
    ]
    return pd.concat(halves, ignore_index=True)[list(COLUMNS)]


@given(TIMES)
def test_no_other_threshold_has_a_lower_mean_loss(times_us: list[tuple[float, float]]) -> None:
    found = crossover(timings(times_us))
    assert found is not None
    losses = {
        least: [
            pair[tokens >= least] / min(pair) - 1.0 for tokens, pair in zip(TOKENS, times_us, strict=True)
        ]
        for least in (*TOKENS, 128)
    }
    assert found.sgmv_from_tokens in losses
    assert found.mean_loss == pytest.approx(min(map(np.mean, losses.values())))
    assert found.max_loss == pytest.approx(max(losses[found.sgmv_from_tokens]))
    assert found.cases == len(TOKENS)


def test_tiles_that_never_win_are_never_used() -> None:
    found = crossover(timings([(1.0, 2.0)] * 7))
    assert found is not None
    assert found.sgmv_from_tokens > max(TOKENS)
    assert found.max_loss == 0.0


def test_calibration_keeps_the_measured_threshold_in_the_profile(tmp_path: Path) -> None:
    base = load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5")
    file = tmp_path / "kernels.parquet"
    timings([(float(tokens), 10.0) for tokens in TOKENS]).to_parquet(file)
    made = calibrate(base, CalibrationTables(kernels=str(file))).profile
    assert made.engine.sgmv_from_tokens == 16
    assert Profile.model_validate_json(made.model_dump_json()) == made
    assert base.engine.sgmv_from_tokens is None
    assert "sgmv_from_tokens" not in base.model_dump_json()


def test_the_profile_of_a_campaign_keeps_its_crossover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, commands = ClosedLoop(tmp_path, LoopSettings()), []
    monkeypatch.setattr(loop, "_run", lambda *words: commands.append(words))
    loop.calibrate()
    file = tmp_path / "kernels" / "kernels.parquet"
    file.parent.mkdir()
    timings([(2.0, 1.0)] * 7).to_parquet(file)
    loop.calibrate()
    assert [("--kernels", str(file)) == words[-2:] for words in commands] == [False, True]


def test_a_table_without_both_kernels_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "kernels.parquet"
    timings([(1.0, 2.0)] * 7, phase="prefill").to_parquet(file)
    base = load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5")
    with pytest.raises(InputError, match="phase crossover"):
        calibrate(base, CalibrationTables(kernels=str(file)))
