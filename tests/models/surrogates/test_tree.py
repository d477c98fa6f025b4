import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from capplan import InputError
from capplan.models.surrogates import FEATURES, LOG_OVER_EXPECTED, Tree
from capplan.models.surrogates._tree import MAX_DEPTH, PROBABILITY, tree_of
from tests.models.surrogates.trees import LEAF, around, trees

GOOD = {
    "answer": "probability",
    "nodes": [
        {"feature": "adapters", "at_most": 32.0, "left": 1, "right": 2},
        {"value": 0.0, "share": 0.25},
        {"feature": "a_max", "at_most": 8.5, "left": 3, "right": 4},
        {"value": 1.0, "share": 0.5},
        {"value": 0.5, "share": 0.25},
    ],
}


def walked(tree: Tree, x: np.ndarray) -> float:
    node = 0
    while tree.feature[node] != LEAF:
        goes_left = x[tree.feature[node]] <= np.float32(tree.threshold[node])
        node = tree.left[node] if goes_left else tree.right[node]
    return tree.value[node]


@given(trees())
def test_many_rows_are_answered_as_one_by_one(tree: Tree) -> None:
    rows = around(tree)
    expected = [walked(tree, row) for row in rows]
    assert tree.predict(rows).tolist() == expected


@given(trees())
def test_a_tree_outlives_its_file(tree: Tree) -> None:
    again = Tree.from_document(json.loads(json.dumps(tree.to_document())))
    assert again.share == pytest.approx(tree.share, abs=1e-12)
    assert (again.feature, again.threshold, again.left, again.right, again.value, again.answer) == (
        (tree.feature, tree.threshold, tree.left, tree.right, tree.value, tree.answer)
    )


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(2, 32), st.booleans())
def test_a_tree_of_scikit_learn_keeps_its_answers(seed: int, leaves: int, classifies: bool) -> None:
    rng = np.random.default_rng(seed)
    # Few distinct values, so that many answers hang on a comparison with a threshold between two of them.
    x = np.round(rng.lognormal(0, 1, (200, len(FEATURES))), 1).astype(np.float32)
    y = x[:, 0] * x[:, 1] + rng.normal(0, 0.1, 200)
    if classifies:
        model = DecisionTreeClassifier(max_leaf_nodes=leaves, random_state=0).fit(x, y > np.median(y))
        tree, asks = tree_of(model, PROBABILITY), lambda rows: model.predict_proba(rows)[:, 1]
    else:
        model = DecisionTreeRegressor(max_leaf_nodes=leaves, random_state=0).fit(x, y)
        tree, asks = tree_of(model, LOG_OVER_EXPECTED), model.predict
    rows = np.concatenate([x, around(tree)])
    assert tree.predict(rows).tolist() == asks(rows).tolist()
    assert tree.rules == model.get_n_leaves()
    assert tree.depth == model.get_depth()


def test_shares_of_leaves_add_up_on_the_way_to_the_root() -> None:
    tree = Tree.from_document(GOOD)
    assert tree.share == (1.0, 0.25, 0.75, 0.5, 0.25)
    assert tree.rules == 3
    assert tree.depth == 2


def broken(**changes: object) -> dict[str, object]:
    """Return the good document with some keys of nodes changed: ``node0_left=7``; None leaves a key out."""
    document = copy.deepcopy(GOOD)
    for key, value in changes.items():
        node, name = int(key[4]), key[6:]
        if value is None:
            del document["nodes"][node][name]
        else:
            document["nodes"][node][name] = value
    return document


CORRUPT = [
    None,
    [],
    "tree",
    {},
    GOOD | {"more": 1},
    GOOD | {"answer": "shell"},
    GOOD | {"answer": ["probability"]},
    GOOD | {"nodes": []},
    GOOD | {"nodes": "nodes"},
    GOOD | {"nodes": [1, 2]},
    GOOD | {"nodes": GOOD["nodes"][:3]},
    GOOD | {"nodes": [*GOOD["nodes"], {"value": 0.1, "share": 0.1}]},
    GOOD | {"nodes": [{"value": 0.1, "share": 0.1}] * 100_000},
    broken(node0_left=0),
    broken(node0_left=2),
    broken(node0_left=-1),
    broken(node0_left=10**30),
    broken(node0_left=1.0),
    broken(node0_left=True),
    broken(node0_left=None),
    broken(node2_left=1),
    broken(node2_right=9),
    broken(node0_feature="__import__('os')"),
    broken(node0_feature=["adapters"]),
    broken(node0_feature=0),
    broken(node0_at_most=float("nan")),
    broken(node0_at_most=float("inf")),
    broken(node0_at_most=0.1),
    broken(node0_at_most=1e39),
    broken(node0_at_most=10**400),
    broken(node0_at_most="1"),
    broken(node1_value=1.5),
    broken(node1_value=float("nan")),
    broken(node1_value=None),
    broken(node1_share=-0.1),
    broken(node1_share=2),
    broken(node1_extra=1),
]


@pytest.mark.parametrize("document", CORRUPT)
def test_a_corrupt_document_is_refused_in_one_line(document: object) -> None:
    with pytest.raises(InputError) as refused:
        Tree.from_document(document)
    assert str(refused.value).startswith("tree: ")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_a_tree_too_deep_to_be_written_as_code_is_refused() -> None:
    def chain(depth: int) -> dict[str, object]:
        nodes: list[dict[str, object]] = []
        for level in range(depth):
            below = 2 * level + 2
            nodes.append({"feature": "adapters", "at_most": 1.0, "left": below - 1, "right": below})
            nodes.append({"value": 0.0, "share": 0.0})
        return {"answer": "probability", "nodes": [*nodes, {"value": 0.0, "share": 1.0}]}

    assert Tree.from_document(chain(MAX_DEPTH)).depth == MAX_DEPTH
    with pytest.raises(InputError, match="deeper"):
        Tree.from_document(chain(MAX_DEPTH + 1))


@given(
    st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), lambda inner: st.lists(inner))
)
def test_no_node_of_another_kind_passes(node: object) -> None:
    with pytest.raises(InputError):
        Tree.from_document({"answer": "probability", "nodes": [node]})
