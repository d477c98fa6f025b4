"""Scores, intervals and calibration of training."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.models.surrogates import FEATURES, feature_of
from capplan.models.surrogates._outputs import LEAF, Forest
from capplan.models.training._data import TrainingTable
from capplan.models.training._evaluation import (
    NEAR_CAPACITY,
    coverage,
    importance,
    regimes,
    reliability,
    rounded,
    starvation_scores,
    throughput_errors,
)
from tests.models.training.scenarios import scenarios


@pytest.fixture(scope="module")
def table() -> TrainingTable:
    x, throughput, _, groups = scenarios()
    offered = feature_of(x, "offered_tok_s")
    return TrainingTable(
        features=x,
        throughput_tok_s=throughput,
        offered_drawn_tok_s=offered,
        served_fraction=throughput / offered,
        step_ms=feature_of(x, "step_ms"),
        group=groups,
        design=np.where(np.arange(len(x)) < 100, "one", "two"),
        number=np.arange(len(x)),
    )


def test_regimes_are_parts_of_the_table(table: TrainingTable) -> None:
    parts = regimes(table)
    assert parts["all"].all()
    assert np.array_equal(parts["starved"], ~parts["not starved"])
    assert np.array_equal(parts["one"], ~parts["two"])
    assert parts["one"].sum() == 100
    load = feature_of(table.features, "load_over_capacity")
    assert np.array_equal(parts["near the edge"], (load >= 1 - NEAR_CAPACITY) & (load <= 1 + NEAR_CAPACITY))
    assert np.array_equal(parts["near the edge"], parts["near the edge, one"] | parts["near the edge, two"])


@given(st.floats(0.1, 10.0))
def test_errors_are_smape_in_every_regime(table: TrainingTable, factor: float) -> None:
    errors = throughput_errors(table, factor * table.throughput_tok_s)
    assert set(errors) == set(regimes(table))
    expected = 100 * abs(factor - 1) / (factor + 1)
    assert errors == pytest.approx(dict.fromkeys(errors, expected), abs=1e-9)


def test_regimes_without_rows_or_without_both_classes_have_no_score(table: TrainingTable) -> None:
    only = TrainingTable(
        **{name: getattr(table, name)[table.starved] for name in TrainingTable.__dataclass_fields__}
    )
    assert "not starved" not in throughput_errors(only, only.throughput_tok_s)
    assert starvation_scores(only, np.ones(len(only))) == {}
    assert "starved" not in starvation_scores(table, table.starved.astype(float))


def test_scores_are_one_for_the_truth_and_less_for_any_mistake(table: TrainingTable) -> None:
    truth = table.starved.astype(float)
    assert set(starvation_scores(table, truth).values()) == {1.0}
    assert starvation_scores(table, 1.0 - truth)["all"] == 0.0
    wrong = truth.copy()
    wrong[0] = 1.0 - wrong[0]
    assert 0.9 < starvation_scores(table, wrong)["all"] < 1.0


def test_coverage_is_the_share_inside_ends_included(table: TrainingTable) -> None:
    answers = table.throughput_tok_s
    assert coverage(table, answers, answers)["all"] == 1.0
    low = np.where(np.arange(len(table)) % 4 == 0, answers * 1.01, answers)
    assert coverage(table, low, 2 * answers)["all"] == 0.75
    assert coverage(table, 0 * answers, answers * 0.99)["starved"] == 0.0


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=200))
def test_reliability_counts_every_scenario_once(rows: list[tuple[float, bool]]) -> None:
    said, starved = np.array([p for p, _ in rows]), np.array([s for _, s in rows])
    curve = reliability(said, starved)
    assert sum(count for *_, count in curve) == len(rows)
    assert sum(count * mean for mean, _, count in curve) == pytest.approx(said.sum())
    assert sum(count * share for _, share, count in curve) == pytest.approx(starved.sum())
    means = [mean for mean, *_ in curve]
    assert means == sorted(means)


def stump(first: int, second: int) -> Forest:
    """Return a tree that asks `first`, and below on the right `second`."""
    return Forest(
        roots=np.zeros(1, np.int32),
        feature=np.array([first, LEAF, second, LEAF, LEAF], np.int16),
        threshold=np.zeros(5, np.float32),
        left=np.array([1, LEAF, 3, LEAF, LEAF], np.int32),
        right=np.array([2, LEAF, 4, LEAF, LEAF], np.int32),
        value=np.zeros(5, np.float32),
    )


def test_the_first_question_weighs_twice_the_second() -> None:
    assert importance((stump(3, 5),)) == pytest.approx({FEATURES[3]: 2 / 3, FEATURES[5]: 1 / 3})
    assert list(importance((stump(3, 5), stump(5, 5)))) == [FEATURES[5], FEATURES[3]]
    assert sum(importance((stump(3, 5), stump(1, 2))).values()) == pytest.approx(1.0)


def test_figures_of_a_report_are_short() -> None:
    assert rounded({"a": np.float64(1.23456789), "b": 2}) == {"a": 1.2346, "b": 2.0}
