from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capplan import (
    Assignment,
    EngineConfig,
    InfeasibleError,
    InputError,
    Lengths,
    Problem,
    Profile,
    Slo,
    Workload,
    plan,
    simulate,
)
from capplan.models.surrogates import KINDS
from capplan.planner import RequiredEstimator, Solver
from capplan.spec import Trace
from capplan.twin.cluster import Instance, simulate_cluster
from tests.planner.conftest import PROFILE

Make = Callable[..., Workload]


LONG: Any = {"prompt_tokens": Lengths(mean=1600, std=1200), "output_tokens": Lengths(mean=400, std=240)}
"""Lengths of requests: a GPU is busy with few of them."""


def all_on_one_gpu(problem: Problem, *_: object) -> tuple[Assignment, ...]:
    return (Assignment(problem.shares, 1),)


CARELESS = Solver(
    "careless", "all on one GPU", "a test", all_on_one_gpu, required_estimator=RequiredEstimator.NONE
)


def crowd(workload: Make, rate_rps: float = 0.6, **fields: Any) -> Workload:
    return workload(*((f"a{i}", 8, rate_rps) for i in range(24)), **fields)


@pytest.mark.parametrize("solver", ["capplan", "greedy"])
def test_the_same_seed_gives_the_same_plan_on_any_number_of_threads(
    workload: Make, solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = crowd(workload, rate_rps=0.15, **LONG)
    texts = []
    for threads in (1, 5):
        monkeypatch.setattr("capplan.planner.problem._execution.cpu_count", lambda threads=threads: threads)
        texts.append(plan(spec, solver=solver, seed=3, seeds=2).to_json())
    assert texts[0] == texts[1]


def test_predictions_keep_the_bounds(workload: Make) -> None:
    slo = Slo(ttft_p99_s=2.0, tpot_p99_ms=60.0, served_fraction=0.95)
    made = plan(workload(*((f"a{i}", 16, 0.8) for i in range(16)), slo=slo))
    assert made.verification.ok
    assert made.verification.min_served_fraction >= 0.95
    for group in made.groups:
        assert group.predicted.ttft_s.p99 is not None
        assert group.predicted.ttft_s.p99 <= 2.0
        assert group.predicted.tpot_ms.p99 is not None
        assert group.predicted.tpot_ms.p99 <= 60.0


def test_a_hot_adapter_is_shared_and_its_shares_sum_to_one(workload: Make) -> None:
    spec = workload(("hot", 8, 12.0), ("cold", 8, 0.1), gpus={"count": 8}, **LONG)
    made = plan(spec, verify=False)
    shares = [a.share for g in made.groups for a in g.adapters if a.name == "hot"]
    assert len(shares) == len([g for g in made.groups if any(a.name == "hot" for a in g.adapters)])
    assert len(shares) >= 2
    assert sum(shares) == pytest.approx(1.0)


def test_a_failing_answer_of_a_custom_solver_is_repaired(workload: Make) -> None:
    made = plan(crowd(workload, rate_rps=1.6, gpus={"count": 4}), solver=CARELESS)
    assert made.provenance["solver"] == "careless"
    assert made.verification.ok
    assert made.provenance["repairs"]
    assert sum(len(group.adapters) for group in made.groups) == 24


def test_load_is_moved_if_no_number_of_slots_holds(workload: Make) -> None:
    made = plan(workload(*((f"a{i}", 8, 2.5) for i in range(14)), gpus={"count": 4}), solver=CARELESS)
    assert made.verification.ok
    assert len(made.groups) > 1
    assert any("moved" in str(change) for change in made.provenance["repairs"])  # type: ignore[union-attr]


def test_without_repair_the_plan_records_the_failure(workload: Make) -> None:
    made = plan(crowd(workload, rate_rps=1.6), solver=CARELESS, repair=False)
    assert not made.verification.ok
    assert made.provenance["repairs"] == []
    assert made.verification.groups[0].note


def test_slots_that_do_not_fit_in_memory_are_repaired_or_rejected(workload: Make) -> None:
    def greedy_for_slots(problem: Problem, *_: object) -> tuple[Assignment, ...]:
        return (Assignment(problem.shares, len(problem.shares)),)

    solver = Solver(
        "slots", "a slot for everyone", "a test", greedy_for_slots, required_estimator=RequiredEstimator.NONE
    )
    spec = workload(*((f"a{i}", 64, 0.02) for i in range(300)))
    made = plan(spec, solver=solver)
    assert made.verification.ok
    assert "for want of memory" in str(made.provenance["repairs"])
    with pytest.raises(InfeasibleError, match="300 slots of rank 64") as error:
        plan(spec, solver=solver, repair=False)
    assert error.value.reason == "memory"


def test_an_unverified_plan_is_marked(workload: Make) -> None:
    made = plan(workload(("a", 8, 0.1)), verify=False)
    assert made.verification.seeds == ()
    assert made.verification.digest is None
    assert not made.verification.ok
    assert made.changed_after_verification() == ""


def test_a_plan_has_the_digest_of_what_was_verified(workload: Make, tmp_path: Path) -> None:
    made = plan(workload(("a", 8, 0.1)), seeds=1)
    made.to_json(tmp_path / "plan.json")
    read = type(made).from_json(tmp_path / "plan.json")
    assert read.is_verified
    assert read.verification.digest == read.digest()
    fewer = tuple(
        group.replace(engine_args=group.engine_args.replace(max_num_seqs=8)) for group in read.groups
    )
    assert not read.replace(groups=fewer).is_verified


@pytest.mark.parametrize("solver", ["capplan", "greedy"])
@pytest.mark.parametrize(
    ("adapters", "fields", "reason"),
    [
        ([("a", 256, 0.01), ("b", 8, 0.5)], {"engine": EngineConfig(max_loras=256)}, "memory"),
        (
            [("a", 8, 0.1)],
            {"engine": EngineConfig(max_model_len=131_072, gpu_memory_utilization=0.4)},
            "memory",
        ),
        ([("hot", 8, 90.0)], {"gpus": {"count": 1}}, "starvation"),
        ([(f"a{i}", 8, 7.0) for i in range(6)], {"gpus": {"count": 1}}, "gpus"),
        ([("a", 8, 0.5)], {"slo": Slo(ttft_p99_s=0.001)}, "slo"),
    ],
    ids=["slots", "model length", "hot adapter", "too few", "latency"],
)
def test_an_infeasible_workload_has_a_reason(
    workload: Make, adapters: Any, fields: Any, reason: str, solver: str
) -> None:
    with pytest.raises(InfeasibleError) as error:
        plan(workload(*adapters, **fields), solver=solver)
    assert error.value.reason == reason
    assert len(str(error.value).splitlines()) == 1


def with_adapter(**changes: Any) -> Callable[[Workload], Workload]:
    return lambda w: w.replace(adapters=(w.adapters[0].replace(**changes), *w.adapters[1:]))


def two_pools(**fields: Any) -> Callable[[Workload], Workload]:
    pools = tuple(
        {"name": name, "profile": PROFILE, "count": 1, "usd_per_hour": price}
        for name, price in (("dear", 4.0), ("cheap", 1.0))
    )
    return lambda w: w.replace(profile=None, gpus=None, pools=pools, **fields)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (with_adapter(apart_from=("b",)), "apart_from"),
        (with_adapter(together_with=("b",)), "together_with"),
        (lambda w: w.replace(objective="min_latency"), "objective"),
        (two_pools(), "pools"),
    ],
)
def test_an_unsupported_requirement_is_rejected_in_one_line(workload: Make, change: Any, key: str) -> None:
    with pytest.raises(InputError, match=key) as error:
        plan(change(workload(("a", 8, 0.1), ("b", 8, 0.1))), solver="greedy")
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"solver": "magic"}, "solver: must be one of capplan, greedy, .*, milp"),
        ({"estimator": "oracle"}, "estimator: must be one of auto, best, forest, tree, twin"),
        ({"seed": -1}, "seed"),
        ({"gpus": 0}, "gpus"),
    ],
)
def test_an_invalid_argument_is_named(workload: Make, arguments: Any, key: str) -> None:
    with pytest.raises(InputError, match=key):
        plan(workload(("a", 8, 0.1)), **arguments)


