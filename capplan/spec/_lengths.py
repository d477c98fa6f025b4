"""Request lengths in tokens: distributions, and recorded pairs of prompt and output length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, Strict, model_validator

from capplan.errors import InputError
from capplan.spec._trace import Recording, lengths_column
from capplan.spec._validation import MAX_TOKENS, Many, NonNegative, SpecModel, at_most, rule, rule_error

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

_LENGTH_RULE = f"must be a whole number of tokens from 1 to {MAX_TOKENS}"

TokenLength = Annotated[int, Strict(), Field(ge=1, le=MAX_TOKENS), rule(_LENGTH_RULE)]

EdgeLength = Annotated[int, Strict(), Field(ge=1, le=MAX_TOKENS + 1), rule(_LENGTH_RULE)]

MeanLength = Annotated[
    float, Strict(), Field(ge=1, le=MAX_TOKENS), rule(f"must be a number of tokens from 1 to {MAX_TOKENS}")
]

StdLength = Annotated[NonNegative, at_most(MAX_TOKENS)]


class Lengths(SpecModel):
    """Distribution of prompt or output lengths, in one of four forms.

    - ``Lengths(mean=m)`` is constant (a fraction is shared out between the two neighbouring integers).
    - ``Lengths(mean=m, std=s)`` is a gamma distribution rounded to integers and clipped to
      [1, max_model_len] whose realised mean is ``m``.
    - ``Lengths(values=..., counts=...)`` takes each value as often as its count says.
    - ``Lengths(edges=..., counts=...)`` is uniform over the integers of each bin [lo, hi).

    Raises
    ------
    InputError
        Unless exactly one form is given, lengths are at least 1 token and some count is positive.
    """

    mean: MeanLength | None = Field(
        default=None, description="Mean length in tokens; alone: every request has it."
    )
    std: StdLength | None = Field(
        default=None, description="Standard deviation in tokens, beside mean: gamma lengths."
    )
    values: Many[TokenLength] | None = Field(
        default=None,
        min_length=1,
        description="Exact lengths in tokens, ascending; taken as often as counts says.",
    )
    edges: Many[EdgeLength] | None = Field(
        default=None,
        min_length=2,
        description="Edges of histogram bins in tokens, ascending; bin i is [edge i, edge i + 1).",
    )
    counts: Many[NonNegative] | None = Field(
        default=None, min_length=1, description="Weight of each value or bin; need not sum to 1."
    )

    @classmethod
    def of(cls, tokens: ArrayLike) -> Self:
        """Return the histogram of exact values of a sample, in tokens.

        Raises
        ------
        InputError
            Unless ``tokens`` are whole numbers of at least 1, one or more.
        """
        import numpy as np

        sample = np.asarray(tokens)
        if sample.ndim != 1 or len(sample) == 0 or sample.dtype.kind not in "iuf":
            raise InputError("must be a column of numbers, at least one", location="Lengths.of")
        broken_rows = ~((sample >= 1) & (sample <= MAX_TOKENS) & (sample == np.floor(sample)))
        if broken_rows.any():
            row = int(broken_rows.argmax())
            raise InputError(f"{_LENGTH_RULE} (row {row + 1})", sample[row].item(), "Lengths.of")
        values, counts = np.unique(sample.astype(np.int64), return_counts=True)
        return cls(values=tuple(values.tolist()), counts=tuple(counts.tolist()))

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if sum(form is not None for form in (self.mean, self.values, self.edges)) != 1:
            raise rule_error("must give exactly one of mean, values with counts, edges with counts")
        if self.mean is not None:
            if self.counts is not None:
                raise rule_error("does not go with mean", key=("counts",), value=self.counts)
            return self
        if self.std is not None:
            raise rule_error("goes with mean only", key=("std",), value=self.std)
        self._check_histogram()
        return self

    def _check_histogram(self) -> None:
        name, points, spare = (
            ("edges", self.edges or (), 1) if self.edges else ("values", self.values or (), 0)
        )
        if any(low >= high for low, high in pairwise(points)):
            raise rule_error("must ascend", key=(name,), value=points)
        if self.counts is None:
            raise rule_error(f"is required beside {name}", key=("counts",))
        if len(self.counts) != len(points) - spare:
            words = f"must have {len(points) - spare} entries to match {name}"
            raise rule_error(words, key=("counts",), value=len(self.counts))
        if not 0 < math.fsum(self.counts) < math.inf:
            raise rule_error("must have a positive, finite sum", key=("counts",), value=self.counts)

    @property
    def mean_tokens(self) -> float:
        """Mean in tokens, before any clip to max_model_len."""
        return self.mean if self.mean is not None else self._moments()[0]

    @property
    def std_tokens(self) -> float:
        """Standard deviation in tokens, before any clip to max_model_len."""
        return (self.std or 0.0) if self.mean is not None else math.sqrt(self._moments()[1])

    def _moments(self) -> tuple[float, float]:
        """Return mean and variance of a histogram; a bin [lo, hi) is uniform over its integers."""
        counts = self.counts or ()
        if self.values is not None:
            centres, variances = tuple(map(float, self.values)), (0.0,) * len(counts)
        else:
            bins = list(pairwise(self.edges or ()))
            centres = tuple((low + high - 1) / 2 for low, high in bins)
            variances = tuple(((high - low) ** 2 - 1) / 12 for low, high in bins)
        total = math.fsum(counts)
        mean = math.fsum(n * c for n, c in zip(counts, centres, strict=True)) / total
        spread = (n * (v + (c - mean) ** 2) for n, v, c in zip(counts, variances, centres, strict=True))
        return mean, math.fsum(spread) / total


@dataclass(frozen=True, eq=False)
class LengthPairs(Recording):
    """Lengths of requests, drawn jointly; the arrays are read-only. Build it with :meth:`from_arrays`.

    Attributes
    ----------
    prompt_tokens, output_tokens : ndarray of int32, shape (n,)
        Lengths in tokens.
    """

    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]

    @classmethod
    def from_arrays(cls, prompt_tokens: ArrayLike, output_tokens: ArrayLike) -> LengthPairs:
        """Check and keep two columns of equal length.

        Raises
        ------
        InputError
            Located at the column: lengths not whole numbers of at least 1 token, or no request.
        """
        import numpy as np

        if np.size(prompt_tokens) == 0:
            raise InputError("must hold at least one request", location="prompt_tokens")
        columns = (
            lengths_column("prompt_tokens", prompt_tokens),
            lengths_column("output_tokens", output_tokens),
        )
        if len(columns[0]) != len(columns[1]):
            raise InputError("columns must be equally long")
        for column in columns:
            column.setflags(write=False)
        return cls(*columns)

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def scaled(self, factor: float) -> LengthPairs:
        """Return the pairs with both lengths times `factor`, rounded, at least 1 token.

        Raises
        ------
        InputError
            Located at the column: a length beyond 2**31 - 1.
        """
        import numpy as np

        if factor == 1.0:
            return self
        columns = (self.prompt_tokens, self.output_tokens)
        return LengthPairs.from_arrays(*(np.maximum(np.rint(column * factor), 1.0) for column in columns))

    def marginals(self) -> tuple[Lengths, Lengths]:
        """Return the distribution of prompts and that of outputs, each on its own."""
        return Lengths.of(self.prompt_tokens), Lengths.of(self.output_tokens)

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of a workload with these lengths."""
        prompt_tokens, output_tokens = self.marginals()
        return {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "length_pairs": self}

    def _digested(self) -> tuple[bytes, tuple[NDArray[Any], ...]]:
        return b"length pairs", (self.prompt_tokens, self.output_tokens)

    def __hash__(self) -> int:
        return hash((len(self), int(self.prompt_tokens[0]), int(self.output_tokens[0])))
