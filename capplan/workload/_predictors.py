"""Predicted output lengths of requests: exact ones, length classes of set accuracy, and a learned model.

A length class is a range of outputs, cut at the percentiles `CUT_PERCENTILES`; its prediction is the mean
output of the class. Chameleon's proxy model puts about 80 % of the requests into the right class (section
5.4.1). The classes are not in the paper (assumed).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import jit
from capplan.errors import NO_VALUE, InputError
from capplan.spec import MAX_TOKENS, Predictor, parse_json, read_text

if TYPE_CHECKING:
    from capplan.workload._requests import Requests

CUT_PERCENTILES: Final = (25.0, 50.0, 75.0, 99.0)

FEATURES: Final = ("prompt_tokens", "adapter", "hour")
"""What a learned predictor reads; the adapter by its number in the file, 0 the base model, NaN any other."""

CLASS_TOKENS: Final = "class_tokens"
"""Attribute of a learned predictor's file: the prediction of each class, ascending, as a JSON list."""

ADAPTERS: Final = "adapters"
"""Attribute of that file: the names of the adapters, numbered from 1, as a JSON list."""

_STREAM: Final = 0x70726564  # keeps the draws apart from those of other users of a seed
_NS_PER_HOUR: Final = 3_600_000_000_000
_HOURS: Final = 24

_MAX_BYTES: Final = 16 * 2**20
"""Of a learned predictor's file; 300 trees of depth 4 take 1 MiB."""
_MODEL: Final = "learner.gradient_booster.model"
_TREE: Final = (
    *("left_children", "right_children", "parents", "split_indices", "split_conditions", "default_left"),
    "split_type",
)
"""Arrays of a tree that predictions depend on, in XGBoost's JSON."""
_LEAF: Final = -1
_NO_PARENT: Final = 2**31 - 1
_MOST_FLOAT32: Final = float(np.finfo(np.float32).max)


