"""Requests: distributions of their lengths, pairs of recorded lengths, and recordings for replay."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Self

from pydantic import Field, Strict, model_validator
from pydantic_core import CoreSchema, core_schema

from capplan.errors import InputError
from capplan.spec._validation import (
    LEAST_S,
    MAX_SIMULATED_S,
    MAX_TOKENS,
    Many,
    NonNegative,
    SpecModel,
    at_most,
    rule,
    rule_error,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray
    from pydantic import GetCoreSchemaHandler


NS_PER_S: Final = 1_000_000_000
_BLOCK_S: Final = 60.0
_BLOCK_REQUESTS: Final = 50
"""Length of a block that is resampled: the longer of this time and that of so many requests."""


class Recording(ABC):
    """Columns of recorded requests; documents hold them as they are, and write their digest."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(cls.digest, when_used="json")
        return core_schema.is_instance_schema(cls, serialization=written)

    def digest(self) -> str:
        """Return the SHA-256 of the contents, in hexadecimal; the same on every machine."""
        prefix, columns = self._digested()
        sha = hashlib.sha256(prefix)
        for column in columns:
            sha.update(column.astype("<i8").tobytes())
        return sha.hexdigest()

    @abstractmethod
    def _digested(self) -> tuple[bytes, tuple[NDArray[Any], ...]]:
        """Return a prefix and the columns that the digest covers."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.digest() == other.digest()

    @abstractmethod
    def __hash__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Trace(Recording):
    """Requests as they came, sorted by arrival; the arrays are read-only. Build it with :meth:`from_arrays`.

    Attributes
    ----------
    names : tuple of str
        Adapters of the trace.
    arrival_ns : ndarray of int64, shape (n,)
        Arrival times in nanoseconds from the start of the trace.
    adapter : ndarray of int32, shape (n,)
        Position of each request's adapter in ``names``.
    prompt_tokens, output_tokens : ndarray of int32, shape (n,)
        Lengths in tokens.
    duration_s : float
        Length of the recording in seconds: the denominator of rates.
    speed : float
        Rate relative to the recording's own: above 1, time is compressed.
    notes : tuple of str
        Assumptions of the reader of the file, and what it left out.
    """

    names: tuple[str, ...]
    arrival_ns: NDArray[np.int64]
    adapter: NDArray[np.int32]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    duration_s: float
    speed: float = 1.0
    notes: tuple[str, ...] = ()

    @classmethod
    def from_arrays(
        cls,
        arrival_s: ArrayLike,
        adapter: Sequence[str] | NamedRows,
        prompt_tokens: ArrayLike,
        output_tokens: ArrayLike,
        duration_s: float | None = None,
    ) -> Trace:
        """Check and keep four columns of equal length; ``adapter`` holds names.

        Parameters
        ----------
        duration_s : float, optional
            Length of the recording in seconds; the last arrival by default.

        Raises
        ------
        InputError
            Located at the column: arrivals not finite, negative or not sorted, lengths not whole numbers
            of at least 1 token, an adapter without a name, or a duration that ends before the last arrival.
        """
        import numpy as np

        arrivals = _arrivals(arrival_s)
        end_s = float(arrivals[-1]) if duration_s is None else duration_s
        if not (0 < end_s <= MAX_SIMULATED_S and end_s >= arrivals[-1]):
            raise InputError("must be above 0 and not end before the last arrival", end_s, "duration_s")
        names, position = _names(adapter)
        lengths = (
            lengths_column("prompt_tokens", prompt_tokens),
            lengths_column("output_tokens", output_tokens),
        )
        if len({len(arrivals), len(position), len(lengths[0]), len(lengths[1])}) != 1:
            raise InputError("columns must be equally long")
        return cls._frozen(
            names, np.rint(arrivals * NS_PER_S).astype(np.int64), position, *lengths, duration_s=end_s
        )

    @classmethod
    def _frozen(
        cls,
        names: tuple[str, ...],
        *columns: NDArray[Any],
        duration_s: float,
        speed: float = 1.0,
        notes: tuple[str, ...] = (),
    ) -> Trace:
        for array in columns:
            array.setflags(write=False)
        arrival_ns, adapter, prompt_tokens, output_tokens = columns
        return cls(names, arrival_ns, adapter, prompt_tokens, output_tokens, duration_s, speed, notes)

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def subset(self, shares: Mapping[str, float]) -> Trace:
        """Return the requests of the adapters in ``shares``, thinned evenly to each one's share.

        Of an adapter's k requests so far, floor(k * share) are kept; nothing is drawn at random.
        """
        import numpy as np

        names = tuple(name for name in self.names if name in shares)
        share = np.array([shares.get(name, 0.0) for name in self.names])
        keep = share[self.adapter] == 1
        for position in np.flatnonzero((share > 0) & (share < 1)):
            mine = np.flatnonzero(self.adapter == position)
            due = np.floor(np.arange(len(mine) + 1) * share[position] + 1e-9)
            keep[mine[np.diff(due) > 0]] = True
        renumber = (np.cumsum(share > 0) - 1).astype(np.int32)
        columns = (self.arrival_ns, renumber[self.adapter], self.prompt_tokens, self.output_tokens)
        kept = (column[keep] for column in columns)
        return self._frozen(names, *kept, duration_s=self.duration_s, speed=self.speed, notes=self.notes)

    def window(self, start_s: float, end_s: float) -> Trace:
        """Return the requests that arrive in [``start_s``, ``end_s``), as a recording of that length."""
        import numpy as np

        first, last = np.searchsorted(self.arrival_ns, np.rint(np.array([start_s, end_s]) * NS_PER_S))
        if end_s >= self.duration_s:  # the last arrival may be at the very end
            last = len(self)
        rows = slice(int(first), int(last))
        arrival_ns = self.arrival_ns[rows] - round(start_s * NS_PER_S)
        columns = (self.adapter[rows], self.prompt_tokens[rows], self.output_tokens[rows])
        return self._frozen(self.names, arrival_ns, *columns, duration_s=end_s - start_s, speed=self.speed)

    def resampled(self, seed: int) -> Trace:
        """Return a bootstrap sample of the recording, block by block.

        Within a block of a minute, or of 50 requests on average if that is longer, requests (adapter and
        lengths) and the gaps between them are drawn with replacement. The rate over time stays as recorded,
        and so do bursts that are shorter than a block.
        """
        import numpy as np

        count = len(self)
        if count == 0:
            return self
        block_s = min(self.duration_s, max(_BLOCK_S, _BLOCK_REQUESTS * self.duration_s / count))
        arrival_s = self.arrival_ns / NS_PER_S
        blocks = max(1, round(self.duration_s / block_s))
        edges_s = np.linspace(0.0, self.duration_s, blocks + 1)
        cuts = np.searchsorted(arrival_s, edges_s[1:-1])
        start, size = np.append(0, cuts), np.diff(np.concatenate(([0], cuts, [count])))
        rng = np.random.default_rng(seed)

        def drawn(first: NDArray[np.int64], of: NDArray[np.int64], times: NDArray[np.int64]) -> Any:
            low, width = np.repeat(first, times), np.repeat(of, times)
            return low + np.floor(rng.random(len(low)) * width).astype(np.int64)

        row = drawn(start, size, size)
        # Gaps of a block: from its beginning to the first request, between requests, and to its end.
        block = np.repeat(np.arange(blocks), size)
        ends_s = np.insert(arrival_s, np.append(cuts, count), edges_s[1:])
        begins_s = np.insert(arrival_s, np.append(0, cuts), edges_s[:-1])
        gap_s = np.maximum(ends_s - begins_s, 0.0)[drawn(start + np.arange(blocks), size + 1, size + 1)]
        passed_s = np.cumsum(gap_s)
        last = np.cumsum(size + 1) - 1
        before_s = np.append(0.0, passed_s[last[:-1]])
        total_s = np.maximum(passed_s[last] - before_s, np.finfo(float).tiny)
        within = (np.delete(passed_s, last) - before_s[block]) / total_s[block]
        length_s = np.diff(edges_s)
        arrival_ns = np.rint((edges_s[block] + within * length_s[block]) * NS_PER_S).astype(np.int64)
        columns = (self.adapter[row], self.prompt_tokens[row], self.output_tokens[row])
        order = np.argsort(arrival_ns, kind="stable")
        kept = (column[order] for column in (arrival_ns, *columns))
        return self._frozen(self.names, *kept, duration_s=self.duration_s, speed=self.speed)

    def at_rate(self, rate_rps: float) -> Trace:
        """Return the same requests at another mean rate: all times are scaled in proportion."""
        import numpy as np

        at_rate = rate_rps * self.duration_s
        scale = len(self) / at_rate if at_rate > 0 else float("inf")
        if not 0 < self.duration_s * scale <= MAX_SIMULATED_S:
            raise InputError("makes the recording too long", rate_rps, "rate_rps")
        if self.duration_s * scale < LEAST_S:
            raise InputError("makes the recording shorter than a nanosecond", rate_rps, "rate_rps")
        arrival_ns = np.rint(self.arrival_ns * scale).astype(np.int64)
        columns = (arrival_ns, self.adapter, self.prompt_tokens, self.output_tokens)
        duration_s, speed = self.duration_s * scale, self.speed / scale
        return self._frozen(self.names, *columns, duration_s=duration_s, speed=speed, notes=self.notes)

    def lengths_by_adapter(self) -> dict[str, tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """Return the prompt and the output lengths of each adapter's requests, in tokens."""
        import numpy as np

        order = np.argsort(self.adapter, kind="stable")
        cuts = np.cumsum(np.bincount(self.adapter, minlength=len(self.names)))[:-1]
        prompts, outputs = (
            np.split(column[order], cuts) for column in (self.prompt_tokens, self.output_tokens)
        )
        return dict(zip(self.names, zip(prompts, outputs, strict=True), strict=True))

    def _digested(self) -> tuple[bytes, tuple[NDArray[Any], ...]]:
        columns = (self.arrival_ns, self.adapter, self.prompt_tokens, self.output_tokens)
        return repr((self.names, self.duration_s)).encode(), columns

    def __hash__(self) -> int:
        return hash((self.names, len(self), self.duration_s))


