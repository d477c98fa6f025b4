"""Comparison with measured rows: what is read, simulated and fitted, on rows that these tests write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.measured import dense_stages, layers, rank_sweeps, request_logs
from benchmarks.measured.case import Deployment, LeftOut, data_folder, roofline_for
from benchmarks.measured.compare import compare, errors
from benchmarks.measured.composed import Composed
from benchmarks.measured.dense_stages import Stage
from benchmarks.measured.host_terms import Rows, fitted, with_terms
from benchmarks.measured.replay import Engine, closed_loop, requests_of, scenario_of
from benchmarks.measured_check import report
from capplan import InputError, Profile

MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def stage(rate_rps: float = 4.0, gpu: str = "h100-80g", **measured: float) -> Stage:
    return Stage("written here", Deployment(gpu, MODEL, 1, "0.15.1"), rate_rps, 550.0, 200.0, 512, measured)


@dataclass(frozen=True)
class Known:
    """A row whose prediction is given."""

    deployment: Deployment
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    name: str = "known"

    def predict(self, _profile: Profile) -> Mapping[str, float]:
        return self.predicted


def refused(_deployment: Deployment, _left_out: LeftOut | None) -> Profile:
    raise InputError("no such GPU", "abacus", "--gpu")


def test_host_terms_that_made_the_measurement_are_found() -> None:
    true = np.array([9.5, 0.03, 6.0])
    plain = [stage(rate_rps) for rate_rps in (2.0, 8.0, 16.0)]
    profile = roofline_for(plain[0].deployment)
    stages = [stage(each.rate_rps, **each.predict(with_terms(profile, true))) for each in plain]
    rows = Rows.of([*stages, stage(9.0, itl_ms=500.0, ttft_ms=9.0)], roofline_for)
    found, std_errors = fitted(rows.without([3]))
    assert found == pytest.approx(true, rel=0.02)
    assert np.all(std_errors > 0.0)
    assert np.abs(rows.only([0, 1, 2]).errors(found)).max() < 0.002


def test_a_stage_is_read_with_the_units_of_its_columns(tmp_path: Path) -> None:
    (tmp_path / dense_stages.FILE).write_text(
        "hardware,model,tp,workload,max_num_batched_tokens,exp_id,stage_index,rate_rps,prompt_tokens,"
        "shared_prefix_tokens,output_tokens,itl_ms_mean,ttft_ms_mean,ttft_ms_p90,ttft_ms_p99,e2e_ms_mean\n"
        f"L40S,{MODEL},1,made,2048,9,1,2.5,500,100,200.4,20,60,70,80,4068\n"
    )
    (row,) = dense_stages.read(tmp_path)
    assert row.deployment == Deployment("l40s", MODEL, 1, "0.15.1")
    assert row.workload(MODEL).shared_prefix_tokens == 484
    predicted = row.predict(roofline_for(row.deployment))
    assert set(predicted) == set(row.measured)
    assert predicted["e2e_ms"] == pytest.approx(predicted["ttft_ms"] + 200 * predicted["itl_ms"])


def test_closed_loop_keeps_its_requests_in_flight() -> None:
    """A request follows each end at once, and the list is served in its order."""
    count, concurrency = 40, 4
    outputs = np.random.default_rng(1).integers(20, 60, count)
    requests = requests_of(np.zeros(count), np.full(count, 300), outputs)
    profile = roofline_for(Deployment("h100-80g", MODEL, 1, "0.12.0"))
    scenario, trace = closed_loop(scenario_of(profile, Engine(), requests), concurrency)
    arrival_ns = scenario.requests.arrival_ns
    assert np.array_equal(arrival_ns[concurrency:], np.sort(trace.finish_ns)[: count - concurrency])
    assert not arrival_ns[:concurrency].any()


def test_a_replayed_log_is_measured_on_the_clock_of_its_engine(tmp_path: Path) -> None:
    folder = tmp_path / "vllm_request_logs" / "L40S_made"
    folder.mkdir(parents=True)
    request = {"input_toks": 40, "output_toks": 11, "queued_ts": 70.0, "arrival_time": 1000.5}
    request |= {"scheduled_ts": 70.0, "first_token_ts": 70.2, "last_token_ts": 70.7}
    lines = [request, request | {"queued_ts": 70.1, "arrival_time": 1000.6, "first_token_ts": 70.4}]
    (folder / "vllm_requests.jsonl").write_text("\n".join(map(json.dumps, lines)))
    kwargs = {"max_num_seqs": 8, "max_num_batched_tokens": 2048, "max_model_len": 4096}
    meta = {"model": MODEL, "engine_kwargs": kwargs, "started_at": "1970-01-01T00:16:40Z"}
    meta["kv_cache"] = {"num_gpu_blocks": 101, "num_kv_tokens": 1616}
    (folder / "vllm_meta.json").write_text(json.dumps(meta))
    (folder / "vllm_timeseries.csv").write_text("t,running,waiting,kv_cache_pct\n1.0,2,0,5.0\n2.0,0,0,0.0\n")
    (log,) = request_logs.read(tmp_path)
    assert log.measured["ttft_ms"] == pytest.approx(250.0)
    assert log.measured["tpot_ms"] == pytest.approx(40.0)
    assert log.requests.arrival_ns.tolist() == [0, 100_000_000]
    assert log.course["t"].tolist() == [0.5, 1.5]
    log = replace(log, deployment=replace(log.deployment, gpu="l40s"))
    profile = roofline_for(log.deployment)
    assert log.scenario(profile).num_blocks == 100
    assert log.predict(profile)["e2e_ms"] < log.measured["e2e_ms"]
    course = log.replayed_course(profile)
    assert course["running"].max() == 2.0


def test_errors_have_the_stated_formulas_and_refusals_their_reason() -> None:
    one = Known(Deployment("h100-80g", MODEL), {"itl_ms": 10.0}, {"itl_ms": 8.0})
    found = compare("made", [one], {"half": roofline_for, "none": refused})
    row = errors(found.records, ()).loc[("itl_ms", "half")]
    assert (row["MAPE"], row["bias"]) == pytest.approx((20.0, -20.0))
    assert row["SMAPE"] == pytest.approx(100 * 2 / 18)
    (refusal,) = found.refusals
    assert (refusal.methods, refusal.rows) == ("none", 1)
    assert "no such GPU" in refusal.reason
    page = report({"made": found}, with_rows=True)
    assert "| itl_ms | 1 | 20.0 / 11.1 / -20.0 % |" in page
    assert "| h100-80g | Llama-3.1-8B-Instruct | 1 | known | 10 | -20.0 % |" in page
    assert "| none | --gpu: no such GPU (got 'abacus') |" in page


def test_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--data: must be the folder of measured data .*CAPPLAN_MEASURED"):
        data_folder(tmp_path / "absent")


def test_measured_layers_add_up_to_a_step(tmp_path: Path) -> None:
    """The layers of a step are 32 times those within, with two norms each, and the others once."""
    folder = tmp_path / "layers_rtx4090"
    folder.mkdir()
    within = ["qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj", "layernorm"]
    sizes = [1, 8, 32, 64, 128, 256, 512, 2048]
    dense = [f"{layer},{n},10" for layer in [*within, "embedding", "final_layernorm"] for n in sizes]
    (folder / "dense.csv").write_text("\n".join(["layer,tokens,time_us", *dense]))
    last = [f"{layer},{n},500" for layer in ("lm_head", "sampler") for n in sizes]
    (folder / "per_sequence.csv").write_text("\n".join(["layer,sequences,time_us", *last]))
    decode = [f"0,0,{n},{kv},30" for n in sizes for kv in (128, 512, 2048)]
    prefill = [f"{n},0,0,0,30" for n in sizes]
    head = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    (folder / "attention.csv").write_text("\n".join([head, *decode, *prefill]))
    steps = layers.read(tmp_path)
    for step in steps:
        assert step.measured["step_ms"] == pytest.approx((32 * 110 + 1020) / 1e3)
    profile = roofline_for(replace(steps[0].deployment, gpu="l40s"))
    longer = [step.predict(profile)["step_ms"] for step in steps if step.name.startswith("decode 64")]
    assert longer == sorted(set(longer))


def test_ratios_of_prefills_grow_with_the_rank_but_not_on_a_gpu_without_operators(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "loraserve_authors"
    folder.mkdir()
    head = "model,rank,tp,prompt_tokens,req_rate,ttft_mean_s"
    rows = [f"llama-7b,{rank},8,2000,1,{ttft_s}" for rank, ttft_s in ((8, 0.2), (16, 0.22), (128, 0.3))]
    rows += [f"llama-7b,8,8,{tokens},1,{0.1 + tokens / 2e4}" for tokens in (500, 1000, 1500)]
    (folder / "rank_sweeps.csv").write_text("\n".join([head, *rows, "llama-7b,64,8,2000,2,9.0"]))
    (sweep,) = rank_sweeps.read(tmp_path)
    assert sweep.measured == pytest.approx({"prefill_ratio_16": 1.1, "prefill_ratio_128": 1.5})
    assert sweep.rank_8_ms == pytest.approx(200.0)
    found = sweep.predict(roofline_for(sweep.deployment))
    assert 1.0 < found["prefill_ratio_16"] < found["prefill_ratio_128"]
    with pytest.raises(InputError, match="measured operators or a shipped profile"):
        Composed([])(replace(sweep.deployment, gpu="l4"))
