"""Gradient-boosted trees of XGBoost as the flat arrays that compiled code answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.models.surrogates.forest import LEAF, Forest

if TYPE_CHECKING:
    from xgboost import Booster, XGBModel

_IDENTITY = ("reg:squarederror", "reg:absoluteerror", "reg:pseudohubererror", "reg:quantileerror")
_LOGISTIC = ("binary:logistic", "reg:logistic")


def flatten_boosted(model: XGBModel | Booster, columns: Sequence[int] | None = None) -> Forest:
    """Return a fitted XGBoost model as a `Forest` whose answer is the model's margin.

    The margin is the prediction of a regressor; of a classifier it is the log odds of the second class, which
    the caller turns into a probability (`probability_of`).

    A forest answers the *mean* of its leaves, boosting the *sum* of them and a base score. So every leaf is
    stored as ``trees * leaf + base``, whose mean is that sum: no second kind of forest is needed. XGBoost
    goes left where ``x < threshold``, a forest where ``x <= threshold``; both compare float32, so the
    threshold is the next smaller float32. Missing values never occur in features and have no branch here.

    Parameters
    ----------
    model
        A fitted single-output model of plain trees (booster ``gbtree``). Trees after the best iteration of
        early stopping are left out, as XGBoost's scikit-learn interface does.
    columns
        The feature that each column of the model's input was, when it saw a selection of them.

    Raises
    ------
    InputError
        For a model of another kind: several outputs, categorical splits, an unknown objective.
    """
    booster = model if not hasattr(model, "get_booster") else model.get_booster()
    if booster.attr("best_iteration") is not None:
        booster = booster[: booster.best_iteration + 1]
    learner = json.loads(booster.save_raw("json"))["learner"]
    gradient = learner["gradient_booster"]
    sizes = learner["learner_model_param"]
    if gradient["name"] != "gbtree":
        raise InputError("must be gbtree", gradient["name"], "booster")
    if int(sizes.get("num_class", 0)) > 1 or int(sizes.get("num_target", 1)) > 1:
        raise InputError("must have a single output", location="booster")
    trees = gradient["model"]["trees"]
    if not trees:
        raise InputError("must have at least one tree", location="booster")
    base = _base_margin(learner["objective"]["name"], sizes["base_score"])
    known = np.arange(int(sizes["num_feature"])) if columns is None else np.asarray(columns)
    return _joined([_flat_tree(tree, known) for tree in trees], base)


def probability_of(margin: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """Return the probability whose log odds are `margin`."""
    # tanh neither overflows nor warns, whatever the margin.
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * np.asarray(margin, float))))


def _base_margin(objective: str, written: str) -> float:
    """Return the base score as XGBoost adds it; the model holds it on the scale of predictions."""
    # A list of one since XGBoost 3.1, a number before.
    score = float(written.strip("[]"))
    if objective in _IDENTITY:
        return score
    if objective in _LOGISTIC:
        return math.log(score / (1.0 - score))
    raise InputError(f"must be one of {', '.join(_IDENTITY + _LOGISTIC)}", objective, "objective")


def _flat_tree(tree: Mapping[str, Any], columns: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Return one tree with its nodes in depth-first order, so that children come after their parent."""
    if any(tree["split_type"]):
        raise InputError("must not have categorical splits", location="booster")
    left, right = np.asarray(tree["left_children"]), np.asarray(tree["right_children"])
    order, waiting = [], [0]
    while waiting:
        node = waiting.pop()
        order.append(node)
        if left[node] >= 0:
            waiting += [int(right[node]), int(left[node])]
    place = np.zeros(left.size, np.int64)
    place[order] = np.arange(len(order))
    left, right = left[order], right[order]
    inner = left >= 0
    # Of an inner node this is the threshold, of a leaf its value; the JSON holds float32 exactly.
    condition = np.asarray(tree["split_conditions"])[order].astype(np.float32)
    below = np.nextafter(condition, np.float32(-np.inf))
    return {
        "feature": np.where(inner, columns[np.asarray(tree["split_indices"])[order]], LEAF),
        "threshold": np.where(inner, below, np.float32(0.0)),
        "left": np.where(inner, place[left], LEAF),
        "right": np.where(inner, place[right], LEAF),
        "value": np.where(inner, np.float32(0.0), condition),
    }


def _joined(trees: Sequence[Mapping[str, NDArray[Any]]], base: float) -> Forest:
    roots = np.cumsum([0] + [tree["feature"].size for tree in trees[:-1]])
    column = {name: np.concatenate([tree[name] for tree in trees]) for name in trees[0]}
    inner = column["feature"] != LEAF
    shift = np.repeat(roots, [tree["feature"].size for tree in trees])
    leaves = len(trees) * column["value"].astype(float) + base
    return Forest(
        roots=roots.astype(np.int32),
        feature=column["feature"].astype(np.int16),
        threshold=column["threshold"].astype(np.float32),
        left=np.where(inner, column["left"] + shift, LEAF).astype(np.int32),
        right=np.where(inner, column["right"] + shift, LEAF).astype(np.int32),
        value=np.where(inner, 0.0, leaves).astype(np.float32),
    )
