"""Plans of which every GPU stores all adapters, for a router that looks at the GPUs."""

from typing import Any

import pytest

from capplan import Adapter, InputError, Plan, Workload, plan
from capplan.deploy import export
from capplan.planner.explain.rebuild import rebuild
from capplan.planner.served import fleet_of_plan
from capplan.serving.routers import LeastWorkLeft
from capplan.spec import RouterOptions
from capplan.twin.cluster.routers import served_router
from tests.planner.test_rebalancing import make

FACTORS: dict[str, Any] = {"off_plan": 1.25, "rank_raise": 1.5, "turn_s": 0.5}
ALL: dict[str, Any] = {"router": "least-work-left", "router_options": {"holders": "all", **FACTORS}}


@pytest.fixture(scope="module")
def planned() -> tuple[Plan, Workload]:
    workload = make(**ALL)
    return plan(workload, gpus=2, solver="loraserve", seeds=1), workload


def test_groups_store_all_adapters_and_shares_are_those_of_the_placement(planned) -> None:
    made, workload = planned
    alone = plan(make(), gpus=2, solver="loraserve", seeds=1)
    assert Plan.model_validate_json(made.to_json()) == made
    assert made.router_options == RouterOptions(**ALL["router_options"])
    for group, placed in zip(made.groups, alone.groups, strict=True):
        assert [each.name for each in group.adapters] == [each.name for each in workload.adapters]
        assert group.placed == placed.adapters
        assert group.engine_args.max_lora_rank == 16, "any adapter may come"


def test_a_plan_is_verified_as_it_is_simulated(planned) -> None:
    made, workload = planned
    fleet = fleet_of_plan(made, workload, None, "workload")
    result = fleet.simulate(made.verification.seeds[0], made.verification.duration_s)
    served = min(each.served_fraction for each in result.instances)
    assert made.verification.ok
    assert made.verification.min_served_fraction == pytest.approx(served, abs=1e-9)
    elsewhere = 0
    for number, group in enumerate(made.groups):
        own = result.requests.instance == number
        placed = {each.name for each in group.placed}
        names = [workload.adapters[a - 1].name for a in result.requests.adapter[own].tolist()]
        elsewhere += sum(name not in placed for name in names)
    assert 0 < elsewhere < 0.5 * result.requests.instance.size, "the placement is a preference"


def test_the_router_has_the_parameters_of_the_plan(planned) -> None:
    made, _ = planned
    assert served_router("least-work-left", made.router_options) == LeastWorkLeft(**FACTORS)
    assert served_router("toppings", made.router_options) == "toppings"
    assert served_router("least-work-left", RouterOptions(holders="all")) == LeastWorkLeft(
        1.25, rank_raise=1.5
    )
    assert served_router("least-work-left", RouterOptions()) == LeastWorkLeft()


def test_the_search_of_a_rebuilt_plan_has_what_is_placed(planned) -> None:
    made, workload = planned
    rebuilt = rebuild(made, workload, None, "workload")
    for each in rebuilt.groups:
        assert {share.name for share in each.assignment.shares} == {a.name for a in each.group.placed}
    again = plan(workload.replace(previous_plan=None), gpus=2, solver="loraserve", seeds=1)
    assert again.groups == made.groups


def test_an_exported_instance_loads_all_adapters(planned) -> None:
    made, workload = planned
    files = export(made)
    scripts = [text for path, text in files.items() if path.endswith(".sh")]
    assert len(scripts) == len(made.groups)
    for text in scripts:
        assert all(f"{adapter.name}=" in text for adapter in workload.adapters)
    assert '"holders": "all"' in files["routing.json"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"router_options": {"off_plan": 1.5}}, "router_options.off_plan: goes with router least-work-left"),
        ({"router": "toppings", "router_options": {"turn_s": 1.0}}, "goes with router least-work-left"),
        ({**ALL, "router_options": {"off_plan": 0.5}}, "off_plan: must be a number >= 1"),
        ({**ALL, "router_options": {"holders": "some"}}, "holders: must be"),
        ({"router_options": {"holders": "all"}}, "goes with a router that reads more than shares"),
        ({**ALL, "router": "smooth-shares", "router_options": {"holders": "all"}}, "reads more than shares"),
        ({**ALL, "rebalance": {}}, "all does not go with rebalance"),
        (
            {**ALL, "adapters": [Adapter(name="a", rank=8, rate_rps=1.0, max_replicas=1)]},
            r"adapters\[0\].max_replicas: does not go with router_options.holders all",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make(**fields)


def test_a_share_of_0_needs_a_router_that_looks(planned) -> None:
    made, _ = planned
    with pytest.raises(InputError, match="share: must be a number above 0"):
        made.replace(router_options=None)
