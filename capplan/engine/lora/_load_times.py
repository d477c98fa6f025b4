"""Times of adapter loads, the cost of a load in the cache policy ``gdsf``."""

from __future__ import annotations

from typing import Self

from capplan.spec import FittedModel, NonNegative, SpecModel


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
