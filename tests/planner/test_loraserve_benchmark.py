"""Benchmark of LoRAServe's evaluation: servers, rates, placements, routing by shares, measured rows."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.loraserve.__main__ import main
from benchmarks.papers.loraserve.authors import PrefillFit, batches, held_out, sweep
from benchmarks.papers.loraserve.hardware import PROMPT_TOKENS, SETTING, hardware, prefill_ms, standin
from benchmarks.papers.loraserve.lab import PRECISION, Lab, highest, mean_and_range
from benchmarks.papers.loraserve.load import (
    LENGTHS,
    MAX_OUTPUT_TOKENS,
    MAX_PROMPT_TOKENS,
    Load,
    at_rate,
    grown,
    p95_ttft_s,
    trace_workload,
    ttft_s,
)
from benchmarks.papers.loraserve.parts import OF_LORASERVE, equal_load
from benchmarks.papers.loraserve.systems import (
    FACTORS,
    OFF_PLAN,
    OURS,
    RANK_RAISE,
    TURN_S,
    Scene,
    rebalanced,
    routed,
    shares_of,
    stepped,
)
from capplan import Adapter, Assignment, Lengths, Profile, Workload
from capplan.errors import InputError
from capplan.models import StepRanks, coefficient_array, latency_code, rank_ms
from capplan.planner.problem import AdapterShare
from capplan.spec import Kernel, ProvenanceKind, RebalanceSettings
from capplan.twin.instance import NEVER, STATUS_REJECTED
from capplan.workload import Requests

pytestmark = pytest.mark.long

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

    def twin_ms(rank: int) -> float:
        nobody = StepRanks(0.0, 1.0, 0.0, 1.0, float(PROMPT_TOKENS), rank, 0.0, rank, PROMPT_TOKENS * rank)
        form = latency_code(step.form, made.engine.kernel)
        return prefill_ms(step, PROMPT_TOKENS, 0) + rank_ms(form, coefficient_array(step), 128.0, nobody)

    assert twin_ms(128) / twin_ms(8) == pytest.approx(ratio)
    assert twin_ms(128) == pytest.approx(prefill_ms(step, PROMPT_TOKENS, 128))


def test_a_server_of_the_paper_is_a_roofline_of_s_lora_on_all_its_gpus() -> None:
    made = hardware(SETTING)
    assert (made.tp, made.engine.rules, made.engine.kernel) == (4, "slora", Kernel.BGMV)
    assert made.provenance.kind is ProvenanceKind.ROOFLINE
    alone = hardware("a100-80g/llama-7b/tp1")
    assert prefill_ms(made.step_latency, 500, 8) < prefill_ms(alone.step_latency, 500, 8)
    with pytest.raises(InputError, match="must divide the 52 heads"):
        hardware("a100-40g/llama-30b/tp8")


def test_slots_and_adapters_are_free_in_the_stand_in(profile: Profile) -> None:
    step = standin(profile).step_latency
    assert not any(c.value for name, c in step.coefficients.items() if "slot" in name or "adapter" in name)
    assert step.value("base_ms") == profile.step_latency.value("base_ms")


@given(st.floats(0.2, 500.0), st.floats(1.0, 300.0), st.sampled_from([1.04, 1.2, 2.0]))
def test_the_highest_rate_is_found_to_one_percent(limit: float, start: float, step: float) -> None:
    found = highest(lambda rps: rps <= limit, start, step)
    assert found <= limit <= found * (1.0 + PRECISION) * (1.0 + 1e-9)


def test_a_system_that_never_holds_has_rate_0() -> None:
    assert highest(lambda rps: False, 16.0) == 0.0
    assert mean_and_range([0.0, 0.0]) == "0.0"
    assert mean_and_range([10.0, 14.0]) == "12.0 (10.0 to 14.0)"


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Return a folder with a trace of lengths, some of them too long for the model."""
    lengths = np.tile(np.array([[100, 20], [400, 60], [3000, 60], [400, 700]]), (500, 1)).astype(np.int32)
    columns = {"arrival_s": np.arange(2000.0), "prompt_tokens": lengths[:, 0], "output_tokens": lengths[:, 1]}
    pq.write_table(pa.table(columns), tmp_path / LENGTHS)
    return tmp_path


