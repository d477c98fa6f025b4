"""Fractional designs of factors with levels: which configurations, and what follows from their responses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Levels: TypeAlias = tuple[str, ...]
"""A level of every factor, in the order of the recipe."""
Array: TypeAlias = NDArray[np.float64]
_PRIOR: Final = 1e-3
"""Information of every term before the first configuration."""
SHRINKAGE: Final = 1.0
"""Information that an interaction is 0: that of one configuration."""


@dataclass(frozen=True)
class Factors:
    """Factors with their levels, and the combinations that are possible."""

    levels: Mapping[str, Sequence[str]]
    possible: tuple[Levels, ...]

    @cached_property
    def _parts(self) -> Mapping[frozenset[str], Array]:
        """Terms by their factors; the effects of a factor's levels sum to 0."""
        main = {frozenset([name]): self._coded(place) for place, name in enumerate(self.levels)}
        both = {
            one | other: (left[:, :, None] * right[:, None, :]).reshape(len(self.possible), -1)
            for (one, left), (other, right) in combinations(main.items(), 2)
        }
        return {frozenset(): np.ones((len(self.possible), 1)), **main, **both}

    @cached_property
    def terms(self) -> Array:
        """Terms of each possible combination: the mean, main effects, interactions of two factors."""
        return np.hstack(list(self._parts.values()))

    def order(self) -> NDArray[np.int64]:
        """Return the number of factors of each term."""
        return np.concatenate([np.full(part.shape[1], len(names)) for names, part in self._parts.items()])

    def is_of(self, names: Collection[str]) -> NDArray[np.bool_]:
        """Return which terms are of exactly these factors."""
        return np.concatenate(
            [np.full(part.shape[1], own == set(names)) for own, part in self._parts.items()]
        )

    def _coded(self, place: int) -> Array:
        known = list(self.levels.values())[place]
        code = np.vstack([np.eye(len(known) - 1), -np.ones(len(known) - 1)])
        return code[[known.index(levels[place]) for levels in self.possible]]

    def design(self, first: Sequence[Levels], count: int) -> list[int]:
        """Return positions of so many possible combinations, a D-optimal choice one after the other."""
        chosen = [self.possible.index(levels) for levels in first]
        taken = self.terms[chosen]
        inverse = np.linalg.inv(_PRIOR * np.eye(self.terms.shape[1]) + taken.T @ taken)
        while len(chosen) < count:
            gain = np.einsum("ij,jk,ik->i", self.terms, inverse, self.terms)
            gain[chosen] = -1.0
            chosen.append(int(gain.argmax()))
            along = inverse @ self.terms[chosen[-1]]
            inverse -= np.outer(along, along) / (1.0 + along @ self.terms[chosen[-1]])
        return chosen

    def changed(self, factor: str, level: str) -> NDArray[np.int64]:
        """Return the position of each possible combination with this level instead of the factor's first.

        It is -1 where that is not possible, or the combination has not the first level.
        """
        place, first = list(self.levels).index(factor), self.levels[factor][0]
        position = {each: i for i, each in enumerate(self.possible)}
        instead = [(*each[:place], level, *each[place + 1 :]) for each in self.possible]
        return np.array(
            [
                position.get(new, -1) if each[place] == first else -1
                for each, new in zip(self.possible, instead, strict=True)
            ]
        )


@dataclass(frozen=True)
class Effects:
    """Effects on a response, which was found at some of the possible combinations."""

    factors: Factors
    chosen: Sequence[int]
    response: Array
    """By chosen combination and seed."""
    shrinkage: float = SHRINKAGE
    """Information that an interaction is 0; there are almost as many terms as configurations."""

    @cached_property
    def _inverse(self) -> Array:
        taken = self.factors.terms[self.chosen]
        shrunk = np.diag(np.sqrt(self.shrinkage) * (self.factors.order() == 2))
        return _floats(np.linalg.pinv(np.vstack([taken, shrunk]))[:, : len(taken)])

    @cached_property
    def fitted(self) -> Array:
        """Response of every possible combination by least squares, by seed."""
        return _floats(self.factors.terms @ (self._inverse @ self.response))

    @cached_property
    def fitted_by_main_effects(self) -> Array:
        """What main effects alone explain of it."""
        return self._explained(self.factors.order() < 2)

    def _explained(self, kept: NDArray[np.bool_]) -> Array:
        terms = self.factors.terms[:, kept]
        return _floats(terms @ np.linalg.lstsq(terms, self.fitted, rcond=None)[0])

    def left_out(self) -> Array:
        """Return the errors of chosen combinations if each is left out, if the others have all terms."""
        terms = self.factors.terms[self.chosen]
        leverage = np.einsum("ij,ji->i", terms, self._inverse)
        known = leverage < 1.0 - 1e-6
        wrong = self.response - self.fitted[self.chosen]
        return _floats(wrong[known] / (1.0 - leverage[known])[:, None])

    def main(self, factor: str, level: str) -> Array:
        """Return the mean difference of a level from the first one, by seed."""
        new = self.factors.changed(factor, level)
        plain = np.flatnonzero(new >= 0)
        return _floats((self.fitted[new[plain]] - self.fitted[plain]).mean(axis=0))

    def together(self, one: tuple[str, str], other: tuple[str, str]) -> Array:
        """Return what two levels add together beyond the sum of what each adds alone, by seed."""
        left, right = self.factors.changed(*one), self.factors.changed(*other)
        plain = np.flatnonzero((left >= 0) & (right >= 0) & (right[left] >= 0))
        fitted, left_alone, right_alone = self.fitted, left[plain], right[plain]
        beyond = fitted[right[left_alone]] - fitted[left_alone] - fitted[right_alone] + fitted[plain]
        return _floats(beyond.mean(axis=0))

    def size(self, one: str, other: str) -> Array:
        """Return the root mean square, over the possible combinations, of what no other term explains."""
        own = self.fitted - self._explained(~self.factors.is_of({one, other}))
        return _floats(np.sqrt((own**2).mean(axis=0)))


def _floats(values: Any) -> Array:
    return np.asarray(values, np.float64)
