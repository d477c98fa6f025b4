import dataclasses
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import Adapter, Slo, Workload, simulate, simulate_detailed
from capplan.spec import Trace, grouped_latency_stats
from capplan.twin import DetailedResult, Scenario
from capplan.twin.instance import FINISHED, REJECTED, STATUSES, WAITING, run
from capplan.twin.instance import _trace as t
from capplan.twin.instance._details import RUNNING, bucket_count, request_table
from tests.twin.examples import profile, workload
from tests.twin.scenarios import scenarios, seeded_scenario
from tests.twin.test_simulate import hand_computed

STATISTICS = ("mean", "p50", "p90", "p95", "p99")
BUSY: dict[str, Any] = {
    "a_max": 2,
    "s_max": 16,
    "duration_s": 60.0,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_in_flight": 12,
    "max_cpu_loras": 4,
}
EASY: dict[str, Any] = {"a_max": 6, "s_max": 16, "duration_s": 60.0, "max_model_len": 512}


def mixed(**changes: Any) -> Workload:
    """Six adapters of two ranks, one of them idle."""
    adapters = [Adapter(name=f"a{i}", rank=(8, 16)[i % 2], rate_rps=4.0 * (i < 5)) for i in range(6)]
    return workload().replace(adapters=adapters, **changes)


@cache
def busy() -> DetailedResult:
    """An engine with more to do than it can: requests wait, are rejected, and load adapters."""
    return simulate_detailed(mixed(), profile(load_ms=30, disk_ms=90, request_ms=5), **BUSY)


def test_detailed_results_equal_those_of_simulate() -> None:
    plain = simulate(mixed(), profile(load_ms=30, disk_ms=90, request_ms=5), **BUSY)
    assert dataclasses.replace(busy().result, wall_s=0.0) == dataclasses.replace(plain, wall_s=0.0)
    assert plain.rejected > 0
    assert plain.disk_loads > 0


@given(scenarios())
def test_recording_details_changes_nothing_else(scenario: Scenario) -> None:
    plain, detailed = run(scenario._replace(buckets=0)), run(scenario._replace(buckets=7))
    for field in ("first_ns", "finish_ns", "stalled_ns", "status", "gaps", "sums"):
        np.testing.assert_array_equal(getattr(plain, field), getattr(detailed, field))
    for field in plain.counts.dtype.names:
        assert plain.counts[field] == detailed.counts[field] or field.startswith("bucket")


@given(scenarios(), st.integers(1, 30))
def test_buckets_add_up_to_the_whole(scenario: Scenario, buckets: int) -> None:
    trace = run(scenario._replace(buckets=buckets))
    series = trace.series
    assert series.steps.sum() == trace.counts.steps
    assert series.loads.sum() == trace.counts.adapter_loads
    assert series.load_ns.sum() == trace.counts.load_ns
    for integral in ("busy_ns", "running_ns", "waiting_ns", "kv_token_ns"):
        assert series[integral].sum() == trace.sums[integral]


@given(scenarios())
def test_every_load_and_admission_belongs_to_an_adapter(scenario: Scenario) -> None:
    trace = run(scenario._replace(buckets=3))
    seen = trace.adapters
    assert seen.loads.sum() == trace.counts.adapter_loads
    assert np.all(seen.hits <= seen.admissions)
    admitted = trace.admitted_ns != t.NEVER
    assert np.all(admitted[trace.first_ns != t.NEVER])
    assert np.all(trace.admitted_ns[admitted] >= scenario.requests.arrival_ns[admitted])
    assert seen.admissions.sum() >= admitted.sum()
    begun = trace.first_ns != t.NEVER
    assert np.all(trace.held_up_ns[begun] >= 0)
    assert np.all(trace.held_up_ns[begun] <= (trace.first_ns - trace.admitted_ns)[begun])


