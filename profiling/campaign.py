"""Measuring campaign on one machine in resumable slices.

    python -m capplan.profiling.campaign --device cuda --out datasets/h200

Every slice takes less than nine minutes, and is worth keeping by itself. ``campaign.json`` in the folder
records progress and machine, ``README.md`` shows the results. The same command resumes a campaign.
``--time-s`` ends it before a time limit of the machine, if necessary within a slice; a slice that cannot end
in time is not started. ``--part`` runs the slices of one part, within eight minutes; ``--slices`` runs some
slices only, and ``--slice-s`` shortens each. The results are printed last.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from capplan.errors import CapplanError, InputError
from capplan.models import (
    ADDITIVE_KERNEL,
    TOPPINGS_BGMV,
    TOPPINGS_MBGMV,
    crossover,
    explain_kernels,
    read_kernel_table,
)
from capplan.profiling._tables import LOADING, MEMORY, PROVENANCE, SERVED, STEPS, MeasurementFolder
from capplan.spec import EngineConfig, open_stream, read_text, write_text_atomic

if TYPE_CHECKING:
    import pandas as pd

    from capplan.profiling.validation._loop import ClosedLoop

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
MOST_SLICE_S: Final = 480.0
"""Budget of a slice; with starting and compiling, a slice stays under nine minutes."""
LEAST_S: Final = 5.0
"""Minimum time left for starting a slice."""
_START_S: Final = 30.0
"""Time for loading a model."""
_LEAST_ENGINE_S: Final = _START_S + 30.0
_COPIES_S: Final = 60.0
_PLAN_S: Final = 60.0
"""Time for a calibration and two verified plans."""
_VALIDATION_S: Final = (60.0, 120.0)
"""Shortest and longest load of a validation."""
_VALIDATION_MORE_S: Final = 2 * _START_S
"""Time of a validation beside its load: starting the engine, and the twin's simulations."""
_READING_THREADS: Final = 8
"""Threads of the engine's CPU, which draw and read adapters."""
_LOADS: Final = (0.4, 0.9, 1.5)
"""Loads of the validations, as shares of the capacity."""
_CORRECTNESS_S: Final = 240.0
_DECODE_S: Final = 300.0
PART_S: Final = 480.0
"""Time limit of a part."""
PARTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "steps": ("correctness", "copies", "decode", "prompts"),
        "kernels": ("copies", "kernels-"),
        "served": ("kernels-crossover", "engine-", "profile", "plan", "validation-"),
        "more": ("copies", "decode-"),
    }
)
"""Slices of each part by the beginnings of their names, in order of worth."""
_RANKS: Final = 2
"""GPUs of the slice with tensor parallelism."""
_LONG_TOKENS: Final = 16384
"""Context of long decodes, which are split among programs."""
_TINY_BUDGET_S: Final = 12.0  # twice the time to measure the rows that a fit needs, on an idle machine
_TINY_S: Final = 1.0
RECORD: Final = "campaign.json"
_COMMAND: Final = "python -m capplan.profiling.campaign"


class SliceSettings(NamedTuple):
    """Inputs of a run of a slice, in at most `budget_s`; `tiny`: a few cases, to test the campaign."""

    device: str
    folder: Path
    budget_s: float
    tiny: bool = False


class SliceResult(NamedTuple):
    """Completeness of a slice, and a note."""

    is_complete: bool
    note: str


@dataclass(frozen=True)
class Slice:
    """Resumable part of a campaign."""

    name: str
    """Unique name, the key of its record."""
    run: Callable[[SliceSettings], SliceResult]
    """Measures until done or out of time."""
    budget_s: float = MOST_SLICE_S
    """Time limit over all runs, after which the slice counts as done."""
    least_s: float = LEAST_S
    """Minimum time of a run; with less of its budget left, the slice counts as done."""
    after: tuple[str, ...] = ()
    """Names of slices that must be done first."""

    def __post_init__(self) -> None:
        for name, limit in (("budget_s", MOST_SLICE_S), ("least_s", self.budget_s)):
            if not 0.0 < getattr(self, name) <= limit:
                raise ValueError(f"{name} must be above 0 and at most {limit:g}, got {getattr(self, name)}")


