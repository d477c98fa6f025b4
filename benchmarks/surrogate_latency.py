"""How long surrogates take to answer: ``python -m benchmarks.surrogate_latency`` prints a table.

Median time per answer, features given. *In compiled code* is a compiled loop over vectors of many different
scenarios in a random order too long for a processor to learn its branches by heart; *from Python* is one call
for one vector, or one for many. scikit-learn answers with the very trees that were compiled, which learned a
stand-in of the shape of throughput: time depends on the size of trees, not on their values. The shipped
surrogates, whose scikit-learn models nobody keeps, stand beside.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import RandomForestRegressor
from sklearn.tree import DecisionTreeRegressor

from benchmarks.common import markdown
from capplan import load_profile, load_surrogate
from capplan.models.surrogates.features import FEATURES, feature_of
from capplan.models.surrogates.outputs import Forest, flatten_forest, forest_value, forest_values
from capplan.models.surrogates.tree import LOG_OVER_EXPECTED, Tree, tree_of
from capplan.models.surrogates.tree_export import TreeFunction, compile_tree
from capplan.twin.dataset import Sample, draw

PROFILE = load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5")
SCENARIOS = 1024
ANSWERS = 16_384
TREES = 64
RULES = 32
ROUNDS = 101
TREE_BAR_NS = 100.0
FOREST_BAR_NS = 20_000.0
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


def looped(compiled: TreeFunction) -> Callable[[NDArray[np.float32]], float]:

    @numba.njit(error_model="numpy")
    def over_compiled(rows: NDArray[np.float32]) -> float:
        total = 0.0
        for i in range(rows.shape[0]):
            total += compiled(rows[i])
        return total

    return over_compiled  # type: ignore[no-any-return]


def many(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return rows[np.random.default_rng(0).integers(0, len(rows), ANSWERS)]


def shipped_in_compiled_code(rows: NDArray[np.float32]) -> Mapping[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {}
    for kind in ("best", "forest", "tree"):
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
    rows = many(models.rows)

    @numba.njit(error_model="numpy")
    def over_forest(forest: Forest, rows: NDArray[np.float32]) -> float:
        total = 0.0
        for i in range(rows.shape[0]):
            total += forest_value(forest, rows[i])
        return total

    return {
        "compiled tree": functools.partial(looped(models.compiled), rows),
        "flat tree": functools.partial(over_forest, models.tree.forest, rows),
        "forest": functools.partial(over_forest, models.forest, rows),
    }


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
    asked = models()
    found = {
        (name, "in compiled code"): median_ns(run, ANSWERS, 41)
        for name, run in in_compiled_code(asked).items()
    }
    for name, every in shipped_in_compiled_code(many(asked.rows)).items():
        found[name, "in compiled code"] = median_ns(every, ANSWERS, 21)
    for kind in ("best", "forest", "tree"):
        surrogate, vectors = load_surrogate(PROFILE, kind), itertools.cycle(asked.rows)
        found[f"shipped {kind}: all of an answer", "from Python, one"] = median_ns(
            lambda surrogate=surrogate, vectors=vectors: surrogate.predict_features(next(vectors)), 1, 1023
        )
    for name, answer in one_by_one(asked).items():
        rows = itertools.cycle(asked.rows)
        found[name, "from Python, one"] = median_ns(
            lambda answer=answer, rows=rows: answer(next(rows)), 1, 2001
        )
    for name, learned in (("tree", asked.learned_tree), ("forest", asked.learned_forest)):
        batch = functools.partial(learned.predict, asked.rows)
        found[f"scikit-learn's {name}", f"from Python, {len(asked.rows)} at once"] = median_ns(
            batch, len(asked.rows), 21
        )
    drawn = itertools.cycle(samples())
    found["features of a scenario", "from Python, one"] = median_ns(
        lambda: next(drawn).features(PROFILE), 1, 1023
    )
    return found


if __name__ == "__main__":
    table = figures()
    tree = models().tree
    print(f"tree of {tree.rules} rules, {tree.depth} deep; forest of {TREES} trees; {SCENARIOS} scenarios\n")
    print(markdown(HEADER, [[*names, f"{value:,.0f}"] for names, value in table.items()]))