def test_the_table_of_a_case_computed_by_hand() -> None:
    scenario = hand_computed()._replace(buckets=4)
    two = workload(adapters=2)
    table = request_table(two, scenario, run(scenario), 0.002, np.array([0.037, 0.010, 0.020]))
    assert [STATUSES[code] for code in table.status] == [
        "finished",
        "finished",
        "finished",
        "rejected",
        "running",
    ]
    nan = math.nan
    expected = {
        "admitted_s": [0.000, 0.057, 0.017, nan, 0.095],
        "first_token_s": [0.017, 0.074, 0.027, nan, 0.112],
        "finish_s": [0.037, 0.084, 0.057, nan, nan],
        "queue_s": [0.000, 0.057, 0.002, nan, 0.000],
        "load_wait_s": [0.007, 0.007, 0.000, nan, 0.007],
        "ttft_s": [0.019, 0.076, 0.014, nan, 0.019],
        "e2e_s": [0.039, 0.086, 0.044, nan, nan],
        "tpot_ms": [10.0, 10.0, 10.0, nan, nan],
        "tpt_ms": [13.0, 43.0, 11.0, nan, nan],
        "slowdown": [1.0, 86 / 12, 2.0, nan, nan],
    }
    for name, values in expected.items():
        assert getattr(table, name) == pytest.approx(values, nan_ok=True), name


def test_waits_and_steps_add_up_to_the_time_to_the_first_token() -> None:
    """Every step takes 10 ms, so a TTFT without waits and loads is a multiple of that."""
    table = busy().requests
    begun = ~np.isnan(table.first_token_s)
    steps = (table.ttft_s - 0.005 - table.queue_s - table.load_wait_s)[begun] / 0.010
    assert np.all(steps >= 1 - 1e-6)
    assert steps == pytest.approx(np.round(steps), abs=1e-6)


def test_a_request_that_is_alone_is_not_slowed_down() -> None:
    columns = {"adapter": ["a0", "a0", "a1"], "prompt_tokens": [64, 500, 64], "output_tokens": [1, 12, 30]}
    alone = workload().replace(trace=Trace.from_arrays([0.0, 5.0, 10.0], **columns))
    settings: dict[str, Any] = {"a_max": 4, "s_max": 8, "duration_s": 20.0, "max_num_batched_tokens": 300}
    table = simulate_detailed(alone, profile(request_ms=7), **settings, max_model_len=512).requests
    # 500 prompt tokens take two steps of at most 300.
    assert table.isolated_s == pytest.approx([0.017, 0.137, 0.307])
    assert table.slowdown == pytest.approx([1.0, 1.0, 1.0])
    loads = simulate_detailed(alone, profile(load_ms=50), **settings, max_model_len=512).requests
    assert loads.isolated_s == pytest.approx([0.010, 0.130, 0.300])  # its adapter is resident
    assert loads.slowdown == pytest.approx([6.0, 1.0, 350 / 300])


def test_isolated_long_requests_do_not_overlap() -> None:
    """Alone, one after the other, means after the other: here each takes longer than the first guess."""
    columns = {"adapter": ["a0"] * 3, "prompt_tokens": [8, 9, 10], "output_tokens": [20, 30, 40]}
    slow = workload().replace(trace=Trace.from_arrays([0.0, 0.0, 0.0], duration_s=1.0, **columns))
    table = simulate_detailed(slow, profile(step_ms=20_000), a_max=4, s_max=8, duration_s=10_000).requests
    assert table.isolated_s == pytest.approx([400.0, 600.0, 800.0])


def test_missing_times_are_null_in_parquet(tmp_path: Path) -> None:
    table = busy().requests
    path = tmp_path / "requests.parquet"
    table.to_parquet(str(path))
    read = pd.read_parquet(path)
    assert len(read) == len(table) == busy().result.submitted
    counts = {name: int((table.status == code).sum()) for code, name in enumerate(STATUSES)}
    assert read["status"].value_counts().to_dict() == counts
    assert counts.pop("lost") == 0, "without a crash"
    assert min(counts.values()) > 0
    assert set(read["adapter"]) == {f"a{i}" for i in range(5)}
    assert read["finish_s"].isna().sum() == (table.status != FINISHED).sum() > 0
    np.testing.assert_array_equal(read["arrival_s"], table.arrival_s)
    assert [each.name for each in tmp_path.iterdir()] == ["requests.parquet"]


