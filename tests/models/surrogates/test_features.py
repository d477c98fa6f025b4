"""What a surrogate is told of the memory that requests hold."""

import numpy as np
import pytest

from capplan.models.surrogates.features import held_tokens


@pytest.mark.parametrize("correlation", [-0.8, -0.4, 0.0, 0.5])
def test_held_tokens_are_those_of_the_average_moment_of_decoding(correlation: float) -> None:
    scores = np.random.default_rng(0).multivariate_normal(
        [0, 0], [[1, correlation], [correlation, 1]], 400_000
    )
    prompt, output = np.exp(np.array([5.0, 4.5]) + [0.8, 0.7] * scores).T
    held = held_tokens(prompt.mean(), prompt.std(), output.mean(), output.std(), correlation)
    assert held == pytest.approx(float((output * (prompt + output / 2)).sum() / output.sum()), rel=0.02)


def test_constant_lengths_hold_the_prompt_and_half_the_output() -> None:
    for correlation in (-0.5, 0.0, 0.5):
        assert held_tokens(200.0, 0.0, 100.0, 0.0, correlation) == pytest.approx(250.0)