def _correctness(setting: SliceSettings) -> SliceResult:
    """Compare the kernels of the device with PyTorch's."""
    from capplan.profiling.engine._checks import CorrectnessCase, correctness_rows

    tiny = CorrectnessCase(
        model="tiny-llama", ranks=(4, 8), prompts=(1, 16, 17, 40), repeats=1, output_tokens=3
    )
    rows = list(correctness_rows(setting.device, tiny if setting.tiny else CorrectnessCase()))
    _write_table(setting.folder / CORRECTNESS, rows)
    wrong = [row for row in rows if not row["error"] <= row["limit"]]
    if wrong:
        names = "; ".join(f"{row['lora_kernel']}, {row['dtype']}: {row['error']:.1e}" for row in wrong)
        raise RuntimeError(f"kernels differ from PyTorch's: {names}")
    return SliceResult(True, f"{len(rows)} variants of the kernels agree with PyTorch's")


def _copies(setting: SliceSettings) -> SliceResult:
    """Measure copies, to which kernels and loads are compared."""
    from capplan.profiling.kernels._measure import copy_rows

    rows = copy_rows(setting.device)
    _write_table(setting.folder / COPIES, rows)
    note = ", ".join(f"{row['bytes_per_s'] / 1e9:.0f} GB/s from the {row['source']}" for row in rows)
    return SliceResult(True, note)


def _decode(points: Mapping[str, Any], setting: SliceSettings, name: str = DECODE) -> SliceResult:
    """Time steps of a grid against the bytes that they must move: decodes, or those beside a prompt."""
    from capplan.profiling.engine._checks import DecodeGrid, decode_rows, prompt_rows

    grid = DecodeGrid(**points)
    model = "meta-llama/Llama-3.1-8B-Instruct"
    if setting.tiny:
        model, context = "tiny-llama", grid.context // 64
        grid = replace(grid, batches=(1, 4), adapters=(0, 2), rank=4, context=context, steps=8)
        grid = replace(grid, prompt=16, prompts=2)
    bandwidth = device_bytes_per_s(setting.folder)
    if bandwidth is None:
        raise RuntimeError(f"{COPIES} is missing: the slice copies has failed")
    file = setting.folder / name
    rows = read_rows(file)
    same = {"tensor_parallel_size": grid.tensor_parallel_size, "context": grid.mean_context}
    if name == PROMPTS:
        same = {"prompt": grid.prompt}
    measured = prompt_rows if name == PROMPTS else decode_rows
    known = {(row["adapters"], row["batch"]) for row in rows if same.items() <= row.items()}
    found = measured(model, setting.device, grid, bandwidth, known, setting.budget_s - _start_s(setting))
    for row in found:
        rows.append(row)
        known.add((row["adapters"], row["batch"]))
        _write_table(file, rows)
    total = len(grid.points())
    return SliceResult(len(known) == total, f"{len(known)} of {total} batches")


def _start_s(setting: SliceSettings) -> float:
    return 0.0 if setting.tiny else _START_S