def _arrivals(column: ArrayLike) -> NDArray[np.float64]:
    import numpy as np

    arrivals = _numbers("arrival_s", column)
    if len(arrivals) == 0:
        raise InputError("must hold at least one request", location="arrival_s")
    require_each(
        "arrival_s", arrivals, np.isfinite(arrivals) & (arrivals >= 0), "must be finite seconds >= 0"
    )
    in_order = np.diff(arrivals, prepend=arrivals[0]) >= 0
    require_each("arrival_s", arrivals, in_order, "must be sorted by arrival")
    return arrivals


def lengths_column(
    name: str, column: ArrayLike, least: int = 1, rows: NDArray[Any] | None = None
) -> NDArray[np.int32]:
    """Return a column of whole numbers of tokens from `least`, checked.

    `rows` are the positions in the file, from 0, of a column that is a part of it.

    Raises
    ------
    InputError
        Located at ``name``, with the row.
    """
    import numpy as np

    tokens = _numbers(name, column)
    whole = (tokens >= least) & (tokens <= MAX_TOKENS) & (tokens == np.floor(tokens))
    require_each(name, tokens, whole, f"must be whole numbers of tokens from {least} to {MAX_TOKENS}", rows)
    return tokens.astype(np.int32)


class NamedRows(NamedTuple):
    """Names of rows, each distinct one once; compact for many rows."""

    names: tuple[Any, ...]
    row: NDArray[np.int32]
    """Position of each row's name in ``names``."""

    def __len__(self) -> int:
        return len(self.row)

    def renamed(self, rename: Callable[[Any], Any]) -> NamedRows:
        """Return the rows with other names; several names may become equal."""
        import numpy as np

        positions: dict[Any, int] = {}
        place = [positions.setdefault(rename(name), len(positions)) for name in self.names]
        return NamedRows(tuple(positions), np.array(place, np.int32)[self.row])