@pytest.mark.parametrize("slo", [Slo(), Slo(ttft_p99_s=1.0)])
def test_idle_adapters_are_planned_onto_one_gpu(workload: Make, slo: Slo) -> None:
    """A latency bound holds without requests."""
    made = plan(workload(*((f"a{i}", 8, 0.0) for i in range(9)), slo=slo))
    assert made.totals.gpus == 1
    assert made.verification.ok
    assert made.groups[0].binds is None


@pytest.mark.parametrize(("rank", "slot_rank"), [(1, 8), (8, 8), (512, 512)])
def test_one_adapter_of_any_rank_is_planned(workload: Make, rank: int, slot_rank: int) -> None:
    """vLLM 0.8.5 has no slots of rank 1."""
    made = plan(workload(("only", rank, 0.2)))
    (group,) = made.groups
    assert made.verification.ok
    assert (group.engine_args.max_loras, group.engine_args.max_lora_rank) == (1, slot_rank)


def recorded(workload: Make, rate_rps: float, seconds: float = 300.0) -> Workload:
    random = np.random.default_rng(0)
    n = int(rate_rps * seconds)
    arrivals = np.sort(random.random(n)) * seconds
    names = [f"a{i}" for i in random.integers(0, 6, n)]
    trace = Trace.from_arrays(arrivals, names, np.full(n, 400), np.full(n, 100), seconds)
    rates = {name: names.count(name) / seconds for name in names}
    constant = {"prompt_tokens": Lengths(mean=400), "output_tokens": Lengths(mean=100)}
    return workload(*((name, 8, rates[name]) for name in sorted(rates)), trace=trace, **constant)


