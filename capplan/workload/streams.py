"""Random numbers by position: the i-th number of a stream is a function of the stream's key and of i.

No state is kept, so streams need no order among each other, every stream can be read on past any point, and
compiled code draws one number in a few instructions. The function is SplitMix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014): a bit mixer over a counter in steps of the golden
ratio, uniform over all 64-bit numbers. It uses whole-number arithmetic only: the same on every machine.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.compile import jit

_STEP: Final = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_SHIFT_1: Final = np.uint64(30)
_SHIFT_2: Final = np.uint64(27)
_SHIFT_3: Final = np.uint64(31)
_SHIFT_DOUBLE: Final = np.uint64(11)  # a double holds 53 bits
_UNIT: Final = 2.0**-53


class Streams(NamedTuple):
    """Keys of the streams that requests are drawn from, one per quantity."""

    arrivals: np.uint64
    adapters: np.uint64
    prompts: np.uint64
    outputs: np.uint64
    repetitions: np.uint64
    repeated: np.uint64


def streams(seed: int) -> Streams:
    """Return the keys for a seed, which is at least 0; seeds close to each other give unrelated keys."""
    return Streams(*np.random.SeedSequence(seed).generate_state(len(Streams._fields), np.uint64))


@jit
def uniform(key: np.uint64, index: int) -> float:
    """Return the number at `index` of a stream, uniform over the multiples of 2^-53 in [0, 1)."""
    bits = key + np.uint64(index) * _STEP
    bits = (bits ^ (bits >> _SHIFT_1)) * _MIX_1
    bits = (bits ^ (bits >> _SHIFT_2)) * _MIX_2
    bits ^= bits >> _SHIFT_3
    return float(bits >> _SHIFT_DOUBLE) * _UNIT


@jit
def exponential(key: np.uint64, index: int) -> float:
    """Return an exponential number of mean 1 made from the one at `index`."""
    return -math.log(1.0 - uniform(key, index))


def uniforms(key: np.uint64, count: int) -> NDArray[np.float64]:
    """Return the first `count` numbers of a stream."""
    numbers = np.empty(count)
    _fill(numbers, key)
    return numbers


@jit
def _fill(numbers: NDArray[np.float64], key: np.uint64) -> None:
    for i in range(numbers.size):
        numbers[i] = uniform(key, i)
