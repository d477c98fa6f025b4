from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.models.training._refinement import (
    GrowthProblem,
    LeafNode,
    Node,
    count,
    cut,
    grow,
    optimize,
    prune,
    short_between,
    total_loss,
)

COLUMN = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=60)


@given(COLUMN, st.integers(2, 20))
def test_a_bin_is_at_most_a_cut_where_the_feature_is_at_most_its_threshold(
    column: list[float], most: int
) -> None:
    features = np.array([column, column[::-1]], np.float32).T
    cuts = cut(features, most)
    assert cuts.bins <= most + 1
    for feature in range(2):
        for number, threshold in enumerate(cuts.thresholds[feature]):
            below = features[:, feature] <= threshold
            assert np.array_equal(cuts.codes[:, feature] <= number, below)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 10**6))
def test_a_short_number_keeps_its_place_between_two_floats(low: float, steps: int) -> None:
    with np.errstate(over="ignore"):
        high = float(np.float32(low) + np.float32(steps) * np.spacing(np.float32(abs(low))))
    if high <= low or not np.isfinite(high):
        return
    short = short_between(low, high)
    assert low <= short < high
    assert float(np.float32(short)) == short


@pytest.mark.parametrize(
    ("low", "high", "short"), [(0.931, 0.939, 0.935), (95.0, 117.0, 100.0), (-3.2, 4.0, 0.4), (256, 512, 400)]
)
def test_thresholds_have_few_digits(low: float, high: float, short: float) -> None:
    assert short_between(low, high) == np.float32(short)


def quadrants(rows: int = 600) -> tuple[np.ndarray, GrowthProblem]:
    """Return points whose two classes are opposite quadrants, and a feature that says nothing of them."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (rows, 3)).astype(np.float32)
    classes = ((x[:, 0] > 0) ^ (x[:, 1] > 0.2)).astype(np.intp)
    values = np.linspace(0.0, 1.0, 11)
    loss = (values[:, None] - np.array([0.0, 1.0])) ** 2
    return x, GrowthProblem(cut(x), classes, np.ones(rows), loss, 5)


def test_four_leaves_separate_four_quadrants() -> None:
    _, problem = quadrants()
    root = grow(problem, 6)
    assert count(root) <= 6
    assert total_loss(problem, root) < 0.02 * problem.bins.size


def test_optimization_never_increases_the_loss() -> None:
    _, problem = quadrants()
    root: Node = grow(problem, 8, sweeps=0)
    for _ in range(4):
        other = optimize(problem, root, 1)
        assert total_loss(problem, other) <= total_loss(problem, root) + 1e-9
        root = other


def test_smaller_trees_have_ever_fewer_leaves_down_to_one() -> None:
    _, problem = quadrants()
    counts = [count(node) for node in prune(problem, grow(problem, 10))]
    assert all(later < earlier for earlier, later in pairwise(counts))
    assert counts[-1] == 1


def test_no_leaf_has_fewer_rows_than_the_minimum() -> None:
    x, problem = quadrants()

    def smallest(node: Node, rows: np.ndarray) -> int:
        if isinstance(node, LeafNode):
            return int(rows.size)
        left = problem.cuts.codes[rows, node.feature] <= node.cut
        return min(smallest(node.left, rows[left]), smallest(node.right, rows[~left]))

    assert smallest(grow(problem, 40), np.arange(len(x))) >= problem.min_rows


def test_a_target_of_one_kind_needs_one_leaf() -> None:
    x, problem = quadrants()
    alike = GrowthProblem(problem.cuts, np.zeros(len(x), np.intp), problem.weight, problem.loss, 5)
    assert grow(alike, 16) == LeafNode(0)