def _write_table(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    import pandas as pd

    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(file, pd.DataFrame(rows).to_csv(index=False))


def _kernels(width: int, phase: str, setting: SliceSettings) -> SliceResult:
    """Time kernels at one hidden size."""
    if phase == "crossover" and setting.device == "cpu":
        return SliceResult(True, "the kernels in question run on a GPU")
    from capplan.profiling.kernels._measure import KernelProfilingOptions, SamplingLimits, measure

    grid = "wide" if phase == "decode" else phase
    options = KernelProfilingOptions(
        device=setting.device,
        grids=("tiny" if setting.tiny else grid,),
        phases=(phase,),
        widths=(32 if setting.tiny else width,),
        limits=SamplingLimits(budget_s=setting.budget_s, max_passes=2 if setting.tiny else 60),
    )
    found = measure(setting.folder / "kernels", options)
    return SliceResult(found.is_complete, f"{found.converged} of {found.points} medians converged")


def _loop(setting: SliceSettings) -> ClosedLoop:
    """Return the closed loop of a campaign: Llama-3.1-8B with random weights, or the tiny one."""
    from capplan.profiling.validation._loop import ClosedLoop, LoopSettings

    if setting.tiny:
        known = LoopSettings(
            model="tiny-llama",
            device=setting.device,
            adapters=3,
            ranks=(8,),
            slots=(2,),
            engine=EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128),
            prompt_tokens=(48.0, 8.0),
            output_tokens=(56.0, 8.0),  # long, so that an hour of the twin holds few requests
            point_s=1.0,
            plan_seeds=1,
        )
    else:
        known = LoopSettings(
            model="meta-llama/Llama-3.1-8B-Instruct",
            device=setting.device,
            adapters=64,
            ranks=(8, 64),
            slots=(8, 32),
            threads=_READING_THREADS,
            engine=EngineConfig(max_num_seqs=128, max_num_batched_tokens=2048, max_model_len=4096),
            prompt_tokens=(223.0, 245.0),
            output_tokens=(194.0, 206.0),
            form=None,
        )
    return ClosedLoop(setting.folder, known)


def _engine(stages: Sequence[str], setting: SliceSettings) -> SliceResult:
    """Run stages of `capplan profile engine`."""
    budget_s = min(setting.budget_s, _TINY_BUDGET_S) if setting.tiny else setting.budget_s
    is_complete = _loop(setting).measure(max(1.0, budget_s - _start_s(setting)), stages)
    note = f"measured {', '.join(stages)} for at most {budget_s:.0f} s"
    return SliceResult(is_complete or setting.tiny, note)


def _profile(setting: SliceSettings) -> SliceResult:
    loop = _loop(setting)
    loop.calibrate()
    return SliceResult(True, f"calibrated {loop.profile.name}")


def _plan(setting: SliceSettings) -> SliceResult:
    loop = _loop(setting)
    loop.plan()
    return SliceResult(True, f"planned, with {loop.group()['engine_args']['max_loras']} slots")


def _validation(load: float, setting: SliceSettings) -> SliceResult:
    """Run the plan at a share of its capacity."""
    from capplan.profiling.validation._loop import VoidError

    duration_s = min(_VALIDATION_S[1], setting.budget_s - _VALIDATION_MORE_S)
    try:
        found = _loop(setting).validate(load, _TINY_S if setting.tiny else duration_s)
    except VoidError as error:
        if setting.tiny:  # a second on a busy machine may well be void
            return SliceResult(True, str(error))
        raise
    verdict = "agree" if found["agrees"] else "disagree"
    return SliceResult(True, f"twin and engine {verdict} at {load:.0%} of the capacity")


def slices(gpus: int = 1) -> tuple[Slice, ...]:
    """Return all slices, in the order in which they are run: those of most worth first.

    A machine with two GPUs has a slice with tensor parallelism.
    """
    stepping = partial(Slice, budget_s=_DECODE_S, least_s=_LEAST_ENGINE_S, after=("copies",))
    kernels = [
        Slice(f"kernels-{phase}-{width}", partial(_kernels, width, phase))
        for width in (4096, 3584)
        for phase in ("decode", "prefill")
    ]
    first = (
        Slice("correctness", _correctness, _CORRECTNESS_S),
        Slice("copies", _copies, _COPIES_S),
        *kernels[:2],
        stepping("decode", partial(_decode, {})),
        stepping("prompts", partial(_decode, {"batches": (64,)}, name=PROMPTS)),
        Slice("kernels-crossover-4096", partial(_kernels, 4096, "crossover")),
    )
    engine = tuple(
        Slice(name, partial(_engine, stages), least_s=_LEAST_ENGINE_S)
        for name, stages in (
            ("engine-steps", ("memory", "steps")),
            ("engine-loads", ("memory", "loads")),
            ("engine-iterations", ("iterations",)),
            ("engine-served", ("memory", "served")),
        )
    )
    # A profile of incomplete tables would be kept, so calibration waits for all of them.
    measured = (first[-1].name, *(each.name for each in engine))
    profile = Slice("profile", _profile, least_s=_START_S, after=measured)
    plan = Slice("plan", _plan, least_s=_PLAN_S, after=(*profile.after, profile.name))
    validations = tuple(
        Slice(
            f"validation-{round(100 * load)}",
            partial(_validation, load),
            least_s=_VALIDATION_S[0] + _VALIDATION_MORE_S,
            after=(*plan.after, plan.name),
        )
        for load in _LOADS
    )
    points = {"batches": (1, 4, 16), "adapters": (0,), "context": _LONG_TOKENS}
    last = [*kernels[2:], stepping("decode-long", partial(_decode, points))]
    if gpus >= _RANKS:
        last.append(stepping(f"decode-tp{_RANKS}", partial(_decode, {"tensor_parallel_size": _RANKS})))
    return (*first, *engine, profile, plan, *validations, *last)


