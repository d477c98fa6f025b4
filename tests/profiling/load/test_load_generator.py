"""The benchmark's verdict on the times of sending: gaps of another rate do not pass."""

import numpy as np
import pytest

pytest.importorskip("psutil", reason="the benchmark looks at its own memory")

from benchmarks.load_generator import KS_BAR, poisson


def test_gaps_are_those_of_the_rate_that_was_asked_for() -> None:
    sent_s = np.cumsum(np.random.default_rng(0).exponential(1.0 / 10.0, 600))
    assert poisson(sent_s, 10.0)[1] > KS_BAR
    assert poisson(sent_s, 12.5)[1] < KS_BAR
