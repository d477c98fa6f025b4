import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import Lengths, SimulationResult, errors, load_profile, simulate
from capplan.models._step_latency import DIGITAL_TWIN
from capplan.serving import Limits
from capplan.spec import LengthPairs
from capplan.twin import Scenario
from capplan.twin.instance import STATUS_REJECTED, run, summarize
from capplan.twin.instance._scenario import NS_PER_MS, Costs
from capplan.twin.instance._trace import STATUS_RUNNING, gap_bin, gap_percentiles_ms, new_trace
from capplan.workload import Requests
from tests.oracle import run_reference, simulate_with_reference
from tests.twin.examples import profile, workload

SETTINGS: dict[str, Any] = {"a_max": 4, "s_max": 8, "duration_s": 60.0, "max_model_len": 512}


def answer(**changes: Any) -> SimulationResult:
    result = simulate(workload(), profile(), **(SETTINGS | changes))
    return dataclasses.replace(result, wall_s=0.0)


# Every step takes 10 ms. One slot; to fill it takes 6 ms, and a sixth of that again while no slot is free:
#   request  arrives  adapter  prompt  output   first token  last token
#      0        0        1        4       3         17           37
#      1        0        2        4       2         74           84     waits for the slot
#      2       15        1        4       4         27           57     overtakes request 1
#      3       90        1       20       5     too long: rejected
#      4       95        1        4       9        112          (192)  runs when the time is over
def hand_computed() -> Scenario:
    return Scenario(
        requests=Requests(
            arrival_ns=np.array([0, 0, 15, 90, 95]) * NS_PER_MS,
            adapter=np.array([1, 2, 1, 1, 1], np.int32),
            prompt_tokens=np.array([4, 4, 4, 20, 4], np.int32),
            output_tokens=np.array([3, 2, 4, 5, 9], np.int32),
        ),
        limits=Limits(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=16,
            max_loras=1,
            max_cpu_loras=2,
            block_size=4,
            watermark_blocks=0,
            long_prefill_tokens=0,
            reserve_full_sequence=0,
        ),
        num_blocks=64,
        costs=Costs(
            form=DIGITAL_TWIN.code,
            coefficients=np.array([0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 10.0]),
            a_max=1,
            s_max=8,
            slots_per_adapter=0.5,
            adapters_served=2,
            load_ns=np.array([0, 6, 6]) * NS_PER_MS,
            disk_ns=np.array([0, 0, 0]),
            rank=np.array([0, 8, 8]),
            uses_ranks=False,
            uses_decode_ranks=False,
            pages=np.array([0, 0, 0]),
        ),
        horizon_ns=120 * NS_PER_MS,
        max_in_flight=8,
    )


@pytest.mark.parametrize("runner", [run, run_reference])
def test_a_case_computed_by_hand(runner: Any) -> None:
    scenario = hand_computed()
    trace = runner(scenario)
    assert (trace.first_ns / NS_PER_MS).tolist() == pytest.approx([17, 74, 27, 0, 112], abs=1.1e-6)
    assert (trace.finish_ns / NS_PER_MS).tolist() == pytest.approx([37, 84, 57, 0, 0], abs=1.1e-6)
    assert trace.status.tolist() == [0, 0, 0, STATUS_REJECTED, STATUS_RUNNING]
    result = summarize(scenario, trace, request_overhead_ms=2.0)
    assert (result.submitted, result.completed, result.rejected, result.adapter_loads) == (5, 3, 1, 3)
    # 7 + 6 + 8 tokens completed, 4 + 5 rejected, 4 + 9 still in execution: in neither side of the fraction.
    tokens = 7 + 6 + 8
    assert result.throughput_tok_s == pytest.approx(tokens / 0.12)
    assert result.input_tok_s == pytest.approx(12 / 0.12)
    assert result.output_tok_s == pytest.approx(9 / 0.12)
    assert result.served_fraction == pytest.approx(tokens / (tokens + 20 + 1))
    assert result.starved
    ttft = np.array([17, 74, 12]) + 2.0
    assert result.ttft_s_mean == pytest.approx(ttft.mean() / 1e3)
    assert result.ttft_s_mean_charged == pytest.approx((ttft.sum() + 2 * 120) / 5 / 1e3)
    e2e = np.array([37, 84, 42]) + 2.0
    assert result.e2e_s_mean == pytest.approx(e2e.mean() / 1e3)
    assert result.tpt_ms_mean == pytest.approx((e2e / [3, 2, 4]).mean())
    assert result.itl_ms_mean == pytest.approx(10.0)
    assert result.tpot_ms_p99 == pytest.approx(10.0)
    assert result.itl_ms_p99 == pytest.approx(10.0, rel=0.006)
    assert result.load_s == pytest.approx(0.021)


