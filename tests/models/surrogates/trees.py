"""Random small trees, and feature vectors on and beside their thresholds."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from capplan.models.surrogates import FEATURES, Tree
from capplan.models.surrogates._tree import ANSWERS

LEAF = -1
finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def trees(draw: st.DrawFn, most_splits: int = 12) -> Tree:
    """Split leaves of a growing tree, then number its nodes so that children come after their parent."""
    answer = draw(st.sampled_from(list(ANSWERS)))
    low, high = ANSWERS[answer]
    feature, threshold, left, right = [LEAF], [0.0], [LEAF], [LEAF]
    for _ in range(draw(st.integers(0, most_splits))):
        leaves = [node for node, asked in enumerate(feature) if asked == LEAF]
        node = draw(st.sampled_from(leaves))
        feature[node] = draw(st.integers(0, len(FEATURES) - 1))
        threshold[node] = draw(finite32)
        left[node], right[node] = len(feature), len(feature) + 1
        for column, empty in ((feature, LEAF), (threshold, 0.0), (left, LEAF), (right, LEAF)):
            column.extend([empty, empty])
    values = [draw(st.floats(low, high)) if asked == LEAF else 0.0 for asked in feature]
    share = [0.0] * len(feature)
    weights = {node: draw(st.integers(1, 9)) for node, asked in enumerate(feature) if asked == LEAF}
    for node in reversed(range(len(feature))):
        inner = feature[node] != LEAF
        share[node] = (
            share[left[node]] + share[right[node]] if inner else weights[node] / sum(weights.values())
        )
    return Tree(
        answer,
        *map(tuple, (feature, threshold, left, right, values)),
        share=tuple(min(1.0, each) for each in share),
    )


def around(tree: Tree, seed: int = 0) -> np.ndarray:
    """Return rows on each threshold and one float32 to either side; other features stand on some as well.

    All of them are finite, as features are.
    """
    rng = np.random.default_rng(seed)
    inner = [node for node, asked in enumerate(tree.feature) if asked != LEAF]
    pool = np.array([0.0, *(tree.threshold[node] for node in inner)], np.float32)
    rows = rng.choice(pool, (3 * len(inner) + 8, len(FEATURES)))
    for i, node in enumerate(inner):
        at = np.float32(tree.threshold[node])
        with np.errstate(over="ignore"):
            sides = (at, np.nextafter(at, np.float32(-np.inf)), np.nextafter(at, np.float32(np.inf)))
        rows[3 * i : 3 * i + 3, tree.feature[node]] = sides
    largest = np.finfo(np.float32).max
    return np.clip(rows, -largest, largest).astype(np.float32)