def test_lengths_are_bounded_as_in_the_traces_of_the_authors(traces: Path) -> None:
    workload = trace_workload("poisson-uniform", traces)
    pairs = workload.length_pairs
    assert pairs is not None
    assert {*pairs.prompt_tokens.tolist()} == {100, 400}
    assert pairs.prompt_tokens.max() <= MAX_PROMPT_TOKENS
    assert pairs.output_tokens.max() <= MAX_OUTPUT_TOKENS
    assert (workload.prompt_tokens, workload.output_tokens) == pairs.marginals()


@given(st.integers(1, 4))
def test_weak_scaling_multiplies_adapters_and_traffic(factor: int) -> None:
    adapters = (Adapter(name="a", rank=8, rate_rps=1.0), Adapter(name="b", rank=128, rate_rps=3.0))
    workload = Workload(
        base_model="meta-llama/Llama-3.1-8B-Instruct",
        adapters=adapters,
        prompt_tokens=Lengths(mean=100.0),
        output_tokens=Lengths(mean=50.0),
    )
    larger = grown(workload, factor)
    assert larger.total_rate_rps == pytest.approx(factor * workload.total_rate_rps)
    assert sorted(a.rank for a in larger.adapters) == [8] * factor + [128] * factor
    assert len({a.name for a in larger.adapters}) == 2 * factor


def scene_of(lab: Lab, trace: str, servers: int = 4) -> Scene:
    """Return a scene with given operating points, which take long to measure."""
    scene = lab.scene(trace, servers)
    points = {"8": 30e3, "16": 26e3, "32": 23e3, "64": 18e3, "128": 13e3}
    scene.folder.mkdir(parents=True, exist_ok=True)
    (scene.folder / f"{trace}.operating-points.{servers}.json").write_text(json.dumps(points))
    return scene


def test_re_balancing_at_run_time_follows_a_shifting_popularity(traces: Path) -> None:
    lab = Lab(traces, traces / "out", SETTING, duration_s=60.0)
    scene = scene_of(lab, "poisson-shifting")
    load = lab.load(scene, 220.0, 0)

    def times_s(period_s: float) -> np.ndarray:
        return rebalanced(load, scene.points(), 4, RebalanceSettings(every_s=period_s))

    moving, frozen = times_s(5.0), times_s(2.0 * load.duration_s)
    assert moving.shape == frozen.shape == load.requests.arrival_ns.shape
    assert np.isfinite(moving).all()
    assert p95_ttft_s(load, moving) < 0.8 * p95_ttft_s(load, frozen)
    assert np.array_equal(moving, times_s(5.0)), "same seed, same result"


def test_five_ranks_mix_on_four_servers_more_than_on_eight(traces: Path) -> None:
    lab = Lab(traces, traces / "out", SETTING)
    four, eight = (scene_of(lab, "poisson-uniform", servers) for servers in (4, 8))
    of_unmixed = [scene.placed_rps() / scene.sustained_rps() for scene in (four, eight)]
    assert 0.5 < of_unmixed[0] < of_unmixed[1] < 1.0


def test_results_are_stored_and_an_interrupted_run_goes_on(traces: Path) -> None:
    lab = Lab(traces, traces / "out", SETTING, duration_s=20.0, seeds=2)
    scene = scene_of(lab, "poisson-uniform")
    found = lab.highest_rps(scene, "toppings")
    assert len(found) == 2
    assert all(0.2 < rps / scene.sustained_rps() < 5.0 for rps in found), "a short trace allows overload"
    (stored,) = scene.folder.parent.glob("*.toppings.json")
    before = stored.stat().st_mtime_ns
    assert lab.highest_rps(scene, "toppings") == found
    assert stored.stat().st_mtime_ns == before
    stored.write_text(json.dumps({**json.loads(stored.read_text()), "found": [1.0, 2.0]}))
    assert lab.highest_rps(scene, "toppings") == [1.0, 2.0], "read, not simulated again"
    assert replace(lab, seeds=1).highest_rps(scene, "toppings") == found[:1], "other settings: simulated"
    later = replace(lab, seeds=1, first_seed=1)
    assert [seed for seed, _ in later.runs("toppings")] == [1]
    assert later.highest_rps(scene, "toppings") != [1.0], "other seeds: simulated"
    assert later.highest_rps(scene, "toppings")[0] == pytest.approx(found[1], rel=2 * PRECISION)


