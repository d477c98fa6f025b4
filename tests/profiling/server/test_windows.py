"""Windows of events recover the known steps of a toy engine."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from capplan import Profile
from capplan.profiling.load._record import FINISHED, UNFINISHED, RequestOutcome
from capplan.profiling.server._closed_loop import ClosedLoopRequest
from capplan.profiling.server._profiler import window_rows
from capplan.twin.calibration import CalibrationOptions, CalibrationTables, calibrate
from tests.cli.examples import profile_document

RANKS = {1: 8, 2: 16, 3: 8}


@dataclass
class ToyRequest:
    model: int
    prompt: int
    output: int
    times: list[float] = field(default_factory=list)


@dataclass
class ToyEngine:
    """A closed loop of streams in steps: every running request gets a token at the end of each."""

    streams: int
    base_ms: float = 10.0
    ms_per_token: float = 0.05
    jitter_ms: float = 0.0
    merge: float = 0.0
    """Share of tokens that arrive with the next one."""

    def run(
        self, seconds: float, seed: int
    ) -> tuple[list[ClosedLoopRequest], NDArray[np.float64], list[int]]:
        """Return what a client saw, the ends of the steps, and the tokens of each."""
        rng = np.random.default_rng(seed)

        def new(at: int) -> ToyRequest:
            return ToyRequest(at % 4, int(rng.integers(5, 60)), int(rng.integers(10, 40)))

        running = [new(at) for at in range(self.streams)]
        everyone = list(running)
        now, ends, tokens = 0.0, [], []
        while now < seconds:
            step = sum(1 if each.times else each.prompt for each in running)
            now += (self.base_ms + self.ms_per_token * step) / 1e3
            ends.append(now)
            tokens.append(step)
            for at, each in enumerate(running):
                each.times.append(now)
                if len(each.times) == each.output:
                    running[at] = new(each.model)
                    everyone.append(running[at])
        late = self.jitter_ms / 1e3
        return [self._seen(each, rng, late) for each in everyone if each.times], np.array(ends), tokens

    def _seen(self, each: ToyRequest, rng: np.random.Generator, late: float) -> ClosedLoopRequest:
        times = each.times
        done = len(times) == each.output
        if self.merge and done:
            kept = rng.random(len(times)) >= self.merge
            kept[[0, -1]] = True
            times = [time for time, keep in zip(times, kept.tolist(), strict=True) if keep]
        seen = sorted(time + float(rng.random()) * late for time in times)
        kind = FINISHED if done else UNFINISHED
        outcome = RequestOutcome(0, kind, 0.0, seen[-1], seen, each.prompt, each.output if done else None)
        return ClosedLoopRequest(outcome, each.model, each.prompt, each.output)


@settings(max_examples=20)
@given(st.integers(6, 24), st.integers(0, 1000), st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.02]))
def test_rows_recover_the_steps_of_the_engine(
    streams: int, seed: int, jitter_ms: float, merge: float
) -> None:
    answered, ends, tokens = ToyEngine(streams, jitter_ms=jitter_ms, merge=merge).run(6.0, seed)
    edges = np.array([2.0, 4.0])
    (row,) = window_rows(answered, edges, RANKS, 512)
    inside = (ends > 2.0) & (ends <= 4.0)
    loose = 0.02 if jitter_ms or merge else 0.01
    assert row["steps"] == pytest.approx(inside.sum(), rel=loose)
    assert row["step_ms"] == pytest.approx(2e3 / inside.sum(), rel=loose)
    assert row["tokens"] == pytest.approx(np.mean(np.array(tokens)[inside]), rel=0.05)
    assert row["requests"] == pytest.approx(streams, rel=0.05)
    assert row["adapters"] == pytest.approx(min(3, max(0, streams - 1)), abs=0.2)
    assert row["decodes"] + row["prefills"] == pytest.approx(row["requests"])


@pytest.mark.parametrize("streams", [1, 3, 12])
def test_a_fit_to_the_rows_recovers_base_and_token_time(streams: int) -> None:
    """Calibration recovers base and time per token."""
    rows = []
    for seed, count in enumerate((streams, 2 * streams, 4 * streams)):
        answered, _, _ = ToyEngine(count).run(8.0, seed)
        rows += window_rows(answered, np.linspace(1.0, 7.0, 4), RANKS, 512)
    design = np.array([[1.0, row["tokens"]] for row in rows])
    (base_ms, per_token), *_ = np.linalg.lstsq(design, np.array([row["step_ms"] for row in rows]), rcond=None)
    assert base_ms == pytest.approx(10.0, rel=0.02)
    assert per_token == pytest.approx(0.05, rel=0.05)


def test_a_single_stream_shows_decode_steps_only() -> None:
    """The step of a lone prompt is not observable: its time and its tokens are left out."""
    answered, _, _ = ToyEngine(1).run(6.0, 0)
    (row,) = window_rows(answered, np.array([1.0, 5.0]), RANKS, None)
    assert row["step_ms"] == pytest.approx(10.05, rel=1e-6)
    assert (row["tokens"], row["prefills"]) == (pytest.approx(1.0, rel=0.01), 0.0)


@pytest.mark.parametrize("counted", [100, 130])
def test_kv_tokens_are_produced_ones_and_the_prompt_as_the_server_counted_it(counted: int) -> None:
    times = [1.0 + 0.1 * number for number in range(41)]
    outcome = RequestOutcome(0, FINISHED, 0.9, times[-1], times, counted, 41)
    (row,) = window_rows([ClosedLoopRequest(outcome, 1, 100, 41)], np.array([1.0, 5.0]), RANKS, None)
    assert row["kv_tokens"] == pytest.approx(counted + np.mean(np.arange(1, 41)))


def test_a_prompt_beyond_the_budget_takes_several_steps() -> None:
    answered, _, _ = ToyEngine(6).run(6.0, 0)
    (one,), (several,) = (window_rows(answered, np.array([1.0, 5.0]), RANKS, b) for b in (None, 16))
    assert several["prefills"] > 1.5 * one["prefills"]
    assert several["tokens"] == one["tokens"]


def test_ranks_are_those_of_the_models() -> None:
    answered, _, _ = ToyEngine(8).run(6.0, 0)
    (row,) = window_rows(answered, np.array([1.0, 5.0]), RANKS, None)
    assert row["max_rank"] == 16
    assert 0 < row["lora_decodes"] < row["decodes"]
    assert 8 * row["lora_decodes"] <= row["decode_rank_sum"] <= 16 * row["lora_decodes"]
    (base,) = window_rows(answered, np.array([1.0, 5.0]), {}, None)
    assert (base["adapters"], base["lora_decodes"], base["max_rank"]) == (0.0, 0.0, 0.0)


def test_windows_without_steps_give_no_rows() -> None:
    answered, _, _ = ToyEngine(2).run(2.0, 0)
    assert window_rows(answered, np.array([3.0, 4.0]), RANKS, None) == []
    assert window_rows([], np.array([3.0, 4.0]), RANKS, None) == []


def test_unfinished_requests_count_with_the_tokens_per_event_of_finished_ones() -> None:
    """A server with two tokens per event, and a request that outlasts the window."""
    times = [1.0 + 0.1 * number for number in range(41)]
    done = RequestOutcome(0, FINISHED, 0.9, times[-1], times, 100, 81)
    open_end = RequestOutcome(1, UNFINISHED, 0.9, times[-1], times)
    edges = np.array([1.0, 5.0])
    (row,) = window_rows(
        [ClosedLoopRequest(done, 1, 100, 81), ClosedLoopRequest(open_end, 2, 100, 500)], edges, RANKS, None
    )
    assert (row["steps"], row["decodes"]) == (pytest.approx(80.0), pytest.approx(2.0))
    (alone,) = window_rows([ClosedLoopRequest(open_end, 2, 100, 500)], edges, RANKS, None)
    assert alone["steps"] == pytest.approx(40.0)


def test_windows_calibrate_a_profile(tmp_path: Path) -> None:
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
