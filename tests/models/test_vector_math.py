"""Functions for vectorised loops, against those of Python."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from capplan._jit import jit
from capplan.models._vector_math import LEAST_EXPONENT, asinh, exp, log

TWO_UNITS = 2.0**-51
"""Relative error of two units in the last place."""


@jit
def exponentials(x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
    for i in range(x.size):
        y[i] = exp(x[i])


@jit
def logarithms(x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
    for i in range(x.size):
        y[i] = log(x[i])


@jit
def inverse_hyperbolic_sines(x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
    for i in range(x.size):
        y[i] = asinh(x[i])


def in_a_loop(function, values: list[float]) -> list[float]:  # type: ignore[no-untyped-def]
    """Return the values of a function in a compiled loop, which LLVM vectorises from eight numbers on."""
    found = np.empty(len(values))
    function(np.array(values), found)
    return [float(value) for value in found]


@given(st.lists(st.floats(LEAST_EXPONENT, 700.0), min_size=1, max_size=40))
def test_the_exponential_is_that_of_python(values: list[float]) -> None:
    expected = [math.exp(value) for value in values]
    assert in_a_loop(exponentials, values) == pytest.approx(expected, rel=TWO_UNITS, abs=0.0)


@given(st.floats(-1e300, LEAST_EXPONENT))
def test_below_the_least_exponent_it_is_constant_and_as_good_as_zero(value: float) -> None:
    (found,) = in_a_loop(exponentials, [value])
    assert 0.0 < found < 1e-300


@given(st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=40))
def test_the_logarithm_is_that_of_python(values: list[float]) -> None:
    expected = [math.log(value) for value in values]
    assert in_a_loop(logarithms, values) == pytest.approx(expected, rel=TWO_UNITS, abs=2.0**-52)


@given(st.lists(st.floats(-1e150, 1e150), min_size=1, max_size=40))
def test_the_inverse_hyperbolic_sine_is_that_of_python(values: list[float]) -> None:
    expected = [math.asinh(value) for value in values]
    assert in_a_loop(inverse_hyperbolic_sines, values) == pytest.approx(expected, rel=1e-15, abs=1e-15)


def test_both_are_exact_at_one() -> None:
    assert in_a_loop(exponentials, [0.0] * 9) == [1.0] * 9
    assert in_a_loop(logarithms, [1.0] * 9) == [0.0] * 9
