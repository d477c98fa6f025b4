"""Latency of surrogates: ``python -m benchmarks.surrogate_latency`` prints a table.

Median time per answer, features given. *In compiled code* is a compiled loop over vectors of many different
scenarios, in a random order too long for branch prediction; *from Python* is one call for one vector, or one
for many. scikit-learn answers with the same trees that were compiled. They are fitted to a stand-in of the
shape of throughput: time depends on the size of trees, not on their values. The shipped surrogates are listed
beside them, without scikit-learn.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import RandomForestRegressor
from sklearn.tree import DecisionTreeRegressor

from benchmarks.common import H100_LLAMA, markdown
from capplan import load_profile, load_surrogate
from capplan.models.surrogates import FEATURES, LOG_OVER_EXPECTED, Tree, feature_of
from capplan.models.surrogates._outputs import Forest, flatten_forest, forest_value, forest_values
from capplan.models.surrogates._tree import TreeFunction, compile_tree, tree_of
from capplan.twin.dataset import Sample, draw

PROFILE = load_profile(H100_LLAMA)
SCENARIOS = 1024
ANSWERS = 16_384
TREES = 64
RULES = 32
ROUNDS = 101
TREE_BAR_NS = 100.0
FOREST_BAR_NS = 20_000.0
KINDS = ("best", "forest", "tree")
HEADER = ("model", "where", "ns per answer")


@functools.cache
def samples() -> tuple[Sample, ...]:
    return tuple(draw("space-filling", PROFILE, 0, 0, SCENARIOS))


@dataclass(frozen=True)
class Models:
    """Same trees in scikit-learn, flat, and compiled."""

    rows: NDArray[np.float32]
    learned_tree: DecisionTreeRegressor
    learned_forest: RandomForestRegressor
    tree: Tree
    compiled: TreeFunction
    forest: Forest


@functools.cache
def models() -> Models:
    rows = np.array([sample.features(PROFILE) for sample in samples()])
    # Some structure for the trees to find: a knee at capacity, and corrections by lengths and adapters.
    sizes = np.log1p(np.abs(rows.astype(float)))
    target = np.sin(sizes @ np.random.default_rng(0).normal(0.0, 0.3, len(FEATURES)))
    target -= np.maximum(0.0, np.log(np.maximum(feature_of(rows, "load_over_capacity"), 1e-6)))
    learned_tree = DecisionTreeRegressor(max_leaf_nodes=RULES, random_state=0).fit(rows, target)
    forest = RandomForestRegressor(TREES, min_samples_leaf=2, max_features=0.5, random_state=0)
    learned_forest = forest.fit(rows, target)
    tree = tree_of(learned_tree, LOG_OVER_EXPECTED)
    flat = flatten_forest(learned_forest)
    return Models(rows, learned_tree, learned_forest, tree, compile_tree(tree), flat)


def looped(answer: Callable[..., float], *model: object) -> Callable[[NDArray[np.float32]], float]:
    """Return a compiled loop over rows; `answer` takes the model, if any, and a row."""

    @numba.njit(error_model="numpy")
    def over(model: Any, rows: NDArray[np.float32]) -> float:
        total = 0.0
        for i in range(rows.shape[0]):
            total += answer(*model, rows[i])
        return total

    return functools.partial(over, model)


def many(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return rows[np.random.default_rng(0).integers(0, len(rows), ANSWERS)]


def shipped_in_compiled_code(rows: NDArray[np.float32]) -> Mapping[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {}
    for kind in KINDS:
        surrogate = load_surrogate(PROFILE, kind)
        for task, head, tree in (
            ("throughput", surrogate.throughput, surrogate.throughput_tree),
            ("starvation", surrogate.starvation, surrogate.starvation_tree),
        ):
            if tree is not None:
                found[f"shipped {kind}: {task}, compiled"] = functools.partial(
                    looped(compile_tree(tree)), rows
                )
            for number, forest in enumerate(head.forests):
                name = f"shipped {kind}: {task}" + (f", part {number + 1}" if number else "")
                found[name] = functools.partial(forest_values, forest, rows)
    return found


def in_compiled_code(models: Models) -> Mapping[str, Callable[[], float]]:
    loops = {
        "compiled tree": looped(models.compiled),
        "flat tree": looped(forest_value, models.tree.forest),
        "forest": looped(forest_value, models.forest),
    }
    return {name: functools.partial(loop, many(models.rows)) for name, loop in loops.items()}


def one_by_one(models: Models) -> Mapping[str, Callable[[NDArray[np.float32]], object]]:
    return {
        "compiled tree": models.compiled,
        "flat tree": functools.partial(forest_value, models.tree.forest),
        "forest": functools.partial(forest_value, models.forest),
        "scikit-learn's tree": lambda row: models.learned_tree.predict(row[None]),
        "scikit-learn's forest": lambda row: models.learned_forest.predict(row[None]),
    }


def median_ns(run: Callable[[], object], answers: int, rounds: int = ROUNDS) -> float:
    """Return the median time per answer; the first call compiles."""
    run()
    taken = []
    for _ in range(rounds):
        before = time.perf_counter_ns()
        run()
        taken.append(time.perf_counter_ns() - before)
    return float(np.median(taken)) / answers


def figures() -> dict[tuple[str, str], float]:
    fitted = models()
    inside, one = "in compiled code", "from Python, one"
    found = {(name, inside): median_ns(run, ANSWERS, 41) for name, run in in_compiled_code(fitted).items()}
    for name, every in shipped_in_compiled_code(many(fitted.rows)).items():
        found[name, inside] = median_ns(every, ANSWERS, 21)
    for kind in KINDS:
        answer = load_surrogate(PROFILE, kind).predict_features
        found[f"shipped {kind}: all of an answer", one] = over_cycle(answer, fitted.rows, 1023)
    for name, answer in one_by_one(fitted).items():
        found[name, one] = over_cycle(answer, fitted.rows, 2001)
    for name, learned in (("tree", fitted.learned_tree), ("forest", fitted.learned_forest)):
        batch, count = functools.partial(learned.predict, fitted.rows), len(fitted.rows)
        found[f"scikit-learn's {name}", f"from Python, {count} at once"] = median_ns(batch, count, 21)
    features = functools.partial(over_cycle, lambda sample: sample.features(PROFILE), samples())
    return found | {("features of a scenario", one): features(1023)}


def over_cycle(answer: Callable[[Any], object], queries: Iterable[Any], rounds: int) -> float:
    """Return the median time per answer, one query after the other."""
    rows = itertools.cycle(queries)
    return median_ns(lambda: answer(next(rows)), 1, rounds)


if __name__ == "__main__":
    table = figures()
    tree = models().tree
    print(f"tree of {tree.rules} rules, {tree.depth} deep; forest of {TREES} trees; {SCENARIOS} scenarios\n")
    print(markdown(HEADER, [[*names, f"{value:,.0f}"] for names, value in table.items()]))
