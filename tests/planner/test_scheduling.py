"""Plans with a scheduler and an adapter cache: simulated as planned, without slots to choose."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from capplan import InputError, Plan, Profile, Workload, plan
from capplan.planner import verify_as_served
from capplan.planner.explain import CurveRuns, slot_curve
from capplan.planner.problem import Assignment
from capplan.planner.problem._settings import slot_grid
from capplan.planner.problem._setup import make_problem, rebuild
from capplan.spec import Cache, Group, Scheduler
from capplan.twin.instance import Run, simulate_run

Make = Callable[..., Workload]

MIXED = tuple((f"a{i}", (8, 16, 64)[i % 3], 0.1) for i in range(9))
SETTINGS = {"scheduler": "chameleon", "cache": {"policy": "gdsf", "prefetch": "histogram"}}


@pytest.fixture(scope="module")
def spec(workload: Make) -> Workload:
    return workload(*MIXED, **SETTINGS)


@pytest.fixture(scope="module")
def planned(spec: Workload, profile: Profile) -> Plan:
    return plan(spec, gpus=1, profile=profile, seeds=1)


def test_a_plan_says_what_its_verification_simulated(spec: Workload, profile: Profile, planned: Plan) -> None:
    (group,) = planned.groups
    check = planned.verification
    assert (group.scheduler, group.cache) == spec.scheduling
    assert group.queues is not None
    assert (check.ok, check.not_simulated) == (True, ())
    # The plan alone decides: the workload has neither scheduler nor cache.
    bare = spec.replace(scheduler=None, cache=None)
    policies = {"scheduler": group.scheduler, "cache": group.cache, "queues": group.queues}
    again = simulate_run(
        bare,
        profile,
        group.engine_args,
        Run(check.duration_s, check.seeds[0], **policies),  # type: ignore[arg-type]
    )
    assert check.groups[0].throughput_tok_s == again.throughput_tok_s
    assert check.groups[0].ttft_p99_s == again.ttft_s_p99
    assert again.pool is not None
    predicted = group.predicted.scheduling
    assert predicted is not None
    assert predicted.hit_rate == again.pool.hit_rate
    assert [each.name for each in predicted.sizes] == [each.name for each in again.pool.sizes]


def test_a_plan_survives_a_file_and_is_rebuilt_with_its_queues(
    spec: Workload, planned: Plan, tmp_path: Path
) -> None:
    planned.to_json(tmp_path / "plan.json")
    assert Plan.from_json(tmp_path / "plan.json") == planned
    (group,) = rebuild(planned, spec, None, "workload").groups
    assert group.assignment.queues == planned.groups[0].queues
    assert group.problem.workload.scheduling == planned.groups[0].scheduling


def test_a_plan_records_the_link_it_was_simulated_with(
    spec: Workload, profile: Profile, planned: Plan
) -> None:
    shared = plan(spec, gpus=1, profile=profile, verify=False, gpus_per_link=4)
    assert shared.provenance["gpus_per_link"] == 4
    assert rebuild(shared, spec, None, "workload").problem.gpus_per_link == 4
    assert rebuild(planned, spec, None, "workload").problem.gpus_per_link == 1
    with pytest.raises(InputError, match="gpus_per_link: must be a whole number >= 1"):
        plan(spec, gpus_per_link=0)


@pytest.mark.parametrize(
    ("file", "flags"),
    [
        ({}, {"scheduler": "chameleon", "cache": Cache(policy="gdsf", prefetch="histogram")}),
        ({"scheduler": "chameleon"}, {"cache": Cache(policy="gdsf", prefetch="histogram")}),
        ({"cache": "lru"}, {"scheduler": Scheduler(policy="sjf")}),
        ({"queues": {}}, {"queues": None, "scheduler": Scheduler(policy="static")}),
        ({"queues": {}}, {"cache": Cache(policy="chameleon")}),
    ],
)
def test_a_plan_with_options_of_the_command_line_is_rebuilt_from_the_file(
    workload: Make, planned: Plan, file: dict[str, object], flags: dict[str, object]
) -> None:
    written = workload(*MIXED, **file)
    asked = written.replace(**flags)
    scheduler, cache = asked.scheduling or (None, None)
    queues = planned.groups[0].queues if scheduler is not None and scheduler.has_queues else None
    groups = (planned.groups[0].replace(scheduler=scheduler, cache=cache, queues=queues),)
    made = planned.replace(groups=groups, workload_digest=asked.digest())
    assert rebuild(made, written, None, "workload").problem.workload.scheduling == asked.scheduling


def test_no_number_of_slots_is_searched(spec: Workload, profile: Profile, planned: Plan) -> None:
    problem = make_problem(spec, 1, profile)
    assert slot_grid(problem, problem.shares) == [len(MIXED)]
    many = Assignment(problem.shares, a_max=10**6)
    assert problem.fits_in_memory(many)
    assert problem.engine_args(many).max_loras == len(MIXED)
    assert planned.groups[0].engine_args.max_loras == len(MIXED)
    curve = slot_curve(CurveRuns(replace(problem, simulated_s=30.0), Assignment(problem.shares, len(MIXED))))
    assert [point.value for point in curve.points] == [len(MIXED)]


def test_a_plan_is_verified_again_for_an_engine_without_scheduler_and_cache(
    spec: Workload, profile: Profile, planned: Plan
) -> None:
    again = verify_as_served(planned, spec)
    (group,) = again.groups
    assert (group.scheduler, group.cache, group.queues) == (None, None, None)
    assert [each.name for each in group.adapters] == [each.name for each in planned.groups[0].adapters]
    assert group.id == planned.groups[0].id
    assert again.moves == ()
    bare = spec.replace(scheduler=None, cache=None)
    options = Run(again.verification.duration_s, again.verification.seeds[0])
    own = simulate_run(bare, profile, group.engine_args, options)
    assert again.verification.groups[0].throughput_tok_s == own.throughput_tok_s
    assert own.pool is None


def test_a_workload_without_the_keys_has_a_plan_as_before(planned: Plan) -> None:
    group: Group = planned.groups[0].replace(scheduler=None, cache=None, queues=None)
    predicted = group.predicted.replace(scheduling=None)
    text = group.replace(predicted=predicted).model_dump_json()
    assert '"scheduler"' not in text
    assert '"scheduling"' not in text