def test_parts_add_up_to_the_whole() -> None:
    detail = busy()
    whole = detail.overall
    for parts in (detail.by_rank.values(), detail.by_adapter.values()):
        for name in (
            "submitted",
            "finished",
            "running",
            "waiting",
            "rejected",
            "admissions",
            "adapter_loads",
        ):
            assert sum(getattr(part, name) for part in parts) == getattr(whole, name), name
        for name in ("throughput_tok_s", "offered_tok_s", "load_s"):
            total = sum(getattr(part, name) for part in parts)
            assert total == pytest.approx(getattr(whole, name)), name


def test_overall_metrics_equal_the_result() -> None:
    detail = busy()
    whole, result = detail.overall, detail.result
    assert whole.submitted == result.submitted
    assert whole.finished == result.completed
    assert whole.rejected == result.rejected
    assert whole.adapter_loads == result.adapter_loads
    assert whole.load_s == pytest.approx(sum(got.load_s for got in detail.by_adapter.values()))
    for name in ("throughput_tok_s", "offered_tok_s", "served_fraction", "itl_ms_mean"):
        assert getattr(whole, name) == pytest.approx(getattr(result, name)), name
    for kind in ("ttft_s", "tpot_ms", "tpt_ms", "e2e_s"):
        for statistic in STATISTICS:
            ours = getattr(getattr(whole, kind), statistic)
            assert ours == pytest.approx(getattr(result, f"{kind}_{statistic}")), (kind, statistic)


def test_ranks_ascend_and_an_idle_adapter_has_an_empty_row() -> None:
    detail = busy()
    assert list(detail.by_rank) == [8, 16]
    assert list(detail.by_adapter) == [f"a{i}" for i in range(6)]
    idle = detail.by_adapter["a5"]
    assert (idle.submitted, idle.served_fraction, idle.starved) == (0, 1.0, False)
    assert math.isnan(idle.ttft_s.p50)
    assert math.isnan(idle.hit_rate)


def test_every_adapter_is_loaded_once_if_all_fit() -> None:
    settings = BUSY | {"a_max": 6, "max_cpu_loras": None}
    detail = simulate_detailed(mixed(), profile(load_ms=30), **settings)
    served = [got for got in detail.by_adapter.values() if got.submitted]
    assert [got.adapter_loads for got in served] == [1] * 5
    for got in served:
        # Only those admitted in the very step that loads the adapter did not find it there.
        assert 0 < got.admissions * (1 - got.hit_rate) <= BUSY["max_num_seqs"]
    assert detail.overall.hit_rate > busy().overall.hit_rate


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1e3) | st.just(math.nan)), max_size=80))
def test_statistics_of_groups_are_those_of_their_members(rows: list[tuple[int, float]]) -> None:
    group = np.array([row[0] for row in rows], np.int64)
    values = np.array([row[1] for row in rows], np.float64)
    for number, found in enumerate(grouped_latency_stats(values, group, 5)):
        members = values[(group == number) & ~np.isnan(values)]
        got = [getattr(found, name) for name in STATISTICS]
        if members.size:
            assert got == pytest.approx([members.mean(), *np.percentile(members, (50, 90, 95, 99))])
        else:
            assert np.isnan(got).all()


def with_slo(**bounds: float) -> DetailedResult:
    slow = profile(load_ms=30, disk_ms=90, request_ms=5)
    return simulate_detailed(mixed(slo=Slo(**bounds)), slow, **BUSY)


def test_every_request_meets_violates_or_leaves_open_each_bound() -> None:
    detail = with_slo(ttft_p99_s=0.5, e2e_mean_s=1.0, tpt_p50_ms=60.0, tpot_p95_ms=12.0, itl_p99_ms=12.0)
    assert [each.bound for each in detail.slo] == [
        "ttft_p99_s",
        "e2e_mean_s",
        "tpot_p95_ms",
        "tpt_p50_ms",
        "itl_p99_ms",
        "all",
    ]
    table = detail.requests
    for each in detail.slo:
        assert each.kept + each.broken + each.open == len(table)
        assert each.broken >= (table.status == REJECTED).sum() > 0
    ttft, together = detail.slo[0], detail.slo[-1]
    assert ttft.kept == (table.ttft_s <= 0.5).sum() > 0
    assert ttft.value == detail.result.ttft_s_p99
    assert together.kept <= min(each.kept for each in detail.slo)
    assert detail.overall.slo_share == pytest.approx(together.share)
    by_rank = sum(
        got.slo_share * (got.submitted - got.running - got.waiting) for got in detail.by_rank.values()
    )
    assert by_rank > 0


