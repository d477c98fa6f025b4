"""Design and effects of the interaction study."""

from itertools import product

import numpy as np
import pytest

from capplan.reproduce.joint import Effects, Factors, factors, papers, setting


@pytest.fixture(name="small")
def _small() -> Factors:
    levels = {"a": ("a0", "a1", "a2"), "b": ("b0", "b1"), "c": ("c0", "c1", "c2")}
    return Factors(levels, tuple(each for each in product(*levels.values()) if each[:2] != ("a2", "b1")))


def test_design_tells_all_effects_and_interactions_of_two_factors_apart() -> None:
    known, size = factors(), setting().design
    chosen = known.design(list(papers().values()), size.configurations)
    assert len(set(chosen)) == size.configurations <= 150 - 2 * size.candidates
    assert np.linalg.matrix_rank(known.terms[chosen]) == np.linalg.matrix_rank(known.terms)


def test_what_a_workload_refuses_is_not_possible() -> None:
    for cache, scheduler, loading, placement, router, rebalancing in factors().possible:
        assert placement != "everywhere" or (router != "shares" and rebalancing == "never")
        assert scheduler != "slora" or (cache, loading) == ("none", "asynchronous")


def test_effects_are_those_of_the_response(small: Factors) -> None:
    def response(levels: tuple[str, ...]) -> float:
        a, b, c = levels
        together = 0.5 if (a, c) == ("a1", "c2") else 0.0
        return 3.0 + {"a0": 0.0, "a1": -1.0, "a2": 2.0}[a] - (b == "b1") + (c == "c1") + together

    chosen = small.design([small.possible[0]], 14)
    values = np.array([[response(small.possible[i])] * 2 for i in chosen])
    found = Effects(small, chosen, values, shrinkage=0.0)
    np.testing.assert_allclose(found.fitted[:, 0], [response(each) for each in small.possible])
    np.testing.assert_allclose(found.main("b", "b1"), -1.0)
    np.testing.assert_allclose(found.main("a", "a2"), 2.0)
    np.testing.assert_allclose(found.main("a", "a1"), -1.0 + 0.5 / 3.0)
    np.testing.assert_allclose(found.together(("a", "a1"), ("c", "c2")), 0.5)
    np.testing.assert_allclose(found.together(("a", "a1"), ("b", "b1")), 0.0, atol=1e-9)
    assert found.size("a", "c").min() > 0.1 > 1e-9 > found.size("a", "b").max()
    np.testing.assert_allclose(found.left_out(), 0.0, atol=1e-9)


def test_a_response_without_interactions_is_found_with_shrinkage(small: Factors) -> None:
    values = np.array(
        [[float(levels[0] == "a1") - 2.0 * float(levels[2] == "c2")] for levels in small.possible]
    )
    chosen = small.design([small.possible[0]], 10)
    np.testing.assert_allclose(Effects(small, chosen, values[chosen]).fitted, values, atol=1e-9)
