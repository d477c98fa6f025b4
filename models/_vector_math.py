"""Exponential, logarithm and inverse hyperbolic sine that LLVM vectorises in loops over arrays.

Calls of the C library keep a loop scalar. These functions are arithmetic and shifts alone: on 96 numbers with
AVX-512 they take a quarter of the time.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from capplan._jit import inner

_LOG2_E: Final = 1.4426950408889634
_LN_2_HIGH: Final = 6.93147180369123816490e-01
_LN_2_LOW: Final = 1.90821492927058770002e-10
_ROUND: Final = 1.5 * 2.0**52
"""Added to a number, it leaves the nearest whole number in the last bits."""
_MANTISSA_BITS: Final = np.int64(52)
_EXPONENT_BIAS: Final = np.int64(1023)
_SQRT_HALF_BITS: Final = np.int64(0x3FE6A09E667F3BCD)
LEAST_EXPONENT: Final = -700.0
"""Smaller arguments of `exp` count as this one."""


@inner
def exp(x: float) -> float:
    """Return e^x for x <= 700, within two units in the last place.

    x is reduced to at most half of ln 2 by a power of two; then follows the Taylor polynomial of degree 13.
    """
    x = max(x, LEAST_EXPONENT)
    rounded = x * _LOG2_E + _ROUND
    power = rounded - _ROUND
    r = (x - power * _LN_2_HIGH) - power * _LN_2_LOW
    series = 1.0 / 479001600.0 + r * (1.0 / 6227020800.0)
    series = 1.0 / 39916800.0 + r * series
    series = 1.0 / 3628800.0 + r * series
    series = 1.0 / 362880.0 + r * series
    series = 1.0 / 40320.0 + r * series
    series = 1.0 / 5040.0 + r * series
    series = 1.0 / 720.0 + r * series
    series = 1.0 / 120.0 + r * series
    series = 1.0 / 24.0 + r * series
    series = 1.0 / 6.0 + r * series
    series = 1.0 + (r + r * r * (0.5 + r * series))
    bits = (np.float64(rounded).view(np.int64) + _EXPONENT_BIAS) << _MANTISSA_BITS
    return float(series * np.int64(bits).view(np.float64))


@inner
def log(x: float) -> float:
    """Return the natural logarithm of a normal number above 0, within two units in the last place.

    x is divided by a power of two into sqrt(1/2) to sqrt(2); the series is that of FreeBSD's `e_log.c`.
    """
    bits = np.float64(x).view(np.int64)
    power = (bits - _SQRT_HALF_BITS) >> _MANTISSA_BITS
    f = np.int64(bits - (power << _MANTISSA_BITS)).view(np.float64) - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01))
    odd = z * (
        6.666666666666735130e-01
        + w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01))
    )
    half_square = 0.5 * f * f
    low = s * (half_square + odd + even) + power * _LN_2_LOW
    return float(power * _LN_2_HIGH - ((half_square - low) - f))


@inner
def asinh(x: float) -> float:
    """Return the inverse hyperbolic sine of a number up to 1e150, within 1e-15 or as much of its value."""
    size = abs(x)
    value = log(size + np.sqrt(size * size + 1.0))
    return float(value if x >= 0.0 else -value)
