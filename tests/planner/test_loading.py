"""What `explain` tells of loading policies."""

from dataclasses import replace

from capplan import explain, plan
from capplan.spec import Cache, Scheduler, Slo
from tests.twin.examples import profile, workload
from tests.twin.test_loading import assisted_profile


def test_each_policy_is_simulated_with_the_plans_requests() -> None:
    load = workload(adapters=8, rate_rps=0.1, output=30).replace(
        scheduler=Scheduler(policy="fifo"),
        cache=Cache(policy="none", loading="assisted", prefetch="none", cpu_workers=2),
        slo=Slo(ttft_mean_s=0.1),
    )
    assisted = assisted_profile(60.0)
    made = plan(load, profile=assisted, seed=1)
    assert made.is_verified
    (group,) = explain(made, load, profile=assisted).groups
    found = {point.loading: point for point in group.loading}
    assert list(found) == ["assisted", "asynchronous", "on-demand", "resident"]
    ttft = {name: point.ttft_mean_s for name, point in found.items()}
    assert ttft["resident"] < ttft["assisted"] < ttft["on-demand"]
    assert found["asynchronous"].interruption_mean_share < found["on-demand"].interruption_mean_share
    assert not found["assisted"].broken


def test_resident_adapters_take_the_gpus_that_their_memory_needs() -> None:
    load = workload(adapters=600, rate_rps=0.002, rank=64).replace(scheduler=Scheduler(policy="fifo"))
    gpus = {
        loading: plan(
            load.replace(cache=Cache(policy="none", loading=loading)), profile=profile(), seed=1
        ).totals.gpus
        for loading in ("resident", "cached")
    }
    assert gpus["resident"] > gpus["cached"] == 1


def test_without_a_choice_there_is_nothing_to_tell() -> None:
    load = workload(adapters=4, rate_rps=0.1).replace(scheduler=Scheduler(policy="slora"))
    assisted = assisted_profile(60.0)
    (group,) = explain(plan(load, profile=assisted, seed=1), load, profile=assisted).groups
    assert group.loading == ()
    assert replace(group, loading=()) == group
