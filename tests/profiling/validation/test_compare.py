"""Agreement needs errors within tolerances, the same verdict, and a valid measurement."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import InputError, Profile
from capplan.profiling.load import BenchResult
from capplan.profiling.load._preflight import EngineInfo, ServerInfo
from capplan.profiling.load._result import ServerSample
from capplan.profiling.validation import GroupValidation, MetricComparison, Tolerances, ValidationOptions
from capplan.profiling.validation._validate import (
    ITL,
    PROBE_S,
    PROBES,
    THROUGHPUT,
    compared,
    mismatches_of,
    slowdown_of,
)
from capplan.reports.tables import group_verdict, speed_note
from capplan.spec import EngineArgs
from tests.cli.examples import profile_document

PROFILE = Profile.model_validate(profile_document())
POSITIVE = st.floats(1e-3, 1e6)


def comparison(measured: float, predicted: float, tolerance: float | None = 3.0) -> MetricComparison:
    return MetricComparison(THROUGHPUT, measured, predicted, predicted, math.nan, tolerance)


def group(*comparisons: MetricComparison, **fields: object) -> GroupValidation:
    known = {
        "group": "g0",
        "rate_scale": 1.0,
        "duration_s": 10.0,
        "seed": 0,
        "requests": 5,
        "comparisons": comparisons,
        "starved": False,
        "predicted_starved": False,
        "constant_step_starved": True,
    }
    return GroupValidation(**{**known, **fields})  # type: ignore[arg-type]


@given(measured=POSITIVE, predicted=POSITIVE, tolerance=st.floats(0.0, 100.0))
def test_agreement_is_symmetric_and_within_the_tolerance(
    measured: float, predicted: float, tolerance: float
) -> None:
    forth = comparison(measured, predicted, tolerance)
    back = comparison(predicted, measured, tolerance)
    assert forth.error == pytest.approx(100 * abs(measured - predicted) / (measured + predicted))
    assert forth.agrees == back.agrees == (forth.error <= tolerance)


def test_unmeasured_metrics_agree_only_without_prediction() -> None:
    assert not comparison(math.nan, 1.0).agrees
    assert comparison(math.nan, math.nan).agrees
    assert comparison(math.nan, 1.0, None).agrees
    assert comparison(0.0, 0.0).agrees


def test_a_group_agrees_if_all_metrics_agree() -> None:
    near, far = comparison(100.0, 101.0), comparison(100.0, 120.0)
    assert group(near).agrees
    assert not group(near, far).agrees
    assert not group(near, starved=True).agrees
    assert group(near, starved=True, predicted_starved=True).agrees
    assert not group(near, faults=("stopped before its time",)).agrees


def test_measured_metrics_and_those_with_tolerances_are_compared() -> None:
    found = compared(
        {"ttft_s_mean": 1.0},
        {"predicted": {THROUGHPUT: 5.0}, "constant_step": {}, "offered_load": {THROUGHPUT: 6.0}},
        Tolerances(1.0, 2.0),
    )
    assert {each.name: each.tolerance for each in found} == {THROUGHPUT: 1.0, "ttft_s_mean": None, ITL: 2.0}
    assert math.isnan(found[0].measured)
    assert found[0].offered_load == 6.0


@pytest.mark.parametrize("fields", [{"duration_s": 0.0}, {"rate_scale": math.inf}])
def test_invalid_options_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(InputError, match="above 0"):
        ValidationOptions(**fields)
    with pytest.raises(InputError, match=">= 0"):
        Tolerances(throughput=-1.0)


def scraped(*counters: tuple[float, float]) -> BenchResult:
    server = [
        ServerSample(time_s=float(at), took_ms=1.0, values={PROBES: probes, PROBE_S: probe_s})
        for at, (probes, probe_s) in enumerate(counters)
    ]
    return BenchResult.model_construct(server=tuple(server))


def with_probe(probe_ms: float | None) -> Profile:
    steps = PROFILE.step_latency
    return PROFILE.replace(step_latency=steps.replace(fit=steps.fit.replace(probe_ms=probe_ms)))


def test_the_slowdown_is_the_mean_probe_under_load_over_that_of_the_profile() -> None:
    result = scraped((10.0, 9.0), (20.0, 9.0005), (30.0, 9.0012))
    assert slowdown_of(result, with_probe(0.05)) == pytest.approx(1.2)
    assert slowdown_of(result, with_probe(None)) is None
    assert slowdown_of(scraped(), with_probe(0.05)) is None
    assert slowdown_of(scraped((10.0, 9.0)), with_probe(0.05)) is None


def test_the_speed_and_the_predictions_without_it_are_named() -> None:
    near = MetricComparison(THROUGHPUT, 100.0, 101.0, 101.0, math.nan, 3.0, as_profiled=120.0)
    assert speed_note(group(near)) is None
    note = speed_note(group(near, slowdown=1.08))
    assert note is not None
    assert "1.080 times as long as profiled" in note
    assert note.endswith("as profiled: throughput 120.0 tok/s (9.1 %)")
    assert str(speed_note(group(near, slowdown=0.8))).endswith("profile the engine again on this machine")


def test_the_verdict_names_metric_values_error_and_tolerance() -> None:
    slow = MetricComparison(ITL, 8.2, 6.5, 6.5, math.nan, 8.0)
    near = comparison(100.0, 101.0)
    assert group_verdict(group(near, slow)) == (
        "disagrees: mean ITL 8.2 ms measured, 6.5 predicted: 11.6 % over the tolerance of 8 %"
    )
    assert group_verdict(group(near)) == (
        "agrees: throughput 100.0 tok/s measured, 101.0 predicted: 0.5 % within the tolerance of 3 %"
    )
    assert group_verdict(group(near, starved=True)) == "disagrees: starved measured, not starved predicted"
    assert group_verdict(group(near, faults=("stopped before its time",))).endswith(
        "; stopped before its time"
    )


ASSUMED = SimpleNamespace(kv_tokens=1000)
ARGS = EngineArgs(
    max_loras=4,
    max_lora_rank=16,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    gpu_memory_utilization=0.9,
    max_model_len=128,
    enable_prefix_caching=False,
)
(BASE, *_) = PROFILE.model.hf_ids
SAME = ServerInfo(
    EngineInfo(4, 1000, PROFILE.engine.block_size, 0.9),
    engine=PROFILE.engine.name,
    version=PROFILE.engine.version,
    device=PROFILE.gpu.name,
    models={BASE: BASE},
    max_model_len=128,
    prefix_caching=False,
)


def mismatches(info: ServerInfo) -> tuple[str, ...]:
    return mismatches_of(info, BASE, PROFILE, ARGS, ASSUMED)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"version": f"{PROFILE.engine.version}.post1"},
        {"device": PROFILE.gpu.name.upper()},
        {"models": {BASE: "/models/llama", "a0": ""}},
        {"models": {"chat": BASE}},
        {"settings": replace(SAME.settings, kv_tokens=1040)},
    ],
)
def test_a_server_like_the_profile_has_no_mismatch(changes: dict[str, Any]) -> None:
    assert mismatches(replace(SAME, **changes)) == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": "9.9.9"}, "the version 9.9.9, the profile is of"),
        ({"engine": "sglang"}, "the engine sglang, the profile is of"),
        ({"device": "NVIDIA L4"}, "the GPU NVIDIA L4, the profile is of"),
        ({"models": {"other/model": "other/model"}}, "the model other/model, the profile is of"),
        ({"models": {BASE: "other/model"}}, "the model other/model, the profile is of"),
        ({"settings": replace(SAME.settings, a_max=2)}, "--max-loras 2, the prediction assumes 4"),
        ({"settings": replace(SAME.settings, gpu_memory_utilization=0.5)}, "--gpu-memory-utilization 0.5"),
        (
            {"settings": replace(SAME.settings, kv_tokens=2000)},
            "2,000 KV tokens, the prediction assumes 1,000",
        ),
        ({"max_model_len": 64}, "--max-model-len 64, the prediction assumes 128"),
        ({"prefix_caching": True}, "--enable-prefix-caching True, the prediction assumes False"),
        ({"replicas": 2}, "2 engines, the prediction is of one"),
        ({"device": None}, f"does not report, so these are not compared: its GPU ({PROFILE.gpu.name})"),
        ({"models": {}}, f"not compared: its model ({BASE})"),
    ],
)
def test_what_a_server_has_otherwise_is_named(changes: dict[str, Any], said: str) -> None:
    (line,) = mismatches(replace(SAME, **changes))
    assert said in line
