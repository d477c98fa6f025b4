"""Crossover of the Triton LoRA kernels.

A kernel in tiles of tokens (SGMV) beats one token by token (MBGMV) from some number of tokens per adapter.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from capplan.errors import InputError
from capplan.models._kernel_fits import read_kernel_table

MBGMV: Final = "mbgmv"
SGMV: Final = "sgmv"
_CASE: Final = ["width", "case"]


@dataclass(frozen=True)
class Crossover:
    """Threshold between the kernels, and what it costs against the faster kernel of each case."""

    sgmv_from_tokens: int
    """Mean tokens per adapter from which a step uses tiles."""
    cases: int
    """Measured cases with both kernels."""
    mean_loss: float
    """Mean over cases of the time of the chosen kernel relative to the faster one, less 1."""
    max_loss: float
    """Largest loss of a case."""

    def summary(self) -> str:
        """Return the threshold in a sentence."""
        return (
            f"sgmv from {self.sgmv_from_tokens} tokens per adapter: {100 * self.mean_loss:.1f} % slower "
            f"than the faster kernel of each of {self.cases} cases, at most {100 * self.max_loss:.1f} %"
        )


def read_crossover(path: str | os.PathLike[str]) -> Crossover:
    """Return the threshold of a table of kernel timings.

    Raises
    ------
    InputError
        For an unreadable file, or one without cases of both kernels.
    """
    found = crossover(read_kernel_table(path))
    if found is None:
        rule = f"must have cases of phase crossover with {MBGMV} and {SGMV}"
        raise InputError(rule, location=os.fspath(path))
    return found


def crossover(table: pd.DataFrame) -> Crossover | None:
    """Return the threshold with the least mean loss over the cases of phase ``crossover``.

    Candidates are the measured tokens per adapter, and twice the largest: tiles never. The smallest of equal
    ones is returned, and None without cases of both kernels.
    """
    rows = table[table["phase"] == "crossover"]
    # The sum of shrink and expand.
    times = rows.pivot_table(index=_CASE, columns="kernel", values="median_us", aggfunc="sum")
    if not {MBGMV, SGMV} <= set(times.columns):
        return None
    times = times[[MBGMV, SGMV]].dropna()
    if times.empty:
        return None
    first = rows.groupby(_CASE)[["tokens", "adapters"]].first().loc[times.index]
    tokens_each = (first["tokens"] / first["adapters"]).to_numpy(np.float64)
    least = times.min(axis=1).to_numpy(np.float64)
    by_token, tiled = (times[name].to_numpy(np.float64) for name in (MBGMV, SGMV))
    candidates = [*sorted({int(each) for each in tokens_each}), 2 * int(tokens_each.max())]
    losses = {each: np.where(tokens_each >= each, tiled, by_token) / least - 1.0 for each in candidates}
    best = min(candidates, key=lambda each: float(losses[each].mean()))
    return Crossover(best, len(times), float(losses[best].mean()), float(losses[best].max()))
