"""Provenance of a measurement: device, driver, versions, clocks, threads, date."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from capplan.engine import cpu_model, cpuinfo
from capplan.version import installed_version

_GPU_FIELDS: Final = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.limit",
    "persistence_mode",
    "mig.mode.current",
)
_CACHE: Final = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS: Final = MappingProxyType({"K": 2**10, "M": 2**20})
_UNKNOWN_CACHE_BYTES: Final = 32 * 2**20


def describe(device: str, threads: int | None = None) -> dict[str, Any]:
    """Return the provenance of a measurement on this machine."""
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "versions": {
            "capplan": installed_version(),
            "python": platform.python_version(),
            **{package: _version(package) for package in ("torch", "triton", "numpy")},
        },
        "cpu": {
            "model": cpu_model(),
            "cores": os.cpu_count(),
            "cache_bytes": last_cache_bytes(),
            "mhz": float(mhz) if (mhz := cpuinfo("cpu MHz")) else None,
            "threads": torch.get_num_threads() if threads is None else threads,
        },
    }
    if torch.device(device).type == "cuda":
        record["gpu"] = _gpu(torch.device(device))
    return record


def last_cache_bytes() -> int:
    """Return the size of the first core's largest cache; 32 MiB if unknown."""
    texts = [file.read_text().strip() for file in _CACHE.glob("index*/size")]
    sizes = [int(text.rstrip("KM")) * _UNITS.get(text[-1:], 1) for text in texts]
    return max(sizes, default=_UNKNOWN_CACHE_BYTES)


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpu(device: torch.device) -> dict[str, Any]:
    properties: Any = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "processors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        **_driver_fields(device.index or 0),
    }


def _driver_fields(index: int) -> dict[str, str]:
    """Return driver fields from ``nvidia-smi``; none without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, f"--id={index}", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_GPU_FIELDS, (part.strip() for part in output.split(",")), strict=False))
