import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import SimulationResult, simulate
from capplan.spec import PERCENTILES, latency_stats_in_place
from capplan.twin import Scenario
from capplan.twin.instance import NS_PER_S, run, summarize
from capplan.twin.instance import _trace as t
from capplan.twin.instance._scenario import NS_PER_MS
from tests.twin.examples import profile, workload
from tests.twin.scenarios import scenarios


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_statistics_are_the_mean_and_the_percentiles_of_numpy(values: list[float]) -> None:
    found = dataclasses.astuple(latency_stats_in_place(np.array(values)))
    wanted = [np.mean(values), *np.percentile(values, PERCENTILES)]
    assert found == pytest.approx(wanted, rel=1e-12, abs=1e-12)


@given(scenarios())
def test_latencies_are_of_requests_that_ended_within_the_horizon(scenario: Scenario) -> None:
    """The one compiled pass against the definitions, array by array."""
    trace = run(scenario)
    result = summarize(scenario, trace, request_overhead_ms=3.0)
    done = (trace.finish_ns != t.NEVER) & (trace.finish_ns <= scenario.horizon_ns)
    asked = scenario.requests
    room = np.maximum(scenario.limits.max_model_len - asked.prompt_tokens, 1)
    output = np.minimum(asked.output_tokens, room).astype(np.int64)
    tokens = asked.prompt_tokens + output
    executing = (trace.status == t.STATUS_RUNNING) | (trace.finish_ns > scenario.horizon_ns)
    horizon_s = scenario.horizon_ns / NS_PER_S
    assert result.completed == done.sum()
    assert result.throughput_tok_s == pytest.approx(tokens[done].sum() / horizon_s)
    assert result.offered_tok_s == pytest.approx(tokens.sum() / horizon_s)
    answerable = tokens.sum() - tokens[executing].sum()
    assert result.served_fraction == pytest.approx(tokens[done].sum() / answerable if answerable else 1.0)
    ttft_s = (trace.first_ns - asked.arrival_ns)[done] / NS_PER_S + 0.003
    e2e_s = (trace.finish_ns - asked.arrival_ns)[done] / NS_PER_S + 0.003
    several = done & (output > 1)
    decoding_ms = (trace.finish_ns - trace.first_ns)[several] / NS_PER_MS
    wanted = {
        "ttft_s": ttft_s,
        "e2e_s": e2e_s,
        "tpt_ms": 1e3 * e2e_s / output[done],
        "tpot_ms": decoding_ms / (output[several] - 1),
    }
    for name, values in wanted.items():
        found = [getattr(result, f"{name}_{s}") for s in ("mean", "p50", "p90", "p95", "p99")]
        if values.size:
            assert found == pytest.approx([values.mean(), *np.percentile(values, (50, 90, 95, 99))])
        else:
            assert np.isnan(found).all()
    if several.any():
        assert result.itl_ms_mean == pytest.approx(decoding_ms.sum() / (output[several] - 1).sum())


def test_a_result_can_be_pickled() -> None:
    result = simulate(workload(), profile(), a_max=4, s_max=8, duration_s=60.0)
    assert pickle.loads(pickle.dumps(result)) == result
    assert dataclasses.replace(result, completed=result.completed + 1) != result
    assert isinstance(result, SimulationResult)
