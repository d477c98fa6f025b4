"""Host terms of a composed profile: milliseconds per step and request that no operator table holds.

They belong to an engine version and a dtype, and are fitted on measured inter-token latencies (``python -m
benchmarks.fit_host_terms``). Steps of versions in between have those of the nearest fitted
version with the same kind of scheduling, since asynchronous scheduling hides most of the host's work.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

import capplan.datasets
from capplan.errors import InputError
from capplan.spec.validation import Line, SpecModel

FILE: Final = Path(capplan.datasets.__file__).parent / "composed" / "host_terms.json"


class LeftOutError(SpecModel):
    """Error on rows that the fit did not see."""

    left_out: Line = Field(description="Rows left out: all of a GPU or of a model.")
    rows: Annotated[int, Field(ge=1)]
    error_percent: float = Field(description="Mean absolute percentage error of mean ITL on them.")


class HostTerms(SpecModel):
    """Host terms of one engine version and dtype, with their errors."""

    engine_version: Line
    dtype: Line
    parts: Line = Field(
        default="operators", description="Measured parts that the terms go with: operators or layers."
    )
    base_ms: Annotated[float, Field(ge=0)] = Field(description="Milliseconds per step.")
    ms_per_request: Annotated[float, Field(ge=0)] = Field(description="Milliseconds per running request.")
    request_ms: Annotated[float, Field(ge=0)] = Field(description="Milliseconds per request outside steps.")
    std_errors: tuple[float, float] = Field(description="Standard errors of base_ms and ms_per_request.")
    source: Line = Field(description="Rows of the fit.")
    only_for: Line | None = Field(
        default=None, description="GPU and model that the errors hold for; null: those of the rows left out."
    )
    rows: Annotated[int, Field(ge=1)]
    error_percent: float = Field(description="Mean absolute percentage error of mean ITL on these rows.")
    left_out: tuple[LeftOutError, ...] = ()
    scatter: Annotated[float, Field(ge=0)] = Field(
        description="Standard deviation of measured / predicted - 1 on rows left out of the fit."
    )

    @property
    def left_out_error_percent(self) -> float | None:
        """Mean error over all rows left out in turn."""
        rows = sum(each.rows for each in self.left_out)
        return sum(each.rows * each.error_percent for each in self.left_out) / rows if rows else None

    @property
    def spans_hardware(self) -> bool:
        """Whether a GPU or a model was left out: only then do the errors hold for others."""
        return any(each.left_out.startswith(("gpu ", "model ")) for each in self.left_out)

    def in_words(self) -> str:
        """Return rows and errors in one sentence."""
        left = ", ".join(f"{each.left_out} {each.error_percent:.1f} %" for each in self.left_out)
        fitted = (
            "host terms fitted on" if self.base_ms or self.ms_per_request else "no host terms; compared with"
        )
        words = f"{fitted} {self.source}: mean ITL within {self.error_percent:.1f} %"
        return f"{words}; left out in turn: {left}" if left else words


class FittedTerms(SpecModel):
    """Host terms that ship."""

    terms: tuple[HostTerms, ...]


@functools.cache
def fitted_terms() -> tuple[HostTerms, ...]:
    """Return the host terms that ship."""
    return FittedTerms.model_validate_json(FILE.read_bytes()).terms


def host_terms(version: str, dtype: str, parts: str = "operators", is_async: bool | None = None) -> HostTerms:
    """Return the fitted terms of the nearest engine version, in this dtype if there are any.

    Terms of the same scheduling are nearer: asynchronous from vLLM 0.14 on, unless given. Measured layers
    hold the starts of their kernels and the sampler, so that their terms are others.

    Raises
    ------
    InputError
        If the version is not one of numbers.
    """
    asked = _numbers(version)
    scheduling = _is_async(asked) if is_async is None else is_async
    of_parts = [each for each in fitted_terms() if each.parts == parts]
    fitted = [each for each in of_parts if each.dtype == dtype] or of_parts
    return min(
        fitted,
        key=lambda each: (
            _is_async(_numbers(each.engine_version)) != scheduling,
            _distance(asked, _numbers(each.engine_version)),
        ),
    )


def composition_terms() -> HostTerms:
    """Return the terms whose errors hold for other GPUs and models: those with most rows of several."""
    return max((each for each in fitted_terms() if each.spans_hardware), key=lambda each: each.rows)


def _distance(one: tuple[int, int], other: tuple[int, int]) -> int:
    return abs(100 * (one[0] - other[0]) + one[1] - other[1])


def _is_async(version: tuple[int, int]) -> bool:
    return version >= (0, 14)


def _numbers(version: str) -> tuple[int, int]:
    parts = version.split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
        raise InputError("must be a version such as 0.15.1", version, "--engine-version")
    return int(parts[0]), int(parts[1])
