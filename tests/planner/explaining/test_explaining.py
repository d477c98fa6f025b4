"""What the twin adds to a plan agrees with the plan, with the twin, and with what the planner would do."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from capplan import Adapter, InputError, Lengths, Plan, Profile, Workload, explain, plan
from capplan.planner.evaluate import evaluate
from capplan.planner.explain import Explanation, SlotCurve, slot_curve
from capplan.planner.explain.rebuild import rebuild
from capplan.planner.explain.slot_curve import MAX_POINTS
from capplan.spec import QueueConfig, Trace
from tests.planner.conftest import MODEL, PROFILE

Make = Callable[..., Workload]
ADAPTERS = tuple((f"a{i}", (8, 16)[i % 2], 3.0) for i in range(12))


@pytest.fixture(scope="module")
def crowded() -> Workload:
    """More than one GPU carries, in two equal halves."""
    return Workload(
        base_model=MODEL,
        profile=PROFILE,
        gpus={"count": 4},
        prompt_tokens=Lengths(mean=400, std=300),
        output_tokens=Lengths(mean=100, std=60),
        slo={"ttft_p99_s": 5.0},
        adapters=tuple(Adapter(name=n, rank=rank, rate_rps=rate) for n, rank, rate in ADAPTERS),
    )


@pytest.fixture(scope="module")
def made(crowded: Workload) -> Plan:
    return plan(crowded, seeds=1)


@pytest.fixture(scope="module")
def explained(made: Plan, crowded: Workload) -> Explanation:
    return explain(made, crowded)


def test_every_group_is_explained_once(made: Plan, explained: Explanation) -> None:
    told = [name for each in explained.groups for name in each.ids]
    assert sorted(told) == sorted(group.id for group in made.groups)


def test_groups_told_together_are_predicted_alike(made: Plan, explained: Explanation) -> None:
    predicted = {group.id: group.predicted for group in made.groups}
    for each in explained.groups:
        assert len({predicted[name] for name in each.ids}) == 1


def test_what_a_plan_says_is_rebuilt_from_it_and_its_workload(made: Plan, crowded: Workload) -> None:
    rebuilt = rebuild(made, crowded, None, "workload")
    rates: dict[str, float] = {}
    for share in rebuilt.shares:
        rates[share.name] = rates.get(share.name, 0.0) + share.rate_rps
    assert rates == pytest.approx({name: rate for name, _, rate in ADAPTERS})
    assert len(rebuilt.pools) == made.totals.gpus
    seed = made.verification.seeds[0]
    for each, group in zip(rebuilt.groups, made.groups, strict=True):
        result = evaluate(each.problem, each.assignment, seed, made.verification.duration_s).result
        # alone, other requests are drawn than for the plan as a whole
        assert result.throughput_tok_s == pytest.approx(group.predicted.throughput_tok_s, rel=0.01)
        assert result.ttft_s_p99 == pytest.approx(group.predicted.ttft_s.p99, rel=0.1)


def test_replicas_divide_what_their_group_serves(made: Plan, crowded: Workload) -> None:
    first, *others = made.groups
    doubled = first.replace(replicas=2)
    totals = made.totals.replace(gpus=made.totals.gpus + 1)
    rebuilt = rebuild(made.replace(groups=(doubled, *others), totals=totals), crowded, None, "workload")
    offered = sum(a.rate_rps * a.share for a in first.adapters)
    assert sum(p.rate_rps for p in rebuilt.groups[0].assignment.shares) == pytest.approx(offered / 2)
    assert sum(p.rate_rps for p in rebuilt.shares) == pytest.approx(crowded.total_rate_rps)
    assert len({(p.name, p.number) for p in rebuilt.shares}) == len(rebuilt.shares)


def curves(explained: Explanation) -> list[SlotCurve]:
    return [each.curve for each in explained.groups]


def test_a_curve_has_the_chosen_number_and_ever_less_memory(explained: Explanation) -> None:
    for curve in curves(explained):
        slots = [point.a_max for point in curve.points]
        assert curve.chosen in slots
        assert slots == sorted(set(slots))
        assert sum(point.fits for point in curve.points) <= MAX_POINTS
        tokens = [point.kv_tokens for point in curve.points]
        assert tokens == sorted(tokens, reverse=True)


def test_the_chosen_number_holds_on_the_curve_as_in_the_search(explained: Explanation) -> None:
    assert all(curve.chosen_point.holds for curve in curves(explained))


def test_memory_ends_where_the_curve_says(made: Plan, crowded: Workload) -> None:
    each = rebuild(made, crowded, None, "workload").groups[0]
    # Little memory and many adapters, so that the end is near.
    problem = replace(each.problem, engine=each.problem.engine.replace(gpu_memory_utilization=0.37))
    shares = tuple(replace(share, rate_rps=0.01) for share in each.assignment.shares)
    curve = slot_curve(problem, replace(each.assignment, shares=shares, a_max=1), duration_s=60.0)
    assert curve.most_slots is not None
    assert problem.fits_in_memory(replace(each.assignment, a_max=curve.most_slots))
    assert not problem.fits_in_memory(replace(each.assignment, a_max=curve.most_slots + 1))
    assert [p.fits for p in curve.points] == [p.a_max <= curve.most_slots for p in curve.points]
    assert [p.fits for p in curve.points].count(False) <= 1


def test_room_agrees_with_the_plan_and_with_what_breaks(made: Plan, explained: Explanation) -> None:
    groups = {group.id: group for group in made.groups}
    for each in explained.groups:
        load = groups[each.ids[0]].predicted.load_over_capacity
        assert load is not None
        assert each.room.holds_until == pytest.approx(1.0 / load)
        assert each.room.fails_at is not None
        assert each.room.fails_at > 1.0 / load
        assert each.room.broken
        shares = {use.resource: use for use in each.room.uses}
        assert 0.0 < (shares["compute"].now or 0.0) < 1.0
        assert (shares["kv"].beyond or 0.0) > (shares["kv"].now or 0.0)
        over = [use for use in each.room.uses if (use.beyond or 0.0) > 1.0]
        assert {use.resource for use in over} <= {"ttft_p99_s", "served_fraction"}
        assert over


def test_one_fewer_does_not_do_and_one_more_is_faster(made: Plan, explained: Explanation) -> None:
    fewer, more = explained.what_if
    assert (fewer.gpus, more.gpus) == (made.totals.gpus - 1, made.totals.gpus + 1)
    assert not fewer.holds
    assert fewer.outcome is None
    assert "do not fit on" in fewer.words
    assert "spread evenly, 1 of 1 break at the planned load" in fewer.words
    assert more.holds
    assert more.outcome is not None
    assert more.outcome.gpus == more.gpus
    assert (more.outcome.tpot_mean_ms or 0.0) < (explained.outcome.tpot_mean_ms or 0.0)


def test_asked_about_one_group_other_numbers_of_gpus_are_left_out(made: Plan, crowded: Workload) -> None:
    stages: list[str] = []
    told = explain(
        made, crowded, groups=made.groups[:1], progress=lambda stage, done, total: stages.append(stage)
    )
    assert [each.ids for each in told.groups] == [(made.groups[0].id,)]
    assert told.what_if == ()
    assert set(stages) == {"what is in use", "adapter slots"}


def test_the_same_questions_have_the_same_answers(made: Plan, crowded: Workload) -> None:
    one, other = (explain(made, crowded, groups=made.groups[:1]) for _ in range(2))
    assert one == other


def test_a_plan_on_more_gpus_than_it_needs_holds_with_one_fewer(workload: Make) -> None:
    light = workload(("a", 8, 0.5), ("b", 8, 0.5), objective="min_latency")
    made = plan(light, gpus=2, seeds=1)
    fewer, more = explain(made, light).what_if
    assert fewer.holds
    assert fewer.words.startswith("holds")
    assert "more are of no use" in more.words


def test_nothing_is_fewer_than_one(workload: Make) -> None:
    light = workload(("a", 8, 0.0))
    told = explain(plan(light, seeds=1), light)
    assert [each.change for each in told.what_if] == ["one GPU more"]
    (only,) = told.groups
    assert only.room.words == "no load at all, so nothing binds"
    assert only.room.fails_at is None


def test_a_trace_is_explained_by_replaying_it(workload: Make) -> None:
    count = 240
    trace = Trace.from_arrays(
        np.arange(count), ["a", "b"] * (count // 2), np.full(count, 300), np.full(count, 80), float(count)
    )
    recorded = workload(("a", 8, 0.5), ("b", 16, 0.5), trace=trace)
    made = plan(recorded)
    (only,) = explain(made, recorded, groups=made.groups).groups
    assert only.curve.offered_tok_s >= 380.0
    assert only.curve.chosen_point.served_fraction == made.groups[0].predicted.served_fraction == 1.0


def test_queues_asked_for_on_the_command_line_belong_to_the_plan(workload: Make) -> None:
    """`capplan plan --queues` plans for a wish that the file does not have."""
    light = workload(("a", 8, 0.5))
    made = plan(light.replace(queues=QueueConfig()), seeds=1)
    assert rebuild(made, light, None, "workload").problem.workload.queues == QueueConfig()


def test_another_workload_is_refused(made: Plan, crowded: Workload) -> None:
    with pytest.raises(InputError, match=r"other\.yaml: must be the workload that the plan was made for"):
        explain(made, crowded.replace(headroom=0.2), source="other.yaml")


def test_another_profile_is_refused(made: Plan, crowded: Workload, unsurrogated: Profile) -> None:
    with pytest.raises(InputError, match="profile: must be h100-64g"):
        explain(made, crowded, profile=unsurrogated)
