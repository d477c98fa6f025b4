"""Planning of the base model's traffic."""

from pathlib import Path

import pytest

from capplan import Adapter, EngineConfig, InputError, Lengths, Plan, Workload, errors, plan
from capplan.planner import SOLVERS
from capplan.planner.explain import explain
from capplan.planner.problem import Assignment
from capplan.planner.problem._bound import lower_bound
from capplan.planner.problem._setup import make_problem
from capplan.spec import BaseTraffic, QueueConfig
from tests.twin.examples import profile as tiny_profile

MODEL = "org/tiny"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
H100_LLAMA = "h100-64g/llama-3.1-8b/vllm-0.8.5"
SLOW = tiny_profile(step_ms=200.0, load_ms=5.0)
CLOSE = 1e-9


def workload(adapters: int = 0, base_rps: float = 0.3, **changes: object) -> Workload:
    """Return a workload for an engine of four places and slow steps: about one request per second."""
    fields: dict[str, object] = {
        "base_model": MODEL,
        "adapters": [Adapter(name=f"a{i}", rank=8, rate_rps=0.05) for i in range(adapters)],
        "prompt_tokens": Lengths(mean=64),
        "output_tokens": Lengths(mean=16),
        "base": BaseTraffic(rate_rps=base_rps),
        "engine": EngineConfig(max_num_seqs=4, max_model_len=512),
    }
    return Workload(**(fields | changes))  # type: ignore[arg-type]


def planned(given: Workload, gpus: int = 4, **options: object) -> Plan:
    return plan(given, gpus=gpus, profile=SLOW, seeds=1, **options)  # type: ignore[arg-type]


def base_share(answer: Plan) -> float:
    return sum(group.replicas * group.base.share for group in answer.groups if group.base is not None)


def test_a_fleet_of_the_base_model_alone_has_no_slots() -> None:
    answer = planned(workload())
    (group,) = answer.groups
    assert (group.engine_args.max_loras, group.engine_args.max_lora_rank, group.adapters) == (0, 0, ())
    assert group.base is not None
    assert (group.base.rate_rps, group.base.share) == (0.3, 1.0)
    assert answer.verification.ok
    assert Plan.model_validate_json(answer.to_json()) == answer


def test_a_time_limit_applies_to_the_base_model_alone() -> None:
    assert planned(workload(), time_limit_s=60.0).groups[0].base is not None


def test_hot_base_traffic_is_split_over_the_fewest_gpus() -> None:
    answer = planned(workload(base_rps=3.0))
    assert answer.totals.gpus == 3
    assert base_share(answer) == pytest.approx(1.0, abs=CLOSE)
    assert answer.verification.ok
    with pytest.raises(errors.InfeasibleError, match=f"base model {MODEL} at 9 req/s"):
        planned(workload(base_rps=9.0), gpus=2)


def test_base_traffic_fills_the_gpus_of_adapters() -> None:
    """1.6 requests per second of both together take two GPUs, as of one kind alone would."""
    answer = planned(workload(adapters=8, base_rps=1.2))
    assert answer.totals.gpus == 2
    assert base_share(answer) == pytest.approx(1.0, abs=CLOSE)
    placed = [adapter.name for group in answer.groups for adapter in group.adapters]
    assert sorted(placed) == [f"a{i}" for i in range(8)]
    assert any(group.adapters and group.base is not None for group in answer.groups)
    rates = [
        sum(a.rate_rps for a in g.adapters) + (g.base.share * 1.2 if g.base else 0.0) for g in answer.groups
    ]
    assert max(rates) < 1.0  # balanced
    assert answer.verification.ok


@pytest.mark.parametrize("solver", [name for name in SOLVERS if name != "greedy-fast"])
def test_every_solver_places_all_of_it(solver: str) -> None:
    answer = planned(workload(adapters=3, base_rps=0.3), gpus=2, solver=solver, repair=False)
    assert base_share(answer) == pytest.approx(1.0, abs=CLOSE)
    assert {adapter.name for group in answer.groups for adapter in group.adapters} == {"a0", "a1", "a2"}
    for group in answer.groups:
        assert (group.engine_args.max_loras == 0) == (not group.adapters)


