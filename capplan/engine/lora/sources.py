"""Where adapters come from: a folder that PEFT wrote, or a seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.lora.adapter import HostAdapter, pack, ranks_of
from capplan.engine.lora.layout import MODULES, AdapterLayout
from capplan.engine.lora.peft_files import read_peft, read_shapes


class AdapterSource(Protocol):
    """Reads an adapter; called again whenever it has left the host's memory."""

    def __str__(self) -> str:
        """Return what messages call it."""
        ...

    def ranks(self, layout: AdapterLayout) -> NDArray[np.int64]:
        """Return the rank on each module, shape (layers, modules), without reading the adapter's numbers.

        Raises
        ------
        InputError
            When the adapter cannot be read, or does not go with the model.
        """
        ...

    def read(self, layout: AdapterLayout, dtype: torch.dtype, pin: bool) -> HostAdapter:
        """Return the adapter; `pin` puts it into memory from which a GPU can copy by itself."""
        ...


@dataclass(frozen=True)
class PeftFolder:
    """``adapter_config.json`` and ``adapter_model.safetensors``."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def ranks(self, layout: AdapterLayout) -> NDArray[np.int64]:
        """Read the files' headers; see `AdapterSource`."""
        return ranks_of(layout, read_shapes(self.path), str(self))

    def read(self, layout: AdapterLayout, dtype: torch.dtype, pin: bool) -> HostAdapter:
        """Read the folder; see `AdapterSource`."""
        return pack(layout, read_peft(self.path), dtype, pin, str(self))


@dataclass(frozen=True)
class RandomAdapter:
    """An adapter of one rank on all modules, the same for the same seed.

    A is drawn as PEFT draws it; B, which training moves away from zero, so that the answer changes.
    """

    rank: int
    seed: int

    def __str__(self) -> str:
        return f"random adapter of rank {self.rank}"

    def ranks(self, layout: AdapterLayout) -> NDArray[np.int64]:
        """Return the one rank everywhere; see `AdapterSource`."""
        return layout.ranks(self.rank)

    def read(self, layout: AdapterLayout, dtype: torch.dtype, pin: bool) -> HostAdapter:
        """Draw the adapter; see `AdapterSource`."""
        generator = torch.Generator().manual_seed(self.seed)
        matrices = {}
        for layer in range(layout.layers):
            for module in range(len(MODULES)):
                size_in, size_out = layout.sizes[module]
                a = (torch.rand(self.rank, size_in, generator=generator) * 2 - 1) / size_in**0.5
                b = torch.randn(size_out, self.rank, generator=generator) / self.rank
                matrices[layer, module] = a, b
        return pack(layout, matrices, dtype, pin, str(self))
