"""Comparison with measured rows: what is read, simulated and fitted, on rows that these tests write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.measured import dense_stages
from benchmarks.measured.case import Deployment, LeftOut, roofline_for
from benchmarks.measured.dense_stages import Stage
from benchmarks.measured.host_terms import HostTerms, fit_host_terms
from benchmarks.measured.step_log import log_steps
from capplan.twin.core import run

MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def stage(rate_rps: float = 4.0, gpu: str = "h100-80g", **measured: float) -> Stage:
    return Stage("written here", Deployment(gpu, MODEL, 1, "0.15.1"), rate_rps, 550.0, 200.0, 512, measured)


def test_every_step_of_a_simulation_is_in_its_log() -> None:
    """Tokens, gaps and pairs of the log are those of the requests; a prompt of 550 takes two steps of 512."""
    one = stage(rate_rps=8.0)
    scenario = one.scenario(roofline_for(one.deployment), duration_s=20.0)._replace(shared_prefix_tokens=0)
    log, trace = log_steps(scenario), run(scenario)
    assert log.ms.size == trace.counts.steps
    assert log.ms.sum() == pytest.approx(trace.sums.busy_ns / 1e6)
    assert log.decodes.sum() == trace.gaps.sum()
    done = trace.first_ns >= 0
    pairs = scenario.requests.prompt_tokens[done] * (scenario.requests.prompt_tokens[done] + 1.0) / 2e6
    assert log.prefill_mpairs.sum() == pytest.approx(pairs.sum())
    assert log.prefills.sum() > done.sum()
    assert np.all(log.tokens >= log.decodes)


def test_host_terms_that_made_the_measurement_are_found() -> None:
    true = HostTerms(ms_per_step=1.5, ms_per_request=0.03)
    stages = []
    for rate_rps in (2.0, 8.0, 16.0):
        plain = stage(rate_rps)
        itl_ms = plain.predict(true.added_to(roofline_for(plain.deployment)))["itl_ms"]
        stages.append(stage(rate_rps, itl_ms=itl_ms))
    odd = stage(gpu="l40s", itl_ms=500.0)
    found = fit_host_terms([*stages, odd], roofline_for, LeftOut("gpu", "l40s"))
    assert found.ms_per_step == pytest.approx(true.ms_per_step, rel=0.03)
    assert found.ms_per_request == pytest.approx(true.ms_per_request, rel=0.05)


def test_a_stage_is_read_with_the_units_of_its_columns(tmp_path: Path) -> None:
    (tmp_path / dense_stages.FILE).write_text(
        "hardware,model,tp,workload,max_num_batched_tokens,exp_id,stage_index,rate_rps,prompt_tokens,"
        "shared_prefix_tokens,output_tokens,itl_ms_mean,ttft_ms_mean,ttft_ms_p90,ttft_ms_p99,e2e_ms_mean\n"
        f"L40S,{MODEL},1,made,2048,9,1,2.5,500,100,200.4,20,60,70,80,4068\n"
    )
    (row,) = dense_stages.read(tmp_path)
    assert row.deployment == Deployment("l40s", MODEL, 1, "0.15.1")
    assert row.workload(MODEL).shared_prefix_tokens == 484
    assert row.measured["running"] == pytest.approx(2.5 * 4.068)
    predicted = row.predict(roofline_for(row.deployment))
    assert set(predicted) == set(row.measured)
    assert predicted["e2e_ms"] == pytest.approx(predicted["ttft_ms"] + 200 * predicted["itl_ms"])