@dataclass
class SliceProgress:
    """Progress of one slice, as recorded."""

    spent_s: float = 0.0
    is_complete: bool = False
    runs: list[dict[str, Any]] = field(default_factory=list)

    def is_done(self, each: Slice) -> bool:
        """Return whether the slice is complete or its budget is spent."""
        return self.is_complete or self.spent_s > each.budget_s - each.least_s


class Campaign:
    """Slices of a campaign and their record in a folder, which is of one chip, and tiny or not."""

    def __init__(
        self, folder: str | Path, device: str, parts: Sequence[Slice] | None = None, *, tiny: bool = False
    ) -> None:
        from capplan.engine import device_name

        self.folder = Path(folder)
        self._device = device
        self._of = {"chip": device_name(device), "tiny": tiny}
        self.parts = slices(_gpus(device)) if parts is None else tuple(parts)
        if tiny:
            self.parts = tuple(replace(each, least_s=min(each.least_s, LEAST_S)) for each in self.parts)
        self.progress: defaultdict[str, SliceProgress] = defaultdict(SliceProgress)
        if (self.folder / RECORD).exists():
            self._read()

    def pending_parts(self) -> list[Slice]:
        """Return the pending slices."""
        return [each for each in self.parts if not self.progress[each.name].is_done(each)]

    def run(
        self,
        time_s: float,
        log: Callable[[str], None] = lambda _: None,
        now_s: Callable[[], float] = time.monotonic,
        slice_s: float = MOST_SLICE_S,
    ) -> bool:
        """Run pending slices within `time_s` seconds, each within `slice_s`; return whether none failed."""
        until, succeeded = now_s() + time_s, True
        for each in self.pending_parts():
            left = min(until - now_s(), slice_s, each.budget_s - self.progress[each.name].spent_s)
            if pending := [other.name for other in self.pending_parts() if other.name in each.after]:
                log(f"{each.name}: waits for {', '.join(pending)}")
            elif left < each.least_s:
                log(f"{each.name}: takes {each.least_s:.0f} s at least, {max(0.0, left):.0f} s are left")
            else:
                log(f"{each.name}: at most {left:.0f} s")
                succeeded = self._run_part(each, left, log, now_s) and succeeded
        return succeeded

    def _run_part(
        self, each: Slice, left_s: float, log: Callable[[str], None], now_s: Callable[[], float]
    ) -> bool:
        from capplan.profiling._machine import describe

        progress = self.progress[each.name]
        setting = SliceSettings(self._device, self.folder, left_s, tiny=bool(self._of["tiny"]))
        begin, note, failed = now_s(), "interrupted", False
        try:
            result = each.run(setting)
            progress.is_complete, note = result.is_complete, result.note
            short = [name for name in each.after if not self.progress[name].is_complete]
            if short:  # prerequisites that ended with their budget
                note += f"; not complete before it: {', '.join(short)}"
        except Exception as error:  # noqa: BLE001 - such as of Triton's compiler; later slices run
            traceback.print_exc()
            failed, note = True, f"failed: {(str(error) or type(error).__name__).splitlines()[0]}"
        finally:
            progress.spent_s += now_s() - begin
            machine = describe(self._device)
            progress.runs.append({"seconds": round(now_s() - begin, 1), "note": note, "machine": machine})
            self._write()
        log(f"{each.name}: {note}")
        try:
            write_page(self.folder, self._record(), _COMMAND)
        except (CapplanError, OSError, LookupError, ValueError) as error:  # the tables are there
            log(f"{PAGE} is not written: {error}")
        return not failed

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text_atomic(self.folder / RECORD, json.dumps(self._record(), indent=2) + "\n")

    def _record(self) -> dict[str, Any]:
        return {**self._of, "slices": {name: vars(each) for name, each in self.progress.items()}}

    def _read(self) -> None:
        path = self.folder / RECORD
        try:
            record = json.loads(read_text(path))
            known = {name: record[name] for name in self._of}
            self.progress.update({name: SliceProgress(**each) for name, each in record["slices"].items()})
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise InputError("must be the record of a campaign", location=str(path)) from None
        for name, value in self._of.items():
            if known[name] != value:
                rule = f"must be {known[name]!r}, as in the campaign that this folder holds"
                raise InputError(rule, value, f"{path}: {name}")


