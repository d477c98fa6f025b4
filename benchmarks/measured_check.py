"""Simulate every visible measured row of others with the twin, and compare.

    python -m benchmarks.measured_check [--data DIR] [--only NAME ...] [--rows] [--json FILE] [--plots DIR]

DIR is the folder of measured data: by default that of the environment variable CAPPLAN_MEASURED, or else
``../shared/reference/measured`` beside the checkout. Nothing of it is part of the project. Rows are simulated
at their rate or concurrency and with their lengths, not at the measured batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from benchmarks.common import command_line, emit, records_table, user_errors
from benchmarks.fit_host_terms import bare_profile
from benchmarks.measured import (
    dense_stages,
    estimator,
    estimator_rows,
    h100_64g,
    layers,
    memory_gap,
    mlperf,
    rank_sweeps,
    request_logs,
    silicon_moe,
    silicon_vllm,
    slora,
    vllm_023,
)
from benchmarks.measured.case import LeftOut, MeasuredCase, ProfileFor, data_folder, roofline_for
from benchmarks.measured.compare import FORMULAS, Comparison, Refusal, compare, error_table, row_table
from benchmarks.measured.composed import Composed
from benchmarks.measured.dense_stages import Stage
from benchmarks.measured.plots import draw_courses
from benchmarks.measured.request_logs import RequestLog
from capplan import InputError
from capplan.spec import write_text_atomic

MEASURED: Final[Mapping[str, Callable[[Path], Sequence[MeasuredCase]]]] = MappingProxyType(
    {
        "dense_stages": dense_stages.read,
        "silicon_vllm": silicon_vllm.read,
        "silicon_moe": silicon_moe.read,
        "request_logs": request_logs.read,
        "vllm_023": vllm_023.read,
        "memory_gap": memory_gap.read,
        "layers": layers.read,
        "mlperf": mlperf.read,
        "rank_sweeps": rank_sweeps.read,
    }
)
_SLORA: Final = "slora"
"""Runs of S-LoRA, compared with its shipped profile instead of the methods."""

SOURCES: Final = MappingProxyType(
    {
        **MEASURED,
        "h100_64g": lambda _folder: h100_64g.read(),
        "estimator": lambda _folder: estimator.read(),
    }
)
"""Also steps by shipped profiles, and by the estimator in the package of the operator tables."""
LEFT_OUT: Final = "left_out"

_BY_HARDWARE: Final = ((), ("gpu", "model", "tp", "dtype"))
_TABLES: Final = MappingProxyType({LEFT_OUT: (("source",),), "estimator": ((), ("gpu",), ("tp",))})
"""Groups of the error tables of a source."""


def comparisons(folder: Path, chosen: Sequence[str]) -> Iterator[tuple[str, Comparison]]:
    """Compare the chosen sources one by one, and stages also with profiles that rest on none like them."""
    stages = dense_stages.read(folder)
    methods = methods_for(stages)
    for name in chosen:
        used = methods if name in MEASURED else {"composed": bare_profile}
        try:
            cases = SOURCES[name](folder)
        except InputError as error:
            yield name, Comparison([], [Refusal("all", 0, ", ".join(used), str(error))])
            continue
        found = compare(name, cases, used)
        if name == "rank_sweeps":
            found = replace(found, more=records_table(rank_sweeps.ratios_by_tp(cases, used)))
        if name == "estimator":
            rows = estimator_rows.supported(stages, silicon_vllm.read(folder), silicon_moe.read(folder))
            found = replace(found, more=records_table(rows))
        yield name, found
        if name == "dense_stages":
            yield LEFT_OUT, left_out_errors(stages, methods)


def methods_for(stages: Sequence[Stage]) -> dict[str, ProfileFor]:
    """Return the methods by name; host terms for rows left out are fitted on the other stages."""
    return {"composed": Composed(stages), "roofline": roofline_for}


def left_out_errors(stages: Sequence[Stage], methods: Mapping[str, ProfileFor]) -> Comparison:
    """Compare stages with profiles that rest on no stage of their GPU, then of their model."""
    found = []
    for key in ("gpu", "model"):
        for value in dict.fromkeys(getattr(stage.deployment, key) for stage in stages):
            left_out = LeftOut(key, value)
            rows = [stage for stage in stages if left_out.covers(stage.deployment)]
            if len(rows) < len(stages):
                found.append(compare(f"without {key} {value}", rows, methods, left_out))
    return Comparison(
        records=[record for each in found for record in each.records],
        refusals=[refusal for each in found for refusal in each.refusals],
    )


def report(found: Mapping[str, Comparison], with_rows: bool) -> str:
    """Return the report in Markdown."""
    parts = [f"Errors: {FORMULAS}, of simulated against measured rows."]
    for name, each in found.items():
        parts += [f"## {name}", *(error_table(each.records, by) for by in _TABLES.get(name, _BY_HARDWARE))]
        if with_rows:
            parts.append(row_table(each.records))
        parts.append(each.more)
        if each.refusals:
            parts += ["Not predicted:", records_table(map(asdict, each.refusals))]
    return "\n\n".join(part for part in parts if part) + "\n"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, help="folder of measured data")
    parser.add_argument("--only", nargs="+", choices=[*SOURCES, _SLORA], help="sources; default: all")
    parser.add_argument("--rows", action="store_true", help="also print every row")
    parser.add_argument("--out", type=Path, help="file for the report")
    parser.add_argument("--json", type=Path, help="file for the records")
    parser.add_argument("--plots", type=Path, help="folder for the figure of request logs")
    args = parser.parse_args()
    with user_errors():
        folder = data_folder(args.data)
        chosen = args.only or [*SOURCES, _SLORA]
        found = dict(comparisons(folder, [name for name in chosen if name in SOURCES]))
        if args.json is not None:
            records = {name: [vars(record) for record in each.records] for name, each in found.items()}
            write_text_atomic(args.json, json.dumps(records, indent=1))
        if args.plots is not None:
            logs = [each for each in request_logs.read(folder) if isinstance(each, RequestLog)]
            draw_courses(logs, methods_for([]), args.plots)
        text = report(found, args.rows)
        if _SLORA in chosen:
            text += f"\n## {_SLORA}\n\nMAPE of the shipped profile:\n\n{slora.shipped_errors(folder)}\n"
        emit(text, args.out)


if __name__ == "__main__":
    main()
