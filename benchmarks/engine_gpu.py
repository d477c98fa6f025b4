"""Bandwidth of shrink and expand on a GPU, relative to a device copy: `python -m benchmarks.engine_gpu`.

`--device cpu --model tiny-llama` runs the same code without a GPU; its times have no meaning.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.common import command_line, records_table
from capplan.engine import ModelConfig, Segment
from capplan.engine.lora import MODULES, AdapterLayout, B, RowTables
from capplan.engine.lora._adapter import SITES
from capplan.engine.lora._memory import StaticSlots
from capplan.engine.models import model_config

Timer = Callable[[Callable[[], object]], float]


def timer_of(device: torch.device, repeats: int) -> Timer:

    def on_gpu(run: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3

    def on_cpu(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    once = on_gpu if device.type == "cuda" else on_cpu
    return lambda run: statistics.median(once(run) for _ in range(repeats))


def copy_bandwidth(device: torch.device, timer: Timer) -> float:
    size = 2**30 if device.type == "cuda" else 2**25
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * size / timer(lambda: target.copy_(source))


@dataclass(frozen=True)
class Kernels:
    """Adapters of one rank in memory, with the shrink and expand kernels."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    adapters: int
    rank: int

    def measure(self, batch: int, kind: str, copy: float, timer: Timer) -> dict[str, Any]:
        """Return the bandwidth of shrink and expand over all modules of all layers, one token per request.

        Layers have rows of their own, so weights come from memory, not from a cache.
        """
        from capplan.engine.kernels import TritonLoRA

        layout = AdapterLayout(self.config)
        memory = StaticSlots(layout, self.adapters, self.rank, self.dtype, self.device)
        memory.storage.normal_()
        tables = RowTables(layout, self.adapters, self.rank, self.device)
        for number in range(1, self.adapters + 1):
            placement = memory.place(number, layout.ranks(self.rank))
            tables.add(number, placement, memory.padding(number, self.rank))
        ends = np.cumsum(np.bincount(np.arange(batch) % self.adapters, minlength=self.adapters)).tolist()
        segments = [
            Segment(number, start, end)
            for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False), start=1)
            if end > start
        ]
        chosen: Any = kind
        step = TritonLoRA(layout, tables, memory.storage, segments, batch, chosen)
        result: dict[str, Any] = {
            "kernel": kind,
            "batch": batch,
            "adapters": len(segments),
            "rank": self.rank,
        }
        for site, modules in enumerate(SITES):
            width = layout.sizes[modules[0]][0]
            out_width = sum(layout.sizes[module][B] for module in modules)
            x = torch.randn(batch, width, device=self.device).to(self.dtype)
            out = torch.zeros(batch, out_width, device=self.device, dtype=self.dtype)
            rows = len(segments) * self.rank * self.dtype.itemsize
            halves = {
                "shrink": (rows * width * len(modules) + x.nbytes, partial(step.shrink, site=site, x=x)),
                "expand": (rows * out_width + 2 * out.nbytes, partial(step.expand, site=site, out=out)),
            }
            where = "+".join(MODULES[module].removesuffix("_proj") for module in modules)
            for name, (moved, run) in halves.items():
                run_all = partial(_for_all, layout.layers, run)
                run_all()  # compiled
                result[f"{name} {where}"] = round(moved * layout.layers / timer(run_all) / copy, 3)
        return result


def _for_all(layers: int, run: Callable[[int], object]) -> None:
    for layer in range(layers):
        run(layer)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B-Instruct", help="a built-in one")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--adapters", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--kernels", nargs="+", default=["mbgmv", "bgmv", "sgmv"])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA GPU; --device cpu --model tiny-llama shows that it runs", file=sys.stderr)
        return 2
    timer = timer_of(device, given.repeats)
    copy = copy_bandwidth(device, timer)
    config = model_config(given.model)
    dtype: torch.dtype = getattr(torch, config.dtype)
    kernels = [
        Kernels(config, dtype, device, adapters, given.rank).measure(batch, kind, copy, timer)
        for adapters in given.adapters
        for batch in given.batches
        for kind in given.kernels
    ]
    if given.json:
        print(json.dumps({"copy_bytes_per_s": copy, "kernels": kernels}))
        return 0
    print(f"{given.model}, {config.dtype}; a copy moves {copy / 1e9:.1f} GB/s\n")
    print(
        f"Shrink and expand at rank {given.rank}: share of the copy's bandwidth\n\n{records_table(kernels)}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
