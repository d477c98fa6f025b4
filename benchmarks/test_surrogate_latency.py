"""How fast surrogates answer, beside scikit-learn with the same trees: `benchmarks.surrogate_latency`.

Bars are for one quiet core; a shared machine may be slower by `NOISE`. Ratios within one run need no margin.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks import surrogate_latency as latency

NOISE = 0.6
SCIKIT_OVER_COMPILED = 20.0  # one answer, asked from Python


@pytest.fixture(scope="module")
def models() -> latency.Models:
    return latency.models()


def test_all_forms_give_the_same_answers(benchmark: BenchmarkFixture, models: latency.Models) -> None:
    expected = models.learned_tree.predict(models.rows)
    forms = latency.one_by_one(models)
    for name in ("compiled tree", "flat tree"):
        assert [forms[name](row) for row in models.rows] == expected.tolist()
    assert benchmark(models.tree.answers, models.rows).tolist() == expected.tolist()
    forest = [forms["forest"](row) for row in models.rows]
    assert forest == pytest.approx(models.learned_forest.predict(models.rows), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "bar_ns"), [("compiled tree", latency.TREE_BAR_NS), ("forest", latency.FOREST_BAR_NS)]
)
def test_an_answer_in_compiled_code(
    benchmark: BenchmarkFixture, models: latency.Models, name: str, bar_ns: float
) -> None:
    run = latency.in_compiled_code(models)[name]
    run()
    benchmark(run)
    found = 1e9 * float(np.median(benchmark.stats.stats.data)) / latency.ANSWERS
    benchmark.extra_info["ns_per_answer"] = round(found, 1)
    assert found <= bar_ns / NOISE


@pytest.mark.parametrize("name", ["tree", "forest"])
def test_an_answer_from_python_beside_scikit_learn(
    benchmark: BenchmarkFixture, models: latency.Models, name: str
) -> None:
    forms = latency.one_by_one(models)
    ours = forms["compiled tree" if name == "tree" else "forest"]
    rows = itertools.cycle(models.rows)
    benchmark(lambda: ours(next(rows)))
    others = latency.median_ns(lambda: forms[f"scikit-learn's {name}"](next(rows)), 1, 201)
    ratio = others / (1e9 * float(np.median(benchmark.stats.stats.data)))
    benchmark.extra_info["scikit_learn_over_compiled"] = round(ratio, 1)
    assert ratio > SCIKIT_OVER_COMPILED


def test_features_of_a_scenario(benchmark: BenchmarkFixture) -> None:
    drawn = itertools.cycle(latency.samples())
    benchmark.pedantic(  # type: ignore[no-untyped-call]
        lambda: latency.features_of(next(drawn)), rounds=200, warmup_rounds=5
    )