def test_the_horizon_of_a_trace_is_its_duration(workload: Make) -> None:
    made = plan(recorded(workload, rate_rps=3.0))
    assert made.verification.ok
    assert made.verification.duration_s == 300.0
    assert len(made.verification.seeds) == 5
    assert made.groups[0].predicted.throughput_tok_s == pytest.approx(1500.0, rel=0.05)


def test_a_dense_trace_gets_more_gpus_and_keeps_its_headroom(workload: Make) -> None:
    made = plan(recorded(workload, rate_rps=40.0))
    assert made.verification.ok
    assert made.totals.gpus >= 2
    loads = [group.predicted.load_over_capacity for group in made.groups]
    assert all(load is not None and load <= 0.9 + 0.02 for load in loads)


def test_auto_uses_the_twin_without_a_surrogate(workload: Make, unsurrogated: Profile) -> None:
    made = plan(workload(("a", 8, 0.1)), profile=unsurrogated, verify=False)
    assert made.provenance["estimator"] == "twin"
    for kind in KINDS:
        with pytest.raises(InputError, match="capplan train"):
            plan(workload(("a", 8, 0.1)), profile=unsurrogated, estimator=kind)


@pytest.mark.parametrize(
    ("measured", "planned"), [(False, False), (True, True), (None, True)], ids=["off", "on", "as-the-rules"]
)
def test_prefix_caching_of_a_plan_is_that_of_the_twin(
    workload: Make, unsurrogated: Profile, measured: bool | None, planned: bool
) -> None:
    engine = unsurrogated.engine.replace(prefix_caching=measured)
    made = plan(workload(("a", 8, 0.1)), profile=unsurrogated.replace(engine=engine), verify=False)
    assert made.groups[0].engine_args.enable_prefix_caching is planned


@pytest.mark.parametrize("kind", KINDS)
def test_surrogates_are_selected_by_name_and_the_twin_confirms(workload: Make, kind: str) -> None:
    made = plan(crowd(workload), estimator=kind)
    assert made.provenance["estimator"] == kind
    assert made.verification.ok


