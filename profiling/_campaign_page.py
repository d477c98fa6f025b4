"""Results page of a campaign: its tables in Markdown, from the files in its folder alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from capplan.models import (
    ADDITIVE_KERNEL,
    TOPPINGS_BGMV,
    TOPPINGS_MBGMV,
    crossover,
    explain_kernels,
    read_kernel_table,
)
from capplan.profiling._tables import LOADING, MEMORY, PROVENANCE, SERVED, STEPS, MeasurementFolder
from capplan.spec import open_stream, read_text, write_text_atomic

if TYPE_CHECKING:
    import pandas as pd

PAGE: Final = "README.md"
COPIES: Final = "copies.csv"
CORRECTNESS: Final = "correctness.csv"
DECODE: Final = "decode.csv"
PROMPTS: Final = "prompts.csv"
_KERNELS: Final = "kernels/kernels.parquet"
_MIB: Final = 2**20
_ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_ACTIVATION_BYTES: Final = 4
"""Of a number between shrink and expand."""


def write_page(folder: Path, record: Mapping[str, Any], command: str) -> None:
    """Write the page of a campaign's folder, from its record and the command that measures the tables."""
    parts = (
        _correctness_section,
        _copies_section,
        _kernels_section,
        _decode_section,
        _prompts_section,
        _engine_section,
        _profile_section,
        _validations_section,
    )
    sections = [_machine_section(record), *(part(folder) for part in parts)]
    size = ", a few small cases: the numbers have no meaning" if record["tiny"] else ""
    head = f"# Campaign on {record['chip']}{size}\n\nWritten by `{command}` from the tables in this folder."
    write_text_atomic(folder / PAGE, "\n\n".join([head, *filter(None, map("\n".join, sections))]) + "\n")


def _machine_section(record: Mapping[str, Any]) -> Iterator[str]:
    runs = [(name, run) for name, each in record["slices"].items() for run in each["runs"]]
    if not runs:
        return
    machine = runs[-1][1]["machine"]
    gpu = machine.get("gpu", {})
    versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items() if value)
    yield f"{machine['cpu']['model']}, {machine['cpu']['cores']} cores; {versions}."
    if gpu:
        facts = ", ".join(f"{name} {value}" for name, value in gpu.items())
        yield f"GPU: {facts}."
    yield ""
    rows = [
        (name, run["machine"]["date"], f"{run['seconds']:.0f}", run["note"].replace("|", "/"))
        for name, run in runs
    ]
    yield from _table(("slice", "date (UTC)", "s", "result"), rows)


def _correctness_section(folder: Path) -> Iterator[str]:
    text = (
        "Logits against PyTorch's kernels in the same dtype: largest difference over the largest logit, "
        "over prefill and decode with adapters of several ranks."
    )
    rows = [
        (
            each["dtype"],
            each["lora_kernel"],
            each["attention_kernel"],
            "yes" if each["cuda_graphs"] else "no",
            str(each["compared"]),
            f"{each['error']:.1e}",
            f"{each['limit']:.0e}",
        )
        for each in read_rows(folder / CORRECTNESS)
    ]
    head = ("dtype", "LoRA", "attention", "CUDA graphs", "vectors", "error", "limit")
    return _section("Correctness", text, head, rows)


def _copies_section(folder: Path) -> Iterator[str]:
    text = "A copy on the device counts bytes read and written; one from pinned host memory counts its bytes."
    rows = [
        (each["source"], f"{each['bytes'] / _MIB:.0f}", f"{each['bytes_per_s'] / 1e9:.1f}")
        for each in read_rows(folder / COPIES)
    ]
    return _section("Copies", text, ("from", "MiB", "GB/s"), rows)


def device_bytes_per_s(folder: Path) -> float | None:
    """Return the bandwidth of a copy on the device; None if it is not measured."""
    table = read_rows(folder / COPIES)
    return next((float(each["bytes_per_s"]) for each in table if each["source"] == "device"), None)


def kernel_shares(table: pd.DataFrame, item_bytes: int, bytes_per_s: float) -> pd.DataFrame:
    """Return kernel timings with their share of a copy's bandwidth.

    The bytes are the least possible: rows of A or B of each adapter once, at its rank; activations of width
    `width`, which expand reads and writes; and those between the two halves in float32.
    """
    rows = table["adapter_rank_sum"] * table["width"] * item_bytes
    outer = table["tokens"] * table["width"] * item_bytes
    outer = outer.where(table["half"] == "shrink", 2 * outer)
    moved = rows + outer + _ACTIVATION_BYTES * table["rank_tokens"]
    return table.assign(share=moved / (table["median_us"] * 1e-6) / bytes_per_s)


