"""Throughput and starvation from the values of trees."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.models.surrogates import feature_of
from capplan.models.surrogates._features import expected_tok_s
from capplan.models.surrogates._outputs import (
    LEAF,
    LOG_ODDS,
    LOG_SERVED,
    OVER_EXPECTED,
    PROBABILITY,
    SERVED_AND_STEP,
    STARVATION,
    THROUGHPUT,
    EnsembleOutput,
    Forest,
    expected_share,
    log_odds,
    served_share,
    throughput_of,
)
from capplan.models.training._train import LEAST_SERVED
from capplan.spec import STARVED_BELOW
from tests.models.surrogates.making import made
from tests.models.surrogates.runs import CASES, run


def rows() -> np.ndarray:
    return made().features[:50]


def constant(value: float) -> Forest:
    """Return a forest of two trees that answer `value` in the mean."""
    return Forest(
        roots=np.array([0, 1], np.int32),
        feature=np.array([LEAF, LEAF], np.int16),
        threshold=np.zeros(2, np.float32),
        left=np.array([LEAF, LEAF], np.int32),
        right=np.array([LEAF, LEAF], np.int32),
        value=np.array([value - 0.5, value + 0.5], np.float32),
    )


def answers(form: str, *values: float) -> np.ndarray:
    return EnsembleOutput(form, tuple(map(constant, values))).predict(rows())


@pytest.mark.parametrize("case", CASES)
def test_served_fraction_and_step_time_of_a_run_give_its_throughput(case: str) -> None:
    result, features = run(case).result, run(case).features[None]
    said = throughput_of(features, np.array([result.served_fraction]), np.array([run(case).step_ms]))
    luck = result.offered_tok_s / feature_of(features, "offered_tok_s")
    assert said * luck == pytest.approx(result.throughput_tok_s, rel=0.005)


@given(st.floats(0.0, 1.0), st.floats(0.01, 1e6))
def test_throughput_is_at_most_the_load_served_and_falls_with_the_time_of_a_step(
    served: float, step_ms: float
) -> None:
    share, step = np.full(len(rows()), served), np.full(len(rows()), step_ms)
    said = throughput_of(rows(), share, step)
    assert np.all(said >= 0.0)
    assert np.all(said <= feature_of(rows(), "offered_tok_s") * served)
    assert np.all(throughput_of(rows(), share, 2 * step) <= said)


def test_over_expected_multiplies_the_expected_throughput() -> None:
    assert answers(OVER_EXPECTED, np.log(0.5)) == pytest.approx(0.5 * expected_tok_s(rows()), rel=1e-6)


def test_served_and_step_are_relative_to_the_estimate() -> None:
    plain = throughput_of(rows(), expected_share(rows()), feature_of(rows(), "step_ms"))
    assert answers(SERVED_AND_STEP, 0.0, 0.0) == pytest.approx(plain, rel=1e-6)
    half = throughput_of(rows(), served_share(rows(), np.log(0.5)), 2 * feature_of(rows(), "step_ms"))
    assert answers(SERVED_AND_STEP, np.log(0.5), np.log(2)) == pytest.approx(half, rel=1e-6)


def test_no_more_is_served_than_all() -> None:
    assert np.all(served_share(rows(), np.full(len(rows()), 50.0)) == 1.0)


@pytest.mark.parametrize(
    ("form", "at_the_edge", "starved"),
    [
        (PROBABILITY, 0.5, 0.8),
        (LOG_ODDS, 0.0, 1.4),
        (LOG_SERVED, np.log(STARVED_BELOW), np.log(LEAST_SERVED)),
    ],
)
def test_scores_are_zero_at_the_edge_and_rise_with_starvation(
    form: str, at_the_edge: float, starved: float
) -> None:
    assert answers(form, at_the_edge) == pytest.approx(0.0, abs=1e-6)
    assert np.all(answers(form, starved) > 0.1)
    assert np.all(answers(form, 2 * at_the_edge - starved) < -0.1)


def test_log_odds_are_finite_where_trees_are_certain() -> None:
    certain = log_odds(np.array([0.0, 0.5, 1.0]))
    assert np.all(np.isfinite(certain))
    assert certain[0] == pytest.approx(-certain[2])
    assert certain[1] == 0.0


def test_every_form_has_its_number_of_forests() -> None:
    assert set(THROUGHPUT).isdisjoint(STARVATION)
    for form, known in (THROUGHPUT | STARVATION).items():
        assert answers(form, *[0.25] * known.forests).shape == (len(rows()),)
