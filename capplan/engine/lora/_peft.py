"""Adapters in PEFT folders: matrices that fit the model, read into host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.lora._adapter import AdapterLayout, HostAdapter, pack, ranks_of, require_rank
from capplan.spec import MatrixPair, PeftFiles, Place, SafetensorsFile, TensorEntry

_TYPES: Final = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
    }
)


class PeftFolder(PeftFiles):
    """PEFT folder as the source of an adapter."""

    def ranks(self, layout: AdapterLayout) -> NDArray[np.int64]:
        """Return the rank on each module, shape (layers, modules), from the file's header.

        Raises
        ------
        InputError
            If the adapter cannot be read, or does not fit the model.
        """
        with self._fitting(layout) as (_, _, ranks):
            return ranks

    def read(self, layout: AdapterLayout, dtype: torch.dtype, pin: bool, max_rank: int) -> HostAdapter:
        """Return the adapter, in pinned memory if `pin`.

        B is multiplied by alpha / rank, or alpha / sqrt(rank) with rsLoRA.

        Raises
        ------
        InputError
            As `ranks`; if a rank exceeds `max_rank`, before weights are read; or if a weight is not finite.
        """
        with self._fitting(layout) as (file, pairs, ranks):
            require_rank(ranks, max_rank, self.name)
            tensors = read_tensors(file, (each for pair in pairs.values() for each in (pair.a, pair.b)))
        matrices = {
            place: (tensors[a.name].float(), tensors[b.name].float() * scale)
            for place, (a, b, scale) in pairs.items()
        }
        return pack(layout, matrices, dtype, pin, self.name)

    @contextmanager
    def _fitting(
        self, layout: AdapterLayout
    ) -> Iterator[tuple[SafetensorsFile, dict[Place, MatrixPair], NDArray[np.int64]]]:
        """Open the weights; yield them with A, B and scale of every (layer, module), and the ranks."""
        with self.opened() as (file, pairs):
            shapes = {place: (pair.a.shape, pair.b.shape) for place, pair in pairs.items()}
            yield file, pairs, ranks_of(layout, shapes, self.name)


def read_tensors(file: SafetensorsFile, entries: Iterable[TensorEntry]) -> dict[str, torch.Tensor]:
    """Return tensors of a file by name."""
    return {
        entry.name: torch.frombuffer(data, dtype=_TYPES[entry.dtype]).reshape(entry.shape)
        for entry, data in file.read(entries)
    }
