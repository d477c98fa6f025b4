"""How requests are shared out among adapters: the laws that papers use, under names of their own."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Self

from pydantic import Field, Strict, model_validator

from capplan.errors import InputError
from capplan.spec.base import SpecModel, broken
from capplan.spec.types import rule

Exponent = Annotated[float, Strict(), Field(ge=0, le=50), rule("must be a number from 0 to 50, such as 1")]
Alpha = Annotated[float, Strict(), Field(gt=0, le=1), rule("must be a number above 0 and at most 1")]


def zipf(adapters: int, s: float) -> tuple[float, ...]:
    """Return shares in proportion to rank^-s: 0 is uniform, 1 is Zipf's law (Chameleon, LoRAServe).

    Parameters
    ----------
    adapters : int
        At least 1; the first adapter is the most popular one.
    s : float
        At least 0.

    Returns
    -------
    tuple of float
        One share per adapter; they sum to 1.
    """
    _require(adapters, s >= 0, "s", s, "must be a number >= 0")
    return _shared([(k + 1.0) ** -s for k in range(adapters)])


def power_law(adapters: int, alpha: float) -> tuple[float, ...]:
    """Return S-LoRA's shares: adapter floor(N U^(1 / alpha)) with U uniform; 1 is uniform, less is skewer.

    The first k of N adapters have (k / N)^alpha together; this is not the exponent of :func:`zipf`.

    Parameters
    ----------
    adapters : int
        At least 1; the first adapter is the most popular one.
    alpha : float
        Above 0 and at most 1.
    """
    _require(adapters, 0 < alpha <= 1, "alpha", alpha, "must be a number above 0 and at most 1")
    together = [(k / adapters) ** alpha for k in range(adapters + 1)]
    return _shared([high - low for low, high in pairwise(together)])


def exponential(adapters: int, b: float) -> tuple[float, ...]:
    """Return shares in proportion to exp(-b k) for k = 0, 1, ... (LoRAServe's exponential popularity).

    Parameters
    ----------
    adapters : int
        At least 1; the first adapter is the most popular one.
    b : float
        At least 0; 0 is uniform.
    """
    _require(adapters, b >= 0, "b", b, "must be a number >= 0")
    return _shared([math.exp(-b * k) for k in range(adapters)])


def _require(adapters: int, holds: bool, name: str, value: float, words: str) -> None:
    if adapters < 1:
        raise InputError("must be a whole number >= 1", adapters, "adapters")
    if not holds or not math.isfinite(value):
        raise InputError(words, value, name)


def _shared(weights: list[float]) -> tuple[float, ...]:
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)


class Popularity(SpecModel):
    """The law by which a group of adapters shares out its requests; exactly one is given."""

    zipf: Exponent | None = Field(None, description="Shares in proportion to rank^-s; 0 is uniform.")
    power_law: Alpha | None = Field(
        None, description="S-LoRA's alpha: the first k of N have (k / N)^alpha together; 1 is uniform."
    )
    exponential: Exponent | None = Field(None, description="Shares in proportion to exp(-b k), k from 0.")

    @model_validator(mode="after")
    def _one_law(self) -> Self:
        if sum(law is not None for law in (self.zipf, self.power_law, self.exponential)) != 1:
            raise broken("must give exactly one of zipf, power_law, exponential")
        return self

    def shares(self, adapters: int) -> tuple[float, ...]:
        """Return one share per adapter, the most popular first; they sum to 1."""
        if self.zipf is not None:
            return zipf(adapters, self.zipf)
        if self.power_law is not None:
            return power_law(adapters, self.power_law)
        return exponential(adapters, self.exponential or 0.0)
