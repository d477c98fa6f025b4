"""Plans that name their re-balancing: slots, verification, and simulation by other settings."""

from dataclasses import replace

import pytest

from capplan import Adapter, InputError, Plan, Workload, plan
from capplan.planner import verify_as_served
from capplan.planner.problem._evaluate import evaluate_cluster, simulate_instances
from capplan.planner.problem._setup import rebuild
from capplan.planner.verification import fleet_of_plan, served_rebalancer
from capplan.spec import Lengths, Pool, RebalanceSettings
from tests.twin.cluster.workloads import PROFILE

pytestmark = pytest.mark.long

SETTINGS = RebalanceSettings(every_s=600.0, forecast="last")


def make(**fields: object) -> Workload:
    return Workload(
        **{
            "base_model": "meta-llama/Llama-3.1-8B-Instruct",
            "profile": PROFILE.name,
            "adapters": [Adapter(name=f"a{i}", rank=8 << (i % 2), rate_rps=1.0) for i in range(12)],
            "prompt_tokens": Lengths(mean=200),
            "output_tokens": Lengths(mean=200),
            **fields,
        }
    )


@pytest.fixture(scope="module")
def planned() -> tuple[Plan, Workload]:
    workload = make(rebalance=SETTINGS)
    return plan(workload, gpus=2, solver="loraserve", seeds=1), workload


def test_a_plan_is_verified_with_its_rebalancing(planned) -> None:
    made, workload = planned
    assert made.rebalance == SETTINGS
    assert Plan.model_validate_json(made.to_json()) == made
    assert all(group.engine_args.max_lora_rank == 16 for group in made.groups), "any adapter may come"
    fleet = fleet_of_plan(made, workload, None, "workload")
    assert fleet.rebalance is not None
    result = fleet.simulate(made.verification.seeds[0], made.verification.duration_s)
    assert result.moves is not None
    assert len(result.moves.rounds) == 5
    served = min(each.served_fraction for each in result.instances)
    assert made.verification.min_served_fraction == pytest.approx(served, abs=1e-9)


def test_a_plan_is_verified_again_for_engines_that_do_not_rebalance(planned) -> None:
    made, workload = planned
    again = verify_as_served(made, workload)
    assert again.rebalance is None
    assert again.verification.ok
    slots = [group.engine_args.max_loras for group in made.groups]
    assert [group.engine_args.max_loras for group in again.groups] == slots
    expected = plan(make(), gpus=2, solver="loraserve", seeds=1)
    assert again.verification.min_served_fraction == expected.verification.min_served_fraction


def test_other_settings_replace_those_of_the_plan(planned) -> None:
    made, workload = planned
    fleet = fleet_of_plan(made, workload, None, "workload", None, RebalanceSettings(every_s=20.0))
    moves = fleet.simulate(1, 61.0).moves
    assert moves is not None
    assert [each.at_s for each in moves.rounds] == [20.0, 40.0, 60.0]


def test_instances_have_the_slots_of_the_largest_group(planned) -> None:
    made, workload = planned
    first = made.groups[0]
    every = {a.name: a.model_copy(update={"share": 1.0}) for group in made.groups for a in group.adapters}
    whole = [[a for a in every.values() if a.rank == rank] for rank in (8, 16)]
    small = first.engine_args.model_copy(update={"max_lora_rank": 8})
    groups = [
        first.replace(id="small", adapters=whole[0], engine_args=small),
        first.replace(id="large", adapters=whole[1]),
    ]
    apart = made.replace(groups=groups, verification=made.verification.replace(groups=()))
    fleet = fleet_of_plan(apart, workload, None, "workload")
    assert [each.s_max for each in fleet.instances] == [16, 16]
    assert fleet.simulate(1, 60.0).moves is not None


def test_verification_has_the_settings_that_run(planned) -> None:
    """Groups with few and many slots."""
    made, workload = planned
    first, second = (group.engine_args for group in made.groups)
    groups = [
        made.groups[0].replace(engine_args=first.replace(max_loras=1, max_num_seqs=64)),
        made.groups[1].replace(engine_args=second.replace(max_loras=8, max_num_seqs=32)),
    ]
    uneven = made.replace(groups=groups)
    rebuilt = rebuild(uneven, workload, None, "workload")
    fleet = fleet_of_plan(uneven, workload, None, "workload")
    assert [(each.a_max, each.max_num_seqs) for each in fleet.instances] == [(8, 32)] * 2
    wanted = list(fleet.simulate(1, 300.0).instances)
    assignments = [each.assignment for each in rebuilt.groups]
    options = (replace(rebuilt.problem, simulated_s=300.0), assignments, 1)
    verified = evaluate_cluster(*options, rebalance=fleet.rebalance)
    assert [each.result for each in verified] == wanted
    assert simulate_instances(*options, rebalance=fleet.rebalance) == wanted


UNEVEN = Workload(
    base_model="meta-llama/Llama-3.1-8B-Instruct",
    profile=PROFILE.name,
    adapters=[
        *(Adapter(name=f"hot{i}", rank=8, rate_rps=4.0) for i in range(3)),
        *(Adapter(name=f"cold{i}", rank=16, rate_rps=0.1) for i in range(40)),
    ],
    prompt_tokens=Lengths(mean=200),
    output_tokens=Lengths(mean=200),
)


def test_the_document_has_the_settings_that_run_and_were_verified() -> None:
    """Groups of few hot and many cold adapters: without re-balancing each has slots of its own."""
    options = {"gpus": 2, "solver": "latency", "seeds": 1}
    moving = UNEVEN.model_copy(update={"rebalance": SETTINGS})
    assert len({group.engine_args.max_loras for group in plan(UNEVEN, **options).groups}) == 2
    made = plan(moving, **options)
    first, *others = (group.engine_args for group in made.groups)
    assert others == [first]
    fleet = fleet_of_plan(made, moving, None, "workload")
    assert {each.a_max for each in fleet.instances} == {first.max_loras}
    kv_tokens = [each.kv_tokens for each in fleet.simulate(1, 10.0).instances]
    assert [group.predicted.kv_tokens for group in made.groups] == kv_tokens


def test_a_simulation_has_a_bounded_number_of_rebalancings(planned) -> None:
    made, workload = planned
    fleet = fleet_of_plan(made, workload, None, "workload", None, RebalanceSettings(every_s=1e-9))
    with pytest.raises(InputError, match="every_s: must be at least the simulated time over 100,000"):
        fleet.simulate(1, 60.0)


def test_a_running_rebalancer_requires_a_workload_with_the_traffic_of_the_plan(planned) -> None:
    made, workload = planned
    less = workload.model_copy(update={"adapters": workload.adapters[1:]})
    missing = workload.adapters[0].name
    with pytest.raises(InputError, match=f"must have all 12 adapters of the plan .got 'no {missing}'"):
        served_rebalancer(made, made.groups, SETTINGS, {}, {PROFILE.name: PROFILE}, less)


def test_rebalancing_needs_equal_gpus() -> None:
    pool = Pool(name="h100", profile=PROFILE.name, count=2)
    with pytest.raises(InputError, match="rebalance: needs equal GPUs"):
        make(profile=None, pools=[pool], rebalance=SETTINGS)
