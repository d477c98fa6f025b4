"""Tables, command lines and memory readings that all benchmarks share."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def peak_mib() -> float:
    """Return the peak memory of this process; unlike ru_maxrss, VmHWM excludes the parent."""
    if Path("/proc/self/status").exists():
        return resident_mib("VmHWM")
    per_mib = 2**20 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / per_mib


def resident_mib(key: str = "VmRSS") -> float:
    """Return the memory of this process on Linux: VmRSS, held now, or VmHWM, the peak."""
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) / 1024
