"""Predicted beside measured: one record per row, metric and method, and error tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pandas as pd

from benchmarks.common import records_table
from benchmarks.measured.case import LeftOut, MeasuredCase, ProfileFor
from capplan import InputError
from capplan.errors import InfeasibleError

FORMULAS: Final = (
    "MAPE = 100 * mean(|p / a - 1|), SMAPE = 100 * mean(|p - a| / (|p| + |a|)), bias = 100 * mean(p / a - 1)"
)


@dataclass(frozen=True)
class Record:
    """One metric of one row by one method."""

    source: str
    method: str
    row: str
    metric: str
    measured: float
    predicted: float
    gpu: str
    model: str
    tp: int
    version: str
    dtype: str
    kv_cache_dtype: str
    rules: str
    expert_parallel: bool


@dataclass(frozen=True)
class Refusal:
    """A deployment that some methods have no profile for."""

    deployment: str
    rows: int
    methods: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    records: Sequence[Record]
    refusals: Sequence[Refusal]
    more: str = ""
    """Another table of the source, in Markdown."""


def compare(
    source: str,
    cases: Sequence[MeasuredCase],
    methods: Mapping[str, ProfileFor],
    left_out: LeftOut | None = None,
) -> Comparison:
    """Simulate all rows with the profiles of all methods."""
    records: list[Record] = []
    refused: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        at = case.deployment
        for method, profile_for in methods.items():
            try:
                predicted = case.predict(profile_for(at, left_out))
            except (InputError, InfeasibleError) as error:
                where = f"{at.model} {at.dtype} on {at.tp} x {at.gpu}"
                refused.setdefault((where, str(error)), []).append(method)
                continue
            records.extend(
                Record(source, method, case.name, metric, measured, predicted[metric], **vars(at))
                for metric, measured in case.measured.items()
            )
    refusals = [
        Refusal(where, len(missing) // len(set(missing)), ", ".join(dict.fromkeys(missing)), reason)
        for (where, reason), missing in refused.items()
    ]
    return Comparison(records, refusals)


def errors(records: Iterable[Record], by: Sequence[str]) -> pd.DataFrame:
    """Return rows and errors in percent of each method, by group and metric."""
    table = pd.DataFrame([vars(record) for record in records])
    difference = table["predicted"] - table["measured"]
    table["bias"] = 100.0 * difference / table["measured"]
    table["MAPE"] = table["bias"].abs()
    table["SMAPE"] = 100.0 * difference.abs() / (table["predicted"].abs() + table["measured"].abs())
    groups = table.groupby([*by, "metric", "method"], sort=False)[["MAPE", "SMAPE", "bias"]]
    return groups.mean().assign(rows=groups.size())


def error_table(records: Sequence[Record], by: Sequence[str]) -> str:
    """Return a Markdown table with a row per group and metric, and the methods side by side."""
    if not records:
        return ""
    lines: dict[tuple[object, ...], dict[str, object]] = {}
    for key, row in errors(records, by).iterrows():
        *group, method = key
        line = lines.setdefault(tuple(group), dict(zip([*by, "metric"], group, strict=True)))
        line[f"{method}: rows"] = int(row["rows"])
        line[f"{method}: MAPE / SMAPE / bias"] = (
            f"{row['MAPE']:.1f} / {row['SMAPE']:.1f} / {row['bias']:+.1f} %"
        )
    return _with_all_columns(lines.values())


def row_table(records: Sequence[Record]) -> str:
    """Return a Markdown table with a row per measured row: measured value, and predictions by method."""
    lines: dict[tuple[object, ...], dict[str, object]] = {}
    for each in records:
        key = (each.source, each.gpu, each.model, each.tp, each.dtype, each.row)
        line = lines.setdefault(
            key, {"GPU": each.gpu, "model": each.model.split("/")[-1], "TP": each.tp, "row": each.row}
        )
        line.setdefault(each.metric, f"{each.measured:.4g}")
        line[f"{each.metric} {each.method}"] = f"{100 * (each.predicted / each.measured - 1):+.1f} %"
    return _with_all_columns(lines.values())


def _with_all_columns(lines: Collection[Mapping[str, object]]) -> str:
    names = dict.fromkeys(name for line in lines for name in line)
    return records_table({name: line.get(name, "") for name in names} for line in lines)
