"""Intervals of predictions carry the spread over seeds and that of drawn profiles."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import Adapter, Lengths, Profile, Workload, explain, load_profile, plan, simulate
from capplan.models import DRAWS, pessimistic_profile
from capplan.planner._document import LEVEL, prediction_interval
from capplan.planner.explain import CurveRuns
from capplan.planner.problem._estimate import TwinEstimator
from capplan.planner.problem._setup import rebuild
from capplan.reports.tables import verdict
from capplan.spec import Plan, Uncertainty

pytestmark = pytest.mark.long

VALUES = st.lists(st.floats(1.0, 1e5), min_size=2, max_size=8)
QWEN = "h100-64g/qwen2.5-7b/vllm-0.8.5"


def test_one_seed_gives_no_interval() -> None:
    assert prediction_interval([5.0], [4.0, 6.0]) is None


@given(VALUES, st.lists(st.floats(1.0, 1e5), min_size=0, max_size=8))
def test_the_interval_holds_the_mean_and_grows_with_drawn_profiles(
    values: list[float], drawn: list[float]
) -> None:
    alone, both = prediction_interval(values), prediction_interval(values, drawn)
    assert alone is not None
    assert both is not None
    slack = 1e-9 * max(values)
    assert both[0] - slack <= alone[0] <= float(np.mean(values)) + slack
    assert float(np.mean(values)) - slack <= alone[1] <= both[1] + slack


def test_a_metric_that_drawn_profiles_only_lower_has_no_wider_upper_end() -> None:
    """Throughput never exceeds the offered load, so slower steps alone move it."""
    low, high = prediction_interval([100.0, 100.0], [90.0, 100.0, 95.0, 100.0]) or (0.0, 0.0)
    assert high == pytest.approx(100.0)
    assert low < 95.0


def test_nine_of_ten_further_seeds_are_inside() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(2000):
        *values, further = rng.normal(100.0, 3.0, 6).tolist()
        low, high = prediction_interval(values) or (math.nan, math.nan)
        inside += low <= further <= high
    assert inside / 2000 == pytest.approx(LEVEL, abs=0.02)


def tight(rate_rps: float = 1.0) -> Workload:
    return Workload(
        base_model="Qwen/Qwen2.5-7B-Instruct",
        profile=QWEN,
        gpus={"count": 1},
        adapters=[Adapter(name=f"a{i}", rank=8, rate_rps=rate_rps) for i in range(8)],
        prompt_tokens=Lengths(mean=223, std=245),
        output_tokens=Lengths(mean=190, std=206),
    )


def with_scatter(scatter: float) -> Profile:
    profile = load_profile(QWEN)
    return profile.replace(
        step_latency=profile.step_latency.replace(uncertainty=Uncertainty(scatter=scatter))
    )


def test_plans_state_intervals_that_grow_with_the_uncertainty_of_the_profile() -> None:
    def width(made: Plan) -> float:
        low, high = made.groups[0].predicted.intervals["tpot_mean_ms"]
        return high - low

    certain, uncertain = (plan(tight(), profile=with_scatter(s), seeds=3) for s in (0.0, 0.1))
    assert certain.verification.drawn_profiles == DRAWS
    assert width(uncertain) > 2 * width(certain)
    assert certain.groups[0].predicted.ttft_s == uncertain.groups[0].predicted.ttft_s


def test_plans_of_one_seed_state_no_interval() -> None:
    predicted = plan(tight(), seeds=1).groups[0].predicted
    assert (predicted.low_tok_s, predicted.high_tok_s, predicted.intervals) == (None, None, {})


def test_a_robust_plan_holds_with_slow_steps_and_takes_a_gpu_for_it() -> None:
    """The bound lies between what one GPU reaches with the fitted step times and with slow ones."""
    profile, quantile = with_scatter(0.15), 0.95
    workload = tight().replace(gpus={"count": 2}, engine={"max_loras": 8, "max_num_seqs": 256})
    at_headroom = workload.replace(
        adapters=[a.replace(rate_rps=a.rate_rps / (1.0 - workload.headroom)) for a in workload.adapters]
    )
    slow = pessimistic_profile(profile, quantile)
    reached = [simulate(at_headroom, p, a_max=8, duration_s=3600).tpot_ms_p99 for p in (profile, slow)]
    bounded = workload.replace(slo={"tpot_p99_ms": math.sqrt(math.prod(reached))})
    usual, robust = (plan(bounded, profile=profile, seeds=2, robust=each) for each in (None, quantile))
    assert (usual.totals.gpus, robust.totals.gpus) == (1, 2)
    assert robust.verification.ok
    assert robust.provenance["robust"] == quantile
    assert f"headroom with step times at quantile {quantile}, at least" in verdict(robust)
    assert "quantile" not in verdict(usual)
    check_explanations(usual, robust, bounded, profile)


def check_explanations(usual: Plan, robust: Plan, workload: Workload, profile: Profile) -> None:
    """Check that curves and other fleets have the step times of the search: one GPU fails with slow ones."""
    told, slow = (explain(each, workload, profile=profile) for each in (usual, robust))
    (alone,) = told.groups
    assert alone.curve.chosen_point.holds
    assert alone.curve.robust is None
    fewer = slow.what_if[0]
    assert fewer.gpus == 1
    assert not fewer.holds
    for group in slow.groups:
        assert group.curve.robust == robust.provenance["robust"]
        assert group.curve.chosen_point.holds
        assert "step times at their quantile" not in alone.why_a_max
    instance = rebuild(robust, workload, profile, "workload").groups[0]
    runs = CurveRuns(instance.problem, instance.assignment)
    estimate = TwinEstimator(instance.problem, 0)(instance.assignment)
    simulated = runs.evaluate("a_max", instance.assignment.a_max).result
    assert simulated.throughput_tok_s == estimate.throughput_tok_s
    fitted = CurveRuns(replace(instance.problem, robust=None), instance.assignment)
    assert simulated.tpot_ms_p99 > fitted.evaluate("a_max", instance.assignment.a_max).result.tpot_ms_p99
