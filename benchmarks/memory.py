"""Memory of this process, for benchmarks."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_mib() -> float:
    """Return the most memory this process ever held; VmHWM, unlike ru_maxrss, forgets the parent."""
    if Path("/proc/self/status").exists():
        return resident_mib("VmHWM")
    per_mib = 2**20 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / per_mib


def resident_mib(key: str = "VmRSS") -> float:
    """Return memory of this process on Linux: VmRSS, held now, or VmHWM, at most ever."""
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) / 1024
