"""Queues of one instance of a plan, from its simulation in the twin."""

from collections.abc import Callable

import numpy as np
import pytest

from capplan import Assignment, Lengths, Profile, Slo, Workload, plan, simulate
from capplan.planner.problem import AdapterShare
from capplan.planner.problem._settings import group_queues, stated_bound_s
from capplan.planner.problem._setup import make_problem
from capplan.spec import QueueConfig, Queues, Trace

Make = Callable[..., Workload]

MIXED = tuple((f"a{i}", (8, 16, 64)[i % 3], 0.4) for i in range(12))


def on_one_gpu(workload: Workload, profile: Profile) -> Queues | None:
    problem = make_problem(workload, 1, profile)
    return group_queues(problem, Assignment(problem.shares, a_max=8))


def made(workload: Workload, profile: Profile) -> Queues:
    queues = on_one_gpu(workload, profile)
    assert queues is not None
    return queues


def test_the_quotas_are_the_kv_tokens_of_the_gpu(workload: Make, profile: Profile) -> None:
    spec = workload(*MIXED, queues=QueueConfig())
    queues = made(spec, profile)
    result = simulate(spec, profile, a_max=8, duration_s=60.0, max_num_seqs=256, max_num_batched_tokens=2048)
    assert len(queues.classes) > 1
    assert sum(each.quota_tokens for each in queues.classes) == result.kv_tokens


def test_queues_are_deterministic(workload: Make, profile: Profile) -> None:
    spec = workload(*MIXED, queues=QueueConfig())
    assert made(spec, profile) == made(spec, profile)


def test_no_queues_without_configuration_or_requests(workload: Make, profile: Profile) -> None:
    assert on_one_gpu(workload(*MIXED), profile) is None
    assert on_one_gpu(workload(*MIXED, scheduler="sjf", cache="lru"), profile) is None
    assert on_one_gpu(workload(("idle", 8, 0.0), queues=QueueConfig()), profile) is None


@pytest.mark.parametrize("most", [1, 2])
def test_the_configuration_is_applied(workload: Make, profile: Profile, most: int) -> None:
    wanted = QueueConfig(max_queues=most, clusters="wcss", size="output_only", adapter_charge="none")
    queues = made(workload(*MIXED, queues=wanted), profile)
    assert len(queues.classes) == most
    assert (queues.wrs.form, queues.wrs.a, queues.adapter_charge) == ("output_only", 0.0, "none")


def test_sizes_and_charges_are_those_of_predicted_outputs(workload: Make, profile: Profile) -> None:
    """A class predictor returns few different lengths, so the largest one is a class mean."""
    predictor = {"kind": "classes", "accuracy": 1.0}
    spec = workload(*MIXED, scheduler={"policy": "chameleon", "predictor": predictor})
    by_class, by_output = made(spec, profile), made(spec.replace(scheduler="chameleon"), profile)
    assert by_class.wrs.max_prompt_tokens == by_output.wrs.max_prompt_tokens
    assert by_class.wrs.max_output_tokens != by_output.wrs.max_output_tokens


def test_static_queues_have_equal_quotas(workload: Make, profile: Profile) -> None:
    queues = made(workload(*MIXED, scheduler="static"), profile)
    quotas = [each.quota_tokens for each in queues.classes]
    assert len(quotas) == 4
    assert max(quotas) - min(quotas) <= 1


def test_sizes_are_those_of_the_instance(workload: Make, profile: Profile) -> None:
    spec = workload(
        *MIXED, queues=QueueConfig(), prompt_tokens=Lengths(mean=90), output_tokens=Lengths(mean=30)
    )
    problem = make_problem(spec, 2, profile)
    half = tuple(AdapterShare(p.name, p.rank, p.rate_rps / 2, 0.5) for p in problem.shares if p.rank == 16)
    queues = group_queues(problem, Assignment(half, a_max=4))
    assert queues is not None
    assert (queues.wrs.max_prompt_tokens, queues.wrs.max_output_tokens) == (90, 30)
    assert len(queues.classes) == 1  # requests of one length and rank are all of one size


def test_queues_of_a_trace(workload: Make, profile: Profile) -> None:
    prompt = np.array([100, 4000] * 200)
    trace = Trace.from_arrays(np.arange(400) * 0.5, ["a0"] * 400, prompt, np.full(400, 50), 200.0)
    lengths = {"prompt_tokens": Lengths(mean=2050), "output_tokens": Lengths(mean=50)}
    spec = workload(("a0", 8, 2.0), trace=trace, queues=QueueConfig(), **lengths)
    queues = made(spec, profile)
    assert len(queues.classes) == 2
    assert queues.wrs.max_prompt_tokens == 4000


@pytest.mark.parametrize(
    ("slo", "bound_s"),
    [
        (Slo(), None),
        (Slo(ttft_p99_s=1.0), None),
        (Slo(e2e_p99_s=30.0), 30.0),
        (Slo(e2e_mean_s=8.0, e2e_p99_s=30.0), 8.0),
    ],
    ids=["none", "on another metric", "one", "several"],
)
def test_the_bound_is_the_tightest_one_on_e2e_that_the_user_states(slo: Slo, bound_s: float | None) -> None:
    assert stated_bound_s(slo) == bound_s


def test_quotas_that_miss_a_stated_bound_are_scaled_down_and_say_so(workload: Make, profile: Profile) -> None:
    spec = workload(*MIXED, queues=QueueConfig(), slo=Slo(e2e_mean_s=0.01))
    tight, plain = made(spec, profile), made(spec.replace(slo=Slo()), profile)
    assert tight.missing_tokens is not None
    assert plain.missing_tokens is None
    assert sum(each.quota_tokens for each in tight.classes) == sum(
        each.quota_tokens for each in plain.classes
    )


def test_queues_cost_no_gpu_that_their_minima_alone_would_need(workload: Make) -> None:
    """One GPU at half of its capacity: by the largest requests the minimum quotas exceed its memory."""
    spec = workload(*((f"a{i}", (8, 16, 64)[i % 3], 0.5) for i in range(12)), gpus={"count": 4})
    alone, queued = plan(spec, seeds=1), plan(spec.replace(queues=QueueConfig()), seeds=1)
    assert queued.verification.ok
    assert queued.totals.gpus == alone.totals.gpus == 1
