"""Command lines, tables, child processes, timing and workloads that benchmarks share."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from capplan import Adapter, Workload, load_workload
from capplan.errors import CapplanError
from capplan.spec import write_text_atomic
from capplan.workload import preset

H100_LLAMA = "h100-64g/llama-3.1-8b/vllm-0.8.5"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
Answer = TypeVar("Answer")
_PROGRESS_EVERY = 100
"""Cases between two lines of progress."""


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the docstring of the benchmark."""
    spec = sys.modules["__main__"].__spec__
    name = None if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"
    return argparse.ArgumentParser(
        prog=name, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def play_cases(doc: str | None, play: Callable[[int], Counter[str]], cases: int) -> int:
    """Check random cases as the command line says, print how often each event occurred and failing seeds.

    Parameters
    ----------
    doc
        Docstring of the benchmark.
    play
        Checks the case of a seed and returns its events; raises AssertionError if it fails.
    cases
        Default number of cases.

    Returns
    -------
    int
        The exit code: 1 if a case failed.
    """
    parser = command_line(doc)
    parser.add_argument("--cases", type=int, default=cases, metavar="N")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N")
    given = parser.parse_args()
    events: Counter[str] = Counter()
    failures = 0
    began_s = time.perf_counter()
    for case in range(given.cases):
        seed = given.first_seed + case
        try:
            events += play(seed)
        except AssertionError as error:
            failures += 1
            print(f"seed {seed}: {' '.join(str(error).split())[:300]}", flush=True)
        if (case + 1) % _PROGRESS_EVERY == 0:
            elapsed_s = time.perf_counter() - began_s
            print(f"{case + 1} cases, {failures} failed, {elapsed_s:.0f} s", file=sys.stderr, flush=True)
    for name, count in events.most_common():
        print(f"{count:9}  {name.replace('_', ' ')}")
    print(f"{given.cases} cases, {failures} failed, {time.perf_counter() - began_s:.0f} s")
    return 1 if failures else 0


@contextmanager
def user_errors() -> Iterator[None]:
    """Exit with one line and the exit code of capplan for its errors."""
    try:
        yield
    except CapplanError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def emit(text: str, file: Path | None = None) -> None:
    """Print a report, and write it to a file if given."""
    print(text, end="")
    if file is not None:
        write_text_atomic(file, text)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def records_table(records: Iterable[Mapping[str, object]]) -> str:
    """Return a Markdown table with a row per record; the keys are the header."""
    rows = list(records)
    return markdown(list(rows[0]), [[str(value) for value in row.values()] for row in rows]) if rows else ""


def mape(predicted: NDArray[np.float64], actual: NDArray[np.float64]) -> str:
    """Return ``100 * mean(|p / a - 1|)`` in words."""
    return f"{100.0 * np.mean(np.abs(predicted / actual - 1.0)):.1f} %"


def read_or_make(path: Path, make: Callable[[], Answer]) -> Answer:
    """Return the JSON value of a file; make and write it if missing."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, json.dumps(make()))
    found: Answer = json.loads(path.read_text(encoding="utf-8"))
    return found


def in_fresh_process(benchmark: str, *words: str, env: Mapping[str, str] | None = None) -> str:
    """Return the output of ``python -m benchmarks.NAME WORDS``, with further environment variables."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *words]
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, **(env or {})}
    child = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return child.stdout


def cpu_timed(call: Callable[[], Answer]) -> tuple[float, Answer]:
    """Return the CPU seconds of this process during a call, and its result."""
    start_s = time.process_time()
    answer = call()
    return time.process_time() - start_s, answer


def peak_mib() -> float:
    """Return the peak memory of this process; unlike ru_maxrss, VmHWM excludes the parent."""
    if Path("/proc/self/status").exists():
        return resident_mib("VmHWM")
    per_mib = 2**20 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / per_mib


def resident_mib(key: str = "VmRSS") -> float:
    """Return the memory of this process on Linux: VmRSS, held now, or VmHWM, the peak."""
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) / 1024


def numbered_adapters(ranks: Iterable[int], rates_rps: Iterable[float]) -> tuple[Adapter, ...]:
    """Return adapters a0, a1, ... of these ranks and rates."""
    return tuple(
        Adapter(name=f"a{i}", rank=int(rank), rate_rps=float(rate_rps))
        for i, (rank, rate_rps) in enumerate(zip(ranks, rates_rps, strict=True))
    )


def equal_adapters(count: int, rank: int, total_rps: float) -> tuple[Adapter, ...]:
    """Return adapters of one rank that share a rate equally."""
    return numbered_adapters([rank] * count, [total_rps / count] * count)


def preset_workload(name: str, **options: Any) -> Workload:
    """Return the workload of a preset on the shipped Llama profile; options as for `Preset.yaml`."""
    text = preset(name).yaml(profile=H100_LLAMA, base_model=LLAMA, **options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.yaml"
        path.write_text(text, encoding="utf-8")
        return load_workload(path)
