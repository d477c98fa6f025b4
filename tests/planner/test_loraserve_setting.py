"""Benchmark of LoRAServe's setting: stand-in profile, rates, and routing by shares."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.loraserve_setting import PRECISION, highest, main, rates_cell
from benchmarks.loraserve_systems import (
    PROMPT_TOKENS,
    Load,
    at_rate,
    base_prefill_ms,
    p95_ttft_s,
    routed,
    shares_of,
    standin,
    stepped,
    ttft_s,
)
from capplan import Adapter, Assignment, Lengths, Profile, Workload
from capplan.models.step_latency import StepRanks, coefficient_array, latency_code, rank_ms
from capplan.planner.problem import AdapterShare
from capplan.spec import Kernel
from capplan.twin.trace import NEVER, STATUS_REJECTED
from capplan.workload import Requests

POINTS = {8: 9000.0, 128: 4000.0}


def load_of(arrival_s: list[float], adapter: list[int], duration_s: float, profile: Profile) -> Load:
    workload = Workload(
        base_model="meta-llama/Llama-3.1-8B-Instruct",
        adapters=(Adapter(name="a", rank=8, rate_rps=1.0), Adapter(name="b", rank=128, rate_rps=3.0)),
        prompt_tokens=Lengths(mean=100.0),
        output_tokens=Lengths(mean=50.0),
    )
    count = len(arrival_s)
    requests = Requests(
        (np.array(arrival_s) * 1e9).astype(np.int64),
        np.array(adapter, np.int32),
        np.full(count, 100, np.int32),
        np.full(count, 50, np.int32),
    )
    return Load(workload, profile, requests, duration_s, seed=0)


@pytest.mark.parametrize("ratio", [1.2, 2.7])
def test_prefill_at_rank_128_takes_the_published_multiple_of_rank_8(profile: Profile, ratio: float) -> None:
    made = standin(profile, ratio)
    step = made.step_latency
    assert made.engine.kernel is Kernel.BGMV

    def prefill_ms(rank: int) -> float:
        nobody = StepRanks(0.0, 1.0, 0.0, 1.0, float(PROMPT_TOKENS), rank, 0.0, rank, PROMPT_TOKENS * rank)
        form = latency_code(step.form, made.engine.kernel)
        return base_prefill_ms(step) + rank_ms(form, coefficient_array(step), 128.0, nobody)

    assert prefill_ms(128) / prefill_ms(8) == pytest.approx(ratio)


def test_slots_and_adapters_are_free_in_the_stand_in(profile: Profile) -> None:
    step = standin(profile).step_latency
    assert not any(c.value for name, c in step.coefficients.items() if "slot" in name or "adapter" in name)
    assert step.value("base_ms") == profile.step_latency.value("base_ms")


@given(st.floats(0.2, 500.0))
def test_the_highest_rate_is_found_to_one_percent(limit: float) -> None:
    found = highest(lambda rps: rps <= limit, 16.0)
    assert found <= limit <= found * (1.0 + PRECISION) * (1.0 + 1e-9)


def test_a_system_that_never_holds_has_rate_0() -> None:
    assert highest(lambda rps: False, 16.0) == 0.0
    assert rates_cell([0.0, 0.0], [20.0, 22.0]).endswith("never")
    assert rates_cell([10.0, 14.0], [20.0, 22.0]) == "12.0 (10.0 to 14.0), 1.75 x"


def test_requests_are_routed_by_the_shares_at_their_arrival(profile: Profile) -> None:
    count = 20_000
    load = load_of(np.linspace(0.0, 99.99, count).tolist(), [1, 2] * (count // 2), 100.0, profile)
    before, after = [{"a": 1.0, "b": 0.25}, {"b": 0.75}], [{"b": 1.0}, {"a": 1.0}]
    server = routed(load, [before, after])
    early = load.requests.arrival_ns < 50e9
    of_a = load.requests.adapter == 1
    assert set(server[early & of_a]) == {0}
    assert server[early & ~of_a].mean() == pytest.approx(0.75, abs=0.02)
    assert set(server[~early & of_a]) == {1}
    assert set(server[~early & ~of_a]) == {0}


def test_a_placement_depends_on_earlier_steps_only(profile: Profile) -> None:
    """Rank 8 alone in the first step and rank 128 alone in the second show one step later."""
    load = load_of([1.0, 2.0, 11.0, 12.0], [1, 1, 2, 2], 30.0, profile)
    placements, moved = stepped(load, POINTS, 2, 10.0, literal_leftovers=False)
    assert len(placements) == len(moved) == 3
    assert moved[0] == 0
    homes = [[sum(name in server for server in shares) for name in ("a", "b")] for shares in placements]
    assert homes[0] == [2, 2], "declared: both have traffic"
    assert homes[1:] == [[2, 1], [1, 2]], "who asks has both servers, who is idle lives on one"


def test_ttft_of_waiting_and_rejected_requests() -> None:
    times = ttft_s(
        np.array([0, 10, 20]) * 10**9,
        np.array([3 * 10**9, NEVER, NEVER]),
        np.array([0, 0, STATUS_REJECTED], np.int8),
        100 * 10**9,
    )
    assert times.tolist() == [3.0, 90.0, np.inf]


def test_the_percentile_excludes_the_last_requests(profile: Profile) -> None:
    load = load_of([float(i) for i in range(100)], [1] * 100, 100.0, profile)
    waits = np.where(np.arange(100) < 90, 1.0, 99.0)
    assert p95_ttft_s(load, waits, 10.0) == 1.0
    waits[:6] = 50.0
    assert p95_ttft_s(load, waits, 10.0) == 50.0


def test_rates_scale_to_a_total(profile: Profile) -> None:
    faster = at_rate(load_of([0.0], [1], 1.0, profile).workload, 10.0)
    assert [adapter.rate_rps for adapter in faster.adapters] == pytest.approx([2.5, 7.5])


def test_assignments_become_shares_of_all_servers() -> None:
    shares = (AdapterShare("a", 8, 0.5, 0.5, 0), AdapterShare("b", 8, 1.0))
    assert shares_of((Assignment(shares, 2),), 3) == [{"a": 0.5, "b": 1.0}, {}, {}]


def test_a_missing_trace_is_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--traces", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert not (tmp_path / "out").exists()
