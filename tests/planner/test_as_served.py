"""Plans verified as a deployment target serves them: by another router, or with all adapters everywhere."""

from typing import Any

import pytest

from capplan import Adapter, InputError, Plan, Workload, plan
from capplan.planner import verify_as_served
from capplan.spec import STATE_PERIOD_S, RouterOptions
from capplan.twin.cluster import ClusterResult, Instance, simulate_cluster
from tests.planner.test_base_traffic import SLOW, workload

HOT = workload(adapters=3, base_rps=2.0)


@pytest.fixture(scope="module")
def planned() -> Plan:
    """Three GPUs that share the traffic of the base model."""
    made = plan(HOT, gpus=3, profile=SLOW, seeds=1)
    assert made.verification.ok
    assert len(made.groups) == 3
    return made


def simulated(made: Plan, router: str, given: Workload = HOT) -> ClusterResult:
    """Simulate the groups of a plan behind a router, by the public function."""
    instances = []
    for group in made.groups:
        args = group.engine_args
        knobs = {
            "max_num_seqs": args.max_num_seqs,
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "max_model_len": args.max_model_len,
        }
        instances.append(
            Instance(
                SLOW,
                a_max=args.max_loras,
                s_max=args.max_lora_rank,
                adapters=made.shares_of(group),
                **knobs,  # type: ignore[arg-type]
            )
        )
    check = made.verification
    return simulate_cluster(
        given,
        instances,
        router=router,
        duration_s=check.duration_s,
        seed=check.seeds[0],
        state_period_s=STATE_PERIOD_S,
    )


@pytest.mark.parametrize("router", ["random", "least-loaded"])
def test_the_twin_verifies_with_the_router_of_the_target(planned: Plan, router: str) -> None:
    again = verify_as_served(planned, HOT, router=router, profile=SLOW)
    assert again.router == router
    assert [each.engine_args for each in again.groups] == [each.engine_args for each in planned.groups]
    assert [each.adapters for each in again.groups] == [each.adapters for each in planned.groups]
    found = [each.throughput_tok_s for each in again.verification.groups]
    assert found == [each.throughput_tok_s for each in simulated(again, router).instances]
    assert found != [each.throughput_tok_s for each in planned.verification.groups]


def test_a_plan_verified_as_served_belongs_to_its_workload(planned: Plan) -> None:
    again = verify_as_served(planned, HOT, router="random", everywhere=True, profile=SLOW)
    assert not again.changed_after_verification()
    assert verify_as_served(again, HOT, profile=SLOW).verification == again.verification


def test_everywhere_every_server_has_every_adapter_and_an_equal_part(planned: Plan) -> None:
    again = verify_as_served(planned, HOT, everywhere=True, profile=SLOW)
    assert again.router is None
    assert again.moves == ()
    assert not again.changed_after_verification()
    assert {group.id for group in again.groups} == {group.id for group in planned.groups}
    for group in again.groups:
        assert [each.name for each in group.adapters] == ["a0", "a1", "a2"]
        assert [each.share for each in group.adapters] == pytest.approx([1 / 3] * 3)
        assert group.base is not None
        assert group.base.share == pytest.approx(1 / 3)
        assert group.engine_args.max_loras > 0
        assert group.engine_args.max_lora_rank == 8
    found = [each.throughput_tok_s for each in again.verification.groups]
    assert found == [each.throughput_tok_s for each in simulated(again, "smooth-shares").instances]


def test_an_unknown_router_is_refused(planned: Plan) -> None:
    with pytest.raises(InputError, match="router: must be one of"):
        verify_as_served(planned, HOT, router="telepathy", profile=SLOW)


@pytest.mark.parametrize(
    ("router", "options", "stores_all"),
    [
        ("inference-gateway", RouterOptions(holders="all"), True),
        ("smooth-shares", None, False),
        ("least-work-left", RouterOptions(holders="all", off_plan=2.0), True),
    ],
)
def test_servers_store_all_adapters_behind_another_router_that_looks(
    router: str, options: RouterOptions | None, stores_all: bool
) -> None:
    fields: dict[str, Any] = {
        "router": "least-work-left",
        "router_options": {"holders": "all", "off_plan": 2.0},
    }
    adapters = [Adapter(name=f"a{i}", rank=8, rate_rps=0.2) for i in range(8)]
    given = workload(adapters=1, base=None, **fields).replace(adapters=adapters)
    made = plan(given, gpus=2, profile=SLOW, seeds=1)
    again = verify_as_served(made, given, router=router, profile=SLOW)
    assert again.router_options == options
    assert all(len(group.adapters) == 8 for group in again.groups) == stores_all
