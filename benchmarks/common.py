"""Tables, command lines and memory readings that all benchmarks share."""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from capplan.spec import write_text_atomic


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the docstring of the benchmark."""
    name = f"python -m benchmarks.{Path(sys.argv[0]).stem}"
    return argparse.ArgumentParser(
        prog=name, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def emit(text: str, file: Path | None = None) -> None:
    """Print a report, and write it to a file if given."""
    print(text, end="")
    if file is not None:
        write_text_atomic(file, text)


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