def test_the_factors_and_turns_of_ours_change_the_routing(traces: Path) -> None:
    lab = Lab(traces, traces / "out", SETTING, duration_s=20.0)
    scene = scene_of(lab, "poisson-uniform")
    halves = (scene.workload.adapters[:15], scene.workload.adapters[15:])
    shares = [{adapter.name: 0.5 for adapter in half} for half in halves for _ in range(2)]
    (scene.folder / "uniform.capplan.4.json").write_text(json.dumps(shares))
    load = lab.load(scene, scene.sustained_rps(), 0)
    chosen = f"{OURS}-{OFF_PLAN:g}-{RANK_RAISE:g}-{TURN_S:g}"
    assert FACTORS[chosen] == (OFF_PLAN, RANK_RAISE, TURN_S)
    others = [f"{OURS}-1.5-1-0", f"{OURS}-{OFF_PLAN:g}-{RANK_RAISE:g}-0"]
    own, same, *different = (scene.ttft_s(name, load) for name in (OURS, chosen, *others))
    np.testing.assert_array_equal(own, same)
    assert all((own != other).any() for other in different)


def test_servers_for_a_load_are_those_of_the_option(traces: Path) -> None:
    lab = Lab(traces, traces / "out", SETTING, duration_s=20.0, seeds=1, step_s=5.0, servers=8)
    scene = scene_of(lab, "poisson-uniform", 8)
    for servers in range(1, 25):
        name = f"{lab.shared(scene, servers).name}.operating-points.{servers}.json"
        (scene.folder / name).write_text(json.dumps(dict(scene.points())))
    table = equal_load(lab, ["poisson-uniform"])
    cells = [cell.strip() for cell in table.splitlines()[2].split("|")]
    assert float(cells[2]) == pytest.approx(OF_LORASERVE * lab.loraserve_rps(scene), abs=0.05)
    assert cells[4] in ("7 (0%)", "8 (0%)"), "at 95 % of what LoRAServe sustains on eight"
    rates = [cell.strip() for cell in table.splitlines()[-1].split("|")]
    assert rates[3] == f"{lab.loraserve_rps(scene):.1f}, 1.00"


FIT = PrefillFit(base_s=0.15, s_per_ktoken=0.02, s_per_mrank=0.25)


def sweep_rows() -> list[dict[str, str]]:
    rows = []
    for tokens in range(100, 2001, 100):
        for rank in (8, 32, 128):
            seconds = FIT.seconds(np.array([float(tokens)]), np.array([float(rank)]))[0]
            row = {"model": "m", "req_rate": "1", "note": "", "prompt_tokens": str(tokens)}
            rows.append({**row, "rank": str(rank), "ttft_mean_s": str(seconds)})
    return [*rows, {**rows[0], "ttft_mean_s": "9", "note": "cold start"}, {**rows[0], "req_rate": "2"}]


def test_a_sweep_gives_back_the_terms_it_was_made_with() -> None:
    prefills = sweep(sweep_rows(), "m")
    assert prefills.seconds.size == 60, "neither the cold start nor another rate"
    assert astuple(prefills.fitted()) == pytest.approx(astuple(FIT))
    assert PrefillFit(base_s=0.1, s_per_ktoken=0.0, s_per_mrank=0.0).ratio == 1.0
    errors, of_mean = held_out(prefills, prefills.tokens % 200 == 0)
    assert max(errors) < 1e-9 < min(of_mean)


def test_rows_of_one_server_with_one_prefill_time_are_a_batch() -> None:
    def row(server: str, seconds: str, tokens: int, rank: int) -> dict[str, str]:
        times = {"server": server, "server_prefill_exec_s": seconds}
        return {**times, "prompt_len": str(tokens), "rank": str(rank)}

    rows = [row("4", "0.3", 100, 8), row("5", "0.3", 50, 8), row("4", "0.3", 200, 64), row("4", "0.4", 70, 8)]
    every = batches(rows, 1)
    assert every.tokens.tolist() == [300.0, 50.0, 70.0]
    assert every.rank.tolist() == [64.0, 8.0, 8.0]
    assert batches(rows, 2).seconds.tolist() == [0.3]


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
