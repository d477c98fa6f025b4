"""`explain`: agreement with the plan, the twin and the planner; changed fleets; the reason for A_max."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import (
    Adapter,
    InfeasibleError,
    InputError,
    Lengths,
    Plan,
    Problem,
    Profile,
    Workload,
    explain,
    plan,
)
from capplan.planner.explain import CurvePoint, CurveRuns, Explanation, SlotCurve, slot_curve
from capplan.planner.explain._curve import MAX_POINTS, explain_slots
from capplan.planner.explain._explain import one_fewer, one_more
from capplan.planner.problem import Estimate
from capplan.planner.problem._evaluate import evaluate
from capplan.planner.problem._settings import best_slots
from capplan.planner.problem._setup import make_problem, rebuild
from capplan.spec import QueueConfig, Trace
from capplan.twin.instance import PAIRED_SEEDS
from tests.planner.conftest import MODEL, PROFILE

Make = Callable[..., Workload]
ADAPTERS = tuple((f"a{i}", (8, 16)[i % 2], 3.0) for i in range(12))


@pytest.fixture(scope="module")
def crowded() -> Workload:
    """Adapters that need two GPUs."""
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


@pytest.mark.long
def test_every_group_is_explained_once(made: Plan, explained: Explanation) -> None:
    told = [name for each in explained.groups for name in each.ids]
    assert sorted(told) == sorted(group.id for group in made.groups)


def test_groups_explained_together_have_equal_predictions(made: Plan, explained: Explanation) -> None:
    predicted = {group.id: group.predicted for group in made.groups}
    for each in explained.groups:
        assert all(predicted[name] == predicted[each.ids[0]] for name in each.ids)


def test_a_rebuilt_plan_performs_as_predicted(made: Plan, crowded: Workload) -> None:
    rebuilt = rebuild(made, crowded, None, "workload")
    rates: dict[str, float] = {}
    for share in rebuilt.shares:
        rates[share.name] = rates.get(share.name, 0.0) + share.rate_rps
    assert rates == pytest.approx({name: rate for name, _, rate in ADAPTERS})
    assert len(rebuilt.pools) == made.totals.gpus
    seed = made.verification.seeds[0]
    for each, group in zip(rebuilt.groups, made.groups, strict=True):
        result = evaluate(each.problem, each.assignment, seed).result
        # simulated alone, an instance gets other requests than in the cluster
        assert result.throughput_tok_s == pytest.approx(group.predicted.throughput_tok_s, rel=0.01)
        assert result.ttft_s_p99 == pytest.approx(group.predicted.ttft_s.p99, rel=0.1)


def test_replicas_share_the_load_of_their_group(made: Plan, crowded: Workload) -> None:
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


def test_a_curve_contains_the_chosen_number_and_kv_tokens_decrease(explained: Explanation) -> None:
    for curve in curves(explained):
        slots = [point.value for point in curve.points]
        assert curve.chosen in slots
        assert slots == sorted(set(slots))
        assert sum(point.fits for point in curve.points) <= MAX_POINTS
        tokens = [point.kv_tokens for point in curve.points]
        assert tokens == sorted(tokens, reverse=True)


def test_numbers_near_the_chosen_one_are_compared_over_paired_seeds(explained: Explanation) -> None:
    for curve in curves(explained):
        paired = {point.value: point.paired for point in curve.points if point.paired}
        holding = [point.value for point in curve.points if point.holds]
        assert set(paired) <= set(holding)
        assert curve.chosen in paired or len(holding) == 1
        for a_max, values in paired.items():
            assert {len(of) for of in values.values()} == {PAIRED_SEEDS}
            point = next(each for each in curve.points if each.value == a_max)
            assert values["throughput_tok_s"][0] == point.throughput_tok_s


def test_the_chosen_number_of_slots_holds(explained: Explanation) -> None:
    assert all(curve.chosen_point.holds for curve in curves(explained))


def test_most_slots_is_the_limit_of_memory(made: Plan, crowded: Workload) -> None:
    each = rebuild(made, crowded, None, "workload").groups[0]
    problem = replace(each.problem, engine=each.problem.engine.replace(gpu_memory_utilization=0.37))
    shares = tuple(replace(share, rate_rps=0.01) for share in each.assignment.shares)
    assignment = replace(each.assignment, shares=shares, a_max=1)
    curve = slot_curve(CurveRuns(replace(problem, simulated_s=60.0), assignment))
    assert curve.most_slots is not None
    assert problem.fits_in_memory(replace(each.assignment, a_max=curve.most_slots))
    assert not problem.fits_in_memory(replace(each.assignment, a_max=curve.most_slots + 1))
    assert [p.fits for p in curve.points] == [p.value <= curve.most_slots for p in curve.points]
    assert [p.fits for p in curve.points].count(False) <= 1


def test_headroom_agrees_with_the_plan(made: Plan, explained: Explanation) -> None:
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


def test_one_gpu_fewer_is_infeasible_and_one_more_is_faster(made: Plan, explained: Explanation) -> None:
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


def test_selected_groups_are_explained_without_other_fleets(made: Plan, crowded: Workload) -> None:
    stages: list[str] = []
    told = explain(
        made, crowded, groups=made.groups[:1], progress=lambda stage, done, total: stages.append(stage)
    )
    assert [each.ids for each in told.groups] == [(made.groups[0].id,)]
    assert told.what_if == ()
    assert set(stages) == {"what is in use", "adapter slots", "engine knobs"}


def test_explanations_are_deterministic(made: Plan, crowded: Workload) -> None:
    one, other = (explain(made, crowded, groups=made.groups[:1]) for _ in range(2))
    assert one == other


def test_a_plan_with_spare_gpus_holds_with_one_fewer(workload: Make) -> None:
    light = workload(("a", 8, 0.5), ("b", 8, 0.5), objective="min_latency")
    made = plan(light, gpus=2, seeds=1)
    fewer, more = explain(made, light).what_if
    assert fewer.holds
    assert fewer.words.startswith("holds")
    assert "more are of no use" in more.words


def test_an_idle_plan_on_one_gpu_has_no_smaller_fleet_and_no_bottleneck(workload: Make) -> None:
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


def test_a_plan_with_queues_from_the_command_line_is_rebuilt(workload: Make) -> None:
    light = workload(("a", 8, 0.5))
    made = plan(light.replace(queues=QueueConfig()), seeds=1)
    assert rebuild(made, light, None, "workload").problem.workload.queues == QueueConfig()


def test_another_workload_is_rejected(made: Plan, crowded: Workload) -> None:
    with pytest.raises(InputError, match=r"other\.yaml: must be the workload that the plan was made for"):
        explain(made, crowded.replace(headroom=0.2), source="other.yaml")


def test_another_profile_is_rejected(made: Plan, crowded: Workload, unsurrogated: Profile) -> None:
    with pytest.raises(InputError, match="profile: must be h100-64g"):
        explain(made, crowded, profile=unsurrogated)


def pooled_problem(prices: dict[str, float | None], pinned: str | None = None) -> Problem:
    pools = tuple(
        {"name": name, "profile": PROFILE, "count": 4, "usd_per_hour": price}
        for name, price in prices.items()
    )
    workload = Workload(
        base_model=MODEL,
        pools=pools,
        prompt_tokens=Lengths(mean=100),
        output_tokens=Lengths(mean=50),
        adapters=(
            Adapter(name="a", rank=8, rate_rps=1.0, pool=pinned),
            Adapter(name="b", rank=8, rate_rps=1.0),
        ),
    )
    return make_problem(workload, None, None)


@pytest.mark.parametrize(
    ("prices", "used", "left", "grown"),
    [
        ({"dear": 4.0, "cheap": 1.0}, (0, 1, 1), (1, 1), (0, 1, 1, 1)),
        ({"dear": 4.0, "cheap": 1.0}, (0, 0), (0,), (0, 0, 1)),
        ({"x": None, "y": 1.0}, (0, 1, 1), (0, 1), (0, 1, 1, 1)),
    ],
    ids=["both in use", "cheap one unused", "no prices"],
)
def test_the_most_expensive_pool_shrinks_and_the_cheapest_grows(
    prices: dict[str, float | None], used: tuple[int, ...], left: tuple[int, ...], grown: tuple[int, ...]
) -> None:
    problem = pooled_problem(prices)
    fewer = one_fewer(problem, used)
    assert fewer is not None
    assert fewer.pools == left
    assert one_more(problem, used).pools == grown


def test_the_workload_of_a_changed_fleet_has_its_pools_only() -> None:
    fewer = one_fewer(pooled_problem({"dear": 4.0, "cheap": 1.0}), (0, 1, 1))
    assert fewer is not None
    assert [(pool.name, pool.count) for pool in fewer.workload.pools] == [("cheap", 2)]
    assert fewer.gpus == 2


def test_an_adapter_pinned_to_a_removed_pool_is_infeasible() -> None:
    fewer = one_fewer(pooled_problem({"dear": 4.0, "cheap": 1.0}, pinned="dear"), (0, 1))
    assert fewer is not None
    with pytest.raises(InfeasibleError, match="adapter a is pinned to pool dear, which has none left"):
        _ = fewer.workload


def test_a_single_instance_cannot_be_removed() -> None:
    assert one_fewer(pooled_problem({"dear": 4.0}), (0,)) is None


def point(
    a_max: int, tok_s: float = 1000.0, e2e_s: float = 1.0, broken: tuple[str, ...] = (), loads: float = 0.0
) -> CurvePoint:
    return CurvePoint(a_max, 100_000 - 1000 * a_max, True, tok_s, 1.0, 0.1, e2e_s, 20.0, loads, broken)


def over_seeds(a_max: int, *e2e_s: float) -> CurvePoint:
    """Return a point with request times of paired seeds."""
    paired = {"e2e_mean_s": e2e_s, "throughput_tok_s": (1000.0,) * len(e2e_s)}
    return replace(point(a_max, e2e_s=e2e_s[0]), paired=paired)


def unfit(a_max: int) -> CurvePoint:
    return CurvePoint(a_max, 0, fits=False)


def curve(*points: CurvePoint, chosen: int, adapters: int = 64, most: int | None = None) -> SlotCurve:
    return SlotCurve("a_max", points, chosen, 1.0 / 0.9, 1000.0, adapters, most)


def test_a_decided_difference_is_stated_without_doubt() -> None:
    slow, fast = over_seeds(8, 3.0, 2.9, 3.1, 3.0, 3.0), over_seeds(16, 1.0, 1.1, 1.2, 1.1, 1.1)
    seeds = curve(slow, fast, chosen=16)
    words = explain_slots(seeds, "capplan", fixed=False)
    assert words.endswith("8 slots: 3 s from arrival to last token instead of 1.1")


@pytest.mark.parametrize(
    ("given_curve", "fixed", "says"),
    [
        (
            curve(point(8, e2e_s=3.0), point(16), point(32, broken=("served 0.8 < 0.9",)), chosen=16),
            False,
            ("A_max 16: of those that serve most", "the shortest mean time from arrival to last token, 1 s",
             "8 slots: 3 s from arrival to last token instead of 1",
             "32 slots: 19 % fewer KV tokens, breaks served 0.8 < 0.9"),
        ),
        (
            curve(point(32, loads=20.0, broken=("ttft_p99_s 9 > 5",)), point(64), chosen=64),
            False,
            ("a slot for each adapter", "the only number tried with which every bound holds at 1.11 x",
             "32 slots: 20 loads a minute, breaks ttft_p99_s 9 > 5", "more would stay empty"),
        ),
        (
            curve(point(16), point(32), unfit(64), chosen=32, most=40),
            False,
            ("64 slots do not fit in memory", "memory has room for 40 at most", "16 slots: does as well"),
        ),
        (
            curve(point(16, tok_s=500.0), point(32), chosen=16),
            True,
            ("A_max 16: fixed by the workload", "on this curve 32 serves 100 % more"),
        ),
        (
            curve(point(16, e2e_s=4.0), point(32), chosen=16),
            False,
            ("A_max 16: holds, chosen by greedy", "32 does as well or better (1 s from arrival"),
        ),
        (
            curve(over_seeds(8, 3.0, 1.2, 2.6), over_seeds(16, 1.0, 2.0, 1.5), chosen=16),
            False,
            ("8 slots: 2.27 s from arrival to last token instead of 1.5 (undecided: within two standard "
             "errors over 3 seeds)",),
        ),
        (
            curve(over_seeds(16, 4.0, 1.0, 2.0), over_seeds(32, 1.0, 2.0, 1.8), chosen=16),
            False,
            ("32 does as well or better (1.6 s", "here 2.33 s) (undecided: within two standard errors"),
        ),
        (
            curve(point(16, broken=("served_fraction 0.5 < 0.9",)), point(32), chosen=16),
            False,
            ("A_max 16 breaks served_fraction 0.5 < 0.9", "32 would hold"),
        ),
        (
            curve(point(16, broken=("a > b",)), point(32, broken=("a > b",)), chosen=16),
            False,
            ("no other number tried holds",),
        ),
        (curve(point(16), unfit(32), chosen=32), False, ("A_max 32 does not fit in memory", "16 would hold")),
    ],
    ids=["best", "each", "memory", "fixed", "another", "undecided", "undecided best", "fails",
         "all fail", "unfit"],
)  # fmt: skip
def test_the_reason_names_advantages_and_disadvantages(
    given_curve: SlotCurve, fixed: bool, says: tuple[str, ...]
) -> None:
    words = explain_slots(given_curve, "greedy", fixed=fixed)
    for expected in says:
        assert expected in words


points = st.builds(
    lambda a_max, tok_s, e2e_s, fails: point(a_max, tok_s, e2e_s, ("ttft_p99_s 9 > 5",) if fails else ()),
    st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
    st.floats(1.0, 1e5),
    st.floats(0.01, 1e3),
    st.booleans(),
)


@given(st.lists(points, min_size=1, max_size=7, unique_by=lambda p: p.value), st.data())
def test_the_reason_agrees_with_best_slots(drawn: list[CurvePoint], data: st.DataObject) -> None:
    ordered = sorted(drawn, key=lambda p: p.value)
    chosen = data.draw(st.sampled_from(ordered))
    best = best_slots(
        {
            p.value: Estimate(p.throughput_tok_s or 0.0, bool(p.broken), e2e_s_mean=p.e2e_mean_s or 0.0)
            for p in ordered
        }
    )
    words = explain_slots(curve(*ordered, chosen=chosen.value), "capplan", fixed=False)
    assert words.startswith(f"A_max {chosen.value}")
    assert f"breaks {chosen.broken[0]}" in words.split(";")[0] if chosen.broken else True
    assert (f"on this curve {best}" in words) == (chosen.holds and best != chosen.value)
