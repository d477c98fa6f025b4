"""Bytes that Triton kernels load and store: `TRITON_INTERPRET=1 python -m benchmarks.kernel_traffic`.

Kernels run in Triton's interpreter at the shapes of three models. Every element that a lane loads or stores
under its mask counts, in every program. The least possible is each element of activations, weights, keys and
values once; indices do not count towards it. `--step` counts the adapters of a layer of decode steps instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from triton.runtime import interpreter

from benchmarks.common import command_line, records_table
from benchmarks.kernel_launches import (
    LoraBatch,
    attention_launches,
    gpu_models,
    lora_launches,
    prompts_launch,
)
from capplan.engine.kernels._triton_lora import Launch
from capplan.engine.lora import AdapterLayout
from capplan.engine.lora._adapter import SITES, A

BATCHES: Final = (
    LoraBatch("mbgmv", adapters=4, rank=16),
    LoraBatch("sgmv", adapters=1, rank=16, tokens_each=32),
)
STEPS: Final = tuple(
    LoraBatch(kind, adapters, rank=16, tokens_each=256 // adapters)
    for adapters in (8, 64)
    for kind in ("mbgmv", "sgmv")
)
"""Decode steps of 256 requests."""
CONTEXT: Final = 1024
PARTS: Final = (1, 4)
PROMPTS: Final = (2, 64)
"""Prompts, and tokens of each."""


@dataclass
class Traffic:
    """Bytes of one launch."""

    finds_least: bool = True
    loaded: int = 0
    stored: int = 0
    _elements: list[NDArray[np.uint64]] = field(default_factory=list)
    """Addresses and direction of elements that are no indices, with their size."""

    def count(self, pointers: Any, mask: Any, stores: bool) -> None:
        """Add a load or store of a tensor of pointers."""
        kind = pointers.get_element_ty()
        size = kind.primitive_bitwidth // 8
        addresses = np.atleast_1d(pointers.data)[np.atleast_1d(mask.data)].astype(np.uint64).ravel()
        if stores:
            self.stored += addresses.size * size
        else:
            self.loaded += addresses.size * size
        if kind.is_floating() and self.finds_least:
            # Sizes are powers of 2 up to 8 and direction is a bit: a key per element and use.
            keys = addresses * np.uint64(16) + np.uint64(8 * stores) + np.uint64(size.bit_length())
            self._elements.append(np.unique(keys))

    @property
    def least(self) -> int:
        """Bytes if every element is loaded and stored once."""
        keys = np.unique(np.concatenate(self._elements))
        sizes: NDArray[np.uint64] = np.uint64(1) << (keys % np.uint64(8) - np.uint64(1))
        return int(sizes.sum())


@contextmanager
def counted(finds_least: bool = True) -> Iterator[Traffic]:
    """Count the bytes of kernels that the interpreter runs in the context."""
    builder: Any = interpreter.interpreter_builder
    traffic = Traffic(finds_least)
    load, store = builder.create_masked_load, builder.create_masked_store

    def counting_load(pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        traffic.count(pointers, mask, stores=False)
        return load(pointers, mask, *rest, **options)

    def counting_store(pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        traffic.count(pointers, mask, stores=True)
        return store(pointers, value, mask, *rest, **options)

    builder.create_masked_load, builder.create_masked_store = counting_load, counting_store
    try:
        yield traffic
    finally:
        del builder.create_masked_load, builder.create_masked_store


def cases() -> Iterator[tuple[str, str, Launch]]:
    """Yield (model, case, launch) of every kernel at the shapes of every model."""
    device = torch.device("cpu")
    for model, config in gpu_models().items():
        for batch in BATCHES:
            tokens = f"tokens of {batch.adapters} adapters" if batch.adapters > 1 else "tokens of one adapter"
            for half, site, launch in lora_launches(config, batch, device):
                if half == "tiles":
                    launch.run()
                elif half != "add":
                    yield model, f"{site}; {batch.tokens} {tokens}", launch
        for parts in PARTS:
            for launch in attention_launches(config, 1, CONTEXT, device, parts):
                yield model, f"{CONTEXT} tokens in {parts} parts", launch
        prompts, tokens = PROMPTS
        yield model, f"{prompts} prompts of {tokens} tokens", prompts_launch(config, *PROMPTS, device)


def traffic_row(model: str, case: str, launch: Launch) -> dict[str, Any]:
    """Return the row of a launch: bytes, and their ratio to the least possible."""
    with counted() as traffic:
        launch.run()
    moved = traffic.loaded + traffic.stored
    return {
        "model": model,
        "kernel": launch.kernel.fn.__name__,
        "case": case,
        "programs": int(np.prod(launch.grid)),
        "loaded": traffic.loaded,
        "stored": traffic.stored,
        "least": traffic.least,
        "ratio": round(moved / traffic.least, 3),
    }


def step_row(batch: LoraBatch) -> dict[str, Any]:
    """Return the bytes of all adapters of a layer of Llama-3.1-8B, relative to the least.

    The least is A, B and the activations of each site once, its outputs read and written, of gate and up only
    what follows, and half of the cosines and sines of each token.
    """
    config = gpu_models()["Llama-3.1-8B"]
    layout, itemsize = AdapterLayout(config), getattr(torch, config.dtype).itemsize
    with counted(finds_least=False) as traffic:
        for half, _, launch in lora_launches(config, batch, torch.device("cpu")):
            if half != "add":
                launch.run()
    weights = batch.adapters * layout.elements(layout.ranks(batch.rank))
    sites = [[layout.sizes[module] for module in site] for site in SITES]
    each = sum(s[0][A] + 2 * sum(b for _, b in s) for s in sites) - config.intermediate_size + config.head_dim
    least = itemsize * (weights + batch.tokens * each)
    moved = traffic.loaded + traffic.stored
    return {
        "kernels": batch.kind,
        "adapters": batch.adapters,
        "tokens": batch.tokens,
        "rank": batch.rank,
        "MiB": round(moved / 2**20, 1),
        "least MiB": round(least / 2**20, 1),
        "ratio": round(moved / least, 3),
    }


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    parser.add_argument("--step", action="store_true", help="adapters of a layer of decode steps")
    given = parser.parse_args()
    rows = [step_row(batch) for batch in STEPS] if given.step else [traffic_row(*case) for case in cases()]
    print(json.dumps(rows) if given.json else records_table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