def write_page(folder: Path, record: Mapping[str, Any], command: str) -> None:
    """Write the page of a campaign's folder, from its record and the command that measures the tables.

    Sections yield their paragraphs.
    """
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
    paragraphs = [*_machine_section(record), *(each for part in parts for each in part(folder))]
    size = ", a few small cases: the numbers have no meaning" if record["tiny"] else ""
    head = f"# Campaign on {record['chip']}{size}\n\nWritten by `{command}` from the tables in this folder."
    write_text_atomic(folder / PAGE, "\n\n".join([head, *paragraphs]) + "\n")


def _machine_section(record: Mapping[str, Any]) -> Iterator[str]:
    runs = [(name, run) for name, each in record["slices"].items() for run in each["runs"]]
    if not runs:
        return
    machine = runs[-1][1]["machine"]
    gpu = machine.get("gpu", {})
    versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items() if value)
    facts = f"{machine['cpu']['model']}, {machine['cpu']['cores']} cores; {versions}."
    if gpu:
        facts += f"\nGPU: {', '.join(f'{name} {value}' for name, value in gpu.items())}."
    yield facts
    rows = [
        (name, run["machine"]["date"], f"{run['seconds']:.0f}", run["note"].replace("|", "/"))
        for name, run in runs
    ]
    yield _table(("slice", "date (UTC)", "s", "result"), rows)


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
    yield (
        f"Share of the copy's bandwidth, {settings['dtype']}: least bytes (rows of A or B of each adapter "
        "once, at its rank; activations) over the median time. Mixes: adapters of one rank, half of the "
        "largest and half of the smallest, one large among small ones, drawn ranks, and adapters of one rank "
        "that four requests share."
    )
    table = table.assign(mix=table["configuration"].str.rpartition("/")[2])
    for phase, size in (("decode", "requests"), ("prefill", "tokens")):
        if (chosen := table[table["phase"] == phase]).size:
            yield f"In {phase}, by {size}:"
            yield _share_table(chosen, size)
    if (threshold := crossover(whole)) is not None:
        yield f"Crossover of token-wise and tiled kernels: {threshold.summary()}."
    yield "Toppings' linear models on left-out configurations, and errors (SMAPE) of the additive form:"
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
    yield _table(head, fits)


