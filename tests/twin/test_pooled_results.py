"""Results under a scheduler and an adapter cache, through the public surface of the twin."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from capplan import InputError, Workload, simulate, simulate_detailed
from capplan.spec import QueueClass, Queues, Wrs
from capplan.twin import Scenario, build_scenario
from capplan.twin.cluster import Instance, simulate_cluster
from capplan.twin.instance import choose_policies, engine_args, run
from capplan.twin.instance._scenario import new_engine
from tests.twin.cluster.workloads import PROFILE, even
from tests.twin.comparison import assert_same

SETTINGS = {"a_max": 24, "s_max": 64, "duration_s": 700.0, "max_num_seqs": 24}
RANKS = (8, 16, 64)
POLICIES = ("fifo", "sjf", "static", "chameleon")
CACHES = ("none", "lru", "fairshare", "gdsf", "chameleon")


def busy(rps: float = 9.0) -> Workload:
    """Return a workload with queues that change at every refresh."""
    return even(48, rps, RANKS)


def scenario_of(workload: Workload, **policies: Any) -> Scenario:
    args = engine_args(workload, {"a_max": 24, "s_max": 64, "max_num_seqs": 24}, PROFILE)
    chosen = choose_policies(workload, PROFILE, **policies)
    return build_scenario(workload, PROFILE, args, duration_s=700.0, seed=1, policies=chosen)


@pytest.mark.parametrize("policy", POLICIES)
def test_runs_with_refreshes_are_the_same_with_and_without_fast_forward(policy: str) -> None:
    scenario = scenario_of(busy(), scheduler={"policy": policy, "refresh_s": 60.0}, cache="chameleon")
    trace = run(scenario)
    assert_same(trace, run(scenario, fast_forward=False))
    assert_same(trace, run(scenario, interrupt=lambda: None))
    assert (trace.pool.refreshes > 0) == (policy in ("chameleon", "static"))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cluster_of_one_gives_the_result_of_simulate(policy: str) -> None:
    chosen: dict[str, Any] = {"scheduler": {"policy": policy, "refresh_s": 60.0}, "cache": "gdsf"}
    alone = simulate(busy(), PROFILE, seed=3, **chosen, **SETTINGS)
    engine = {name: value for name, value in SETTINGS.items() if name != "duration_s"}
    cluster = simulate_cluster(busy(), [Instance(PROFILE, **chosen, **engine)], duration_s=700.0, seed=3)
    for result in (cluster, cluster.instances[0]):
        assert {**result.document(), "wall_s": 0.0, **NOT_SINGLE} == {
            **alone.document(),
            "wall_s": 0.0,
            **NOT_SINGLE,
        }


NOT_SINGLE = dict.fromkeys(
    ("instances", "requests_per_instance", "migrations", "requests", "tpt_over_base", "moves"), None
)


@pytest.mark.parametrize("cache", CACHES)
def test_metrics_of_a_run_add_up(cache: str) -> None:
    result = simulate(busy(), PROFILE, scheduler="chameleon", cache=cache, **SETTINGS)
    pool = result.pool
    assert pool is not None
    assert pool.hit_rate == pool.hits / (pool.hits + pool.misses)
    assert sum(size.submitted for size in pool.sizes) == result.submitted - result.rejected
    assert sum(size.finished for size in pool.sizes) == result.completed
    assert 0.0 <= pool.queue_share <= 1.0
    assert all(0.0 <= size.queue_share <= 1.0 for size in pool.sizes)
    for metric in ("interruption_count", "interruption_share"):
        parts = [size.finished * getattr(size, metric).mean for size in pool.sizes if size.finished]
        assert sum(parts) / result.completed == pytest.approx(getattr(result, f"{metric}_mean"))
    assert pool.load_wait_ms.mean <= pool.missed_load_wait_ms.mean
    assert 0.0 < pool.link_utilization <= 1.0
    assert pool.evictions <= result.adapter_loads
    assert "pool" in result.document()


def test_the_cache_keeps_adapters_and_relieves_the_link() -> None:
    without, cached = (
        simulate(busy(), PROFILE, scheduler="fifo", cache=cache, **SETTINGS).pool for cache in ("none", "lru")
    )
    assert without is not None
    assert cached is not None
    assert cached.hit_rate > without.hit_rate
    assert cached.link_utilization < without.link_utilization / 2
    assert cached.load_wait_ms.mean < without.load_wait_ms.mean


def test_the_engine_s_own_rules_have_no_metrics_of_a_pool() -> None:
    result = simulate(busy(), PROFILE, **SETTINGS)
    assert result.pool is None
    assert "pool" not in result.document()
    assert "size_class" not in simulate_detailed(busy(), PROFILE, **SETTINGS).requests.columns()


def test_slora_by_name_is_slora_by_rules() -> None:
    by_name = simulate(busy(), PROFILE, scheduler="slora", **SETTINGS)
    by_rules = simulate(busy(), PROFILE, rules="slora", **SETTINGS)
    assert by_name.pool is not None
    assert by_rules.pool is None
    assert {**by_name.document(), "pool": None, "wall_s": 0.0} == {
        **by_rules.document(),
        "pool": None,
        "wall_s": 0.0,
    }


def test_scheduler_and_cache_of_the_workload_apply_unless_rules_are_given() -> None:
    planned = busy().replace(scheduler={"policy": "sjf"}, cache={"policy": "lru"})
    given = simulate(busy(), PROFILE, scheduler="sjf", cache="lru", **SETTINGS)
    assert replace(simulate(planned, PROFILE, **SETTINGS), wall_s=0.0) == replace(given, wall_s=0.0)
    own = simulate(busy(), PROFILE, rules=PROFILE.engine.rules, **SETTINGS)
    overruled = simulate(planned, PROFILE, rules=PROFILE.engine.rules, **SETTINGS)
    assert replace(overruled, wall_s=0.0) == replace(own, wall_s=0.0)


def test_waits_and_size_classes_are_in_the_table_of_requests() -> None:
    detail = simulate_detailed(busy(), PROFILE, scheduler="chameleon", cache="lru", **SETTINGS)
    table, pool = detail.requests, detail.result.pool
    assert pool is not None
    assert table.size_class is not None
    finished = table.status == 0
    assert table.queue_s[finished].mean() == pytest.approx(pool.queue_s.mean)
    with_adapter = finished & (table.adapter > 0)
    assert 1e3 * table.load_wait_s[with_adapter].mean() == pytest.approx(pool.load_wait_ms.mean)
    counts = np.bincount(table.size_class[table.size_class >= 0])
    assert counts.tolist() == [size.submitted for size in pool.sizes]


def test_wrong_predictions_lose_nothing() -> None:
    predictor = {"kind": "classes", "accuracy": 0.0}
    scheduler = {"policy": "chameleon", "predictor": predictor, "refresh_s": 60.0}
    result = simulate(busy(4.0), PROFILE, scheduler=scheduler, cache="chameleon", **SETTINGS)
    assert result.pool is not None
    assert result.pool.overruns > 0
    assert result.served_fraction > 0.99


def test_initial_queues_are_those_given() -> None:
    queues = Queues(
        wrs=Wrs(a=0.4, b=0.6, max_prompt_tokens=500, max_output_tokens=300, max_adapter_bytes=10**8),
        classes=(QueueClass(upper_wrs=0.2, quota_tokens=900), QueueClass(upper_wrs=None, quota_tokens=100)),
    )
    state = new_engine(scenario_of(busy(), queues=queues), 10)
    assert state.pooled.counts.n_queues == 2
    assert state.pooled.cuts.tolist()[:2] == [0.2, np.inf]
    assert state.pooled.queues.quota.tolist()[:2] == [900, 100]


FIVE = Queues(
    wrs=Wrs(a=0.4, b=0.6, max_prompt_tokens=500, max_output_tokens=300, max_adapter_bytes=10**8),
    classes=tuple(QueueClass(upper_wrs=upper, quota_tokens=100) for upper in (0.1, 0.2, 0.3, 0.4, None)),
)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"scheduler": "chamelon"}, "scheduler"),
        ({"cache": "lur"}, "cache"),
        ({"scheduler": "fifo", "rules": "vllm-0.8"}, "rules: must not be given beside"),
        ({"scheduler": "slora", "cache": "lru"}, "cache: must be none beside scheduler slora"),
        ({"scheduler": "fifo", "prefix_caching": True}, "prefix_caching: must be off"),
        ({"scheduler": "fifo", "queues": FIVE}, "scheduler: must be chameleon or static"),
        ({"scheduler": "chameleon", "queues": FIVE}, "queues.classes: must be at most 4"),
        ({"scheduler": "fifo", "gpus_per_link": 0}, "gpus_per_link"),
    ],
)
def test_a_broken_rule_is_one_clear_error(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        simulate(busy(), PROFILE, **{**SETTINGS, **settings})


def test_a_cluster_has_one_kind_of_memory_and_one_predictor() -> None:
    plain, pooled = Instance(PROFILE, a_max=4, s_max=64), Instance(PROFILE, 4, 64, scheduler="fifo")
    with pytest.raises(InputError, match=r"instances\[0\]: must have a scheduler"):
        simulate_cluster(busy(), [plain, pooled], duration_s=60.0)
    other = Instance(PROFILE, 4, 64, scheduler={"policy": "sjf", "predictor": "classes"})
    with pytest.raises(InputError, match="predictor: must be that of the other instances"):
        simulate_cluster(busy(), [pooled, other], duration_s=60.0)


def test_engines_with_schedulers_share_requests_by_tokens() -> None:
    engine = Instance(PROFILE, 24, 64, max_num_seqs=24, scheduler="chameleon", cache="chameleon")
    alone, pair = (
        simulate_cluster(busy(16.0), [engine] * count, router="least-tokens", duration_s=400.0)
        for count in (1, 2)
    )
    first, second = pair.requests_per_instance
    assert abs(first - second) < 0.1 * (first + second)
    assert pair.ttft_s_p99 < alone.ttft_s_p99
    assert pair.pool is not None
    assert pair.pool.hits == sum(one.pool.hits for one in pair.instances if one.pool is not None)