def test_greedy_fast_asks_the_twin_where_there_is_base_traffic() -> None:
    """Its trees were trained without: a GPU that they would call idle is full of base traffic."""
    given = workload(adapters=40, base_rps=10.0, engine=EngineConfig(), prompt_tokens=Lengths(mean=400))
    given = given.replace(base_model=LLAMA, output_tokens=Lengths(mean=100))
    answer = plan(given, gpus=3, profile=H100_LLAMA, seeds=1, solver="greedy-fast")
    assert base_share(answer) == pytest.approx(1.0, abs=CLOSE)
    assert sorted(a.name for g in answer.groups for a in g.adapters) == sorted(f"a{i}" for i in range(40))
    assert answer.verification.ok


def test_the_lower_bound_counts_the_base_model() -> None:
    llama = workload(base_rps=20.0).replace(base_model=LLAMA, engine=EngineConfig())

    def bound(**changes: object) -> float:
        problem = make_problem(llama.replace(**changes), 4, H100_LLAMA)
        return lower_bound(problem).gpus

    as_adapter = bound(adapters=[Adapter(name="a", rank=8, rate_rps=20.0)], base=None)
    assert bound() == pytest.approx(as_adapter, rel=0.02)
    assert bound(base=BaseTraffic(rate_rps=20.0, prompt_tokens=Lengths(mean=640))) > 2.0 * bound()


@pytest.mark.parametrize("solver", ["capplan", "loraserve", "greedy", "dlora-proactive"])
def test_slots_that_the_workload_fixes_are_on_every_gpu(solver: str) -> None:
    fixed = EngineConfig(max_num_seqs=4, max_model_len=512, max_loras=2, max_lora_rank=16)
    (group,) = planned(workload(engine=fixed), gpus=1, solver=solver).groups
    assert (group.engine_args.max_loras, group.engine_args.max_lora_rank) == (2, 16)


def test_replanning_from_a_plan_in_force_moves_nothing(tmp_path: Path) -> None:
    given = workload(adapters=8, base_rps=1.2)
    path = tmp_path / "plan.json"
    before = planned(given)
    before.to_json(path)
    after = planned(given.replace(previous_plan=str(path)))
    assert after.moves == ()
    assert {g.id: g.base for g in after.groups} == {g.id: g.base for g in before.groups}


def test_a_plan_with_base_traffic_is_explained() -> None:
    given = workload()
    answer = planned(given)
    told = explain(answer, given, profile=SLOW, groups=answer.groups)
    assert told.groups[0].why_a_max.startswith("no slots")
    assert "slots" not in {use.resource for use in told.groups[0].room.uses}
    mixed = workload(adapters=2)
    answer = planned(mixed)
    told = explain(answer, mixed, profile=SLOW, groups=answer.groups)
    assert told.groups[0].curve.adapters == 2


def test_queues_of_a_group_of_the_base_model_go_by_lengths() -> None:
    spread = Lengths(mean=64, std=60)
    (group,) = planned(workload(queues=QueueConfig(), prompt_tokens=spread)).groups
    assert group.queues is not None
    assert group.queues.wrs.max_adapter_bytes == 1


def test_shares_that_do_not_sum_to_one_are_refused() -> None:
    (group,) = planned(workload()).groups
    assert group.base is not None
    half = group.replace(base=group.base.replace(share=0.5))
    with pytest.raises(InputError, match="shares of the base model must sum to 1 over groups"):
        planned(workload()).replace(groups=(half,))


def test_an_instance_without_adapters_keeps_no_slots() -> None:
    problem = make_problem(workload(adapters=1), 2, SLOW)
    adapter, base = problem.shares
    args = problem.engine_args(Assignment((base,), 4))
    assert (base.name, args.max_loras, args.max_lora_rank) == (MODEL, 0, 0)
    assert problem.engine_args(Assignment((adapter, base), 1)).max_lora_rank == 8
