"""The sentence on A_max says what the curve bears out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.planner.explain import CurvePoint, SlotCurve
from capplan.planner.explain.slot_curve import explain_slots
from capplan.planner.problem import Estimate
from capplan.planner.slots import best_slots


def point(
    a_max: int, tok_s: float = 1000.0, e2e_s: float = 1.0, broken: tuple[str, ...] = (), loads: float = 0.0
) -> CurvePoint:
    return CurvePoint(a_max, 100_000 - 1000 * a_max, True, tok_s, 1.0, 0.1, e2e_s, 20.0, loads, broken)


def unfit(a_max: int) -> CurvePoint:
    return CurvePoint(a_max, 0, fits=False)


def curve(*points: CurvePoint, chosen: int, adapters: int = 64, most: int | None = None) -> SlotCurve:
    return SlotCurve(points, chosen, adapters, most, 1.0 / 0.9, 1000.0)


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
    ids=["best", "each", "memory", "fixed", "another", "fails", "all fail", "unfit"],
)  # fmt: skip
def test_the_sentence_names_the_merit_and_what_speaks_against_the_neighbours(
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


@given(st.lists(points, min_size=1, max_size=7, unique_by=lambda p: p.a_max), st.data())
def test_the_sentence_agrees_with_the_rule_that_chooses_slots(
    drawn: list[CurvePoint], data: st.DataObject
) -> None:
    """It calls another number better when and only when that rule would take another one."""
    ordered = sorted(drawn, key=lambda p: p.a_max)
    chosen = data.draw(st.sampled_from(ordered))
    best = best_slots(
        {
            p.a_max: Estimate(p.throughput_tok_s or 0.0, bool(p.broken), e2e_s_mean=p.e2e_mean_s or 0.0)
            for p in ordered
        }
    )
    words = explain_slots(curve(*ordered, chosen=chosen.a_max), "capplan", fixed=False)
    assert words.startswith(f"A_max {chosen.a_max}")
    assert f"breaks {chosen.broken[0]}" in words.split(";")[0] if chosen.broken else True
    assert (f"on this curve {best}" in words) == (chosen.holds and best != chosen.a_max)
