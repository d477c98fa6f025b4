"""What it takes to bring an adapter from the disk to the host, and from the host into a slot."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from capplan.engine import Engine
from capplan.engine.lora.adapter import MODULES, AdapterLayout
from capplan.engine.models import ModelConfig
from capplan.engine.request import SamplingParams
from capplan.profiling.engine.memory import config_of
from capplan.profiling.engine.options import Options

_RULES: Final = "vllm-0.8"
"""Under these a step waits for its adapter, so that the step's record tells what the load took."""
_ATTENTION: Final = 4
_WARM_UP: Final = 2


def write_adapter(folder: Path, config: ModelConfig, rank: int, seed: int) -> None:
    """Write an adapter of one rank on all modules as PEFT does."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config.layers):
        for module, (size_in, size_out) in zip(MODULES, AdapterLayout(config).sizes, strict=True):
            part = "self_attn" if MODULES.index(module) < _ATTENTION else "mlp"
            at = f"base_model.model.model.layers.{layer}.{part}.{module}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank, size_in, generator=generator)
            tensors[f"{at}.lora_B.weight"] = torch.randn(size_out, rank, generator=generator)
    folder.mkdir(parents=True)
    known = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(MODULES)}
    (folder / "adapter_config.json").write_text(json.dumps(known))
    file = folder / "adapter_model.safetensors"
    save_file(tensors, file)
    with file.open("rb") as written:
        os.fsync(written.fileno())


def loading_rows(options: Options, s_max: int, rounds: int) -> list[dict[str, float | str]]:
    """Return a row for each rank and kind of load at one size of slots.

    Two adapters share one slot and are asked for in turn, so that every request loads one: with both on the
    host a copy into the slot, with room for one on the host a read from the disk before it. The read is the
    difference of the medians. Files are dropped from the page cache before each read.

    Parameters
    ----------
    options
        The engine.
    s_max
        Rank of the slot.
    rounds
        Loads of each kind.
    """
    rows: list[dict[str, float | str]] = []
    config = config_of(options.model)
    for rank in options.ranks:
        if rank > s_max:
            continue
        with tempfile.TemporaryDirectory() as name:
            folders = [Path(name) / str(at) for at in range(2)]
            for at, folder in enumerate(folders):
                write_adapter(folder, config, rank, at)
            copies = _timed(options, s_max, folders, rounds, on_host=2)
            reads = _timed(options, s_max, folders, rounds, on_host=1)
        rows.append(_row(rank, s_max, "gpu", copies))
        read = [max(1e-3, each - float(np.median(copies))) for each in reads]
        rows.append(_row(rank, s_max, "disk", read))
    return rows


def _timed(
    options: Options, s_max: int, folders: Sequence[Path], rounds: int, *, on_host: int
) -> list[float]:
    """Return the milliseconds that steps waited for their loads."""
    fields: dict[str, Any] = options.engine_fields(a_max=1, s_max=s_max, max_cpu_loras=on_host)
    fields |= {"rules": _RULES, "num_kv_blocks": -(-options.max_model_len // 16) + 1}
    waits = []
    with Engine(options.model, {str(at): each for at, each in enumerate(folders)}, **fields) as engine:
        for turn in range(rounds + _WARM_UP):
            at = turn % 2
            _forget_pages(folders[at])
            request = engine.new_request([1], str(at), SamplingParams(max_tokens=1, ignore_eos=True))
            engine.submit(request)
            while request.finish_reason is None:
                step = engine.step()
                if step is not None and step.record is not None and step.record.loads and turn >= _WARM_UP:
                    waits.append(step.record.load_ms)
    return waits


def _forget_pages(folder: Path) -> None:
    """Have the operating system forget what it keeps of a file."""
    if not hasattr(os, "posix_fadvise"):
        return
    with (folder / "adapter_model.safetensors").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _row(rank: int, s_max: int, kind: str, waits: Sequence[float]) -> dict[str, float | str]:
    low, middle, high = np.percentile(waits, (25, 50, 75)).tolist()
    return {
        "rank": float(rank),
        "s_max": float(s_max),
        "kind": kind,
        "ms": max(1e-3, middle),
        "ms_p25": low,
        "ms_p75": high,
        "loads": float(len(waits)),
    }
