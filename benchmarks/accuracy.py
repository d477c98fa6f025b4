"""Write the errors on measured rows that `capplan profile accuracy` shows.

    python -m benchmarks.accuracy [--data DIR]

Rows are those of ``benchmarks.measured_check``. Groups have one GPU, model, TP, dtype and version. Rows with
expert parallelism are not among them, since no plan asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pandas as pd

from benchmarks.common import command_line, user_errors
from benchmarks.measured.case import data_folder
from benchmarks.measured.compare import Record
from benchmarks.measured_check import comparisons
from capplan.datasets import known_arch
from capplan.models import ACCURACY_FILE, LEFT_OUT, Accuracy, MeasuredRows
from capplan.models.compose import known_decoder
from capplan.spec import ProvenanceKind, version_numbers, write_text_atomic

SOURCES: Final = ("dense_stages", "silicon_vllm", "silicon_moe", "vllm_023", "mlperf")
_METRICS: Final = ("itl_ms", "tpot_ms")
_FITTED: Final = (
    (ProvenanceKind.COMPOSED, "dense_stages"),
    (ProvenanceKind.COMPOSED, "vllm_023"),
    (ProvenanceKind.ROOFLINE, "mlperf"),
)
"""Kinds whose host terms, or shares of a GPU's peaks, are fitted on a source."""
_FITTED_EXPERTS: Final = ("h100-80g", "gpt-oss-120b", "0.18")
"""Rows that fix the spread of gpt-oss's experts."""


def basis(record: Record) -> str:
    """Return what a prediction rests on."""
    if record.source.startswith("without "):
        return record.source.split()[1] + LEFT_OUT
    at = (record.gpu, record.model.rsplit("/", 1)[-1], _minor(record.version))
    experts = record.method == ProvenanceKind.COMPOSED and at == _FITTED_EXPERTS
    return "fitted" if experts or (record.method, record.source) in _FITTED else "not fitted"


def grouped(records: Iterable[Record]) -> Iterator[MeasuredRows]:
    """Yield the errors by deployment, metric and basis."""
    table = pd.DataFrame(
        [
            vars(each)
            | {"basis": basis(each), "version": _minor(each.version)}
            | {"dtype": each.dtype or known_decoder(each.model).expert_dtype}
            for each in records
            if each.metric in _METRICS and not each.expert_parallel
        ]
    )
    table["bias"] = 100.0 * (table["predicted"] / table["measured"] - 1.0)
    names = ["method", "gpu", "model", "tp", "dtype", "version", "metric", "basis"]
    for values, group in table.groupby(names, sort=False):
        at = dict(zip(names, values, strict=True))
        arch = known_arch([at["model"]])
        yield MeasuredRows(
            kind=at.pop("method"),
            experts=arch is not None and arch.experts is not None,
            rows=len(group),
            error_percent=round(float(group["bias"].abs().mean()), 2),
            bias_percent=round(float(group["bias"].mean()), 2),
            **at | {"model": at["model"].rsplit("/", 1)[-1] if arch is None else arch.name},
        )


def _minor(version: str) -> str:
    return ".".join(map(str, version_numbers(version)[:2])) if version else ""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, help="folder of measured data")
    args = parser.parse_args()
    with user_errors():
        found = [each for _, each in comparisons(data_folder(args.data), SOURCES)]
        rows = tuple(grouped(record for each in found for record in each.records))
        accuracy = Accuracy(command="python -m benchmarks.accuracy", rows=rows)
        write_text_atomic(ACCURACY_FILE, accuracy.model_dump_json(indent=1) + "\n")


if __name__ == "__main__":
    main()