def test_open_engine_settings_adapt_to_fixed_ones(workload: Make) -> None:
    few_tokens = plan(workload(("a", 8, 0.1), engine=EngineConfig(max_num_batched_tokens=64)), verify=False)
    assert few_tokens.groups[0].engine_args.max_num_seqs <= 64
    many_seqs = plan(workload(("a", 8, 0.1), engine=EngineConfig(max_num_seqs=3000)), verify=False)
    assert many_seqs.groups[0].engine_args.max_num_batched_tokens >= 3000


@pytest.mark.parametrize("solver", ["capplan", "greedy"])
def test_slots_are_limited_by_the_adapters_on_the_host(workload: Make, solver: str) -> None:
    made = plan(
        workload(*((f"a{i}", 8, 0.1) for i in range(12)), engine=EngineConfig(max_cpu_loras=6)),
        solver=solver,
        verify=False,
    )
    assert all(group.engine_args.max_loras <= 6 for group in made.groups)


def test_tensor_parallel_instances_count_all_gpus(workload: Make, profile: Profile) -> None:
    two = profile.replace(tp=2)
    made = plan(workload(*((f"a{i}", 8, 6.0) for i in range(6))), profile=two, gpus=5, verify=False)
    assert made.totals.gpus == 2 * len(made.groups) <= 4
    with pytest.raises(InputError, match="gpus"):
        plan(workload(("a", 8, 0.1)), profile=two, gpus=1)


def test_the_placement_does_not_depend_on_the_order_of_adapters(workload: Make) -> None:
    adapters = [("a", 8, 5.0), ("b", 8, 5.5), ("c", 64, 5.2), ("d", 64, 5.1)]
    placed = [
        {frozenset(a.name for a in group.adapters) for group in plan(workload(*order), verify=False).groups}
        for order in (adapters, adapters[::-1])
    ]
    assert placed[0] == placed[1]


def test_predictions_are_simulations_with_the_settings_of_the_plan(workload: Make, profile: Profile) -> None:
    spec = workload(("a", 8, 1.0), ("b", 16, 2.0))
    made = plan(spec)
    args = made.groups[0].engine_args
    runs = [
        simulate(
            spec,
            profile,
            a_max=args.max_loras,
            s_max=args.max_lora_rank,
            duration_s=made.verification.duration_s,
            seed=seed,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=args.max_model_len,
            gpu_memory_utilization=args.gpu_memory_utilization,
            prefix_caching=args.enable_prefix_caching,
        )
        for seed in made.verification.seeds
    ]
    mean = sum(run.throughput_tok_s for run in runs) / len(runs)
    assert made.groups[0].predicted.throughput_tok_s == pytest.approx(mean, rel=1e-12)


def test_prompts_longer_than_max_model_len_are_rejected(workload: Make) -> None:
    seconds = np.arange(10.0)
    trace = Trace.from_arrays(seconds, ["a0"] * 10, np.full(10, 9000), np.full(10, 10), 10.0)
    constant = {"prompt_tokens": Lengths(mean=9000), "output_tokens": Lengths(mean=10)}
    with pytest.raises(InputError, match=r"engine\.max_model_len: .*10 of 10 do not fit.*9000 tokens"):
        plan(workload(("a0", 8, 1.0), trace=trace, **constant))


def test_several_instances_are_verified_as_a_cluster(workload: Make, profile: Profile) -> None:
    """Requests are routed by the shares of the plan, also of a split adapter."""
    spec = workload(("hot", 8, 60.0), *((f"a{i}", 16, 0.5) for i in range(8)))
    made = plan(spec, seeds=1)
    assert len(made.groups) > 1
    instances = [
        Instance(
            profile,
            a_max=group.engine_args.max_loras,
            s_max=group.engine_args.max_lora_rank,
            max_num_seqs=group.engine_args.max_num_seqs,
            adapters={adapter.name: adapter.share for adapter in group.adapters},
        )
        for group in made.groups
    ]
    (seed,) = made.verification.seeds
    together = simulate_cluster(spec, instances, router="smooth-shares", seed=seed)
    predicted = [group.predicted.throughput_tok_s for group in made.groups]
    assert predicted == pytest.approx([one.throughput_tok_s for one in together.instances], rel=1e-9)
    assert sum(together.requests_per_instance) == together.submitted
