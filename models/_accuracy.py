"""Errors of composed profiles and rooflines on measured engines, and the rows nearest to a profile."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

import capplan.datasets
from capplan.spec import Line, Profile, ProvenanceKind, SpecModel, version_numbers

ACCURACY_FILE: Final = Path(capplan.datasets.__file__).parent / "composed" / "accuracy.json"
"""Written by ``python -m benchmarks.accuracy``."""

_FAR_MINORS: Final = 6
"""Minor versions of vLLM, about half a year, after which its kernels and scheduler are others."""

LEFT_OUT: Final = " left out"
"""End of the basis of rows whose GPU or model was left out of the fit."""


class MeasuredRows(SpecModel):
    """Errors on the measured rows of one deployment."""

    kind: ProvenanceKind = Field(description="How the profile was made: composed or roofline.")
    gpu: Line
    model: Line = Field(description="Name of the architecture.")
    experts: bool = Field(description="Whether it is a mixture of experts.")
    tp: Annotated[int, Field(ge=1)]
    dtype: Line = Field(description="Of the weights.")
    version: str = Field(description="Version of vLLM without its patch; empty: not stated.")
    metric: Line = Field(description="itl_ms: mean ITL under a rate; tpot_ms: mean TPOT at a concurrency.")
    rows: Annotated[int, Field(ge=1)]
    error_percent: float = Field(description="100 * mean(|p / a - 1|).")
    bias_percent: float = Field(description="100 * mean(p / a - 1).")
    basis: Line = Field(description="fitted, not fitted, or what was left out of the fit: GPU or model.")

    @property
    def is_fitted(self) -> bool:
        """Whether some number of the profile rests on these rows."""
        return self.basis == "fitted"

    @property
    def metric_in_words(self) -> str:
        """The metric as tables and notes name it."""
        return {"itl_ms": "mean ITL", "tpot_ms": "mean TPOT"}.get(self.metric, self.metric)

    def in_words(self) -> str:
        """Return deployment and error as the end of a sentence."""
        rows = f"{self.rows} row{'s' * (self.rows > 1)}"
        at = f"{rows} of {self.model} on {self.gpu}, tp {self.tp}, {self.dtype}"
        return f"{self.metric_in_words} {self.error_percent:.1f} % off on {at} ({self.basis})"


class Accuracy(SpecModel):
    """Errors that ship."""

    command: Line
    rows: tuple[MeasuredRows, ...]


@functools.cache
def measured_accuracy() -> Accuracy:
    """Return the errors that ship."""
    return Accuracy.model_validate_json(ACCURACY_FILE.read_bytes())


def comparable_rows(profile: Profile) -> Sequence[MeasuredRows]:
    """Return the rows of a profile's kind, nearest first.

    Mixtures of experts are nearest to mixtures, and 16-bit weights to their like, of versions not far away.
    Then the same model, GPU, TP and version count, in this order. Where model or GPU is another, rows count
    first that left it out.
    """
    rows = [each for each in measured_accuracy().rows if each.kind == profile.provenance.kind]
    return sorted(rows, key=lambda each: _distance(profile, each))


def _distance(profile: Profile, rows: MeasuredRows) -> tuple[float, ...]:
    gpu = profile.name.removeprefix("roofline/").split("/")[0]
    is_same = {"gpu": rows.gpu == gpu, "model": rows.model == profile.model.name}
    left_out = rows.basis.removesuffix(LEFT_OUT)
    experts = profile.model.experts is not None
    has_16_bits = (profile.model.linear_dtype_bytes or profile.model.dtype_bytes) >= 2
    minors = abs(_minor(rows.version) - _minor(profile.engine.version))
    return (
        rows.experts != experts,
        not experts and rows.dtype.endswith("float16") != has_16_bits,
        bool(rows.version) and minors > _FAR_MINORS,
        not is_same["model"],
        not is_same["gpu"],
        is_same.get(left_out, rows.is_fitted != all(is_same.values())),
        rows.tp != profile.tp,
        minors,
        -rows.rows,
    )


def _minor(version: str) -> float:
    """Return a version as one number; one that is not stated is far from all."""
    if not version[:1].isdigit():
        return float("inf") if not version else 0.0
    major, minor, *_ = version_numbers(version)
    return 1000.0 * major + minor
