"""Plans of which every GPU stores all adapters, for a router that looks at the GPUs."""

from pathlib import Path
from typing import Any

import pytest

from capplan import Adapter, InputError, Plan, Workload, load_workload, plan
from capplan.deploy import export
from capplan.planner.problem._setup import rebuild
from capplan.planner.verification import fleet_of_plan
from capplan.serving.routers import LeastWorkLeft
from capplan.spec import Gpus, Renewal, RouterOptions, Slo
from capplan.twin.cluster import served_router
from capplan.twin.instance import bound_value
from tests.planner.test_rebalancing import make

pytestmark = pytest.mark.long

FACTORS: dict[str, Any] = {"off_plan": 1.25, "rank_raise": 1.5, "turn_s": 0.5}
ALL_PLAIN: dict[str, Any] = {"router": "least-work-left", "router_options": {"holders": "all"}}
CHAT = Path(__file__).parents[2] / "examples" / "chat-96" / "workload.yaml"
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


BURSTS: dict[str, Any] = {
    "adapters": [Adapter(name=f"a{i}", rank=8, rate_rps=3.0) for i in range(8)],
    "arrivals": Renewal(process="gamma", cv=6.0),
    "slo": Slo(ttft_p99_s=2.0),
    "gpus": Gpus(count=6),
}


def test_a_placement_that_fails_behind_its_router_gets_more_slots() -> None:
    """Four adapters per GPU have four slots, and the requests of the other four come, too."""
    made = plan(make(**ALL_PLAIN, **BURSTS), seeds=2)
    assert made.verification.ok
    assert {group.engine_args.max_loras for group in made.groups} == {8}
    assert "8, 8 slots" in str(made.provenance["repairs"])


def test_a_router_that_evens_out_bursts_saves_gpus() -> None:
    bursty = load_workload(CHAT).replace(arrivals=Renewal(process="gamma", cv=5.0))
    workload = bursty.replace(**ALL_PLAIN)
    by_shares, made = (plan(each, seeds=2) for each in (bursty, workload))
    assert by_shares.verification.ok
    assert made.verification.ok
    assert made.totals.gpus < by_shares.totals.gpus
    assert {a.name for group in made.groups for a in group.placed} == {a.name for a in workload.adapters}
    result = fleet_of_plan(made, workload, None, "workload").simulate(77, 3600.0)
    assert max(bound_value(each, "ttft_p99_s") for each in result.instances) < 5.0
