import numpy as np
import pytest

from capplan.models.calibration import smape
from capplan.models.surrogates import FEATURES, LOG_OVER_EXPECTED
from capplan.models.surrogates._features import expected_tok_s
from capplan.models.surrogates._tree import PROBABILITY
from capplan.models.training._refinement import (
    Refinement,
    refine,
    starvation_objective,
    throughput_objective,
)

ROWS = 500


def refined(table: tuple[np.ndarray, np.ndarray, np.ndarray], limit: int) -> Refinement:
    x, tok_s, groups = table
    return refine(throughput_objective(x, tok_s), groups, limit=limit, folds=3)


@pytest.fixture(scope="module")
def table() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features, throughput that is a few steps away from what they expect, and groups of two rows."""
    rng = np.random.default_rng(0)
    x = rng.lognormal(0.0, 1.0, (ROWS, len(FEATURES))).astype(np.float32)
    correction = np.where(x[:, 3] > 1.0, 0.7, 1.0) * np.where(x[:, 6] > 2.0, 0.9, 1.0)
    throughput = expected_tok_s(x) * correction * np.exp(rng.normal(0.0, 0.01, ROWS))
    return x, throughput, np.arange(ROWS) // 2


@pytest.fixture(scope="module")
def throughput(table: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Refinement:
    return refined(table, limit=8)


def test_the_tree_finds_the_few_rules_behind_the_answers(
    table: tuple[np.ndarray, np.ndarray, np.ndarray], throughput: Refinement
) -> None:
    x, tok_s, _ = table
    chosen = throughput.chosen
    assert chosen.tree.answer == LOG_OVER_EXPECTED
    assert 3 <= chosen.rules <= 8
    assert smape(expected_tok_s(x) * np.exp(chosen.tree.predict(x)), tok_s) < 1.0
    assert chosen.error < 1.5


def test_more_rules_on_the_front_mean_less_error(throughput: Refinement) -> None:
    points = [(point.rules, point.error) for point in throughput.front]
    assert points == sorted(points)
    assert [error for _, error in points] == sorted((error for _, error in points), reverse=True)
    assert all(point.tree.rules == point.rules for point in throughput.front)
    assert throughput.front[0].rules == 1


def test_the_limit_holds_whatever_would_err_less(table: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    assert refined(table, limit=2).chosen.rules <= 2


def test_the_same_seed_gives_the_same_trees(
    table: tuple[np.ndarray, np.ndarray, np.ndarray], throughput: Refinement
) -> None:
    again = refined(table, limit=8)
    assert [point.tree for point in again.front] == [point.tree for point in throughput.front]


def test_starvation_is_found_and_leaves_hold_probabilities(
    table: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    x, _, groups = table
    found = refine(starvation_objective(x, (x[:, 3] > 1.0) & (x[:, 6] > 0.7)), groups, limit=6, folds=3)
    tree = found.chosen.tree
    assert tree.answer == PROBABILITY
    assert found.chosen.rules <= 6
    assert found.chosen.error < 5.0
    assert np.all((tree.predict(x) > 0.0) & (tree.predict(x) < 1.0))


def test_better_soft_labels_are_preferred(table: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Where a third of the twin's answers are noise, the true classes are the better labels."""
    x, _, groups = table
    truth = x[:, 3] > 1.0
    noisy = truth ^ (np.random.default_rng(1).random(ROWS) < 0.3)
    asked: list[int] = []

    def better(features: np.ndarray, target: np.ndarray) -> object:
        asked.append(len(features))
        return lambda rows: (rows[:, 3] > 1.0).astype(float)

    taught = refine(starvation_objective(x, noisy), groups, limit=12, folds=3, labels=better)
    assert set(taught.errors) == {"twin", "teacher"}
    assert len(asked) >= 3
    assert taught.errors["teacher"][12] <= taught.errors["twin"][12]
    assert all(size < ROWS for size in asked[:3])  # in cross-validation it does not see what is held out


def test_a_leaf_answers_with_the_least_error_of_its_rows(
    table: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    x, tok_s, _ = table
    objective = throughput_objective(x, tok_s)
    rows = np.arange(0, ROWS, 7)
    best = objective.leaf_value(rows)
    errors = [
        np.abs(np.tanh((v - objective.target[rows]) / 2)).sum() for v in (best, *objective.target[rows])
    ]
    assert errors[0] <= min(errors) * 1.01
    starved = starvation_objective(x, np.arange(ROWS) < 10)
    assert starved.leaf_value(np.arange(20)) == 0.5
    assert starved.leaf_value(np.arange(10, 12)) == 0.25