def _names(column: Sequence[str] | NamedRows) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Return the distinct names, in order of first use, and each request's position among them."""
    import numpy as np

    if isinstance(column, NamedRows):
        for position, name in enumerate(column.names):
            if not isinstance(name, str) or not name:
                row = int((column.row == position).argmax())
                raise InputError(f"must name an adapter (row {row + 1})", name, "adapter")
        return column.names, column.row
    positions: dict[str, int] = {}
    index = np.empty(len(column), dtype=np.int32)
    for row, name in enumerate(column):
        if not isinstance(name, str) or not name:
            raise InputError(f"must name an adapter (row {row + 1})", name, "adapter")
        index[row] = positions.setdefault(name, len(positions))
    return tuple(positions), index


def _numbers(name: str, column: ArrayLike) -> NDArray[np.float64]:
    import numpy as np

    array = np.asarray(column)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise InputError("must be a column of numbers", location=name)
    return array.astype(np.float64)


def require_each(
    name: str, column: NDArray[Any], holds: NDArray[np.bool_], rule: str, rows: NDArray[Any] | None = None
) -> None:
    """Raise an input error at the first row where a rule does not hold; see `lengths_column` for `rows`."""
    if not holds.all():
        place = int(holds.argmin())
        row = place if rows is None else int(rows[place])
        raise InputError(f"{rule} (row {row + 1})", column[place].item(), name)


class TraceFormat(StrEnum):
    """Layout of a file of requests."""

    TABLE = "table"
    AZURE = "azure"
    BURSTGPT = "burstgpt"
    RAGPULSE = "ragpulse"
    BAILIAN = "bailian"
    MOONCAKE = "mooncake"
    VLLM = "vllm"


class TimeUnit(StrEnum):
    """Unit of the times of a trace."""

    S = "s"
    MS = "ms"
    US = "us"
    NS = "ns"


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