def _kernels_section(folder: Path) -> Iterator[str]:
    file, bandwidth = folder / _KERNELS, device_bytes_per_s(folder)
    if not file.exists() or bandwidth is None:
        return
    settings = json.loads(read_text(file.with_name(PROVENANCE)))["settings"]
    whole = read_kernel_table(file)
    table = kernel_shares(whole, _ITEM_BYTES[settings["dtype"]], bandwidth)
    yield "## Shrink and expand"
    yield ""
    yield (
        f"Share of the copy's bandwidth, {settings['dtype']}: least bytes (rows of A or B of each adapter "
        "once, at its rank; activations) over the median time. Mixes: adapters of one rank, half of the "
        "largest and half of the smallest, one large among small ones, drawn ranks, and adapters of one rank "
        "that four requests share."
    )
    yield ""
    table = table.assign(mix=table["configuration"].str.rpartition("/")[2])
    for phase, size in (("decode", "requests"), ("prefill", "tokens")):
        if (chosen := table[table["phase"] == phase]).size:
            yield f"In {phase}, by {size}:"
            yield ""
            yield from _share_table(chosen, size)
            yield ""
    if (threshold := crossover(whole)) is not None:
        yield f"Crossover of token-wise and tiled kernels: {threshold.summary()}."
        yield ""
    yield "Toppings' linear models on left-out configurations, and errors (SMAPE) of the additive form:"
    yield ""
    fits = [
        (
            str(report.width),
            report.phase,
            report.grid,
            report.kernel,
            report.half,
            *(f"{report.fits[form].held_out_r2:.3f}" for form in (TOPPINGS_BGMV, TOPPINGS_MBGMV)),
            f"{report.fits[ADDITIVE_KERNEL].held_out_error:.1f}",
        )
        for report in explain_kernels(whole)
    ]
    head = ("width", "phase", "grid", "kernel", "half", "R² BGMV form", "R² MBGMV form", "additive, %")
    yield from _table(head, fits)


def _share_table(table: pd.DataFrame, size: str) -> Iterator[str]:
    """Yield a table of shares, one row per kernel, half and mix; medians of draws and of equal sizes."""
    shares = table.pivot_table("share", ["width", "kernel", "half", "mix"], size, aggfunc="median")
    rows = [
        (*map(str, key), *("" if math.isnan(value) else f"{value:.2f}" for value in row))
        for key, row in zip(shares.index, shares.to_numpy(), strict=True)
    ]
    yield from _table(("width", "kernel", "half", "mix", *map(str, shares.columns)), rows)


def _decode_section(folder: Path) -> Iterator[str]:
    text = (
        "Least bytes of a rank (weights but the embedding, KV, rows of adapters) at the copy's bandwidth, "
        "and the median forward pass."
    )
    rows = [
        (
            *(str(each[name]) for name in ("tensor_parallel_size", "adapters", "batch", "rank", "context")),
            *(f"{each[name]:.3f}" for name in ("least_ms", "forward_ms", "step_ms")),
            f"{each['step_over_least']:.2f}",
        )
        for each in read_rows(folder / DECODE)
    ]
    head = ("TP", "adapters", "batch", "rank", "context", "least ms", "forward ms", "step ms", "ratio")
    return _section("Decode steps against their bytes", text, head, rows)


def _prompts_section(folder: Path) -> Iterator[str]:
    text = (
        "Least bytes at the copy's bandwidth, products with the model's matrices at the rate of a large "
        "product, and the median forward pass over the longer of both."
    )
    rows = [
        (
            *(str(each[name]) for name in ("adapters", "batch", "rank", "prompt")),
            *(f"{each[name]:.3f}" for name in ("bytes_ms", "products_ms", "forward_ms", "step_ms")),
            f"{each['step_over_least']:.2f}",
        )
        for each in read_rows(folder / PROMPTS)
    ]
    head = (
        "adapters",
        "batch",
        "rank",
        "prompt",
        "bytes ms",
        "products ms",
        "forward ms",
        "step ms",
        "ratio",
    )
    return _section("A prompt beside decodes", text, head, rows)


def _engine_section(folder: Path) -> Iterator[str]:
    engine = folder / "engine"
    loads, memory = read_rows(engine / LOADING), read_rows(engine / MEMORY)
    if not loads and not memory:
        return
    yield "## Engine"
    for title, table, columns in (
        ("Adapter loads", loads, ("rank", "s_max", "kind", "ms", "ms_p25", "ms_p75", "loads")),
        ("KV memory", memory, ("a_max", "s_max", "kv_tokens", "max_num_seqs", "max_num_batched_tokens")),
    ):
        if table:
            yield ""
            yield f"{title}:"
            yield ""
            rows = [
                tuple(
                    f"{each[name]:.4g}" if isinstance(each[name], float) else str(each[name])
                    for name in columns
                )
                for each in table
            ]
            yield from _table(columns, rows)
    counts = [
        f"`engine/{name}` has {len(steps)} rows"
        for name in (STEPS, SERVED)
        if (steps := MeasurementFolder(engine).table(name)) is not None
    ]
    if counts:
        yield ""
        yield f"{'; '.join(counts)}."


def _profile_section(folder: Path) -> Iterator[str]:
    file = folder / "profile.json"
    if not file.exists():
        return
    yield "## Profile"
    yield ""
    yield "`profile.json`, calibrated on the tables of the engine; `profile.html` has its errors."


def _validations_section(folder: Path) -> Iterator[str]:
    rows = []
    for file in sorted(folder.glob("validation-*.json"), key=lambda each: int(each.stem.split("-")[1])):
        found = json.loads(read_text(file))
        for group in found["groups"]:
            rows += [
                (
                    f"{file.stem.partition('-')[2]} %",
                    each["name"],
                    f"{each['measured']:.5g}",
                    f"{each['predicted']:.5g}",
                    f"{each['error']:.2f}",
                )
                for each in group["comparisons"]
                if None not in (each["measured"], each["predicted"], each["error"])
            ]
    head = ("load", "metric", "measured", "predicted", "error, %")
    return _section("Closed loop", "Error: 100 |p - m| / (|p| + |m|).", head, rows)


def _section(title: str, text: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a section with one table; none without rows."""
    if rows:
        yield f"## {title}"
        yield ""
        yield text
        yield ""
        yield from _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a table; none if it is missing."""
    import pandas as pd

    if not file.exists():
        return []
    with open_stream(file) as opened:
        rows: list[Any] = pd.read_csv(opened).to_dict("records")
    return rows