def test_the_same_seed_gives_the_same_result_and_another_one_does_not() -> None:
    assert answer(seed=3) == answer(seed=3)
    assert answer(seed=3) != answer(seed=4)


def test_simulate_gives_equal_results_with_the_compiled_and_the_reference_twin() -> None:
    settings = SETTINGS | {"a_max": 2, "max_num_seqs": 3, "max_num_batched_tokens": 40}
    settings |= {"max_in_flight": 20, "max_cpu_loras": 3}
    busy = workload(adapters=5, rate_rps=0.6)
    ours = simulate(busy, profile(load_ms=3, disk_ms=7), **settings)
    theirs = simulate_with_reference(busy, profile(load_ms=3, disk_ms=7), **settings)
    assert ours.disk_loads > 0
    assert dataclasses.replace(ours, wall_s=0.0) == dataclasses.replace(theirs, wall_s=0.0)


def test_an_idle_engine_serves_everything_at_the_speed_of_its_steps() -> None:
    result = answer(duration_s=600.0)
    assert result.itl_ms_mean == pytest.approx(10.0, rel=1e-6)
    assert result.served_fraction > 0.999
    assert not result.starved
    assert result.throughput_tok_s == pytest.approx(result.offered_tok_s, rel=0.01)
    assert result.ttft_s_p50 <= 0.02


def test_an_overloaded_engine_starves_and_queues() -> None:
    result = simulate(workload(rate_rps=20.0), profile(), **(SETTINGS | {"max_num_seqs": 4}))
    assert result.starved
    assert result.waiting_max > 100
    assert result.running_max == 4
    assert result.ttft_s_mean_charged > result.ttft_s_mean


def test_more_slots_do_not_serve_less_where_slots_bind() -> None:
    busy = workload(adapters=16, rate_rps=1.5, output=160)
    few, many = (simulate(busy, profile(), **(SETTINGS | {"a_max": a})) for a in (1, 16))
    assert few.starved
    assert not many.starved


def test_without_requests_all_metrics_are_zero_or_nan() -> None:
    result = simulate(workload(rate_rps=0.0), profile(), **SETTINGS)
    assert (result.submitted, result.throughput_tok_s, result.served_fraction, result.starved) == (
        0,
        0.0,
        1.0,
        False,
    )
    assert math.isnan(result.ttft_s_mean)


def test_slots_that_leave_no_room_are_infeasible() -> None:
    with pytest.raises(errors.InfeasibleError) as caught:
        simulate(workload(), load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5"), a_max=900, s_max=32)
    assert caught.value.reason == "memory"
    assert "900" in str(caught.value)


@settings(max_examples=20)
@given(st.lists(st.integers(10**5, 10**11), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_gap_quantiles_ascend_and_are_exact_to_half_a_percent(gaps: list[int], quantile: float) -> None:
    bins = new_trace(requests=0).gaps
    for gap in gaps:
        bins[gap_bin(gap)] += 1
    exact = sorted(gaps)[math.ceil(quantile * len(gaps)) - 1] / 1e6
    assert gap_percentiles_ms(bins, (100 * quantile,))[0] == pytest.approx(exact, rel=0.0051)
    found = list(gap_percentiles_ms(bins, (50, 90, 95, 99)))
    assert found == sorted(found)


def test_a_drawn_prompt_leaves_room_for_a_token() -> None:
    """Drawn lengths end at max_model_len; a prompt of that length would be rejected."""
    long = workload().replace(prompt_tokens=Lengths(mean=100, std=200), output_tokens=Lengths(mean=8))
    result = simulate(long, profile(step_ms=1.0), **SETTINGS)
    assert result.submitted > 0
    assert result.rejected == 0


@pytest.mark.parametrize("lengths", ["means", "pairs"])
def test_lengths_beyond_max_model_len_are_refused(lengths: str) -> None:
    too_long = workload().replace(prompt_tokens=Lengths(mean=400), output_tokens=Lengths(mean=400))
    if lengths == "pairs":
        pairs = LengthPairs.from_arrays(np.array([400, 500]), np.array([400, 500]))
        too_long = workload().replace(length_pairs=pairs)
    with pytest.raises(errors.InputError, match=r"^max_model_len: must .*\(got 512\)$"):
        simulate(too_long, profile(), **SETTINGS)