class LengthClasses(NamedTuple):
    """Classes of output lengths, ascending; every class occurs."""

    cuts: NDArray[np.float64]
    """Upper bounds of all classes but the last, exclusive, in tokens; shape (classes - 1,)."""
    tokens: NDArray[np.int64]
    """Mean output of each class, rounded, at least 1; shape (classes,)."""

    def classify(self, output_tokens: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Return the class of each output length."""
        return np.searchsorted(self.cuts, output_tokens, side="right").astype(np.int64)


def length_classes(output_tokens: NDArray[np.integer[Any]]) -> LengthClasses:
    """Return the classes of recorded output lengths, at least one length.

    Cuts are lengths that occur; percentiles that coincide make one cut.
    """
    cuts = np.unique(np.percentile(output_tokens, CUT_PERCENTILES, method="higher")).astype(np.float64)
    cuts = cuts[cuts > output_tokens.min()]
    of = np.searchsorted(cuts, output_tokens, side="right")
    totals = np.bincount(of, weights=output_tokens, minlength=cuts.size + 1)
    tokens = np.maximum(1, np.rint(totals / np.bincount(of, minlength=cuts.size + 1)))
    return LengthClasses(cuts, tokens.astype(np.int64))


def predicted_tokens(
    requests: Requests, predictor: Predictor, seed: int, adapters: Sequence[str] = ()
) -> NDArray[np.int64]:
    """Return the predicted output length of every request, at least 1 token.

    Parameters
    ----------
    requests
        The requests, whose output lengths are known here.
    predictor
        ``oracle`` returns the outputs. ``classes`` returns the mean of the right class with probability
        ``accuracy``, else that of another class, all equally likely; the classes are those of `requests`.
        ``learned`` evaluates the model in ``file``.
    seed
        Seed of ``classes``. Under one seed, requests with the right class keep it at higher accuracies.
    adapters
        Names of the adapters of `requests`, by which ``learned`` finds those that it was trained on.

    Returns
    -------
    ndarray of int64, shape (requests,)

    Raises
    ------
    InputError
        If the file of a learned predictor cannot be read.
    """
    outputs = requests.output_tokens.astype(np.int64)
    if predictor.kind == "oracle" or outputs.size == 0:
        return outputs
    if predictor.kind == "classes":
        return _of_classes(outputs, predictor.accuracy, seed)
    learned = read_predictor(str(predictor.file))
    return learned.predict(predictor_features(requests, adapters, learned.adapters))


def _of_classes(outputs: NDArray[np.int64], accuracy: float, seed: int) -> NDArray[np.int64]:
    """Return class means; wrong classes are drawn from all but the right one."""
    classes = length_classes(outputs)
    right = classes.classify(outputs)
    others = classes.tokens.size - 1
    if others == 0:
        return classes.tokens[right]
    draws = np.random.default_rng([seed, _STREAM]).random((outputs.size, 2))
    other = (draws[:, 1] * others).astype(np.int64)
    other += other >= right
    return classes.tokens[np.where(draws[:, 0] < accuracy, right, other)]


def numbered_adapters(names: Sequence[str]) -> dict[str | None, float]:
    """Return the numbers of adapters in a predictor's file by name; None: the base model."""
    return {None: 0.0, **{name: float(number) for number, name in enumerate(names, start=1)}}


def predictor_features(
    requests: Requests, adapters: Sequence[str], known: Mapping[str | None, float]
) -> NDArray[np.float32]:
    """Return the features of a learned predictor, shape (requests, 3), in the order of `FEATURES`.

    Parameters
    ----------
    requests
        The requests; arrivals count from midnight UTC.
    adapters
        Names of their adapters.
    known
        Numbers of the adapters in the predictor's file, by name.
    """
    hour = requests.arrival_ns // _NS_PER_HOUR % _HOURS
    numbers = np.array([known.get(name, math.nan) for name in (None, *adapters)])
    columns = (requests.prompt_tokens, numbers[requests.adapter], hour)
    return np.stack([column.astype(np.float32) for column in columns], axis=1)


class _Trees(NamedTuple):
    """Boosted trees one after the other; the margin of a class is its base plus the leaves of its trees."""

    roots: NDArray[np.int32]
    """First node of each tree, shape (trees,); tree `i` is of the class `i` modulo the classes."""
    base: NDArray[np.float32]
    """Shape (classes,)."""
    feature: NDArray[np.int64]
    """Shape (nodes,)."""
    condition: NDArray[np.float32]
    """Go left where the feature is below; the value of a leaf."""
    is_missing_left: NDArray[np.int64]
    left: NDArray[np.int64]
    """`_LEAF` in leaves."""
    right: NDArray[np.int64]


@jit
def _fill_classes(
    trees: _Trees, features: NDArray[np.float32], margins: NDArray[np.float32], chosen: NDArray[np.int64]
) -> None:
    """Write the class of the largest margin of every row; sums are those of XGBoost, in its order."""
    classes = margins.size
    for row in range(chosen.size):
        for kind in range(classes):
            margins[kind] = trees.base[kind]
        for tree in range(trees.roots.size):
            root = trees.roots[tree]
            node = root
            while trees.left[node] != _LEAF:
                x = features[row, trees.feature[node]]
                is_left = trees.is_missing_left[node] != 0 if np.isnan(x) else x < trees.condition[node]
                node = root + (trees.left[node] if is_left else trees.right[node])
            margins[tree % classes] += trees.condition[node]
        best = 0
        for kind in range(1, classes):
            if margins[kind] > margins[best]:
                best = kind
        chosen[row] = best


class LearnedPredictor(NamedTuple):
    """The content of a learned predictor's file."""

    trees: _Trees
    tokens: NDArray[np.int64]
    """Prediction of each class."""
    adapters: Mapping[str | None, float]
    """Numbers of the adapters that it was trained on, by name."""

    def predict(self, features: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return the predicted tokens of requests, from their features, shape (requests, 3)."""
        chosen = np.zeros(len(features), np.int64)
        _fill_classes(self.trees, features, np.zeros(self.tokens.size, np.float32), chosen)
        return self.tokens[chosen]


def read_predictor(file: str) -> LearnedPredictor:
    """Return the content of a learned predictor's file.

    The trees are evaluated here: XGBoost trusts the indices in its files, and a wrong one ends the process.

    Raises
    ------
    InputError
        If the file cannot be read, or is not as ``capplan workload predictor`` writes it; names the key.
    """
    document = parse_json(read_text(file, _MAX_BYTES), file)
    tokens = _attribute(document, CLASS_TOKENS, file)
    adapters = _attribute(document, ADAPTERS, file)
    classes = len(tokens)
    is_whole = all(type(value) is int and 0 < value <= MAX_TOKENS for value in tokens)
    if classes < 2 or not is_whole or tokens != sorted(tokens):
        rule = f"must be two or more whole numbers from 1 to {MAX_TOKENS} that ascend"
        raise _wrong(rule, tokens, f"learner.attributes.{CLASS_TOKENS}", file)
    if not all(isinstance(name, str) for name in adapters):
        raise _wrong("must be names", adapters, f"learner.attributes.{ADAPTERS}", file)
    categories = _at(document, f"{_MODEL}.cats", file, {})
    if not isinstance(categories, dict) or any(categories.values()):
        raise _wrong("must hold no categories", None, f"{_MODEL}.cats", file)
    trees = _at(document, f"{_MODEL}.trees", file)
    if not isinstance(trees, list) or not trees or len(trees) % classes:
        raise _wrong(f"must be a list with trees of all {classes} classes", None, f"{_MODEL}.trees", file)
    _require(
        document,
        {
            "learner.feature_names": list(FEATURES),
            "learner.objective.name": "multi:softprob",
            "learner.objective.softmax_multiclass_param.num_class": str(classes),
            "learner.learner_model_param.num_class": str(classes),
            "learner.learner_model_param.num_feature": str(len(FEATURES)),
            "learner.learner_model_param.num_target": "1",
            "learner.gradient_booster.name": "gbtree",
            f"{_MODEL}.gbtree_model_param.num_trees": str(len(trees)),
            f"{_MODEL}.gbtree_model_param.num_parallel_tree": "1",
            f"{_MODEL}.tree_info": [tree % classes for tree in range(len(trees))],
            f"{_MODEL}.iteration_indptr": list(range(0, len(trees) + 1, classes)),
        },
        file,
    )
    columns = [_tree_columns(document, f"{_MODEL}.trees.{number}", file) for number in range(len(trees))]
    sizes = [len(tree["left_children"]) for tree in columns]
    whole = {name: np.concatenate([tree[name] for tree in columns]) for name in _TREE}
    return LearnedPredictor(
        _Trees(
            np.cumsum([0, *sizes[:-1]]).astype(np.int32),
            _base(document, classes, file),
            whole["split_indices"].astype(np.int64),
            whole["split_conditions"].astype(np.float32),
            *(whole[name].astype(np.int64) for name in ("default_left", "left_children", "right_children")),
        ),
        np.array(tokens, np.int64),
        numbered_adapters(adapters),
    )


def _wrong(rule: str, value: object, key: str, file: str) -> InputError:
    made = "; make the file again with capplan workload predictor"
    return InputError(rule + made, NO_VALUE if value is None else value, f"{file}: {key}")


def _at(document: Any, key: str, file: str, default: Any = None) -> Any:
    """Return the value at a dotted key; without a default, its absence is an error."""
    value = document
    for part in key.split("."):
        if isinstance(value, list):
            value = value[int(part)] if part.isdigit() and int(part) < len(value) else None
        else:
            value = value.get(part) if isinstance(value, dict) else None
        if value is None and default is None:
            raise _wrong("is required", None, key, file)
    return default if value is None else value


def _require(document: Any, expected: Mapping[str, object], file: str) -> None:
    for key, value in expected.items():
        given = _at(document, key, file)
        if given != value:
            raise _wrong(f"must be {str(value)[:60]}", given, key, file)


def _attribute(document: Any, name: str, file: str) -> list[Any]:
    key = f"learner.attributes.{name}"
    text = _at(document, key, file)
    values = parse_json(text, f"{file}: {key}") if isinstance(text, str) else None
    if not isinstance(values, list):
        raise _wrong("must be a JSON list", text, key, file)
    return values


def _numbers(values: object, size: int, key: str, file: str) -> NDArray[np.float64]:
    """Return a list of so many numbers that float32 holds."""
    if not isinstance(values, list) or len(values) != size:
        raise _wrong(f"must be a list of {size} numbers", None, key, file)
    for value in values:
        if type(value) not in (int, float) or not abs(value) <= _MOST_FLOAT32:
            raise _wrong("must hold finite numbers", value, key, file)
    return np.array(values, np.float64)


def _base(document: Any, classes: int, file: str) -> NDArray[np.float32]:
    """Return the margins before any tree; XGBoost up to 3.0 writes a number for all classes."""
    key = "learner.learner_model_param.base_score"
    text = _at(document, key, file)
    score = parse_json(text, f"{file}: {key}") if isinstance(text, str) else None
    return _numbers(score if isinstance(score, list) else [score] * classes, classes, key, file).astype(
        np.float32
    )


def _tree_columns(document: Any, key: str, file: str) -> dict[str, NDArray[np.float64]]:
    """Return the arrays of a tree, whose walk goes forward from the root to nodes that exist."""
    tree, children = _at(document, key, file), _at(document, f"{key}.left_children", file)
    nodes = len(children) if isinstance(children, list) else 0
    if not nodes:
        raise _wrong("must be a list with nodes", children, f"{key}.left_children", file)
    none: dict[str, list[Any]] = {name: [] for name in tree if name.startswith("categories")}
    sizes = {"num_nodes": str(nodes), "num_feature": str(len(FEATURES)), "size_leaf_vector": "1"}
    _require(
        document,
        {f"{key}.{name}": value for name, value in none.items()}
        | {f"{key}.tree_param.{name}": value for name, value in sizes.items()},
        file,
    )
    columns = {
        name: _numbers(_at(document, f"{key}.{name}", file), nodes, f"{key}.{name}", file)
        for name in (*_TREE, *(name for name in tree if isinstance(tree[name], list) and name not in none))
    }
    left, right = columns["left_children"], columns["right_children"]
    at, inner = np.arange(nodes), left != _LEAF
    for name, bad, rule in (
        ("left_children", inner & ~((left > at) & (left < nodes)), "must be later nodes of the tree"),
        ("right_children", inner & ~((right > at) & (right < nodes)), "must be later nodes of the tree"),
        ("right_children", ~inner & (right != _LEAF), f"must be {_LEAF} in a leaf"),
        ("split_indices", ~np.isin(columns["split_indices"], range(len(FEATURES))), "must be features"),
        ("default_left", ~np.isin(columns["default_left"], (0, 1)), "must be 0 or 1"),
        ("split_type", columns["split_type"] != 0, "must be 0: no categories"),
        *(
            (name, columns[name] % 1 != 0, "must be whole numbers")
            for name in _TREE
            if name != "split_conditions"
        ),
    ):
        if bad.any():
            raise _wrong(rule, columns[name][bad][0], f"{key}.{name}[{int(bad.argmax())}]", file)
    reached = np.concatenate([left[inner], right[inner]]).astype(np.int64)
    parents = np.full(nodes, _NO_PARENT)
    parents[reached] = np.tile(at[inner], 2)
    if np.unique(reached).size != nodes - 1 or np.any(parents != columns["parents"]):
        raise _wrong(
            "must be the parents of all nodes but the first, by their children", None, f"{key}.parents", file
        )
    return columns
