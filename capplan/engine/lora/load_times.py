"""Times of adapter loads, the cost of a load in the cache policy ``gdsf``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from capplan.spec.profile import FittedModel
from capplan.spec.validation import NonNegative, SpecModel

if TYPE_CHECKING:
    from capplan.engine.lora.manager import LoRAManager

_REPEATS: Final = 5


class LoadTimes(SpecModel):
    """Time of a load from host memory: fixed, and by rank.

    Both are of an adapter on all layers; others take their share of the matrices and of the elements.
    """

    base_ms: NonNegative
    ms_per_rank: NonNegative
    padding_ms: NonNegative = 0.0
    """Beside `base_ms`, for a rank below the largest of the engine."""

    @classmethod
    def of_profile(cls, loading: FittedModel) -> Self:
        """Return the times of a profile's loading model, as the twin computes them."""
        factor = loading.value("serving_factor")
        names = {"base_ms": "gpu_base_ms", "ms_per_rank": "gpu_ms_per_rank", "padding_ms": "gpu_padding_ms"}
        return cls(**{field: factor * loading.value(name) for field, name in names.items()})

    def load_ms(self, rank: int, is_padded: bool, matrices: float, elements: float) -> float:
        """Return the time of a load.

        Parameters
        ----------
        rank
            Largest rank of the adapter.
        is_padded
            Whether it is below the largest of the engine.
        matrices, elements
            Its shares of the matrices, and of the elements of its rank on all layers.
        """
        fixed_ms = self.base_ms + (self.padding_ms if is_padded else 0.0)
        return matrices * fixed_ms + elements * self.ms_per_rank * rank


def measured_load_times(lora: LoRAManager, numbers: Sequence[int]) -> LoadTimes | None:
    """Return the times by loads of the smallest and the largest of some adapters; None without any.

    A single size gives the time by rank alone.
    """
    if not numbers:
        return None
    ends = (min(numbers, key=lora.bytes), max(numbers, key=lora.bytes))
    times_ms = [median(_load_ms(lora, number) for _ in range(_REPEATS)) for number in ends]
    parts = [_parts(lora, number) for number in ends]
    (low_fixed, low), (high_fixed, high) = parts
    if low_fixed * high > high_fixed * low:
        base_ms, ms_per_rank = np.linalg.solve(np.array(parts), np.array(times_ms)).tolist()
        if base_ms >= 0.0 and ms_per_rank >= 0.0:
            return LoadTimes(base_ms=base_ms, ms_per_rank=ms_per_rank)
    return LoadTimes(base_ms=0.0, ms_per_rank=sum(times_ms) / max(1.0, low + high))


def _parts(lora: LoRAManager, number: int) -> tuple[float, float]:
    """Return the multiples of the fixed time and of the time per rank in the load of an adapter."""
    matrices, elements = lora.shares(number)
    return matrices, elements * int(lora.rank_of[number])


def _load_ms(lora: LoRAManager, number: int) -> float:
    """Return the time of a load into memory that no adapter uses yet; the adapter is removed again."""
    load = lora.new_load(number)
    began_s = time.perf_counter()
    load()
    passed_ms = 1e3 * (time.perf_counter() - began_s)
    lora.memory.release(lora.evict(number))
    return passed_ms
