"""A hostile input of a command, and the files that inputs are made of."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

Content: TypeAlias = str | bytes | Callable[[Path], None]
"""Text, bytes, or a function that writes the file at its path."""

PROFILE: Final = "h100-64g/llama-3.1-8b/vllm-0.8.5"
MODEL: Final = "meta-llama/Llama-3.1-8B-Instruct"
DIGITS: Final = "9" * 5000
SIMULATE: Final = ("simulate", "workload.yaml", "--max-loras", "2", "--duration", "20", "--workers", "1")
PLAN: Final = ("plan", "workload.yaml", "-o", "out.json", "--seeds", "1", "--time-limit", "2", "--quiet")
_ARCHITECTURE: Final = ("--model-config", "config.json", "--base-model", "o/m", "-o", "out.json")
ROOFLINE: Final = ("profile", "roofline", "--gpu", "h200", *_ARCHITECTURE)
COMPOSE: Final = ("profile", "compose", "--gpu", "h100-80g", *_ARCHITECTURE)
EXPORT: Final = ("export", "plan.json", "--target", "vllm", "-o", "out", "--unverified")


@dataclass(frozen=True)
class Case:
    """A command line with its files."""

    name: str
    words: tuple[str, ...]
    files: Mapping[str, Content] = field(default_factory=dict)


WORKLOAD: Final[dict[str, Any]] = {
    "base_model": MODEL,
    "profile": "./profile.json",
    "gpus": {"count": 2},
    "engine": {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 4096},
    "requests": {
        "prompt_tokens": {"mean": 120, "std": 60},
        "output_tokens": {"mean": 40, "std": 20},
        "arrivals": {"process": "gamma", "cv": 2.0, "modulation": {"kind": "diurnal", "amplitude": 0.5}},
        "stickiness": {"last": 2, "probability": 0.1},
        "length_correlation": 0.1,
        "shared_prefix_tokens": 4,
    },
    "slo": {"ttft_p99_s": 60.0, "served_fraction": 0.9},
    "headroom": 0.1,
    "base": {"rate_rps": 0.1},
    "adapters": [
        {"name": "support-{i}", "count": 6, "rank": 8, "rate_rps": 0.05},
        {"name": "sales-{i}", "count": 4, "rank": 8, "popularity": {"zipf": 1.0}, "total_rate_rps": 0.5},
        {"name": "legal", "rank": 16, "rate_rps": 0.3, "max_replicas": 2},
    ],
}

STEPS: Final = "step_ms,tokens,requests,kv_tokens,adapters,a_max,s_max,waiting,adapters_served"


def shown(value: str) -> str:
    return repr(value if len(value) <= 60 else f"{value[:20]}...{len(value)}")


def with_value(document: Any, path: str, value: str) -> str:
    """Return a document as JSON, the part at a dotted path replaced by text of JSON or YAML."""
    changed = copy.deepcopy(document)
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    part = changed
    for each in parents:
        part = part[each]
    part[last] = "\0"
    return json.dumps(changed).replace(json.dumps("\0"), value)


def step_row(column: str, cell: str) -> str:
    names = STEPS.split(",")
    return ",".join(cell if name == column else "1" for name in names)


def sparse_file(file: Path) -> None:
    """Write a sparse file of 8 GiB."""
    with file.open("wb") as out:
        out.truncate(8 * 2**30)


def link_to_zeros(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to("/dev/zero")


def write_base(folder: Path) -> None:
    """Write the files that cases change: profile, tables of steps, and an architecture."""
    from capplan.datasets import load_profile

    profile = load_profile(PROFILE).model_dump(mode="json")
    (folder / "profile.json").write_text(json.dumps(profile))
    (folder / "workload.yaml").write_text(json.dumps(WORKLOAD))
    (folder / "steps.csv").write_text("\n".join([STEPS, *([step_row("", "1")] * 30)]))