def _share_table(table: pd.DataFrame, size: str) -> str:
    """Return a table of shares, one row per kernel, half and mix; medians of draws and of equal sizes."""
    shares = table.pivot_table("share", ["width", "kernel", "half", "mix"], size, aggfunc="median")
    rows = [
        (*map(str, key), *("" if math.isnan(value) else f"{value:.2f}" for value in row))
        for key, row in zip(shares.index, shares.to_numpy(), strict=True)
    ]
    return _table(("width", "kernel", "half", "mix", *map(str, shares.columns)), rows)


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
            yield f"{title}:"
            rows = [
                tuple(
                    f"{each[name]:.4g}" if isinstance(each[name], float) else str(each[name])
                    for name in columns
                )
                for each in table
            ]
            yield _table(columns, rows)
    counts = [
        f"`engine/{name}` has {len(steps)} rows"
        for name in (STEPS, SERVED)
        if (steps := MeasurementFolder(engine).table(name)) is not None
    ]
    if counts:
        yield f"{'; '.join(counts)}."


def _profile_section(folder: Path) -> Iterator[str]:
    if (folder / "profile.json").exists():
        yield "## Profile"
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
    """Yield the paragraphs of a section with one table; none without rows."""
    if rows:
        yield f"## {title}"
        yield text
        yield _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*first, *(f"| {' | '.join(row)} |" for row in rows)])


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a table; none if it is missing."""
    import pandas as pd

    if not file.exists():
        return []
    with open_stream(file) as opened:
        rows: list[Any] = pd.read_csv(opened).to_dict("records")
    return rows


def _gpus(device: str) -> int:
    import torch

    return torch.cuda.device_count() if device.startswith("cuda") else 0


def default_folder(device: str) -> Path:
    """Return ``datasets/<gpu>`` for the device's chip."""
    from capplan.engine import device_name

    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower().removeprefix("nvidia ")).strip("-")
    return Path("datasets") / name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign; exit status 0: done or out of time, 1: a slice failed, 2: invalid input."""
    parser = argparse.ArgumentParser(
        prog=_COMMAND,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--out", type=Path, help="folder; default: datasets/<gpu>")
    parser.add_argument("--time-s", type=float, default=float("inf"), help="time limit in seconds")
    parser.add_argument(
        "--part", choices=list(PARTS), help=f"slices of one part, for at most {PART_S:g} s by default"
    )
    parser.add_argument("--slices", metavar="NAMES", help="some slices only, separated by commas")
    longest = f"time limit of each slice in seconds; default: {MOST_SLICE_S:g}"
    parser.add_argument("--slice-s", type=float, default=MOST_SLICE_S, help=longest)
    parser.add_argument("--tiny", action="store_true", help="a few small cases, to test the campaign")
    given = parser.parse_args(arguments)
    try:
        succeeded = _run(given)
    except CapplanError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0 if succeeded else 1


def _run(given: argparse.Namespace) -> bool:
    import torch

    if given.device != "cpu" and not torch.cuda.is_available():
        raise InputError("must be cpu: this PyTorch sees no CUDA device", given.device, "--device")
    parts = _chosen(given.slices, slices(_gpus(given.device)))
    if given.part is not None:
        parts = [each for each in parts if each.name.startswith(PARTS[given.part])]
        given.time_s = min(given.time_s, PART_S)
    campaign = Campaign(given.out or default_folder(given.device), given.device, parts, tiny=given.tiny)
    succeeded = campaign.run(given.time_s, _log, slice_s=given.slice_s)
    done = len(campaign.parts) - len(campaign.pending_parts())
    more = "" if done == len(campaign.parts) else "; the same command resumes it"
    _log(f"{done} of {len(campaign.parts)} slices done in {campaign.folder}{more}")
    if (campaign.folder / PAGE).exists():
        _log(f"{PAGE}\n{read_text(campaign.folder / PAGE)}")
    return succeeded


def _chosen(names: str | None, every: Sequence[Slice]) -> Sequence[Slice]:
    """Return the named slices in the order of the campaign; None: all."""
    if names is None:
        return every
    chosen = set(names.split(","))
    if unknown := sorted(chosen - {each.name for each in every}):
        raise InputError(f"must be some of {', '.join(each.name for each in every)}", unknown[0], "--slices")
    return [each for each in every if each.name in chosen]


def _log(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)  # noqa: T201 - the output of this command


if __name__ == "__main__":
    sys.exit(main())
