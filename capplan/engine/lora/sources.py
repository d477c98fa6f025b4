"""Where adapters come from: a folder that PEFT wrote, or a seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from capplan.engine.lora.adapter import HostAdapter, pack
from capplan.engine.lora.layout import MODULES, AdapterLayout
from capplan.engine.lora.peft_files import read_peft


class AdapterSource(Protocol):
    """Reads an adapter; called again whenever it has left the host's memory."""

    def read(self, layout: AdapterLayout, dtype: torch.dtype, pin: bool) -> HostAdapter:
        """Return the adapter; `pin` puts it into memory from which a GPU can copy by itself."""
        ...


@dataclass(frozen=True)
class PeftFolder:
    """``adapter_config.json`` and ``adapter_model.safetensors``."""

    path: Path

    def read(self, layout: AdapterLayout, dtype: torch.dtype, pin: bool) -> HostAdapter:
        """Read the folder; see `AdapterSource`."""
        return pack(layout, read_peft(self.path), dtype, pin, str(self.path))


@dataclass(frozen=True)
class RandomAdapter:
    """An adapter of one rank on all modules, the same for the same seed.

    A is drawn as PEFT draws it; B, which training moves away from zero, so that the answer changes.
    """

    rank: int
    seed: int

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
        return pack(layout, matrices, dtype, pin, f"random adapter of rank {self.rank}")