def test_an_unfinished_request_violates_a_bound_once_it_waits_longer() -> None:
    table = busy().requests
    waiting = table.status == WAITING
    assert waiting.sum() > 1
    so_far_s = np.sort(busy().result.duration_s - table.arrival_s[waiting] + 0.005)
    middle = float(so_far_s[len(so_far_s) // 2 - 1 : len(so_far_s) // 2 + 1].mean())
    (ttft,) = with_slo(ttft_p99_s=middle).slo
    begun = ~np.isnan(table.ttft_s)
    unknown = int((~begun & (table.status != REJECTED) & (table.status != RUNNING)).sum())
    assert 0 < ttft.open < unknown


def test_loose_bounds_are_met_and_tight_ones_violated() -> None:
    light = mixed(slo=Slo(ttft_p99_s=1e3, tpt_p99_ms=1e-3))
    loose, tight, together = simulate_detailed(light, profile(), **EASY).slo
    assert loose.share == 1.0
    assert tight.share == 0.0
    assert together.share == 0.0
    assert simulate_detailed(mixed(), profile(), **EASY).slo == ()


def test_tpt_over_base_refers_to_the_same_requests_without_adapters() -> None:
    """Steps of 10 ms whatever they hold: a request that never waits has the TPT that it has without LoRA."""
    light = mixed(slo=Slo(tpt_over_base=1.5, attainment=0.9))
    (bound,) = simulate_detailed(light, profile(), **EASY).slo
    assert bound.bound == "tpt_over_base"
    bare = simulate(light, profile(), **EASY)
    assert bound.limit == pytest.approx(1.5 * bare.tpt_ms_mean)
    assert bound.share > 0.99


def test_the_time_series_adds_up_to_the_totals() -> None:
    detail = busy()
    series, result = detail.series, detail.result
    bucket_s = series.bucket_s
    assert series.arrivals_rps.sum() * bucket_s == pytest.approx(result.submitted)
    assert series.completed_tok_s.mean() == pytest.approx(result.throughput_tok_s)
    assert series.loads_per_s.sum() * bucket_s == pytest.approx(result.adapter_loads)
    assert series.load_share.sum() * bucket_s == pytest.approx(result.load_s)
    busy_s = series.busy_share * bucket_s
    assert busy_s.sum() == pytest.approx(result.busy_fraction * result.duration_s, rel=0.01)
    assert (series.running * busy_s).sum() / busy_s.sum() == pytest.approx(result.running_mean)
    assert (series.waiting * busy_s).sum() / busy_s.sum() == pytest.approx(result.waiting_mean)
    assert series.resident_adapters.max() <= BUSY["a_max"]
    assert np.all((series.kv_share >= 0) & (series.kv_share <= 1))
    assert np.all(series.active_adapters <= series.resident_adapters + 1e-9)


def test_adapters_stay_resident_while_nothing_runs() -> None:
    columns = {"adapter": ["a0", "a1"], "prompt_tokens": [8, 8], "output_tokens": [4, 4]}
    sparse = workload().replace(trace=Trace.from_arrays([0.0, 50.0], **columns))
    series = simulate_detailed(sparse, profile(), a_max=4, s_max=8, duration_s=100.0).series
    assert series.running[10] == 0.0
    assert series.resident_adapters[10] == 1.0
    assert series.resident_adapters[-1] == 2.0


@pytest.mark.parametrize("seed", range(20))
def test_sums_over_a_bucket_stay_within_64_bits(seed: int) -> None:
    scenario = seeded_scenario(seed)
    for horizon_s in (1, 60, 3600, 10**7, 9 * 10**9):
        long = scenario._replace(horizon_ns=horizon_s * 10**9, num_blocks=10**5)
        buckets = bucket_count(long)
        most = 10**5 * scenario.limits.block_size
        assert -(-long.horizon_ns // buckets) * most < 2**63
        if horizon_s == 3600:
            assert buckets == 600
